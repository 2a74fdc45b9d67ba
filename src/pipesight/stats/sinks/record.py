"""What is logged: one value of one statistic, and the protocol of those who take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Record", "Sink"]


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one statistic of one tensor.

    Attributes:
        value: a plain float.
        nans: how many NaN elements the value leaves out.
        infs: how many infinite elements the value leaves out.
        ranks: the ranks that have these, where several were merged; the first that had them first.
        order: if there are such elements, the place of the tensor among those of its iteration and rank that have some,
            in the order of computation.
        partition: of the pipeline in which the first of them was computed; so are micro-batch and phase.
    """

    layer: str
    """Its name in the model."""
    tensor: str
    """Such as `activation` or `gradient`."""
    statistic: str
    """Such as `mean` or `l2_norm`."""
    iteration: int
    """The training step."""
    value: float
    nans: int = 0
    infs: int = 0
    ranks: tuple[int, ...] = ()
    order: int | None = None
    partition: int | None = None
    microbatch: int | None = None
    """In which the first of them was computed."""
    phase: str | None = None
    """In which the first of them was computed."""

    @staticmethod
    def named(name: str, value: float, iteration: int) -> Record:
        """Return a record of a scalar that has a name, and no layer, tensor or statistic."""
        return Record(name, "", "", iteration, value)

    @property
    def name(self) -> str:
        """The name of the scalar: ``layer_tensor_statistic``."""
        if self.statistic:
            return f"{self.layer}_{self.tensor}_{self.statistic}"
        return self.layer


class Sink(Protocol):
    """Something that takes records: a file, a TensorBoard writer, a user's logger.

    Example::

        class Prints:
            def write(self, records):
                for record in records:
                    print(record.name, record.iteration, record.value)

            def close(self):
                pass

    A sink may have an attribute ``forgives``, a tuple of exceptions that must not end the training (a full disk). Any
    other exception in a sink is raised.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Take records. When this returns, somebody else can read them."""

    def close(self) -> None:
        """Let go of files and connections. Nothing is written afterwards."""
