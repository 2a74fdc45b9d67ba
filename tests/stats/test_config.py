"""Configurations: what is read, what is wrong with it, and what to log of a tensor."""

import os
import pickle
import re
import time

import pytest
import yaml

from pipesight.stats.config import GEMM_KEYS, STEP_KEYS, TENSOR_KEYS, Config, ConfigError, StatisticRequest, load
from pipesight.stats.config.steps import Steps
from pipesight.stats.registry import Registry
from support.counted import lines_run


def make_registry():
    registry = Registry()
    settings = TENSOR_KEYS | STEP_KEYS | {"stats", "on_nonfinite"}

    @registry.register_feature()
    class LogTensorStats:
        """Logs statistics."""

        keys = settings
        statistics = dict.fromkeys(["min", "max", "mean", "std", "max_blockwise_dynamic_range"])

    @registry.register_feature()
    class Anything:
        """Takes any settings."""

    @registry.register_feature(namespace="transformer_engine")
    class LogFp8TensorStats:
        """Logs statistics of float8."""

        keys = settings | GEMM_KEYS
        statistics = dict.fromkeys(["underflows%", "mse"])
        tensors = frozenset({"activation", "gradient", "weight"})

    return registry


REGISTRY = make_registry()

GOOD = """\
mlp:
  enabled: true
  layers:
    layer_types: [fc1, fc2]
  LogTensorStats:
    enabled: true
    tensors: [activation, gradient]
    stats: [mean, std]
    freq: 10
  transformer_engine:
    LogFp8TensorStats:
      enabled: false
      tensors: all
      stats: [underflows%]
"""


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def write(content):
        file = tmp_path / "config.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


@pytest.fixture
def mistakes(write):
    """Return the mistakes of a file as lines without its path."""

    def mistakes(content):
        file = write(content)
        with pytest.raises(ConfigError) as caught:
            load(file, REGISTRY)
        assert caught.value.source == str(file)
        return [mistake.removeprefix(f"{file}:") for mistake in caught.value.mistakes]

    return mistakes


def section(feature="LogTensorStats", **settings):
    return {"main": {"enabled": True, "layers": {"layer_types": ["fc"]}, feature: {"enabled": True, **settings}}}


def te(**settings):
    features = {"LogFp8TensorStats": {"enabled": True, **settings}}
    return {"main": {"enabled": True, "layers": {"layer_types": ["fc"]}, "transformer_engine": features}}


def feature_of(config):
    return load(config, REGISTRY).sections[0].features[0]


def mistakes_of(config):
    with pytest.raises(ConfigError) as caught:
        load(config, REGISTRY)
    return list(caught.value.mistakes)


def test_a_file_is_read(write):
    """Sections, features, settings and lines are those of the file."""
    file = write(GOOD)
    for config in (load(file, REGISTRY), load(str(file), REGISTRY)):
        (mlp,) = config.sections
        assert (mlp.name, mlp.enabled, mlp.line, config.source) == ("mlp", True, 1, str(file))
        log, fp8 = mlp.features
        assert (log.namespace, log.name, log.enabled, log.line) == ("base", "LogTensorStats", True, 5)
        assert (fp8.namespace, fp8.name, fp8.enabled, fp8.line) == (
            "transformer_engine",
            "LogFp8TensorStats",
            False,
            11,
        )
        assert log.settings == yaml.safe_load(GOOD)["mlp"]["LogTensorStats"]
        assert mlp.feature("base", "LogTensorStats") is log
        assert mlp.feature("transformer_engine", "LogFp8TensorStats") is None  # disabled


def test_a_dict_is_read_and_copied():
    """A dict gives what a file of the same content gives, and may be changed afterwards."""
    settings = yaml.safe_load(GOOD)
    config = load(settings, REGISTRY)
    settings["mlp"]["LogTensorStats"]["stats"].append("nonsense")
    rule = config.section_for("fc1").feature("base", "LogTensorStats").rule("activation")
    assert [request.name for request in rule.stats] == ["mean", "std"]
    assert config.source == ""


def test_no_configuration_is_no_features():
    """The empty string stands for no features."""
    assert load("", REGISTRY) == Config()
    assert load("", REGISTRY).section_for("fc1") is None


def test_one_tensor_needs_no_brackets():
    """``tensors: activation`` is that tensor alone."""
    feature = feature_of(section(tensors="activation", stats=["min"]))
    assert feature.rule("activation") is not None
    assert feature.rule("gradient") is None
    assert feature.rule("activ") is None


def test_a_section_that_is_off_needs_no_layers():
    """What is missing in a section that is off does not matter; what is there is checked."""
    assert load({"a": {"enabled": False}}, REGISTRY).sections[0].enabled is False
    (mistake,) = mistakes_of({"a": {"enabled": False, "Log": {}}})
    assert mistake.startswith("a.Log: is not a feature")


def test_features_of_the_base_namespace_may_be_written_under_it():
    """``base:`` is a namespace like others."""
    config = {"main": {"enabled": True, "layers": {"layer_types": "all"}, "base": {"Anything": {"enabled": True}}}}
    assert feature_of(config).namespace == "base"
    config["main"]["Anything"] = {"enabled": True}
    assert mistakes_of(config) == ["main.Anything: is already given in this section (base.Anything); remove one"]


def test_anchors_aliases_and_merge_keys_work(write):
    """Settings may be shared, and a merged key may be given again."""
    text = """\
one: &one
  enabled: true
  layers: {layer_types: [fc1]}
  LogTensorStats: &log
    enabled: true
    tensors: [x]
    stats: [min]
two:
  <<: *one
  layers: {layer_types: [fc2]}
  LogTensorStats:
    <<: *log
    freq: 5
"""
    config = load(write(text), REGISTRY)
    assert config.section_for("fc1").features[0].rule("x").steps == Steps()
    assert config.section_for("fc2").features[0].rule("x").steps == Steps(freq=5)


# What is logged of a tensor.


def test_tensors_share_the_settings_of_the_feature():
    """All tensors of ``tensors`` get the settings of the feature, others nothing."""
    feature = feature_of(section(tensors=["x", "y"], stats=["min", "MAX"], freq=3, on_nonfinite="warn"))
    rule = feature.rule("x")
    assert rule.stats == (StatisticRequest("min"), StatisticRequest("max"))
    assert rule.steps == Steps(freq=3)
    assert rule.on_nonfinite == "warn"
    assert rule.options == {"tensor": "x", "stats": ["min", "MAX"], "freq": 3, "on_nonfinite": "warn"}
    assert feature.rule("y").steps == Steps(freq=3)
    assert feature.rule("z") is None
    assert feature.rule("x", gemm="fprop") is rule


@pytest.mark.parametrize("word", ["all", ["all"]])
def test_all_tensors(word):
    """The word all, alone or in a list, selects every tensor."""
    feature = feature_of(section(tensors=word, stats=["min"]))
    assert feature.rule("anything").stats == (StatisticRequest("min"),)


def test_entries_override_the_feature():
    """What an entry of tensors_struct says wins over the feature, and the rest is kept."""
    feature = feature_of(
        section(
            stats=["min"],
            freq=2,
            start_step=10,
            on_nonfinite="warn",
            tensors_struct=[
                {"tensor": "x"},
                {"tensor": "y", "stats": ["max"], "freq": 7, "on_nonfinite": "raise"},
                {"tensor": "z", "start_end_list": [[0, 5], [8, -1]]},
            ],
        )
    )
    x, y, z = map(feature.rule, "xyz")
    assert (x.stats, x.steps, x.on_nonfinite) == ((StatisticRequest("min"),), Steps(freq=2, start_step=10), "warn")
    assert (y.stats, y.steps, y.on_nonfinite) == ((StatisticRequest("max"),), Steps(freq=7, start_step=10), "raise")
    assert z.steps == Steps(freq=2, start_end_list=((0, 5), (8, -1)))
    assert feature.rule("other") is None


def test_an_entry_for_all_other_tensors():
    """An entry for all is for the tensors that have none of their own."""
    feature = feature_of(
        section(stats=["min"], tensors_struct=[{"tensor": "all", "freq": 5}, {"tensor": "x", "stats": ["max"]}])
    )
    assert feature.rule("other").steps == Steps(freq=5)
    assert feature.rule("x").stats == (StatisticRequest("max"),)


def test_rules_by_gemm():
    """Entries of gemms_struct hold for their GEMM alone, with tensors or tensors_struct of their own."""
    feature = feature_of(
        te(
            stats=["mse"],
            gemms_struct=[
                {"gemm": "fprop", "tensors": ["activation", "weight"]},
                {"gemm": "dgrad", "freq": 5, "tensors_struct": [{"tensor": "gradient", "stats": ["underflows%"]}]},
            ],
        )
    )
    assert feature.rule("activation", "fprop").options["gemm"] == "fprop"
    assert feature.rule("activation", "dgrad") is None
    assert feature.rule("activation") is None
    gradient = feature.rule("gradient", "dgrad")
    assert (gradient.stats, gradient.steps) == ((StatisticRequest("underflows%"),), Steps(freq=5, inclusive=True))
    assert feature.rule("gradient", "wgrad") is None


def test_a_list_of_gemms():
    """``gemms`` limits the tensors of the feature to some GEMMs; all is no limit."""
    feature = feature_of(te(stats=["mse"], gemms=["fprop"], tensors=["weight"]))
    assert feature.rule("weight", "fprop").options == {"stats": ["mse"], "tensor": "weight", "gemm": "fprop"}
    assert feature.rule("weight", "dgrad") is None
    assert feature_of(te(stats=["mse"], gemms="all", tensors=["weight"])).rule("weight", "dgrad") is not None


def test_ends_of_ranges_are_inclusive_for_transformer_engine_alone():
    """The end of a range is logged in the namespace transformer_engine, and not elsewhere."""
    ranges = [[0, 5]]
    assert feature_of(te(tensors="all", stats=["mse"], start_end_list=ranges)).rule("weight").steps.includes(5)
    assert not feature_of(section(tensors="all", stats=["min"], start_end_list=ranges)).rule("x").steps.includes(5)


def test_options_of_a_blockwise_statistic():
    """A statistic may be a mapping to its options; those left out have Transformer Engine's defaults."""
    name = "max_blockwise_dynamic_range"
    stats = [name, {name: {"block_size": 16}}, {name: {"dims": 2}}, {"min": {}}]
    rule = feature_of(section(tensors=["x"], stats=stats)).rule("x")
    assert [request.label for request in rule.stats] == [
        f"{name}_block_size_32_dims_1",
        f"{name}_block_size_16_dims_1",
        f"{name}_block_size_32_dims_2",
        "min",
    ]
    assert dict(rule.stats[1].options) == {"block_size": 16, "dims": 1}


def test_a_feature_that_declares_nothing_takes_anything():
    """Settings of a feature without keys and statistics are passed on as they are."""
    feature = feature_of(
        section("Anything", colour="red", stats=["odd", {"x": {"y": 1}}], tensors=["a"], nested={"b": [1]})
    )
    assert feature.rule("a").options == {
        "colour": "red",
        "stats": ["odd", {"x": {"y": 1}}],
        "nested": {"b": [1]},
        "tensor": "a",
    }
    assert feature.rule("a").stats[1] == StatisticRequest("x", (("y", 1),))
    assert feature_of(section("Anything")).rule("any tensor") is not None


def test_nonfinite_alone_needs_no_statistics():
    """A feature may only look for NaN and Inf."""
    rule = feature_of(section(tensors="all", on_nonfinite="dump")).rule("x")
    assert (rule.stats, rule.on_nonfinite) == ((), "dump")


def test_a_rule_is_found_cheaply():
    """Finding the section, the feature and the rule of a tensor takes a few lines each, whatever else there is."""
    tensors = ["x", *(f"y{i}" for i in range(100))]
    config = load(section(tensors=tensors, stats=["min"]), REGISTRY)
    feature = config.section_for("a.fc").features[0]
    for ask in (lambda: feature.rule("x"), lambda: feature.rule("z"), lambda: config.section_for("a.fc")):
        assert 1 < lines_run(ask) <= 4


# Mistakes.


def test_all_mistakes_of_a_file_are_told_at_once(mistakes):
    """One error lists every mistake in the order of lines, with path, rule, value and nearest right word."""
    text = """\
mlp:
  enabled: 'false'
  layers:
    layer_types: fc1
    layer_numbers: ['a', true]
    layer_name_regex_pattern: "fc(1"
    layer_typ: [x]
  LogTensorStat: {enabled: true}
  LogTensorStats:
    tensors: [activation]
    stats: [min, maen]
    freq: 0
    frq: 3
    freq: 2.5
  transformer_engin:
    LogFp8TensorStats: {enabled: true}
  transformer_engine:
    LogFp8Stats: {enabled: true}
    LogFp8TensorStats:
      enabled: true
      tensors: [activations]
      stats: [mse]
      start_end_list: [[0, 10], [5, 8]]
"""
    assert mistakes(text) == [
        "2: mlp.enabled: must be true or false (enabled: 'false'); write false without quotes",
        "4: mlp.layers.layer_types: must be a list of names (layer_types: 'fc1'); write layer_types: [fc1]",
        "5: mlp.layers.layer_numbers[0]: must be an integer of 0 or more, or a range such as '0-3' "
        "(layer_numbers[0]: 'a')",
        "5: mlp.layers.layer_numbers[1]: must be an integer of 0 or more, or a range such as '0-3' "
        "(layer_numbers[1]: True)",
        "6: mlp.layers.layer_name_regex_pattern: must be a regular expression (layer_name_regex_pattern: 'fc(1'): "
        "missing ), unterminated subpattern at position 2",
        "7: mlp.layers.layer_typ: unknown layer selector; did you mean 'layer_types'?",
        "8: mlp.LogTensorStat: is not a feature; did you mean 'LogTensorStats'?",
        "9: mlp.LogTensorStats: must say whether it is enabled; add enabled: true",
        "11: mlp.LogTensorStats.stats[1]: 'maen' is not a statistic of this feature; did you mean 'mean'?",
        "13: mlp.LogTensorStats.frq: unknown setting; did you mean 'freq'?",
        "14: key 'freq' is already given in line 12; remove one",
        "14: mlp.LogTensorStats.freq: must be an integer of 1 or more (freq: 2.5)",
        "15: mlp.transformer_engin: is neither a namespace nor a feature; did you mean 'transformer_engine'?",
        "18: mlp.transformer_engine.LogFp8Stats: is not a feature of the namespace transformer_engine; "
        "did you mean 'LogFp8TensorStats'?",
        "21: mlp.transformer_engine.LogFp8TensorStats.tensors[0]: 'activations' is not a tensor of this feature; "
        "did you mean 'activation'?",
        "23: mlp.transformer_engine.LogFp8TensorStats.start_end_list: ranges must not overlap "
        "(found: [0, 10] and [5, 8])",
    ]


def test_a_dict_is_checked_as_a_file_is(mistakes):
    """The mistakes of a dict are those of a file, without lines."""
    text = (
        GOOD.replace("[mean, std]", "[maen, std]")
        .replace("freq: 10", "freq: -1")
        .replace("enabled: true", "enabled: 1")
    )
    in_file = [mistake.partition(": ")[2] for mistake in mistakes(text)]
    assert len(in_file) == 4
    assert sorted(mistakes_of(yaml.safe_load(text))) == sorted(in_file)


def test_the_error_is_a_value_error_with_a_list():
    """It is caught as ValueError, its text has one line a mistake, and it can be pickled."""
    with pytest.raises(ValueError, match="2 mistakes in the configuration:\n  main: must") as caught:
        load({"main": {"enabled": True}}, REGISTRY)
    assert str(caught.value).count("\n") == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({}, "must name its tensors; add tensors: [...] or tensors: all"),
        ({"tensors": ""}, ".tensors[0]: must be a name (tensors[0]: ''); write it in quotes"),
        ({"tensors": []}, ".tensors: must be a list of names or the word all (tensors: [])"),
        ({"tensors": [1]}, ".tensors[0]: must be a name (tensors[0]: 1); write it in quotes"),
        ({"tensors": ["x", "x"]}, ".tensors[1]: is given twice (tensors: 'x'); remove one"),
        (
            {"tensors": ["x"], "tensors_struct": [{"tensor": "y"}]},
            ".tensors_struct: cannot be combined with tensors; remove one of them",
        ),
        (
            {"tensors_struct": {"tensor": "x"}},
            ".tensors_struct: must be a list of mappings, such as tensors_struct: [{tensor: ...}] "
            "(tensors_struct: {'tensor': 'x'})",
        ),
        ({"tensors_struct": [{"freq": 2}]}, ".tensors_struct[0]: must name its tensor (tensor: None)"),
        (
            {"tensors_struct": [{"tensor": "x"}, {"tensor": "x"}]},
            ".tensors_struct[1].tensor: is already in this list (tensor: 'x'); remove one",
        ),
        (
            {"tensors_struct": [{"tensor": "x", "tensors": ["y"]}]},
            ".tensors_struct[0].tensors: cannot be given here, only outside of this list",
        ),
        (
            {"tensors_struct": [{"tensor": "x", "fre": 2}]},
            ".tensors_struct[0].fre: unknown setting; did you mean 'freq'?",
        ),
        (
            {"start_step": 10, "tensors_struct": [{"tensor": "x", "end_step": 5}]},
            ".tensors_struct[0].end_step: must not be before start_step (start_step: 10, end_step: 5)",
        ),
        (
            {"freq": 0, "tensors_struct": [{"tensor": "x", "freq": 2}]},
            ".freq: must be an integer of 1 or more (freq: 0)",
        ),
        (
            {"gemms_struct": [{"gemm": "fprop", "tensors": ["x"]}]},
            ".gemms_struct: unknown setting; did you mean 'tensors_struct'?",
        ),
        (
            {"tensors": "all", "on_nonfinite": "rise"},
            ".on_nonfinite: must be one of warn, raise, dump (on_nonfinite: 'rise'); did you mean 'raise'?",
        ),
    ],
)
def test_mistakes_in_tensors(settings, mistake):
    """Tensors, entries and their settings are checked."""
    found = mistakes_of(section(stats=["min"], **settings))
    assert f"main.LogTensorStats{mistake if mistake.startswith('.') else ': ' + mistake}" in found


@pytest.mark.parametrize(
    ("stats", "mistake"),
    [
        ("min", ": must be a list of statistics (stats: 'min'); write stats: [min]"),
        ([], ": must be a list of statistics (stats: [])"),
        (None, ": must be a list of statistics (stats: None)"),
        ([3], "[0]: must be the name of a statistic (stats[0]: 3)"),
        (["min", "Min"], "[1]: is given twice (stats: 'Min'); remove one"),
        (
            ["frobenius"],
            "[0]: 'frobenius' is not a statistic of this feature; known: max, max_blockwise_dynamic_range, mean, min, "
            "std",
        ),
        ([{"min": {"block_size": 3}}], "[0].min.block_size: unknown option of min; it has none"),
        ([{"min": 3}], "[0]: the options of min must be a mapping (found: 3)"),
        (
            [{"max_blockwise_dynamic_range": {"block_size": 0}}],
            "[0].max_blockwise_dynamic_range.block_size: must be an integer of 1 or more (block_size: 0)",
        ),
        (
            [{"max_blockwise_dynamic_range": {"dims": 3}}],
            "[0].max_blockwise_dynamic_range.dims: must be 1 or 2 (dims: 3)",
        ),
        (
            [{"max_blockwise_dynamic_range": {"blocksize": 8}}],
            "[0].max_blockwise_dynamic_range.blocksize: unknown option of max_blockwise_dynamic_range; "
            "did you mean 'block_size'?",
        ),
    ],
)
def test_mistakes_in_statistics(stats, mistake):
    """Statistics and their options are checked."""
    assert mistakes_of(section(tensors=["x"], stats=stats)) == [f"main.LogTensorStats.stats{mistake}"]


def test_statistics_are_needed():
    """A feature that logs statistics must name some."""
    assert mistakes_of(section(tensors=["x"])) == [
        "main.LogTensorStats: must name its statistics; add stats: [min, max, mean]"
    ]


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        (
            {"gemms": ["fprop"], "gemms_struct": [{"gemm": "x", "tensors": "all"}]},
            ".gemms_struct: cannot be combined with",
        ),
        ({"gemms": "fprop", "tensors": "all"}, ".gemms: must be a list of names (gemms: 'fprop')"),
        ({"gemms_struct": [{"tensors": "all"}]}, ".gemms_struct[0]: must name its gemm (gemm: None)"),
        ({"gemms_struct": [{"gemm": "fprop"}]}, ".gemms_struct[0]: must name its tensors"),
        (
            {"gemms_struct": [{"gemm": "fprop", "tensors_struct": [{"tensor": "wieght"}]}]},
            ".gemms_struct[0].tensors_struct[0].tensor: 'wieght' is not a tensor of this feature; did you mean "
            "'weight'?",
        ),
        (
            {"gemms_struct": [{"gemm": "fprop", "tensors": "all", "freq": 0}]},
            ".gemms_struct[0].freq: must be an integer",
        ),
    ],
)
def test_mistakes_in_gemms(settings, mistake):
    """GEMMs, their tensors and settings are checked."""
    (found,) = mistakes_of(te(stats=["mse"], **settings))
    assert found.startswith(f"main.transformer_engine.LogFp8TensorStats{mistake}")


@pytest.mark.parametrize(
    ("layers", "mistake"),
    [
        ({}, ": must select layers by at least one of exact_layer_names, layer_name_regex_pattern, layer_types, "),
        (None, ": must be a mapping, such as layers: {layer_types: [fc1, fc2]} (it is empty)"),
        (["fc1"], ": must be a mapping, such as layers: {layer_types: [fc1, fc2]} (found: ['fc1'])"),
        ({"layer_types": []}, ".layer_types: must be a list of names or the word all (layer_types: [])"),
        ({"layer_types": [3]}, ".layer_types[0]: must be a name (layer_types[0]: 3)"),
        ({"layer_types": [""]}, ".layer_types[0]: must be a name (layer_types[0]: '')"),
        ({"layer_numbers": 3}, ".layer_numbers: must be a list of numbers or the word all (layer_numbers: 3); write"),
        ({"layer_numbers": [-1]}, ".layer_numbers[0]: must be an integer of 0 or more, or a range such as '0-3'"),
        ({"layer_numbers": ["3-1"]}, ".layer_numbers[0]: must be an integer of 0 or more, or a range such as '0-3'"),
        ({"layer_numbers": [1.0]}, ".layer_numbers[0]: must be an integer of 0 or more, or a range such as '0-3'"),
        ({"exact_layer_names": "all"}, ".exact_layer_names: must be a list of names (exact_layer_names: 'all'); to"),
        ({"exact_layer_names": "fc1"}, ".exact_layer_names: must be a list of names (exact_layer_names: 'fc1'); write"),
        ({"layer_name_regex_pattern": ["a"]}, ".layer_name_regex_pattern: must be a regular expression (layer_name_"),
        ({"layer_name_regex_pattern": "*a"}, ".layer_name_regex_pattern: must be a regular expression (layer_name_"),
    ],
)
def test_mistakes_in_layers(layers, mistake):
    """Every selector is checked."""
    (found,) = mistakes_of({"main": {"enabled": True, "layers": layers, "Anything": {"enabled": True}}})
    assert found.startswith(f"main.layers{mistake}")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["is empty; add a section"]),
        ({"a": 3}, ["a: must be a mapping, with enabled, layers and features (found: 3)"]),
        ({"a": None}, ["a: must be a mapping, with enabled, layers and features (it is empty)"]),
        ({3: {}}, ["[3]: a key must be a word (found: 3); write it in quotes"]),
        (
            {"a": {"Enabled": True}},
            [
                "a: must say whether it is enabled (found: 'Enabled'); add enabled: true",
                "a: must say which layers it selects; add layers: {layer_types: all}",
                "a.Enabled: is not a feature; did you mean 'enabled'?",
            ],
        ),
        (
            {"a": {"enabled": True, "layers": {"layer_types": "all"}}},
            ["a: must have a feature, such as LogTensorStats"],
        ),
        (
            {"a": {"enabled": True, "layers": {"layer_types": "all"}, "Anything": None}},
            ["a.Anything: must be a mapping, such as {enabled: true, tensors: [activation]} (it is empty)"],
        ),
        (
            {"a": {"enabled": True, "layers": {"layer_types": "all"}, "transformer_engine": {}}},
            ["a.transformer_engine: must hold features of the namespace transformer_engine; it is empty"],
        ),
        (
            {"a": {"enabled": True, "layers": {"layer_types": "all"}, "LogFp8TensorStats": {"enabled": True}}},
            [
                "a.LogFp8TensorStats: is a feature of the namespace transformer_engine, not of base; "
                "write it under the key transformer_engine"
            ],
        ),
        (
            {"LogTensorStats": {"enabled": True, "tensors": ["x"], "stats": ["min"]}},
            [
                "LogTensorStats: is a feature, which stands in a section; indent it, below my_section: "
                "{enabled: true, layers: {layer_types: all}, LogTensorStats: ...}"
            ],
        ),
        (
            {"transformer_engine": {"LogFp8TensorStats": {"enabled": True}}},
            [
                "transformer_engine: is a namespace, which stands in a section; indent it, below my_section: "
                "{enabled: true, layers: {layer_types: all}, transformer_engine: ...}"
            ],
        ),
        (
            {"enabled": True, "layers": {"layer_types": "all"}},
            [
                "enabled: is a key of a section; give the section a name, in a line before it, and indent it",
                "layers: is a key of a section; give the section a name, in a line before it, and indent it",
            ],
        ),
    ],
)
def test_mistakes_in_sections(config, expected):
    """Sections and the features in them are checked."""
    assert mistakes_of(config) == expected


def test_disabled_parts_are_checked_too():
    """What is disabled must be right, so that enabling it is no surprise."""
    config = section(tensors=["x"], stats=["maen"])
    config["main"]["enabled"] = config["main"]["LogTensorStats"]["enabled"] = False
    assert mistakes_of(config) == [
        "main.LogTensorStats.stats[0]: 'maen' is not a statistic of this feature; did you mean 'mean'?"
    ]


# Files that are no configuration.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "1: is empty; add a section"),
        ("# nothing\n---\n", "3: is empty; add a section"),
        ("- a\n- b\n", "1: must be a mapping, from names of sections to sections (found: ['a', 'b'])"),
        ("just text\n", "1: must be a mapping, from names of sections to sections (found: 'just text')"),
        ("a: [1,\nb: 2\n", "3: is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a:\n\tb: 1\n", "2: is not valid YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("a: 1\n---\nb: 2\n", "2: is not valid YAML: but found another document"),
        ("a: *b\n", "1: is not valid YAML: found undefined alias 'b'"),
        ("a: &a [*a]\n", "1: contains itself"),
        ("a: 1\nb: \x01\n", "2: is not valid YAML: character '\\x01' is not allowed"),
        (b"a: 1\nb: \xff\n", "2: is not UTF-8 text (byte 0xff); save it as UTF-8"),
        ("a: 1\nb: 2021-13-01\n", "2: is not valid YAML: '2021-13-01' is no timestamp (month must be in 1..12)"),
        ("a: 1\n? [x]\n: 2\n", "2: a key must be a word"),
        ("a: !mine x\n", "1: tag '!mine' is not allowed; write plain values"),
        ("a: !!timestamp x\n", "1: is not valid YAML: 'x' is no timestamp"),
        ("a: !!int x\n", "1: is not valid YAML: 'x' is no int (invalid literal for int() with base 10: 'x')"),
        ("a: 1\nb: !!float x\n", "2: is not valid YAML: 'x' is no float (could not convert string to float: 'x')"),
        (f"a: 0x{'f' * 5000}\n", "1: a number must fit 64 bits ('0xffff"),
        ("a: !!bool x\n", "1: is not valid YAML: 'x' is no bool ('x')"),
        (
            "a: !!binary é\n",
            "1: is not valid YAML: 'é' is no binary (failed to convert base64 data ",
        ),
        (
            "a: !!python/name:os.system\n",
            "1: tag 'tag:yaml.org,2002:python/name:os.system' is not allowed; write plain ",
        ),
        ("a: !!map x\n", "1: tag 'tag:yaml.org,2002:map' is not allowed; write plain values"),
        ("a: !!set {x}\n", "1: tag 'tag:yaml.org,2002:set' is not allowed; write plain values"),
        ('a: 1\nb: "\\Uffffffff"\n', "2: is not valid YAML: "),
        ("a: 1\n<<: 3\n", "2: << must be followed by a mapping, or by a list of mappings"),
        ("a: &a\n  <<: *a\n", "1: contains itself"),
        ("[" * 3000, "1: is nested too deeply, or contains itself"),
    ],
)
def test_a_file_that_is_no_configuration(content, expected, mistakes):
    """What is no YAML, no text or no mapping is told with its line."""
    (found,) = mistakes(content)
    assert found.startswith(expected)


def test_duplicate_keys_name_both_lines(mistakes):
    """A key that is given twice is a mistake at any depth, beside the other mistakes."""
    text = GOOD + "mlp:\n  enabled: 3\n"
    found = mistakes(text)
    assert "15: key 'mlp' is already given in line 1; remove one" in found
    assert "16: mlp.enabled: must be true or false (enabled: 3)" in found


def test_a_word_that_yaml_reads_as_a_switch_is_explained(mistakes):
    """A section called off is a key false to YAML."""
    (found,) = mistakes("off:\n  enabled: true\n")
    assert found.startswith("1: False: a key must be a word (found: False); write it in quotes (YAML reads on, off")


def test_tags_run_nothing(mistakes, tmp_path):
    """A tag that would make Python run something is a mistake, and nothing is run."""
    made = tmp_path / "made"
    (found,) = mistakes(
        f"a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{made}']]\n"
    )
    assert found.startswith("1: tag 'tag:yaml.org,2002:python/object/apply:pathlib.Path.touch' is not allowed")
    assert not made.exists()


def test_many_aliases_are_no_bomb(mistakes):
    """Aliases of aliases are read in no time."""
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    began = time.thread_time()
    found = mistakes("\n".join(lines))
    assert time.thread_time() - began < 5
    assert len(found) == 40


def test_a_byte_order_mark_is_fine(write):
    """Some editors begin UTF-8 files with a mark."""
    assert load(write(b"\xef\xbb\xbf" + GOOD.encode()), REGISTRY).sections[0].name == "mlp"


def test_a_missing_file_is_an_error(tmp_path):
    """A file that is not there is FileNotFoundError, with the way out."""
    file = tmp_path / "none.yaml"
    with pytest.raises(FileNotFoundError, match=re.escape("no such configuration; correct the path")) as e:
        load(file, REGISTRY)
    assert e.value.filename == str(file)
    with pytest.raises(FileNotFoundError):
        load(str(file), REGISTRY)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_file_is_an_error(tmp_path):
    """A folder, a pipe that nobody writes to, a device that never ends, and a text in the place of a path."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; pass the path of a YAML file, or a dict"):
        load(tmp_path, REGISTRY)
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="cannot be read: it is a pipe or a device"):
            load(path, REGISTRY)
    with pytest.raises(ConfigError, match="must have 1 MiB or less"):
        load(tmp_path / "large", REGISTRY)
    for text in ("main: {}\n" * 1000, "main\0"):
        with pytest.raises(ConfigError, match="cannot be read: "):
            load(text, REGISTRY)


def test_mappings_that_bring_in_mappings(tmp_path):
    """Nine levels of nine merges each have 9**9 pairs, of which one is left."""
    lines = ["a0: &a0 {enabled: true}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 30)]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" if i else "l0: &l0 [x]" for i in range(30)]
    path = tmp_path / "laughs.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"laughs\.yaml:1: a0: must say which layers it selects"):
        load(path, REGISTRY)


def test_merged_keys(tmp_path):
    """What << brings in is overridden by what stands beside it, and by what comes earlier in its list."""
    path = tmp_path / "merged.yaml"
    path.write_text(
        "x: &x\n"
        "  enabled: true\n"
        "  layers: {layer_types: all}\n"
        "  LogTensorStats: &f {enabled: true, tensors: [a], stats: [min], freq: 3}\n"
        "y:\n"
        "  <<: *x\n"
        "  enabled: false\n"
        "  LogTensorStats: {<<: [{freq: 5}, *f], stats: [max]}\n"
    )
    x, y = load(path, REGISTRY).sections
    assert (x.enabled, y.enabled, y.line) == (True, False, 5)
    rule = y.features[0].rule("a")
    assert (rule.steps.freq, [request.name for request in rule.stats]) == (5, ["max"])


@pytest.mark.parametrize(
    "settings",
    [
        {"freq": 10**5000},
        {"start_step": 10**5000, "end_step": 3},
        {"start_end_list": [[0, 10**5000]]},
        {"freq": -(1 << 63)},
    ],
)
def test_numbers_beyond_counting(settings):
    """Python does not even write them."""
    (mistake,) = mistakes_of(section(tensors=["x"], stats=["min"], **settings))
    assert "must" in mistake


def test_numbers_of_layers_beyond_counting():
    """Nothing has so many layers, and nobody has the time to list them."""
    for numbers in ([10**5000], [f"0-{'9' * 5000}"], ["0-999999", "0-999999"]):
        config = section(tensors=["x"], stats=["min"])
        config["main"]["layers"] = {"layer_numbers": numbers}
        (mistake,) = mistakes_of(config)
        assert mistake.startswith("main.layers.layer_numbers[")
    config = section(tensors=["x"], stats=["min"], on_nonfinite=10**5000)
    config["main"]["enabled"] = 10**5000
    assert len(mistakes_of({**config, 10**5000: 1})) == 3


def test_more_mistakes_than_anybody_reads():
    """The first hundred are listed, so that no file takes minutes to be refused."""
    assert len(mistakes_of(section(tensors=["x"], stats=[f"maen{i}" for i in range(5000)]))) == 100


@pytest.mark.parametrize("config", [None, 3, [], b"x"])
def test_a_configuration_is_a_path_or_a_dict(config):
    """Anything else is a type error."""
    with pytest.raises(TypeError, match="a configuration must be a path or a dict"):
        load(config, REGISTRY)


def test_a_dict_that_contains_itself():
    """A dict without an end is a mistake, not a crash."""
    config = {}
    config["a"] = config
    with pytest.raises(ConfigError, match="nested too deeply, or contains itself"):
        load(config, REGISTRY)


def test_a_section_may_have_the_name_of_a_feature():
    """A section is known by its layers, whatever its name."""
    settings = section(tensors=["x"], stats=["min"])["main"]
    assert load({"LogTensorStats": settings}, REGISTRY).section_for("fc1").name == "LogTensorStats"
