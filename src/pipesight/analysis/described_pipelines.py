"""The pipelines, layers and hosts that run.json describes, checked field by field: anybody may have written it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesight.runs.format import BARE_TORCH

__all__ = [
    "DescribedLayer",
    "DescribedPipeline",
    "hosts_of",
    "pipelines_of",
    "replicas_in",
]


@dataclass(frozen=True, slots=True)
class DescribedLayer:
    """A layer as the description has it."""

    name: str
    """Its name in the model."""
    type: str | None
    """The class of the module."""
    partition: int
    """The one that runs it."""
    parameter_bytes: int | None
    """Of its parameters."""
    output_bytes: int | None
    """Of its outputs for a mini-batch of ``batch_size`` samples."""
    checkpointed: bool = True
    """Whether checkpointing runs it again."""
    operators: int | None = None
    """That its forward has on a micro-batch, and its backward again."""


@dataclass(frozen=True, slots=True)
class DescribedPipeline:
    """A pipeline as the description has it. What is missing there, or makes no sense, is ``None``."""

    partitions: int
    """How many."""
    chunks: int | None = None
    """Micro-batches per mini-batch."""
    schedule: str | None = None
    """Its name, such as `gpipe` or `1f1b`."""
    balance: tuple[int, ...] | None = None
    """Layers of each partition."""
    cuts: tuple[str, ...] | None = None
    """Of a pipeline of any model, the modules that begin partitions 1, 2 and so on."""
    devices: tuple[str, ...] | None = None
    """Of each partition, such as `cuda:0`."""
    checkpoint: str | None = None
    """`always`, `except_last` or `never`."""
    batch_size: int | None = None
    """Samples per mini-batch."""
    layers: tuple[DescribedLayer, ...] = ()
    """In the order of the model."""
    ranks: tuple[tuple[int, ...], ...] | None = None
    """Of a pipeline over several ranks, those that have each partition: one of each replica, in the same order."""
    workers: tuple[int, ...] | None = None
    """Of a pipeline in one process that ran the steps of a schedule, the worker of each partition."""
    is_bare_torch: bool = False
    """Whether torch's schedules ran it, whose settings have names of their own."""
    processors: int | None = None
    """That the process may use."""
    operator_seconds: tuple[float, float] = (0.0, 0.0)
    """What an operator takes, forward and backward, however small its tensors; 0 if that is not known."""


def pipelines_of(description: Mapping[str, Any]) -> list[DescribedPipeline]:
    """Read the pipelines of a run's description, which may hold anything."""
    entries = description.get("pipelines")
    found = []
    for entry in entries if isinstance(entries, list) else []:
        partitions = _number(entry, "partitions")
        if partitions:
            found.append(_pipeline(entry, partitions, _processors(entry, description)))
    return found


def replicas_in(facts: Iterable[DescribedPipeline]) -> dict[int, int]:
    """Return the replica of each rank, as far as pipelines say so and agree on it.

    >>> replicas_in([DescribedPipeline(2, ranks=((0, 1), (3, 2)))])
    {0: 0, 1: 1, 3: 0, 2: 1}
    """
    found: dict[int, int] = {}
    for fact in facts:
        for row in fact.ranks or ():
            for replica, rank in enumerate(row):
                if found.setdefault(rank, replica) != replica:
                    return {}
    return found


def _processors(entry: Mapping[str, Any], description: Mapping[str, Any]) -> int | None:
    """Return how many processors the partitions share; of several machines, that is not known."""
    hosts = description.get("hosts")
    apart = "ranks" in entry and isinstance(hosts, list) and len(hosts) > 1
    return None if apart else _number(description, "processors")


def hosts_of(description: Mapping[str, Any]) -> dict[int, str]:
    """Return the host of each rank, of a run over several hosts; of others, nothing."""
    known = description.get("host_of_rank")
    hosts = {rank: host for rank, host in known.items() if isinstance(host, str)} if isinstance(known, dict) else {}
    return hosts if len({*hosts.values()}) > 1 else {}


def _pipeline(entry: Mapping[str, Any], partitions: int, processors: int | None) -> DescribedPipeline:
    balance = _list(entry, "balance", int)
    devices, cuts = _list(entry, "devices", str), _list(entry, "cuts", str)
    forward, backward = [*_list(entry, "operator_seconds", float), 0.0, 0.0][:2]
    workers = [worker for worker in _list(entry, "workers", int) if 0 <= worker < partitions]
    return DescribedPipeline(
        partitions=partitions,
        chunks=_number(entry, "chunks"),
        schedule=_text(entry, "schedule"),
        balance=tuple(balance) if len(balance) == partitions else None,
        cuts=tuple(cuts) if len(cuts) == partitions - 1 and "cuts" in entry else None,
        devices=tuple(devices) if len(devices) == partitions else None,
        checkpoint=_text(entry, "checkpoint"),
        batch_size=_number(entry, "batch_size"),
        layers=tuple(_layers(entry.get("layers"), partitions)),
        ranks=_ranks(entry.get("ranks"), partitions),
        workers=tuple(workers) if len(workers) == partitions else None,
        is_bare_torch=_text(entry, "engine") == BARE_TORCH,
        processors=processors,
        operator_seconds=(forward, backward) if 0 <= forward < 1 and 0 <= backward < 1 else (0.0, 0.0),
    )


def _layers(entries: object, partitions: int) -> Iterable[DescribedLayer]:
    for entry in entries if isinstance(entries, list) else []:
        name, partition = _text(entry, "name"), entry.get("partition") if isinstance(entry, dict) else None
        if name is not None and isinstance(partition, int) and 0 <= partition < partitions:
            sizes = _number(entry, "parameter_bytes"), _number(entry, "output_bytes")
            again = entry.get("checkpointed") is not False
            operators = _number(entry, "operators")
            yield DescribedLayer(name, _text(entry, "class"), partition, *sizes, again, operators)


def _ranks(value: object, partitions: int) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(value, list) or len(value) != partitions or not value:
        return None
    rows = [row for row in value if isinstance(row, list) and row and all(type(rank) is int for rank in row)]
    if len(rows) != partitions or len({len(row) for row in rows}) != 1:
        return None
    return tuple(map(tuple, rows))


def _number(entry: object, key: str) -> int | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _text(entry: object, key: str) -> str | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    return value if isinstance(value, str) else None


def _list(entry: Mapping[str, Any], key: str, of: type) -> Sequence[Any]:
    value = entry.get(key)
    return value if isinstance(value, list) and all(isinstance(item, of) for item in value) else []
