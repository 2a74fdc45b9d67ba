"""What one contender has to run, as a record that crosses to its process as JSON."""

import dataclasses
import json
import sys
from types import ModuleType
from typing import Self

__all__ = ["PIPELINES", "SCHEDULES", "Job", "require_original"]

# Packages that have a `GPipe` of the same signature.
PIPELINES = ("pipesight", "torchgpipe")

# Classes of torch.distributed.pipelining that run one stage a process.
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload and the way to run it.

    `engine` is `whole` (the plain model on the whole batch), `accumulated` (the plain model fed the
    micro-batches one after another), a package from `PIPELINES`, `any_model` (`pipesight.Pipeline`, for `gpt`),
    `step` and a schedule, such as `step 1f1b` (`pipesight.Pipeline.step`), a class from `SCHEDULES`, `recorder` (of
    spans; see recorders.py), or `statistics` (see loggers.py).
    """

    engine: str
    workload: str
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    partitions: int = 1
    chunks: int = 1
    checkpoint: str = "never"
    device: str = "cpu"
    threads: int = 1
    backward: bool = True

    def balance(self, layers: int) -> list[int]:
        """Spread the layers evenly, the larger shares first: 10 layers over 4 partitions are 3, 3, 2, 2."""
        share, more = divmod(layers, self.partitions)
        return [share + (j < more) for j in range(self.partitions)]

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Self:
        return cls(**json.loads(text))


def require_original(package: ModuleType) -> None:
    """Raise if a peer's package is the drop-in of that name: pipesight would be compared with itself."""
    if "pipesight" in sys.modules:
        raise RuntimeError(
            f"{package.__name__} must be the original, not pipesight's drop-in of that name "
            f"({package.__file__}); run: python -m benchmarks --peers .venv-peers/bin/python"
        )
