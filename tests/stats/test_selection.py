"""Which layers a section selects."""

import contextlib
import re
import time
import warnings

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.config import ConfigError, _patterns, load
from pipesight.stats.config._patterns import compiled
from pipesight.stats.config.selection import Selection, spans
from pipesight.stats.registry import Registry

NAMES = st.lists(st.sampled_from(["fc1", "fc2", "qkv", "0", "1", "2", "12", "layers"]), min_size=1, max_size=4).map(
    ".".join
)


def registry():
    known = Registry()

    @known.register_feature()
    class Log:
        """Logs."""

    return known


def config(**sections):
    return {
        name: {"enabled": True, "layers": layers, "Log": {"enabled": True, "tensors": "all"}}
        for name, layers in sections.items()
    }


def selection(**layers):
    return load(config(main=layers), registry()).sections[0].selection


@pytest.mark.parametrize(
    ("layers", "matching", "other"),
    [
        ({"layer_types": ["fc1", "qkv"]}, ["a.fc1", "fc10", "xqkvx"], ["a.fc2", "FC1", ""]),
        ({"layer_types": ["f.1"]}, ["f.1"], ["fc1"]),
        ({"layer_types": "all"}, ["a", "b.1", ""], []),
        ({"layer_types": ["all"]}, ["a", "b.1"], []),
        ({"layer_numbers": [1]}, ["1", "a.1", "a.1.fc2", "a.01"], ["a1", "a.11", "fc1", "a.-1", "a.1b"]),
        ({"layer_numbers": [0, "2-4"]}, ["a.0", "a.2", "a.3", "a.4"], ["a.1", "a.5"]),
        ({"layer_numbers": "all"}, ["a", "a.3"], []),
        ({"layer_numbers": ["all"]}, ["a", "a.3"], []),
        ({"layer_types": ["fc"], "layer_numbers": [1]}, ["a.1.fc2"], ["a.1.qkv", "a.2.fc2"]),
        ({"layer_types": ["fc"], "layer_numbers": "all"}, ["a.1.fc2", "fc"], ["a.1.qkv"]),
        ({"layer_types": "all", "layer_numbers": [1]}, ["a.1.fc2"], ["a.2.fc2"]),
        ({"layer_name_regex_pattern": r"a\.(fc1|fc2)"}, ["a.fc1", "a.fc2", "a.fc10", "b.a.fc1"], ["aafc1", "a"]),
        ({"layer_name_regex_pattern": r"^a\.(fc1|fc2)$"}, ["a.fc1", "a.fc2"], ["a.fc10", "b.a.fc1"]),
        ({"layer_name_regex_pattern": r".*fc1.*", "layer_types": ["qkv"]}, ["a.fc1.b"], ["qkv"]),
        ({"exact_layer_names": ["a.b", "all"]}, ["a.b", "all"], ["a.b.c", "x"]),
        ({"exact_layer_names": ["x"], "layer_name_regex_pattern": "y", "layer_types": ["z"]}, ["x"], ["y", "z"]),
    ],
)
def test_selectors(layers, matching, other):
    """Each selector selects the names it should, alone and beside others."""
    chosen = selection(**layers)
    assert [name for name in [*matching, *other] if chosen.matches(name)] == matching


def test_selectors_that_do_not_count_are_named():
    """The strictest selector decides alone, and the selection says which ones it left out."""
    assert selection(layer_types=["a"], layer_numbers=[1]).ignored == ()
    assert selection(layer_name_regex_pattern="a", layer_numbers=[1]).ignored == ("layer_numbers",)
    assert selection(exact_layer_names=["a"], layer_name_regex_pattern="a", layer_types=["a"]).ignored == (
        "layer_name_regex_pattern",
        "layer_types",
    )


@given(name=NAMES, types=st.sets(st.sampled_from(["fc1", "fc", "q"])), numbers=st.sets(st.integers(0, 12)))
def test_types_and_numbers_agree_with_their_definition(name, types, numbers):
    """A layer is selected if it contains a type and one of its parts is a number, asked once or again."""
    chosen = Selection(types=tuple(types), numbers=frozenset(numbers))
    expected = any(word in name for word in types) and any(str(number) in name.split(".") for number in numbers)
    assert chosen.matches(name) is expected
    assert chosen.matches(name) is expected


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (Selection(), "all layers"),
        (Selection(exact=frozenset({"b", "a"})), "the names a, b"),
        (Selection(pattern=compiled("a.*")), "names with a match of a.*"),
        (Selection(types=("a", "b"), numbers=frozenset({0, 1, 2, 7})), "names with a or b and numbers 0-2, 7"),
    ],
)
def test_selection_is_written_for_people(chosen, text):
    """As text, a selection says what it looks for."""
    assert str(chosen) == text


@given(st.sets(st.integers(0, 30)))
def test_spans_hold_the_numbers(numbers):
    """Ranges hold exactly the numbers they were made of."""
    held = []
    for span in spans(numbers):
        first, _, last = span.partition("-")
        held += range(int(first), int(last or first) + 1)
    assert held == sorted(numbers)


def test_section_of_a_layer():
    """A layer belongs to the section that selects it, or to none."""
    read = load(config(mlp={"layer_types": ["fc"]}, attention={"layer_types": ["qkv"]}), registry())
    assert [section and section.name for section in map(read.section_for, ("fc1", "qkv", "head"))] == [
        "mlp",
        "attention",
        None,
    ]
    assert {name: section.name for name, section in read.select(["head", "a.fc1"]).items()} == {"a.fc1": "mlp"}


def test_a_layer_of_two_sections_is_an_error(tmp_path):
    """A layer that two sections select is an error that names it, both sections and their lines, each time."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "mlp:\n  enabled: true\n  layers: {layer_types: [fc]}\n  Log: {enabled: true}\n"
        "first:\n  enabled: true\n  layers: {layer_numbers: [0]}\n  Log: {enabled: true}\n"
    )
    read = load(file, registry())
    assert read.section_for("1.fc") is read.sections[0]
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            read.section_for("0.fc")
        assert caught.value.mistakes == (
            f"{file}:5: layer '0.fc' is selected by the sections 'mlp' (line 1) and 'first' (line 5); "
            "change the layers of one, or set enabled: false in it",
        )
    with pytest.raises(ConfigError) as caught:
        read.select(["0.fc", "1.fc", "0.a.fc"])
    assert len(caught.value.mistakes) == 2


def test_a_disabled_section_claims_nothing():
    """Sections that are disabled select no layer."""
    sections = config(mlp={"layer_types": ["fc"]}, other={"layer_types": ["fc"]})
    sections["mlp"]["enabled"] = False
    read = load(sections, registry())
    assert read.section_for("fc").name == "other"


HARD = [
    r"(a+)+$",
    r"(a|aa)+$",
    r"(x+x+)+y",
    r"(.*a){12}$",
    r"(?:a?){40}a{40}$",
    "a?" * 40 + "a" * 40 + "$",
    "(a|aa)" * 40 + "b",
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", HARD)
def test_patterns_that_take_exponential_time(pattern, tmp_path, monkeypatch):
    """One that would take years on a name is an error with its line, the name and a fix; on other names it matches."""
    monkeypatch.setattr(_patterns, "LIMIT", 0.2)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config(mlp={"layer_name_regex_pattern": pattern})))
    read = load(path, registry())
    assert "zzz" not in read.select(["zzz"])
    name = "x" * 60 + "a" * 79 + "!"
    began = time.monotonic()
    with contextlib.suppress(ConfigError):
        assert not read.select(["b", name])  # sre may be clever
    assert time.monotonic() - began < 60
    if pattern == HARD[0]:
        with pytest.raises(ConfigError) as raised:
            read.select(["a" * 50 + "!"])
        (mistake,) = raised.value.mistakes
        assert re.fullmatch(
            rf"{path}:\d+: mlp.layers.layer_name_regex_pattern: takes more than 0.2 s to match the layer 'a.*!' "
            r"\(layer_name_regex_pattern: '\(a\+\)\+\$'\); write it without a repeat or \| inside of a repeat.*",
            mistake,
        )


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(?:layers\.\d+\.)+(?:mlp|attn)", r"(a|b.)*c", r"(?!.*head).*fc\d?", r"((x)|y)+\.z", r"(.)\1+"),
        *(r".*.*.*.*.*mlp", r"(?i)LAYERS.*", r"", r"(?:ab|a)(?:c|bc)", r"[[a]+b"),
    ],
)
def test_patterns_match_as_re_does(pattern):
    """Where a pattern is matched makes no difference."""
    names = [
        "layers.3.mlp",
        "layers.3.layers.44.attn",
        "c",
        "bxac",
        "fc1",
        "head.fc1",
        "x.z",
        "xyx.z",
        "aaa",
        "abc",
        "",
        "[[b",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {name: re.search(pattern, name) is not None for name in names}
    assert compiled(pattern).match(names) == expected
