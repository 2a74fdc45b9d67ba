"""Programs that use nvdlfw_inspect as Transformer Engine and Megatron-LM do."""

from __future__ import annotations

import json
from pathlib import Path

from support import warm

CLIENT = Path(__file__).parent / "nvdlfw_client"
FC1, ATTENTION, HEAD = "model.decoder.layers.7.fc1", "model.decoder.layers.7.attn", "model.head"

# What the client sees with nvdlfw_inspect 0.2.2, but for three things: there, a list of layers has no name; the answer
# for the activation of fprop is given for wgrad too, as both are asked for in one line; and LogTensorStats logs a
# message of its own.
SEEN = {
    "before": [True, 0],
    "names": ["model", "model.decoder", "model.decoder.layers", "model.decoder.layers.7", FC1, ATTENTION, HEAD],
    "session": [10, None, True, 3, ["DisableGEMM", "LogTensorStats", "Scale"], ["base", "engine"], {}],
    "gemms": {
        FC1: [[False, False, True], [True, False, False, False]],
        ATTENTION: [[True, False, False], [False, False, True, True]],
        HEAD: [[True, True, True], [False, False, False, False]],
    },
    "outputs": {
        FC1: [[[33.0, 6.0]], [[36.0, 6.0]], [[39.0, 6.0]]],
        ATTENTION: [[[77.0, 14.0], [55.0, 10.0]], [[84.0, 14.0], [60.0, 10.0]], [[91.0, 14.0], [65.0, 10.0]]],
        HEAD: [[], [], []],
    },
    "step": 13,
    "logged": [
        [f"{FC1}_activation_max", 11.0, 10],
        [f"{FC1}_activation_max", 13.0, 12],
        [f"{FC1}_activation_sum", 26.0, 10],
        [f"{FC1}_activation_sum", 30.0, 12],
    ],
    "lines": 4,
    "messages": [
        f"{ATTENTION}: scale: dgrad, gradient",
        f"{ATTENTION}: scale: wgrad, gradient",
        f"{FC1}: inspect: activation",
        f"{FC1}: scale: fprop, activation",
    ],
}


def test_client_with_an_engine_and_a_trainer(tmp_path):
    """Features route by layer, tensor and GEMM, log at their steps, and do so again in a second session."""
    process = warm.start(CLIENT / "client.py", CLIENT / "features", tmp_path / "first", tmp_path / "second")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [
        {**SEEN, "after": [True, 0, 1]},
        {**SEEN, "after": [True, 0, 2]},
    ]


def test_loggers_get_the_last_values(tmp_path):
    """What is measured after the last step reaches a statistics logger when the session ends, and it is forgotten."""
    import torch
    from nvdlfw_inspect import api
    from nvdlfw_inspect.logging import BaseLogger, MetricLogger

    seen = {}

    class Logger(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            seen[name, iteration] = value

    feature = {"enabled": True, "tensors": ["activation"], "stats": ["max"]}
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, "LogTensorStats": feature}
    api.initialize({"section": section}, statistics_logger=Logger(), log_dir=tmp_path)
    api.log_tensor_stats("fc1", tensor=torch.tensor([3.0, 4.0]), tensor_name="activation", iteration=7)
    api.end_debug()
    assert seen == {("fc1_activation_max", 7): 4.0}
    assert MetricLogger.enabled_loggers == []
