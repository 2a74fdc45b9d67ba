"""Train PyTorch models with pipeline parallelism, and see inside the pipe.

`Pipeline` runs any model as a pipeline, `GPipe` an ``nn.Sequential``; `observe` records a training into a run
directory. The public modules, imported when first used:

- `balance`: how many layers each partition takes, by time, by memory or by costs you know
- `context`: which partition, micro-batch and step a thread is working on
- `distributed`: the same pipeline over the processes of ``torchrun``
- `logs`: log lines that name partition and layer
- `plan`: other balances, chunks and schedules, simulated
- `report`: what a recorded run says: bubble, losses, advice
- `skip`: skip connections between layers
- `stats`: statistics of tensors, chosen by a YAML file
- `testing`: the events of a piece of code, for tests
- `trace`: events by DFTracer's ``ai`` conventions

Every other module is private and may change in any release.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if os.name == "nt":
    raise ImportError(
        "pipesight does not run on Windows: it relies on fork, file locks and POSIX signals. Run it on Linux or macOS, "
        "or on Windows in WSL 2."
    )

from pipesight._lazy import lazily
from pipesight._version import __version__

if TYPE_CHECKING:
    from pipesight import balance, context, distributed, logs, plan, report, skip, stats, testing, trace
    from pipesight.context import current_microbatch, is_checkpointing, is_recomputing
    from pipesight.logs import register_layer_logging_hooks
    from pipesight.pipeline.any_model import Pipeline
    from pipesight.pipeline.gpipe import GPipe
    from pipesight.recording import observe

__all__ = [
    "GPipe",
    "Pipeline",
    "__version__",
    "balance",
    "context",
    "current_microbatch",
    "distributed",
    "is_checkpointing",
    "is_recomputing",
    "logs",
    "observe",
    "plan",
    "register_layer_logging_hooks",
    "report",
    "skip",
    "stats",
    "testing",
    "trace",
]

_HOMES = {
    "GPipe": "pipesight.pipeline.gpipe",
    "Pipeline": "pipesight.pipeline.any_model",
    "current_microbatch": "pipesight.context",
    "is_checkpointing": "pipesight.context",
    "is_recomputing": "pipesight.context",
    "observe": "pipesight.recording",
    "register_layer_logging_hooks": "pipesight.logs",
}
_MODULES = ["balance", "context", "distributed", "logs", "plan", "report", "skip", "stats", "testing", "trace"]

__getattr__, __dir__ = lazily(__name__, _HOMES, _MODULES)
