"""The tables of a run that the analysis works on: columns are arrays, times are whole microseconds.

`event_queries` makes them from events, in any engine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Column",
    "Communications",
    "Kernels",
    "LayerRuns",
    "LayerTimes",
    "NameTimes",
    "Operations",
    "Points",
    "ProfilerSteps",
    "ProgramSpans",
    "Spans",
    "Table",
    "Tasks",
    "Transfers",
    "data_frame",
]

Column: TypeAlias = NDArray[Any]


def data_frame(columns: dict[str, Column]) -> Any:
    """Make a pandas ``DataFrame``."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(f"pandas is not installed ({error}): pip install pandas") from error
    return pandas.DataFrame(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns of one length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def columns(self) -> dict[str, Column]:
        """Return the columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def where(self, rows: Column | slice) -> Self:
        """Return the rows that a mask, indices or a slice select."""
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})

    def to_pandas(self) -> Any:
        """Return the table as a pandas ``DataFrame``, a column for each of its own; ``ImportError`` without pandas."""
        return data_frame(self.columns())

    @classmethod
    def of(cls, **columns: Any) -> Self:
        """Make a table from sequences."""
        return cls(**{name: np.asarray(column) for name, column in columns.items()})

    @classmethod
    def empty(cls) -> Self:
        """Make a table without rows."""
        return cls(**{field.name: np.zeros(0, np.int64) for field in fields(cls)})

    @classmethod
    def joined(cls, *tables: Self) -> Self:
        """Concatenate tables."""
        return cls(**{field.name: np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(cls)})


@dataclass(frozen=True, slots=True, eq=False)
class Tasks(Table):
    """A phase of a micro-batch on a partition; ``phase``: `FORWARD`, `RECOMPUTE`, `BACKWARD` or `WEIGHT`."""

    rank: Column
    """The rank that ran it."""
    step: Column
    """The training step."""
    minibatch: Column
    """Counted through the whole run."""
    partition: Column
    """That ran it."""
    microbatch: Column
    """From 0."""
    phase: Column
    """What was computed."""
    begin: Column
    """In microseconds, by the clock of rank 0."""
    end: Column
    """The same."""
    samples: Column
    """Of the whole mini-batch; -1 where it is not recorded: forwards of partition 0 have it."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfers(Table):
    """Transfers of tensors to a partition, of ``size`` bytes."""

    rank: Column
    step: Column
    minibatch: Column
    partition: Column
    microbatch: Column
    begin: Column
    end: Column
    size: Column


@dataclass(frozen=True, slots=True, eq=False)
class Spans(Table):
    """What the main thread of a rank did outside the pipeline; ``kind``: `DATA`, `OPTIMIZER` and so on."""

    rank: Column
    kind: Column
    begin: Column
    end: Column


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSpans(Table):
    """Everything the main threads of ranks did outside pipelines, by rank and begin: PyTorch, and the user's spans."""

    rank: Column
    """Of the main thread."""
    kind: Column
    """`DATA`, `OPTIMIZER`, and so on; `PROGRAM` for modules and the user's spans, `EVALUATION` without gradients."""
    category: Column
    """As the trace has it."""
    name: Column
    """Likewise."""
    layer: Column
    """Of a module: its name in the outermost module that was called; empty for that one."""
    module: Column
    """The class of a module."""
    begin: Column
    """In microseconds, by the clock of rank 0."""
    end: Column
    """The same."""
    step: Column
    """-1 where it is not recorded."""
    samples: Column
    """Likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class Points(Table):
    """Counters and instants by rank and time; ``category`` says which, ``values`` is a JSON object."""

    rank: Column
    category: Column
    name: Column
    begin: Column
    values: Column


@dataclass(frozen=True, slots=True, eq=False)
class Kernels(Table):
    """What ran on GPUs, as PyTorch's profiler recorded it; ``kind``: `COMPUTE`, `MESSAGE` or `MEMORY`."""

    rank: Column
    kind: Column
    begin: Column
    end: Column


@dataclass(frozen=True, slots=True, eq=False)
class ProfilerSteps(Table):
    """The steps that PyTorch's profiler was told of, as ``ProfilerStep#3``, on the host."""

    rank: Column
    step: Column
    begin: Column
    end: Column


@dataclass(frozen=True, slots=True, eq=False)
class Communications(Table):
    """Calls of torch.distributed outside pipelines, and waits for them; ``peers``: ``"0,1"``, or ``"world"``."""

    rank: Column
    name: Column
    peers: Column
    step: Column
    begin: Column
    end: Column
    size: Column


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes(Table):
    """The total time of a layer in one phase, over all its runs."""

    rank: Column
    partition: Column
    layer: Column
    phase: Column
    count: Column
    total: Column
    longest: Column


@dataclass(frozen=True, slots=True, eq=False)
class LayerRuns(Table):
    """Each run of each layer."""

    rank: Column
    step: Column
    minibatch: Column
    partition: Column
    microbatch: Column
    phase: Column
    layer: Column
    begin: Column
    end: Column


@dataclass(frozen=True, slots=True, eq=False)
class NameTimes(Table):
    """The total time of all spans of one name."""

    category: Column
    name: Column
    count: Column
    total: Column


@dataclass(frozen=True, slots=True, eq=False)
class Operations(Table):
    """What every worker did in each step, by step, replica, stage and begin; ``kind`` is one of `operation_kinds`."""

    step: Column
    """The training step."""
    replica: Column
    """The data-parallel rank."""
    stage: Column
    """The pipeline rank."""
    rank: Column
    """The rank of the job that is the worker of this replica and stage."""
    kind: Column
    """Its number in `KINDS`."""
    begin: Column
    """In microseconds; of a communication, when it was launched."""
    duration: Column
    """In microseconds; of a communication, waiting included."""
    chunk: Column
    """The model chunk of the worker, from 0; -1 if it is of none."""
    part: Column
    """The model chunk of the whole model, from 0; -1 if it is of none."""
    microbatch: Column
    """Of computing, from 0; -1 otherwise."""
