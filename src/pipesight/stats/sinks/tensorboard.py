"""Statistics in TensorBoard, through the writer that a program has anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipesight.stats.sinks.record import Record

__all__ = ["ScalarWriter", "TensorBoardSink"]


class ScalarWriter(Protocol):
    """The part of a TensorBoard writer that we need: torch's, tensorboardX's and others have it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Log one value."""


class TensorBoardSink:
    """Calls ``writer.add_scalar("layer/tensor/statistic", value, iteration)`` for each value.

    TensorBoard makes a group of charts of what is before the first ``/``. The writer stays the program's own: it is
    flushed at the end, and not closed.

    Args:
        writer: What ``torch.utils.tensorboard.SummaryWriter`` returned, or one like it.
        prefix: Goes before each name.
        separator: Goes between its parts; ``"_"`` gives names as in the log file.
    """

    forgives = (OSError,)

    def __init__(self, writer: ScalarWriter, *, prefix: str = "", separator: str = "/") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"a tensorboard writer must have add_scalar(tag, value, step) (tb_writer: {type(writer).__name__}); "
                "use torch.utils.tensorboard.SummaryWriter(log_dir)"
            )
        self._writer = writer
        self._prefix, self._separator = prefix, separator

    def write(self, records: Sequence[Record]) -> None:
        """Add a scalar for each record."""
        for record in records:
            tag = f"{self._prefix}{record.joined(self._separator)}"
            self._writer.add_scalar(tag, record.value, record.iteration)

    def close(self) -> None:
        """Flush the writer."""
        flush = getattr(self._writer, "flush", None)
        if callable(flush):
            flush()
