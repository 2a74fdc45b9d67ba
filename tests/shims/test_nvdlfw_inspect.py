"""The shim gives pipesight the import names of nvdlfw_inspect, for programs and for extensions."""

from __future__ import annotations

import importlib
import json
import logging
import textwrap
from pathlib import Path

import nvdlfw_inspect
import nvdlfw_inspect.api as debug_api
import pytest
import torch
from packaging.specifiers import SpecifierSet

import pipesight.stats.api

# What programs, Transformer Engine and Megatron-LM import from nvdlfw_inspect 0.2.2.
NAMES = {
    "nvdlfw_inspect": ["__version__"],
    "nvdlfw_inspect.api": [
        *("BaseLogger", "end_debug", "explain_features", "get_tensor_reduction_group", "infer_and_assign_layer_names"),
        *("initialize", "initialize_training_step", "list_features", "log_message", "log_tensor_stats"),
        *("set_tensor_reduction_group", "step"),
    ],
    "nvdlfw_inspect.base": ["BaseConfigAPIMapper", "BaseNamespaceAPI"],
    "nvdlfw_inspect.config_manager": ["ConfigManager", "ConfigSpec", "is_layer_in_cfg"],
    "nvdlfw_inspect.debug_features": [],
    "nvdlfw_inspect.debug_features.generic_feature_api": ["GenericConfigAPIMapper", "GenericFrameworkAPI"],
    "nvdlfw_inspect.debug_features.log_tensor_stats": ["LogTensorStats"],
    "nvdlfw_inspect.debug_manager": ["DebugManager"],
    "nvdlfw_inspect.logging": [
        *("BaseLogger", "FileLogger", "MetricLogger", "TensorboardLogger", "custom_assert", "get_logger"),
        *("print_rank_0", "wrap_tensorboard_writer"),
    ],
    "nvdlfw_inspect.registry": ["NamespaceData", "Registry", "api_method"],
    "nvdlfw_inspect.utils": [
        *("APICacheIdentifier", "append_parent_docstring", "gather_along_first_dim", "import_and_exec_module"),
    ],
}

CONFIG = """
    statistics:
      enabled: true
      layers:
        layer_types: [fc]
      LogTensorStats:
        enabled: true
        tensors: [activation]
        stats: [max, l1_norm]
      CountCalls:
        enabled: true
        tensors: [activation]
      doubling:
        Double:
          enabled: true
          tensors: [activation]
"""

EXTENSION = """
    import nvdlfw_inspect.api as debug_api
    from nvdlfw_inspect.base import BaseNamespaceAPI
    from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper
    from nvdlfw_inspect.debug_features.log_tensor_stats import LogTensorStats
    from nvdlfw_inspect.logging import MetricLogger, get_logger
    from nvdlfw_inspect.registry import Registry, api_method
    from nvdlfw_inspect.utils import append_parent_docstring

    @Registry.register_feature(namespace="base")
    class CountCalls(GenericConfigAPIMapper):
        count = 0

        @api_method
        def count_calls(self, config, layer_name, **kwargs):
            self.count += 1
            return {"count": self.count, "step": debug_api.DEBUG_MANAGER._trainer_iteration_count}

    class Defaults:
        def double(self, config, layer_name, tensor, tensor_name):
            return tensor

    @Registry.register_namespace_api(namespace="doubling")
    class DoublingAPI(BaseNamespaceAPI):
        def __init__(self):
            BaseNamespaceAPI.__init__(self)
            self._default_api_impl = Defaults()

        def is_multiple_feature_invocation_allowed(self, api_name):
            return False

        def input_assertions_hook(self, api_name, **kwargs):
            assert "tensor_name" in kwargs

        def routing_condition(self, api_name, config, layer_name, feature_obj, **kwargs):
            return feature_obj.parse_config_and_api(config, tensor_parsing=True, **kwargs)

        def output_assertions_hook(self, api_name, ret, **kwargs):
            assert ret.shape == kwargs["tensor"].shape

    @Registry.register_feature(namespace="doubling")
    @append_parent_docstring(parent=GenericConfigAPIMapper)
    class Double(GenericConfigAPIMapper):
        '''Double a tensor.'''

        @api_method
        def double(self, config, layer_name, tensor, tensor_name):
            get_logger().log_message(f"double {layer_name} {config}")
            MetricLogger.log_scalar(f"{layer_name}_doubled", tensor.sum(), 0)
            return 2 * tensor
"""


@pytest.fixture(autouse=True)
def no_session_is_left():
    """End the session of a test."""
    yield
    debug_api.end_debug()


def test_warnings_begin_with_the_name_of_the_tool(tmp_path, capsys):
    """Programs that were written for nvdlfw_inspect find its name on stderr; others find pipesight's."""
    for api, name in ((nvdlfw_inspect.api, "NVDLFW INSPECT"), (pipesight.stats.api, "pipesight")):
        api.initialize("", log_dir=tmp_path)
        api.log_message("look", level=logging.WARNING)
        api.end_debug()
        line = capsys.readouterr().err
        assert line.startswith(f"{name} - ")
        assert line.endswith(" - WARNING - look\n")


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module):
    """Every name that is imported from nvdlfw_inspect is there, and public."""
    found = importlib.import_module(module)
    assert {*NAMES[module]} <= {*getattr(found, "__all__", ())}
    assert all(hasattr(found, name) for name in NAMES[module])


def test_no_module_is_forgotten():
    """The table of names above covers every module of the shim."""
    root = Path(nvdlfw_inspect.__file__).parents[1]
    files = root.glob("nvdlfw_inspect/**/*.py")
    modules = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert modules == set(NAMES)


def test_version_passes_for_0_2_2():
    """A requirement nvdlfw_inspect==0.2.2 or >=0.2 is met by the version."""
    assert nvdlfw_inspect.__version__ in SpecifierSet("==0.2.2")
    assert nvdlfw_inspect.__version__ in SpecifierSet(">=0.2,<0.3")


def test_package_is_typed():
    """The package is typed."""
    assert (Path(nvdlfw_inspect.__file__).parent / "py.typed").is_file()


def test_extension(tmp_path):
    """An extension with features, an API and loggers works as with nvdlfw_inspect, beside the statistics."""
    (tmp_path / "config.yaml").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "doubling.py").write_text(textwrap.dedent(EXTENSION))
    from nvdlfw_inspect.logging import BaseLogger

    logged = []

    class Keeps(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            logged.append((name, value, iteration))

    assert debug_api.DEBUG_MANAGER is None
    debug_api.initialize(
        str(tmp_path / "config.yaml"),
        feature_dirs=[str(tmp_path / "features")],
        statistics_logger=Keeps(),
        log_dir=str(tmp_path),
        init_training_step=5,
    )
    tensor = torch.tensor([1.0, -3.0])
    assert {"base.CountCalls", "base.LogTensorStats", "doubling.Double"} <= set(debug_api.list_features())
    for k in (1, 2):
        assert debug_api.count_calls("fc1", tensor_name="activation") == {"count": k, "step": 4 + k}
        assert dict(debug_api.log_tensor_stats("fc1", tensor=tensor, tensor_name="activation")) == {
            "max": 1.0,
            "l1_norm": 4.0,
        }
        debug_api.step()
    assert debug_api.count_calls("fc1", tensor_name="gradient") == {}
    assert debug_api.count_calls("conv", tensor_name="activation") == {}
    doubled = debug_api.doubling.double("fc1", tensor=tensor, tensor_name="activation")
    assert torch.equal(doubled, 2 * tensor)
    assert debug_api.doubling.double("conv", tensor=tensor, tensor_name="activation") is tensor
    debug_api.log_message("a message", level=logging.INFO)
    debug_api.end_debug()
    assert logged == [
        ("fc1_activation_max", 1.0, 5),
        ("fc1_activation_l1_norm", 4.0, 5),
        ("fc1_activation_max", 1.0, 6),
        ("fc1_activation_l1_norm", 4.0, 6),
        ("fc1_doubled", -2.0, 0),
    ]
    messages = (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert " - INFO - double fc1 {'tensor': 'activation'}\n" in messages
    assert " - INFO - a message\n" in messages


@pytest.mark.parametrize(
    ("namespace", "feature", "statistics"),
    [
        (None, "LogTensorStats", "max min mean std l1_norm l2_norm"),
        ("transformer_engine", "LogTensorStats", "max min mean std l1_norm l2_norm cur_amax dynamic_range"),
        ("transformer_engine", "LogFp8TensorStats", "overflows underflows"),
    ],
)
def test_statistics_of_features(namespace, feature, statistics, tmp_path):
    """The features of nvdlfw_inspect and Transformer Engine log the statistics that these have."""
    settings = {feature: {"enabled": True, "tensors": ["activation"], "stats": statistics.split()}}
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, **({namespace: settings} if namespace else settings)}
    debug_api.initialize({"section": section}, log_dir=tmp_path)
    try:
        debug_api.log_tensor_stats("fc1", tensor=torch.tensor([0.5, -2.0]), tensor_name="activation")
        debug_api.step()
    finally:
        debug_api.end_debug()
    records = map(json.loads, (tmp_path / "stats" / "rank-00000.jsonl").read_text().splitlines())
    assert [record["statistic"] for record in records] == statistics.split()


def test_features_are_printed(capsys):
    """The features, and what they say of themselves, are printed as well as returned."""
    assert "base.LogTensorStats" in debug_api.list_features()
    assert "stats: min, max" in debug_api.explain_features("base.LogTensorStats")
    printed = capsys.readouterr().out
    assert "'base.LogTensorStats'" in printed
    assert "stats: min, max" in printed


def test_unknown_name(tmp_path):
    """A name that the API does not have is an AttributeError with the nearest one, with a session or without."""
    for begin in (lambda: None, lambda: debug_api.initialize(log_dir=str(tmp_path))):
        begin()
        with pytest.raises(AttributeError, match=r"'transformer_engin'; did you mean 'transformer_engine'\?"):
            _ = debug_api.transformer_engin
        assert not hasattr(debug_api, "__path__")


def test_namespace_without_a_session():
    """A namespace that is known asks for a session."""
    with pytest.raises(RuntimeError, match="initialize"):
        _ = debug_api.transformer_engine
