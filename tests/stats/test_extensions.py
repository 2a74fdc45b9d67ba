"""What extensions derive from and call: APIs of namespaces, settings by tensor, loggers."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from pipesight.stats import api as debug_api
from pipesight.stats.config import ConfigError
from pipesight.stats.extensions import (
    APICacheIdentifier,
    BaseConfigAPIMapper,
    BaseNamespaceAPI,
    ConfigManager,
    ConfigSpec,
    GenericConfigAPIMapper,
    GenericFrameworkAPI,
    MetricLogger,
    Registry,
    append_parent_docstring,
    gather_along_first_dim,
    get_logger,
    import_and_exec_module,
    is_layer_in_cfg,
    print_rank_0,
    wrap_tensorboard_writer,
)
from pipesight.stats.extensions.namespaces import attribute
from pipesight.stats.sinks import BaseLogger
from support import warm

FEATURES = """
    from pipesight.stats.extensions import BaseNamespaceAPI, GenericConfigAPIMapper, Registry
    from pipesight.stats.registry import api_method

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


@pytest.fixture
def mine(tmp_path):
    """The API of a namespace, in a session that is configured for it."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "mine.py").write_text(textwrap.dedent(FEATURES))
    debug_api.initialize(CONFIG, feature_dirs=str(folder), log_dir=str(tmp_path / "logs"))
    return attribute("mine")


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


def test_settings_without_tensors():
    """Settings that name no tensors are an error that says what to add; without tensor_parsing nothing is chosen."""
    mapper = GenericConfigAPIMapper()
    with pytest.raises(ValueError, match=r"tensors: \[activation\]"):
        mapper.parse_config_and_api(SETTINGS, tensor_parsing=True, tensor_name="a")
    assert mapper.parse_config_and_api({"tensors": ["a"]}, tensor_name="a") == (False, None)


def test_configuration_by_layer(mine):
    """The settings for a layer are dictionaries by namespace and feature, None where no section selects it."""
    assert ConfigManager.get_config_for_layer("fc1") == {
        "mine": {"One": {"enabled": True, "tensors": ["a"], "factor": 3}, "Two": {"enabled": False, "tensors": ["a"]}}
    }
    assert ConfigManager.get_config_for_layer("conv") is None


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


# Loggers.


class Recorder(BaseLogger):
    """Keeps what it gets."""

    def __init__(self):
        self.calls = []

    def log_scalar(self, name, value, iteration, **kwargs):
        self.calls.append((name, value, type(value), iteration))


def test_metric_logger(tmp_path):
    """A scalar of an extension goes to all sinks, as a plain float; a logger can be added."""
    first, second = Recorder(), Recorder()
    debug_api.initialize(statistics_logger=first, log_dir=str(tmp_path))
    MetricLogger.log_scalar("mine", torch.tensor(0.5, requires_grad=True), 3)
    MetricLogger.add_logger(second)
    MetricLogger.log_scalar("mine", 2, 4)
    debug_api.end_debug()
    assert first.calls == [("mine", 0.5, float, 3), ("mine", 2.0, float, 4)]
    assert second.calls == [("mine", 2.0, float, 4)]


def test_get_logger(mine, tmp_path):
    """The general log can be written to."""
    assert get_logger().root_log_dir == str(tmp_path / "logs")
    get_logger().log_message("from an extension")
    assert "INFO - from an extension\n" in get_logger().path.read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda: MetricLogger.log_scalar("a", 1.0, 0),
        lambda: MetricLogger.add_logger(Recorder()),
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

OWN = """
    from pipesight.stats.extensions import LogTensorStats, Registry
    from pipesight.stats.registry import api_method

    @Registry.register_feature(namespace="own")
    class LogOwnStats(LogTensorStats):
        @api_method
        def look_at(self, config, layer_name, tensor, tensor_name, iteration):
            if iteration % config["every"] == 0:
                return self.log_tensor_stats(
                    config, layer_name, tensor=tensor, tensor_name=tensor_name, iteration=iteration
                )
            return {}
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
    look_at = attribute("own").look_at
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
    from pipesight.stats.extensions import gather_along_first_dim
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
