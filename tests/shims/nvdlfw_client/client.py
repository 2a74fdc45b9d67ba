"""A program with the calls that Transformer Engine's layers and Megatron-LM's trainer make; it prints what it saw."""

import json
import sys
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import torch
from nvdlfw_inspect.config_manager import ConfigManager
from nvdlfw_inspect.logging import BaseLogger, MetricLogger, get_logger, wrap_tensorboard_writer
from nvdlfw_inspect.registry import Registry
from torch import nn

CONFIG = {
    "mlp": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "fc1"},
        "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"], "freq": 2},
        "engine": {
            "DisableGEMM": {"enabled": True, "gemms": ["dgrad"]},
            "Scale": {"enabled": True, "gemms": ["fprop"], "tensors": ["activation", "weight"], "factor": 3},
            "LogTensorStats": {"enabled": True, "tensors": ["activation", "weight"], "stats": ["sum"], "freq": 2},
        },
    },
    "attention": {
        "enabled": True,
        "layers": {"layer_types": ["attn"]},
        "engine": {
            "Scale": {
                "enabled": True,
                "gemms_struct": [
                    {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient", "factor": 5}]},
                    {"gemm": "dgrad", "tensors": ["gradient"], "factor": 7},
                ],
            }
        },
    },
    "off": {"enabled": False},
}
LAYERS = ("model.decoder.layers.7.fc1", "model.decoder.layers.7.attn", "model.head")


class Writer:
    """A TensorBoard writer."""

    def __init__(self):
        self.calls = []

    def add_scalar(self, tag, value, step):
        self.calls.append([tag, float(value), step])


class Tracker(BaseLogger):
    """A logger of the program's own."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_scalar(self, name, value, iteration, **kwargs):
        self.calls.append([name, float(value), iteration])


class Block(nn.Module):
    """A layer that knows its number in the whole model."""

    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.fc1, self.attn = nn.Linear(2, 2), nn.Linear(2, 2)


class Model(nn.Module):
    """One rank's part of a model."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Block(7)])
        self.head = nn.Linear(2, 1)


def gemms_of(layer, iteration):
    """Return which GEMMs a layer computes in low precision, and which tensors of them it changes, as it is built."""
    engine = debug_api.engine
    low = [engine.fp8_gemm_enabled(layer_name=layer, gemm=g, iteration=iteration)[0] for g in ("fprop", "dgrad")]
    low.append(engine.fp8_gemm_enabled(layer_name=layer, gemm="wgrad", iteration=iteration)[0])
    changed = [
        engine.modify_tensor_enabled(layer_name=layer, gemm="fprop", tensor_name="activation", iteration=iteration)[0],
        engine.modify_tensor_enabled(layer_name=layer, gemm="wgrad", tensor_name="activation", iteration=iteration)[0],
    ]
    changed += [
        engine.modify_tensor_enabled(layer_name=layer, gemm="dgrad", tensor_name="gradient", iteration=iteration)[0],
    ]
    changed += [
        engine.modify_tensor_enabled(layer_name=layer, gemm="wgrad", tensor_name="gradient", iteration=iteration)[0],
    ]
    return low, changed


def run_layer(layer, iteration, changed):
    """Inspect and change the tensors of a layer."""
    engine, outputs = debug_api.engine, []
    tensor = torch.tensor([iteration + 1.0, 2.0])
    debug_api.log_tensor_stats(layer, tensor=tensor, tensor_name="activation")
    for name in ("activation", "gradient"):
        if engine.inspect_tensor_enabled(layer_name=layer, tensor_name=name, iteration=iteration)[0]:
            for _ in range(2):  # micro-batches
                engine.inspect_tensor(
                    layer_name=layer, tensor_name=name, tensor=tensor, iteration=iteration, tp_group=None
                )
    arguments = {"iteration": iteration, "default_quantizer": None}
    if changed[0]:
        out = engine.modify_tensor(layer_name=layer, gemm="fprop", tensor_name="activation", tensor=tensor, **arguments)
        outputs.append(out.tolist())
    if changed[2]:
        out = engine.modify_tensor(layer_name=layer, gemm="dgrad", tensor_name="gradient", tensor=tensor, **arguments)
        outputs.append(out.tolist())
    if changed[3]:
        out = engine.modify_tensor(layer_name=layer, gemm="wgrad", tensor_name="gradient", tensor=tensor, **arguments)
        outputs.append(out.tolist())
    return outputs


def main(features, folder):
    """Run the program with a folder of features, logging into another one, and return what it saw."""
    seen = {"before": [debug_api.DEBUG_MANAGER is None, len(MetricLogger.enabled_loggers)]}
    debug_api.initialize(
        config_file=CONFIG,
        feature_dirs=[features],
        log_dir=folder,
        statistics_logger=None,
        init_training_step=0,
        default_logging_enabled=True,
    )
    writer, tracker = Writer(), Tracker()
    MetricLogger.add_logger(wrap_tensorboard_writer(writer))
    MetricLogger.add_logger(tracker)
    debug_api.initialize_training_step(10)
    model = Model()
    debug_api.infer_and_assign_layer_names([model])
    debug_api.set_tensor_reduction_group(None)
    seen["names"] = [module.name for module in model.modules() if hasattr(module, "name")]
    seen["session"] = [
        debug_api.DEBUG_MANAGER._trainer_iteration_count,
        debug_api.get_tensor_reduction_group(),
        get_logger().root_log_dir == folder,
        len(MetricLogger.enabled_loggers),
        sorted(Registry.data["engine"].features),
        sorted(ConfigManager.get_config_for_layer(LAYERS[0])),
        ConfigManager.get_config_for_layer(LAYERS[2]),
    ]
    seen["gemms"] = {layer: gemms_of(layer, 10) for layer in LAYERS}
    seen["outputs"] = {layer: [] for layer in LAYERS}
    for iteration in (10, 11, 12):
        for layer in LAYERS:
            seen["outputs"][layer].append(run_layer(layer, iteration, seen["gemms"][layer][1]))
        debug_api.step()
    seen["step"] = debug_api.DEBUG_MANAGER._trainer_iteration_count
    seen["logged"] = sorted(tracker.calls)
    assert sorted(writer.calls) == seen["logged"]
    debug_api.end_debug()
    buffers = sys.modules["engine_buffers"].BUFFERS
    seen["after"] = [debug_api.DEBUG_MANAGER is None, len(MetricLogger.enabled_loggers), buffers.ended]
    (file,) = Path(folder, "nvdlfw_inspect_statistics_logs").iterdir()
    seen["lines"] = len(file.read_text().splitlines())
    messages = next(Path(folder, "nvdlfw_inspect_logs").iterdir()).read_text()
    about_layers = [line.partition(" - INFO - LAYER=")[2] for line in messages.splitlines()]
    seen["messages"] = sorted(filter(None, about_layers))
    return seen


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        print(json.dumps(main(sys.argv[1], folder)))
