"""What is logged: one value of one statistic, and the protocol of those who take it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, overload

__all__ = ["Name", "Record", "Records", "Sink", "joined"]

Name: TypeAlias = tuple[str, str, str]
"""Layer, tensor and statistic."""


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
        return joined(self[:3], separator)


def joined(name: Name, separator: str) -> str:
    """Return a name as one string."""
    return separator.join(name) if name[2] else name[0]


class Records(Sequence[Record]):
    """The records of one iteration, thousands of them: kept as columns, and made when they are looked at.

    Args:
        iteration: The training step.

    Attributes:
        names: Of the values.
        values: The values.
        extras: By place, what else the records of tensors with NaN or Inf have: all that follows the value.
    """

    __slots__ = ("extras", "iteration", "names", "values")

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.names: list[Name] = []
        self.values: list[float] = []
        self.extras: dict[int, tuple[Any, ...]] = {}

    @staticmethod
    def of(records: Sequence[Record]) -> list[Records]:
        """Return any records as such, in their order."""
        if isinstance(records, Records):
            return [records]
        found = []
        for iteration, some in itertools.groupby(records, attrgetter("iteration")):
            found.append(columns := Records(iteration))
            for record in some:
                extra = None if record[5:] == _NO_EXTRA else record[5:]
                columns.add([record[:3]], [float(record.value)], extra)
        return found

    def add(self, names: Sequence[Name], values: Sequence[float], extra: tuple[Any, ...] | None = None) -> None:
        """Add the values of one tensor."""
        if extra is not None:
            self.extras.update(dict.fromkeys(range(len(self.values), len(self.values) + len(values)), extra))
        self.names += names
        self.values += values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        return Record(*self.names[index], self.iteration, self.values[index], *self.extras.get(index, ()))

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))


_NO_EXTRA = Record("", "", "", 0, 0.0)[5:]


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
