"""Configurations: random valid ones select what an oracle says, and random text is valid or a mistake with its line."""

from __future__ import annotations

import contextlib
import importlib
import re
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import account, fuzz
from pipesight.stats.config import Config, ConfigError, load
from pipesight.stats.registry import default_registry

importlib.import_module("pipesight.stats.builtin_features")  # registers those there are from the start
NAMES = [
    "decoder.0.fc1",
    "decoder.0.attn.qkv",
    "decoder.1.fc1",
    "decoder.11.fc2",
    "encoder.2",
    "fc1",
    "head",
    "0",
    "x.01",
]
TENSORS = ["activation", "gradient", "weight", "odd one"]
STATS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "kurtosis"]


# Valid ones, and what they select.

few = lambda values: st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)


@st.composite
def steps(draw):
    """Settings of steps."""
    chosen = {}
    if draw(st.booleans()):
        chosen["freq"] = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["", "range", "list"]))
    if kind == "range":
        start = draw(st.integers(0, 6))
        chosen["start_step"] = start
        chosen["end_step"] = draw(st.one_of(st.just(-1), st.integers(start, 12)))
    elif kind == "list":
        edges = sorted(draw(st.sets(st.integers(0, 14), min_size=2, max_size=6)))
        pairs = [list(pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
        if draw(st.booleans()):
            pairs[-1][1] = -1
        chosen["start_end_list"] = draw(st.permutations(pairs))
    return chosen


@st.composite
def layers(draw):
    """A way to select layers."""
    chosen = {}
    if draw(st.integers(0, 3)) == 0:
        chosen["exact_layer_names"] = draw(few([*NAMES, "nowhere"]))
    if draw(st.integers(0, 3)) == 0:
        patterns = [r".*fc\d", r"decoder\..*", r"(?:\w+\.)+fc1", r"(?!dec).*", r"", r"[a-f]+1", r"(head|fc1)"]
        chosen["layer_name_regex_pattern"] = draw(st.sampled_from(patterns))
    if draw(st.booleans()) or not chosen:
        chosen["layer_types"] = draw(st.one_of(st.just("all"), few(["fc", "fc1", "attn", "e", "nothing"])))
    if draw(st.integers(0, 2)) == 0:
        numbers = st.one_of(st.integers(0, 12), st.sampled_from(["0-1", "1-12", "2-2"]))
        chosen["layer_numbers"] = draw(st.one_of(st.just("all"), st.lists(numbers, min_size=1, max_size=3)))
    return chosen


@st.composite
def features(draw):
    """The settings of LogTensorStats."""
    feature = {"enabled": draw(st.integers(0, 5)) > 0, **draw(steps())}
    if draw(st.booleans()):
        feature["tensors"] = draw(st.one_of(st.just("all"), few(TENSORS)))
        feature["stats"] = draw(few(STATS))
    else:
        outer = draw(st.booleans())
        if outer:
            feature["stats"] = draw(few(STATS))
        entries = []
        for tensor in draw(few(TENSORS)):
            entry = {"tensor": tensor, **(draw(steps()) if draw(st.booleans()) else {})}
            if not outer or draw(st.booleans()):
                entry["stats"] = draw(few(STATS))
            entries.append(entry)
        feature["tensors_struct"] = entries
    return feature


@st.composite
def configurations(draw):
    """A configuration that has no mistakes."""
    names = draw(
        st.lists(st.sampled_from(["main", "mlp", "a b", "第一", "on it"]), min_size=1, max_size=3, unique=True)
    )
    return {
        name: {"enabled": draw(st.integers(0, 4)) > 0, "layers": draw(layers()), "LogTensorStats": draw(features())}
        for name in names
    }


def selects(chosen, name):
    """Whether ``layers`` of a section selects a name, by the documentation."""
    if "exact_layer_names" in chosen:
        return name in chosen["exact_layer_names"]
    if "layer_name_regex_pattern" in chosen:
        return re.search(chosen["layer_name_regex_pattern"], name) is not None
    types, numbers = chosen.get("layer_types", "all"), chosen.get("layer_numbers", "all")
    if types != "all" and not any(word in name for word in types):
        return False
    if numbers == "all":
        return True
    wanted = set()
    for number in numbers:
        first, _, last = str(number).partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    return any(part.isdigit() and int(part) in wanted for part in name.split("."))


def rule(feature, tensor):
    """The settings that hold for a tensor, or ``None``."""
    if "tensors" in feature:
        return feature if feature["tensors"] == "all" or tensor in feature["tensors"] else None
    for entry in feature["tensors_struct"]:
        if entry["tensor"] == tensor:
            outer = dict(feature)
            if "start_end_list" in entry:
                outer.pop("start_step", None), outer.pop("end_step", None)
            elif "start_step" in entry:
                outer.pop("start_end_list", None)
            return {**outer, **entry}
    return None


def logs(settings, step):
    """Whether a step is logged."""
    if step % settings.get("freq", 1):
        return False
    if "start_end_list" in settings:
        return any(start <= step and (end == -1 or step < end) for start, end in settings["start_end_list"])
    end = settings.get("end_step", -1)
    return settings.get("start_step", 0) <= step and (end == -1 or step <= end)


def selected(config, name):
    """What a configuration logs of a layer, by the oracle; the word twice if two sections claim it."""
    claims = [section for section in config.values() if section["enabled"] and selects(section["layers"], name)]
    if len(claims) > 1:
        return "twice"
    found = {}
    for section in claims:
        feature = section["LogTensorStats"]
        for tensor in TENSORS:
            settings = rule(feature, tensor) if feature["enabled"] else None
            if settings is not None:
                found[tensor] = (settings["stats"], [step for step in range(20) if logs(settings, step)])
    return found


def found_by(config: Config, name):
    """What it logs of a layer."""
    try:
        section = config.section_for(name)
    except ConfigError as error:
        return "twice" if "is selected by the sections" in str(error) else str(error)
    feature = section.feature("base", "LogTensorStats") if section else None
    rules = {tensor: feature.rule(tensor) for tensor in TENSORS} if feature else {}
    return {
        tensor: ([request.name for request in rule.stats], [step for step in range(20) if rule.steps.includes(step)])
        for tensor, rule in rules.items()
        if rule is not None
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where configurations are written."""
    return tmp_path_factory.mktemp("configurations")


@fuzz(few=40)
@given(configurations(), st.sampled_from([None, True, False]), st.booleans())
def test_what_is_selected(folder, config, flow, unicode):
    """A dict, and a file of any style, select what the documentation says."""
    path = folder / "valid.yaml"
    text = yaml.safe_dump(config, default_flow_style=flow, allow_unicode=unicode, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    for loaded in (load(config, default_registry()), load(path, default_registry())):
        for section in loaded.sections:
            section.selection.learn(NAMES)  # at once: some patterns take a process
        for name in NAMES:
            assert found_by(loaded, name) == selected(config, name), name
        claimed = {name for name in NAMES if selected(config, name) == "twice"}
        if claimed:
            with pytest.raises(ConfigError) as error:
                loaded.select(NAMES)
            assert len(error.value.mistakes) == len(claimed)
    account("configurations", "agreed")


# Anything else.

TOKENS = (
    *(
        "!!timestamp x",
        "!!int x",
        "!!float ''",
        "!!binary x",
        "!!python/object/apply:os.system [ls]",
        "!!set {a, b}",
        "!x y",
    ),
    *(
        "&a",
        "*a",
        "<<: *a",
        "<<: [*a, *a]",
        "<<: 3",
        "&b [*b]",
        "- ",
        "? [a]\n: b",
        "? {a: b}",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
    ),
    *(
        "---",
        "...",
        "%YAML 1.1",
        "%TAG ! x",
        "|",
        ">-",
        "'",
        '"',
        '"\\Uffffffff"',
        '"\\ud800"',
        "\t",
        "\x00",
        "\x7f",
        "\ufeff",
    ),
    *(
        "null",
        "~",
        ".nan",
        ".inf",
        "-1",
        "1e3",
        "0x" + "f" * 5000,
        "9" * 5000,
        "2021-13-01",
        "12:30:45",
        "0o8",
        "=",
        "<<",
    ),
    *(
        "true",
        "no",
        "on",
        "all",
        "(a+)+$",
        "(?P<x",
        "*" * 50,
        "[" * 60,
        "0-999999",
        "99999999999999999999-1",
        "é",
    ),
    *(
        "enabled",
        "layers",
        "LogTensorStats",
        "transformer_engine",
        "LogFp8TensorStats",
        "tensors_struct",
        "gemms_struct",
    ),
    *("stats: all", "freq: 0", "start_end_list: [[3, 1]]", "max_blockwise_dynamic_range: {block_size: 0}", "tensor: 3"),
    *("main: {enabled: true}", "layer_types: []", "on_nonfinite: maybe", "\r\n", "\u2028", "#"),
)
EDITS = st.tuples(
    st.sampled_from(["insert", "replace", "delete", "double", "indent", "token", "token", "value", "value"]),
    st.floats(0, 1),
    st.sampled_from(TOKENS),
    st.text(max_size=3),
)


def edited(text, edit):
    """Change a text at one place."""
    kind, share, token, letters = edit
    at = int(share * len(text))
    lines = text.split("\n")
    line = int(share * (len(lines) - 1))
    if kind == "insert":
        return text[:at] + letters + text[at:]
    if kind == "replace":
        return text[:at] + letters + text[at + len(letters) :]
    if kind == "delete":
        return text[:at] + text[at + 7 :]
    if kind == "token":
        return text[:at] + token + text[at:]
    if kind == "double":
        lines.insert(line, lines[line])
    elif kind == "indent":
        lines[line] = f" {lines[line]}" if share < 0.5 else lines[line][1:]
    else:
        lines[line] = f"{lines[line].partition(':')[0]}: {token}"
    return "\n".join(lines)


def mistakes_of(path):
    """What is wrong with a file, and with what it selects."""
    try:
        config = load(path, default_registry())
        config.select(("decoder.0.fc1", "", "fc1"))
    except ConfigError as error:
        return [*error.mistakes, str(error)][:-1]
    return []


def try_out(path, content):
    """Load a file: it is a configuration, or it has mistakes, each with a line of it."""
    path.write_bytes(content)
    began = time.process_time()
    lines = len(re.split(rb"\r\n|\r|\n|\xc2\x85|\xe2\x80[\xa8\xa9]", content)) + 1
    for mistake in mistakes_of(path):
        place = re.match(rf"{re.escape(str(path))}:(\d+): .", mistake, re.DOTALL)
        assert place, mistake
        assert 1 <= int(place[1]) <= lines, mistake
    assert time.process_time() - began < 20
    account("configurations, edited", "agreed")


@fuzz(few=120)
@given(configurations(), st.sampled_from([None, True, False]), st.lists(EDITS, min_size=1, max_size=8))
def test_edited(folder, config, flow, edits):
    """Whatever is done to a file, it is valid or a ConfigError, and soon."""
    text = yaml.safe_dump(config, default_flow_style=flow, sort_keys=False)
    for edit in edits:
        text = edited(text, edit)
    try_out(folder / "edited.yaml", text.encode("utf-8", "surrogatepass"))


@fuzz(few=60)
@given(st.one_of(st.binary(max_size=80), st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join).map(str.encode)))
def test_anything(folder, content):
    """Bytes, and words in any order."""
    try_out(folder / "anything.yaml", content)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(TOKENS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=3), st.none()), inner)
    ),
    max_leaves=6,
)


@fuzz(few=60)
@given(configurations(), st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=5), PLAIN), min_size=1, max_size=4))
def test_edited_dict(config, edits):
    """Whatever is put into a dict, it is valid or a ConfigError."""
    for path, value in edits:
        at = config
        for number in path:
            keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            if not keys:
                break
            key = keys[number % len(keys)]
            if not isinstance(at[key], dict | list) or number == 7:
                at[key] = value
                break
            at = at[key]
        else:
            if isinstance(at, dict):
                at[str(value)[:10]] = value
    with contextlib.suppress(ConfigError):
        load(config, default_registry()).section_for("decoder.0.fc1")
    account("configurations, edited", "agreed")
