"""What is logged: one value of one statistic, and the protocol of those who take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Record", "Sink"]


class Record(NamedTuple):
    """One value of one statistic of one tensor, as sinks get it."""

    layer: str
    """The layer's name in the model."""
    tensor: str
    """Such as `activation` or `gradient`."""
    statistic: str
    """Such as `mean` or `l2_norm`."""
    iteration: int
    """The training step."""
    value: float
    """The value; NaN if the tensor has no finite element."""
    nans: int = 0
    """How many NaN elements the value excludes."""
    infs: int = 0
    """How many infinite elements the value excludes."""
    ranks: tuple[int, ...] = ()
    """The ranks with NaN or Inf, the first to have them first, where ranks were merged."""
    order: int | None = None
    """The position of the tensor among those with NaN or Inf in its iteration and rank, in the order of computation."""
    partition: int | None = None
    """The partition in which NaN or Inf first appeared; ``None`` outside a pipeline."""
    microbatch: int | None = None
    """The micro-batch in which NaN or Inf first appeared."""
    phase: str | None = None
    """The phase in which NaN or Inf first appeared: `forward`, `backward`, ..."""

    @staticmethod
    def named(name: str, value: float, iteration: int) -> Record:
        """Return the record of a scalar that has only a name."""
        return Record(name, "", "", iteration, value)

    @property
    def name(self) -> str:
        """The name of the scalar: ``layer_tensor_statistic``."""
        return self.joined("_")

    def joined(self, separator: str) -> str:
        """Return the name of the scalar with something else between its parts.

        >>> Record("fc1", "activation", "mean", 0, 1.0).joined("/")
        'fc1/activation/mean'
        """
        return separator.join(self[:3]) if self.statistic else self.layer


class Sink(Protocol):
    """Takes records: a file, a TensorBoard writer, your own code.

    Example::

        class Prints:
            def write(self, records):
                for record in records:
                    print(record.name, record.iteration, record.value)

            def close(self):
                pass

    A sink can have an attribute ``forgives``, a tuple of exceptions that must not stop the training, such as
    ``(OSError,)`` for a full disk: they are reported once, and the lost records are counted. Any other exception is
    raised in the training loop.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Store records, so that others can read them when this returns."""

    def close(self) -> None:
        """Release files and connections. ``write`` is not called afterwards."""
