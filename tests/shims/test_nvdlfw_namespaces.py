"""What extensions derive from and call: APIs of namespaces, settings by tensor, loggers."""

from __future__ import annotations

import json
import logging
import sys
import textwrap

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.config_manager import ConfigManager, ConfigSpec, is_layer_in_cfg
from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper, GenericFrameworkAPI
from nvdlfw_inspect.logging import (
    BaseLogger,
    MetricLogger,
    custom_assert,
    get_logger,
    print_rank_0,
    wrap_tensorboard_writer,
)
from nvdlfw_inspect.registry import Registry
from nvdlfw_inspect.utils import (
    APICacheIdentifier,
    append_parent_docstring,
    gather_along_first_dim,
    import_and_exec_module,
)

from pipesight.stats.config import ConfigError
from support import warm

FEATURES = """
    from nvdlfw_inspect.base import BaseNamespaceAPI
    from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper
    from nvdlfw_inspect.registry import Registry, api_method

    class Defaults:
        def scale(self, config, layer_name, **kwargs):
            return ("default", config, layer_name, kwargs)

        def inspect(self, config, layer_name, **kwargs):
            return None

    @Registry.register_namespace_api(namespace="mine")
    class MineAPI(BaseNamespaceAPI):
        def __init__(self):
            super().__init__()
            self.told = []
            self._default_api_impl = Defaults()
            self._cacheable_api_kwargs_map = {"scale": ["tensor_name"]}

        def is_multiple_feature_invocation_allowed(self, api_name):
            return api_name == "inspect"

        def input_assertions_hook(self, api_name, **kwargs):
            if "wrong" in kwargs:
                raise TypeError("wrong")
            self.told.append(("in", api_name, kwargs))

        def routing_condition(self, api_name, config, layer_name, feature_obj, **kwargs):
            self.told.append(("route", api_name, type(feature_obj).__name__))
            if api_name == "scale":
                return feature_obj.parse_config_and_api(config, tensor_parsing=True, **kwargs)
            return True, config

        def output_assertions_hook(self, api_name, ret, **kwargs):
            self.told.append(("out", api_name, ret))

        def step(self):
            self.told.append("step")

        def end_debug(self):
            self.told.append("end")

    @Registry.register_feature(namespace="mine")
    class One(GenericConfigAPIMapper):
        @api_method
        def scale(self, config, layer_name, **kwargs):
            return ("One", config, layer_name, kwargs)

        @api_method
        def inspect(self, config, layer_name, **kwargs):
            return kwargs["value"]

    @Registry.register_feature(namespace="mine")
    class Two(GenericConfigAPIMapper):
        @api_method
        def scale(self, config, layer_name, **kwargs):
            return ("Two", config, layer_name, kwargs)

        @api_method
        def inspect(self, config, layer_name, **kwargs):
            return kwargs["other"]
"""

CONFIG = {
    "one": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "fc.*"},
        "mine": {"One": {"enabled": True, "tensors": ["a"], "factor": 3}, "Two": {"enabled": False, "tensors": ["a"]}},
    },
    "both": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "both.*"},
        "mine": {"One": {"enabled": True, "tensors": ["a"]}, "Two": {"enabled": True, "tensors": ["a"]}},
    },
    "off": {
        "enabled": False,
        "layers": {"layer_name_regex_pattern": "fc.*"},
        "mine": {"One": {"enabled": True, "tensors": ["a"], "factor": 4}},
    },
}


@pytest.fixture(autouse=True)
def no_session_is_left():
    """End the session of a test."""
    yield
    debug_api.end_debug()
    MetricLogger.enabled_loggers.clear()


CONFIG_OF_MAX = {
    "s": {
        "enabled": True,
        "layers": {"layer_types": ["fc"]},
        "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"]},
    }
}


def log_max(step):
    """Log a tensor, and end the step."""
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([float(step)]), tensor_name="activation")
    debug_api.step()


def messages(log_dir):
    """Return what is in the message log."""
    return (log_dir / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()


@pytest.fixture
def mine(tmp_path):
    """The API of a namespace, in a session that is configured for it."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "mine.py").write_text(textwrap.dedent(FEATURES))
    debug_api.initialize(CONFIG, feature_dirs=str(folder), log_dir=str(tmp_path / "logs"))
    return debug_api.mine


# The API of a namespace.


def test_call_is_served(mine):
    """A call goes to the feature that is on for the layer and its tensor, between the hooks for input and output."""
    expected = ("One", {"factor": 3, "tensor": "a"}, "fc1", {"tensor_name": "a", "x": 1})
    assert mine.scale("fc1", tensor_name="a", x=1) == expected
    assert mine.told == [
        ("in", "scale", {"tensor_name": "a", "x": 1}),
        ("route", "scale", "One"),
        ("out", "scale", expected),
    ]
    assert mine.scale(layer_name="fc1", tensor_name="a") == (*expected[:3], {"tensor_name": "a"})


def test_default(mine):
    """A layer that is not selected, or another tensor, has the default, with no settings."""
    assert mine.scale("conv", tensor_name="a") == ("default", {}, "conv", {"tensor_name": "a"})
    assert mine.scale("fc1", tensor_name="b") == ("default", {}, "fc1", {"tensor_name": "b"})


@pytest.mark.parametrize("chosen", [None, {}])
def test_condition_without_settings(mine, monkeypatch, chosen):
    """Where the condition chooses no settings, a feature is called with all it has."""
    monkeypatch.setattr(mine, "routing_condition", lambda *_, **__: (True, chosen))
    settings = {"enabled": True, "tensors": ["a"], "factor": 3}
    assert mine.scale("fc1", tensor_name="a") == ("One", settings, "fc1", {"tensor_name": "a"})


def test_features_are_found_once(mine):
    """Which features serve a call is worked out once for a layer and the arguments that matter."""
    for _ in range(3):
        mine.scale("fc1", tensor_name="a")
        mine.scale("fc1", tensor_name="b")
        mine.scale("fc2", tensor_name="a", x=torch.ones(2))
    assert mine.told.count(("route", "scale", "One")) == 3


def test_one_feature_where_one_may(mine):
    """Two features for a call that one may serve are an error that names them."""
    with pytest.raises(ValueError, match=r"call: mine.scale, layer: both1, features: One, Two"):
        mine.scale("both1", tensor_name="a")


def test_several_features(mine):
    """Where several features may serve a call, they must return the same; the error shows what they returned."""
    assert mine.inspect("both1", value=1, other=1) == 1
    tensor = torch.ones(3)
    assert mine.inspect("both1", value=tensor, other=tensor.clone()) is tensor
    for one, other in ((1, 2), (tensor, tensor + 1), (tensor, 1), (None, tensor)):
        with pytest.raises(ValueError, match="must return the same"):
            mine.inspect("both1", value=one, other=other)


def test_error_in_a_hook_or_feature(mine):
    """What a hook or a feature raises is raised."""
    with pytest.raises(TypeError, match="wrong"):
        mine.scale("fc1", tensor_name="a", wrong=1)
    with pytest.raises(KeyError, match="value"):
        mine.inspect("fc1")


def test_unknown_call(mine):
    """A call that nobody serves is an AttributeError with the nearest name; nvdlfw_inspect returns {}."""
    with pytest.raises(AttributeError, match="did you mean 'scale'"):
        mine.scael("fc1")
    assert not hasattr(mine, "__deepcopy__")


def test_api_without_init():
    """An API that does not call our __init__ gets an ordinary AttributeError, no recursion."""

    class Forgets(GenericFrameworkAPI):
        def __init__(self):
            pass

    with pytest.raises(AttributeError, match="scale"):
        Forgets().scale("fc1")


def test_abstract():
    """The four methods that say what a namespace does must be written."""
    assert BaseNamespaceAPI.__abstractmethods__ == {
        "input_assertions_hook",
        "is_multiple_feature_invocation_allowed",
        "output_assertions_hook",
        "routing_condition",
    }
    with pytest.raises(TypeError, match="abstract"):
        BaseNamespaceAPI()
    with pytest.raises(TypeError, match="parse_config_and_api"):
        BaseConfigAPIMapper()


def test_step_and_end(mine):
    """The API of a namespace is told of each step and of the end."""
    debug_api.step()
    debug_api.step()
    debug_api.end_debug()
    assert mine.told == ["step", "step", "end"]


def test_registry(mine):
    """The registry shows the objects of the session; after it, those that were registered, and not a folder's."""
    space = Registry.data["mine"]
    assert space.api is mine
    assert set(space.features) == {"One", "Two"}
    assert space.feat_api_to_features["scale"] == ["One", "Two"]
    assert space.deferred_features == []
    Registry.validate_and_init()
    Registry.reset()
    assert mine.scale("fc1", tensor_name="a")[0] == "One"
    debug_api.end_debug()
    assert "mine" not in Registry.data
    assert "LogTensorStats" in Registry.data["base"].features


REGISTERED = """
    from nvdlfw_inspect.registry import Registry, api_method
    from nvdlfw_inspect.debug_features.generic_feature_api import GenericFrameworkAPI

    @Registry.register_feature(namespace="routed")
    class Counts:
        @api_method
        def count(self, config, layer_name):
            return 1

    @Registry.register_namespace_api(namespace="routed")
    class API(GenericFrameworkAPI):
        pass

    @Registry.register_feature(namespace="unrouted")
    class Waits:
        pass
"""


def test_registry_without_a_session(tmp_path):
    """What was registered is shown, and a reset forgets it, but not pipesight's own features."""
    (tmp_path / "registered.py").write_text(textwrap.dedent(REGISTERED))
    for _ in range(2):
        import_and_exec_module(str(tmp_path / "registered.py"))
        space = Registry.data["routed"]
        assert isinstance(space.api, GenericFrameworkAPI)
        assert (space.feat_api_to_features, space.deferred_features) == ({"count": ["Counts"]}, [])
        Registry.validate_and_init()
        assert (space.api.name, list(space.api.namespace_features)) == ("routed", ["Counts"])
        waiting = Registry.data["unrouted"]
        assert (waiting.api, [cls.__name__ for cls in waiting.deferred_features]) == (None, ["Waits"])
        Registry.reset()
        assert sorted(Registry.data) == ["base", "transformer_engine"]
    debug_api.initialize(CONFIG_OF_MAX, log_dir=tmp_path)
    log_max(3)


def test_api_that_cannot_route():
    """A class that does not route calls is refused when the APIs are introduced to their features."""
    Registry.register_namespace_api(namespace="odd")(type("Odd", (), {}))
    try:
        with pytest.raises(TypeError, match=r"must have a method route_api \(namespace: odd, API: Odd\)"):
            Registry.validate_and_init()
    finally:
        Registry.reset()


# Settings.

SETTINGS = {"enabled": True, "stats": ["max"], "freq": 2}


@pytest.mark.parametrize(
    ("settings", "tensor", "expected"),
    [
        ({"tensors": ["a", "b"]}, "a", {"tensor": "a"}),
        ({"tensors": ["a", "b"]}, "c", None),
        ({"tensors": "a"}, "a", {"tensor": "a"}),
        ({"tensors": "ab"}, "a", None),
        ({"tensors": "all"}, "a", {"tensor": "a"}),
        ({"tensors": ["all"]}, "a", {"tensor": "a"}),
        ({"tensors_struct": [{"tensor": "a"}, {"tensor": "b", "freq": 7}]}, "b", {"freq": 7, "tensor": "b"}),
        ({"tensors_struct": [{"tensor": "a"}]}, "b", None),
    ],
)
def test_settings_by_tensor(settings, tensor, expected):
    """Settings are those of the feature with those of the tensor over them, and not changed themselves."""
    given = {**SETTINGS, **settings}
    before = json.dumps(given)
    found = GenericConfigAPIMapper().parse_config_and_api(given, tensor_parsing=True, tensor_name=tensor)
    if expected is None:
        assert found == (False, None)
    else:
        assert found == (True, {"stats": ["max"], "freq": 2, **expected})
    assert json.dumps(given) == before


def test_settings_change_in_place():
    """What a mapper of an extension passes on becomes the settings for the tensor; it need not look at the result."""
    mapper = GenericConfigAPIMapper()
    for settings in ({"tensors": ["a", "b"], "factor": 2}, {"tensors_struct": [{"tensor": "b", "factor": 2}]}):
        assert mapper._process_tensor_config(settings, "b") is settings
        assert settings == {"tensor": "b", "factor": 2}
    settings = {"tensors": ["a"]}
    assert mapper._process_tensor_config(settings, "b") is None
    assert settings == {"tensors": ["a"]}


def test_settings_without_tensors():
    """Settings that name no tensors are an error that says what to add; without tensor_parsing nothing is chosen."""
    mapper = GenericConfigAPIMapper()
    with pytest.raises(ValueError, match=r"tensors: \[activation\]"):
        mapper.parse_config_and_api(SETTINGS, tensor_parsing=True, tensor_name="a")
    assert mapper.parse_config_and_api({"tensors": ["a"]}, tensor_name="a") == (False, None)


def test_configuration_by_layer(mine):
    """The settings for a layer are dictionaries by namespace and feature, none where no section selects it."""
    assert ConfigManager.get_config_for_layer("fc1") == {
        "mine": {"One": {"enabled": True, "tensors": ["a"], "factor": 3}, "Two": {"enabled": False, "tensors": ["a"]}}
    }
    assert ConfigManager.get_config_for_layer("conv") == {}


def test_configuration_is_forgotten(mine):
    """After a reset, no layer is selected, and a layer can be asked for again."""
    assert mine.scale("fc1", tensor_name="a")[0] == "One"
    ConfigManager.reset()
    assert ConfigManager.get_config_for_layer("fc1") == {}
    assert mine.scale("fc2", tensor_name="a")[0] == "default"
    debug_api.end_debug()
    ConfigManager.reset()


def test_layer_of_two_sections(tmp_path):
    """A layer that two sections claim is an error, here too."""
    one = {"enabled": True, "layers": {"layer_types": ["fc"]}}
    one["LogTensorStats"] = {"enabled": True, "tensors": ["a"], "stats": ["max"]}
    debug_api.initialize({"one": one, "two": one}, log_dir=str(tmp_path))
    with pytest.raises(ConfigError):
        ConfigManager.get_config_for_layer("fc1")


def test_section_of_the_configuration(mine):
    """A section says whether it is on, which layers it is about, and what it sets."""
    from pipesight.stats.config import load

    settings = {"enabled": True, "tensors": ["a"], "stats": ["max"]}
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, "LogTensorStats": settings}
    (found,) = load({"s": section}).sections
    spec = ConfigSpec(found)
    assert (spec.enabled, spec.extension_config) == (True, {"base": {"LogTensorStats": settings}})
    assert is_layer_in_cfg("fc1", spec)
    assert not is_layer_in_cfg("conv", spec)
    spec.reset()
    assert (spec.enabled, spec.extension_config, is_layer_in_cfg("fc1", spec)) == (False, {}, False)


def test_section_without_a_session():
    """A section can be made empty, told its layers, and reset to be told others."""
    spec = ConfigSpec()
    every = ["decoder.1.mlp.fc1", "decoder.1.attn.proj", "decoder.12.qkv"]
    assert not is_layer_in_cfg("decoder.1.mlp.fc1", spec)
    for layers, names in (
        ({"layer_numbers": [1, 2], "layer_types": ["mlp", "qkv"]}, ["decoder.1.mlp.fc1"]),
        (
            {"layer_numbers": ["all"], "layer_types": ["all"]},
            ["decoder.1.mlp.fc1", "decoder.1.attn.proj", "decoder.12.qkv"],
        ),
        ({"layer_name_regex_pattern": r"1\..*(proj|fc)"}, ["decoder.1.mlp.fc1", "decoder.1.attn.proj"]),
    ):
        spec.initialize({"enabled": True, "layers": layers})
        assert [name for name in every if is_layer_in_cfg(name, spec)] == names
        spec.reset()
    spec.add_extension("base", {"LogTensorStats": {"enabled": True}})
    assert spec.extension_config == {"base": {"LogTensorStats": {"enabled": True}}}
    with pytest.raises(ConfigError, match="unknown layer selector"):
        spec.initialize({"enabled": True, "layers": {"layer_type": ["fc"]}})


# Loggers.


class Recorder(BaseLogger):
    """Keeps what it gets."""

    def __init__(self):
        self.calls = []

    def log_scalar(self, name, value, iteration, **kwargs):
        self.calls.append((name, value, type(value), iteration, *kwargs.items()))


def test_metric_logger(tmp_path):
    """A scalar of an extension goes to all sinks, as a plain float, with more arguments; a logger can be added."""
    first, second = Recorder(), Recorder()
    debug_api.initialize(statistics_logger=first, log_dir=str(tmp_path))
    MetricLogger.log_scalar("mine", torch.tensor(0.5, requires_grad=True), 3)
    MetricLogger.add_logger(second)
    MetricLogger.log_scalar("mine", 2, 4, unit="s")
    debug_api.end_debug()
    assert first.calls == [("mine", 0.5, float, 3), ("mine", 2.0, float, 4, ("unit", "s"))]
    assert second.calls == [("mine", 2.0, float, 4, ("unit", "s"))]


def test_loggers_before_a_session(tmp_path):
    """Loggers can be enabled before a session, which then writes no file, and get scalars at once."""
    logger = Recorder()
    MetricLogger.log_scalar("nobody listens", 1.0, 0)
    MetricLogger.add_logger(logger)
    MetricLogger.log_scalar("early", torch.tensor(1.0), 0, group=1)
    debug_api.initialize(CONFIG_OF_MAX, log_dir=tmp_path)
    assert MetricLogger.enabled_loggers == [logger]
    log_max(0)
    MetricLogger.log_scalar("late", 3.0, 1)
    debug_api.end_debug()
    assert [call[0] for call in logger.calls] == ["early", "fc1_activation_max", "late"]
    assert [call[4:] for call in logger.calls] == [(("group", 1),), (), ()]
    assert MetricLogger.enabled_loggers == []
    assert not (tmp_path / "nvdlfw_inspect_statistics_logs").exists()


def test_enabled_loggers(tmp_path):
    """The list holds every logger of a session, its file too; one that is taken out gets nothing more."""
    writer, logger, added = [], Recorder(), Recorder()

    class Writer:
        def add_scalar(self, *args):
            writer.append(args)

    debug_api.initialize(
        CONFIG_OF_MAX,
        statistics_logger=logger,
        tb_writer=Writer(),
        default_logging_enabled=True,
        log_dir=tmp_path,
    )
    assert MetricLogger.enabled_loggers[0] is logger
    assert MetricLogger.enabled_loggers[2] == get_logger()
    MetricLogger.enabled_loggers.append(added)
    log_max(0)
    MetricLogger.enabled_loggers.remove(logger)
    log_max(1)
    for one in MetricLogger.enabled_loggers:
        one.log_scalar("direct", 5.0, 2)
    debug_api.end_debug()
    names = ["fc1_activation_max", "fc1_activation_max", "direct"]
    assert [call[0] for call in logger.calls] == names[:1]
    assert [call[0] for call in added.calls] == [call[0] for call in writer] == names
    (file,) = (tmp_path / "nvdlfw_inspect_statistics_logs").iterdir()
    assert [line.split(" - INFO - ")[1].split(" ")[0] for line in file.read_text().splitlines()] == names


def test_sinks_beside_loggers(tmp_path):
    """One sink, or several, get the records that loggers get as scalars."""
    kept = []

    class Keeps:
        def write(self, records):
            kept.extend(record.statistic for record in records)

        def close(self):
            kept.append("closed")

    for sinks in (Keeps(), [Keeps()]):
        logger = Recorder()
        debug_api.initialize(CONFIG_OF_MAX, statistics_logger=logger, sinks=sinks, log_dir=tmp_path)
        log_max(0)
        debug_api.end_debug()
        assert (kept, len(logger.calls)) == (["max", "closed"], 1)
        kept.clear()


def test_loggers_of_a_session_that_fails(tmp_path):
    """A session that cannot be opened leaves the enabled loggers as they were."""
    before = Recorder()
    MetricLogger.add_logger(before)
    try:
        with pytest.raises(ConfigError):
            debug_api.initialize({"s": {"enabled": 1}}, statistics_logger=Recorder(), log_dir=tmp_path)
        assert MetricLogger.enabled_loggers == [before]
    finally:
        MetricLogger.enabled_loggers.clear()
    with pytest.raises(TypeError, match="log_scalar"):
        MetricLogger.add_logger(object())
    with pytest.raises(TypeError, match="log_scalar"):
        debug_api.initialize("", statistics_logger=[Recorder(), object()], log_dir=tmp_path)
    assert MetricLogger.enabled_loggers == []


def test_get_logger(mine, tmp_path):
    """The general log can be written to, each time, while ``log_message`` writes a message once."""
    assert get_logger().root_log_dir == str(tmp_path / "logs")
    for _ in range(2):
        get_logger().log_message("from an extension")
    assert messages(tmp_path / "logs").count("INFO - from an extension\n") == 2


def test_messages_are_logged_once(tmp_path):
    """A message is logged once for its layer and the arguments that tell calls apart, and anew in another session."""
    for _ in range(2):
        debug_api.initialize("", log_dir=tmp_path)
        for k in range(3):
            debug_api.log_message("called")
            debug_api.log_message("called", "fc1")
            debug_api.log_message("called", layer_name="fc2", level=logging.WARNING)
            debug_api.log_message("called", "fc1", extra_cachable_args=("fprop", "weight"))
            debug_api.log_message(f"step {k}")
            debug_api.step()
        debug_api.end_debug()
        assert [line.split(",", 1)[1][6:] for line in messages(tmp_path).splitlines()] == [
            "INFO - called",
            "INFO - LAYER=fc1: called",
            "WARNING - LAYER=fc2: called",
            "INFO - LAYER=fc1: called",
            "INFO - step 0",
            "INFO - step 1",
            "INFO - step 2",
        ]


def test_custom_assert(tmp_path):
    """A condition that does not hold is an AssertionError, and a line in the log of a session."""
    custom_assert(True, "fine")
    with pytest.raises(AssertionError, match="no session"):
        custom_assert([], "no session")
    debug_api.initialize("", log_dir=tmp_path)
    with pytest.raises(AssertionError, match="one tensor"):
        custom_assert(False, "one tensor")
    assert messages(tmp_path).endswith(" - ERROR - one tensor\n")


@pytest.mark.parametrize(
    "call",
    [
        get_logger,
        lambda: ConfigManager.get_config_for_layer("fc1"),
    ],
)
def test_no_session(call):
    """Without a session, the error says to initialise one."""
    with pytest.raises(RuntimeError, match="initialize"):
        call()


def test_print_on_the_first_rank(capsys, monkeypatch):
    """Only the first rank prints."""
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        print_rank_0("rank", rank)
    assert capsys.readouterr().out == "rank 0\n"


def test_wrapped_writer():
    """A TensorBoard writer can be a logger."""
    calls = []

    class Writer:
        def add_scalar(self, *args):
            calls.append(args)

    logger = wrap_tensorboard_writer(Writer())
    assert isinstance(logger, BaseLogger)
    logger.log_scalar("a", torch.tensor(2.0), 3)
    assert calls == [("a", 2.0, 3)]


# A feature that logs statistics.


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"freq": 10}, range(0, 100, 10)),
        ({"freq": 5, "start_step": 12, "end_step": 30}, [15, 20, 25, 30]),
        ({"start_end_list": [[0, 2], [50, 51]]}, [0, 1, 50]),
    ],
)
def test_steps_of_calls_through_a_namespace(steps, expected, tmp_path):
    """A call through a namespace, or from a derived feature, logs at the steps of the settings alone."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "own.py").write_text(textwrap.dedent(OWN))
    settings = {"enabled": True, "tensors": ["activation"], "stats": ["max"], **steps}
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, "LogTensorStats": settings}
    section["own"] = {"LogOwnStats": {**settings, "every": 1}}
    logger = Recorder()
    debug_api.initialize({"s": section}, feature_dirs=folder, statistics_logger=logger, log_dir=tmp_path)
    for k in range(100):
        arguments = {"tensor": torch.tensor([k, -1.0]), "tensor_name": "activation"}
        found = [
            debug_api.base.log_tensor_stats("fc1", **arguments),
            debug_api.own.log_tensor_stats("fc2", **arguments),
            debug_api.own.look_at("fc3", iteration=k, **arguments),
        ]
        assert [dict(one) for one in found] == [{"max": k} if k in expected else {}] * 3
        assert debug_api.own.look_at_enabled("fc3", tensor_name="activation", iteration=k) == (k in expected)
        debug_api.step()
    debug_api.end_debug()
    for layer in ("fc1", "fc2", "fc3"):
        assert [(v, i) for name, v, _, i in logger.calls if name == f"{layer}_activation_max"] == [
            (k, k) for k in expected
        ]


OWN = """
    from nvdlfw_inspect.debug_features.log_tensor_stats import LogTensorStats
    from nvdlfw_inspect.registry import Registry, api_method

    @Registry.register_feature(namespace="own")
    class LogOwnStats(LogTensorStats):
        @api_method
        def look_at(self, config, layer_name, tensor, tensor_name, iteration):
            if iteration % config["every"] == 0:
                return self.log_tensor_stats(
                    config, layer_name, tensor=tensor, tensor_name=tensor_name, iteration=iteration
                )
            return {}

        @api_method
        def look_at_enabled(self, config, layer_name, tensor_name, iteration):
            return self._check_params(config, layer_name, iteration=iteration)
"""


def test_feature_derived_from_ours(tmp_path):
    """A feature of an extension logs statistics when it likes, with settings of its own; it needs no API."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "own.py").write_text(textwrap.dedent(OWN))
    own = {"LogOwnStats": {"enabled": True, "tensors": ["a", "b"], "stats": ["max", "l2_norm"], "every": 2}}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["fc"]}, "own": own}}
    logger = Recorder()
    debug_api.initialize(config, feature_dirs=str(folder), statistics_logger=logger, log_dir=str(tmp_path))
    look_at = debug_api.own.look_at
    for k in range(3):
        for tensor_name in ("a", "c"):
            look_at("fc1", tensor=torch.tensor([3.0, 4.0]) + k, tensor_name=tensor_name, iteration=k)
        debug_api.step()
    debug_api.end_debug()
    assert [(name, iteration) for name, _, _, iteration in logger.calls] == [
        ("fc1_a_max", 0),
        ("fc1_a_l2_norm", 0),
        ("fc1_a_max", 2),
        ("fc1_a_l2_norm", 2),
    ]
    values = [value for _, value, _, _ in logger.calls]
    assert values == pytest.approx([4.0, 5.0, 6.0, 61**0.5], rel=1e-9)


# The rest.


def test_where_a_call_comes_from():
    """A call is known by the line of the caller, the layer, its name and the arguments that matter."""

    def function_of_an_api():
        APICacheIdentifier.save_call_details()

    function_of_an_api()
    line = f"{__file__}.{sys._getframe().f_lineno - 1}"
    assert APICacheIdentifier.get_call_details() == line
    cacheable = {"scale": ["tensor_name", "gemm"]}
    identify = APICacheIdentifier.get_unique_identifier
    assert identify(cacheable, "fc1", "scale", tensor_name="a", x=1) == f"{line}.fc1.scale.a.0"
    assert identify(cacheable, "fc1", "other", tensor_name="a") is None


def test_docstring_of_the_parent():
    """A class has its own docstring and that of its parent, or that alone."""

    class Parent:
        """Parent."""

    @append_parent_docstring(parent=Parent)
    class Child(Parent):
        """Child."""

    @append_parent_docstring(Parent)
    class Silent(Parent):
        pass

    assert (Child.__doc__, Silent.__doc__) == ("Child.\n\nParent.", "Parent.")


def test_module_is_run(tmp_path, capsys):
    """A file is run, each time, and is not added to the modules; what it raises is raised."""
    (tmp_path / "some_features.py").write_text("print(__name__)")
    for _ in range(2):
        import_and_exec_module(str(tmp_path / "some_features.py"))
    assert capsys.readouterr().out == "some_features\n" * 2
    assert "some_features" not in sys.modules
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_and_exec_module(str(tmp_path / "broken.py"))
    with pytest.raises(FileNotFoundError, match="missing"):
        import_and_exec_module(str(tmp_path / "missing.py"))
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ImportError, match="not a Python file"):
        import_and_exec_module(str(tmp_path / "text.txt"))


def test_gather_alone():
    """Without other ranks, a tensor is gathered as it is."""
    tensor = torch.ones(2)
    assert gather_along_first_dim(tensor, None) == (tensor, None)


GATHER = """
    import sys, torch, torch.distributed as dist
    from nvdlfw_inspect.utils import gather_along_first_dim
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[2])
    part = torch.full((2, 3), float(rank), requires_grad=True)
    expected = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    whole, waiting = gather_along_first_dim(part, None)
    assert waiting is None and torch.equal(whole, expected) and not whole.requires_grad
    whole, waiting = gather_along_first_dim(part.t().detach(), dist.group.WORLD, async_op=True)
    waiting.wait()
    assert torch.equal(whole, torch.cat([torch.zeros(3, 2), torch.ones(3, 2)]))
    assert gather_along_first_dim(torch.tensor(rank), None)[0].tolist() == [0, 1]
    dist.destroy_process_group()
"""


def test_gather_over_ranks(tmp_path):
    """Over ranks, the parts come one after the other, in order of the ranks, on each of them."""
    store = str(tmp_path / "store")
    ranks = [warm.start("-c", textwrap.dedent(GATHER), rank, store) for rank in "01"]
    errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors


def test_two_built_in_features_of_a_namespace(tmp_path):
    """A call of a namespace is served by all its features, and their statistics are joined."""
    both = {name: {"enabled": True, "tensors": "all"} for name in ("LogTensorStats", "LogFp8TensorStats")}
    both["LogTensorStats"]["stats"], both["LogFp8TensorStats"]["stats"] = ["max"], ["mse"]
    section = {"enabled": True, "layers": {"layer_types": "all"}, "transformer_engine": both}
    debug_api.initialize({"s": section}, log_dir=tmp_path)
    try:
        found = debug_api.transformer_engine.log_tensor_stats("fc1", tensor=torch.ones(4), tensor_name="activation")
        assert sorted(found) == ["max", "mse"]
    finally:
        debug_api.end_debug()
