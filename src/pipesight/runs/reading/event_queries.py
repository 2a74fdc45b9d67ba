"""The report's queries, written once for all engines, as expressions over a lazy frame of events.

Engines filter, project and group. The results are small; they are sorted and filtered further as NumPy arrays, so that
every engine gives the same table, row for row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import narwhals as nw
import numpy as np

from pipesight.runs.reading.event_codes import (
    COMMUNICATING_KERNEL,
    COMMUNICATION,
    COMPUTE,
    KINDS,
    MEMORY,
    MESSAGE,
    PHASES,
)
from pipesight.runs.reading.event_tables import (
    Column,
    Communications,
    Kernels,
    LayerRuns,
    LayerTimes,
    NameTimes,
    ProfilerSteps,
    ProgramSpans,
    Spans,
    Tasks,
    Transfers,
)

__all__ = [
    "COLUMNS",
    "Fetch",
    "Frame",
    "communications",
    "count",
    "kernels",
    "layer_runs",
    "layer_times",
    "names",
    "of_dataset",
    "profiler_steps",
    "program",
    "ranks",
    "spans",
    "steps",
]
__all__ += ["tasks", "transfers", "uses_devices"]

Frame: TypeAlias = nw.LazyFrame[Any]
Fetch: TypeAlias = Callable[[Frame], Mapping[str, Column]]
"""Runs a query, and returns its columns."""

COLUMNS = {
    "rank": "INTEGER",
    "pid": "BIGINT",
    "tid": "BIGINT",
    "category": "VARCHAR",
    "name": "VARCHAR",
    "begin": "BIGINT",
    "end": "BIGINT",
    "phase": "TINYINT",
    "kind": "TINYINT",
    "step": "BIGINT",
    "minibatch": "BIGINT",
    "partition": "INTEGER",
    "microbatch": "INTEGER",
    "layer": "VARCHAR",
    "device": "VARCHAR",
    "size": "BIGINT",
    "peers": "VARCHAR",
    "samples": "BIGINT",
    "module": "VARCHAR",
}
"""Columns of a frame of spans. A missing value is -1 or empty, since engines treat null differently.

``phase`` is that of a task or, if ``layer`` is set, of a layer; ``kind`` is that of a span of the main thread.
"""

_RENAMED = {
    "rank": "process_rank",
    "begin": "started",
    "end": "ended",
    "partition": "partition_index",
    "size": "size_bytes",
}
"""Names of columns in a dataset, where words that SQL reserves would be inconvenient."""


def of_dataset(rows: Frame) -> Frame:
    """Return the spans of a dataset, with codes instead of words, and without nulls."""

    def column(name: str, kind: str) -> nw.Expr:
        given = nw.col(_RENAMED.get(name, name))
        if name in ("phase", "kind"):
            return _code(given.fill_null(""), PHASES if name == "phase" else KINDS)
        return given.fill_null("" if kind == "VARCHAR" else -1)

    spans = rows.filter(nw.col("event") == "span")
    return spans.select(**{name: column(name, kind) for name, kind in COLUMNS.items()})


def _code(given: nw.Expr, words: Sequence[str]) -> nw.Expr:
    number: Any = nw.lit(-1)
    for code, word in enumerate(words):
        number = nw.when(given == word).then(nw.lit(code)).otherwise(number)
    return cast("nw.Expr", number)


_PROFILER_STEP = "ProfilerStep#"
_TASK = ("step", "minibatch", "partition", "microbatch", "phase")


def tasks(events: Frame, fetch: Fetch, wanted: range | None = None) -> Tasks:
    """Return the tasks, by mini-batch and begin; as timed on the device, where a partition has such times."""
    chosen = _within(events.filter((nw.col("phase") >= 0) & (nw.col("layer") == "")), wanted)
    found = fetch(chosen.select("rank", *_TASK, "begin", "end", "samples", _on_device()))
    kept = _on_device_if_any(_with_samples(_stepped(found, wanted)))
    return Tasks(**_sorted(kept, "minibatch", "begin", "rank", "partition", "microbatch", "phase", "end", "step"))


def transfers(events: Frame, fetch: Fetch, wanted: range | None = None) -> Transfers:
    """Return the transfers to partitions, by mini-batch and begin."""
    is_transfer = (nw.col("category") == "device") & (nw.col("name") == "transfer") & (nw.col("partition") >= 0)
    chosen = _within(events.filter(is_transfer), wanted)
    found = fetch(chosen.select("rank", *_TASK[:-1], "begin", "end", "size"))
    return Transfers(
        **_sorted(_stepped(found, wanted), "minibatch", "begin", "rank", "partition", "microbatch", "end", "size")
    )


def spans(events: Frame, fetch: Fetch) -> Spans:
    """Return what main threads did outside pipelines, by rank and begin."""
    chosen = events.filter((nw.col("kind") >= 0) & (nw.col("kind") <= COMMUNICATION))
    return Spans(**_sorted(fetch(chosen.select("rank", "kind", "begin", "end")), "rank", "begin", "end", "kind"))


def program(events: Frame, fetch: Fetch) -> ProgramSpans:
    """Return everything that main threads did outside pipelines; an outer span comes before those inside."""
    columns = ("rank", "kind", "category", "name", "layer", "module", "begin", "end", "step", "samples")
    found = fetch(events.filter((nw.col("kind") >= 0) & (nw.col("partition") < 0)).select(*columns))
    plain = _sorted({**found, "outer": -found["end"].astype(np.int64)}, "rank", "begin", "outer", "name", "layer")
    return ProgramSpans(**{name: plain[name] for name in columns})


def communications(events: Frame, fetch: Fetch) -> Communications:
    """Return the communication of main threads outside pipelines, by rank and begin."""
    columns = ("rank", "name", "peers", "step", "begin", "end", "size")
    chosen = events.filter((nw.col("kind") == COMMUNICATION) & (nw.col("partition") < 0) & (nw.col("peers") != ""))
    return Communications(**_sorted(fetch(chosen.select(*columns)), "rank", "begin", "end", "name", "peers"))


def kernels(events: Frame, fetch: Fetch) -> Kernels:
    """Return what ran on GPUs, by rank and begin, as PyTorch's profiler names its categories."""
    category = nw.col("category")
    moves = (category == "gpu_memcpy") | (category == "gpu_memset")
    sends = nw.col("name").str.contains(COMMUNICATING_KERNEL)
    kind = (
        nw.when(moves).then(nw.lit(MEMORY)).otherwise(nw.when(sends).then(nw.lit(MESSAGE)).otherwise(nw.lit(COMPUTE)))
    )
    chosen = events.filter((category == "kernel") | moves)
    found = fetch(chosen.select("rank", "begin", "end", gpu_kind=kind))
    columns = {"kind" if name == "gpu_kind" else name: column for name, column in found.items()}
    return Kernels(**_sorted(columns, "rank", "begin", "end", "kind"))


def profiler_steps(events: Frame, fetch: Fetch) -> ProfilerSteps:
    """Return the steps that PyTorch's profiler was told of, by rank and begin."""
    named = nw.col("name").str.starts_with(_PROFILER_STEP)
    found = fetch(events.filter(named & (nw.col("device") == "")).select("rank", "name", "begin", "end"))
    numbers = [str(name).removeprefix(_PROFILER_STEP) for name in found["name"].tolist()]
    known = np.array([number.isdecimal() and len(number) < 19 for number in numbers], bool)
    columns = {name: column[known] for name, column in found.items() if name != "name"}
    columns["step"] = np.array([int(number) for number in numbers if number.isdecimal() and len(number) < 19], np.int64)
    return ProfilerSteps(**_sorted(columns, "rank", "begin", "end", "step"))


def layer_times(
    events: Frame, fetch: Fetch, wanted: range | None = None, without: Mapping[int, Column] | None = None
) -> LayerTimes:
    """Return the time of each layer in each phase, by rank, partition, layer and phase.

    ``without`` has the numbers of the mini-batches that do not count, by rank.
    """
    chosen = _within(events.filter((nw.col("phase") >= 0) & (nw.col("layer") != "")), wanted)
    if wanted is not None and abs(wanted.step) != 1:
        chosen = chosen.filter((nw.col("step") - min(wanted, default=0)) % abs(wanted.step) == 0)
    # Engines search a long list of numbers row by row; grouping by mini-batch first takes a fraction of that.
    groups = ("rank", "partition", "layer", "phase", "on_device", *(["minibatch"] if without else []))
    place = [nw.col(name) for name in groups if name != "on_device"]
    runs = chosen.select(*place, _on_device(), dur=nw.col("end") - nw.col("begin"))
    times = runs.group_by(*groups).agg(count=nw.len(), total=nw.col("dur").sum(), longest=nw.col("dur").max())
    found = fetch(times.select(*groups, "count", "total", "longest"))
    if without:
        found = _over_minibatches(found, without)
    return LayerTimes(**_sorted(_on_device_if_any(found), "rank", "partition", "layer", "phase"))


def _over_minibatches(found: Mapping[str, Column], without: Mapping[int, Column]) -> dict[str, Column]:
    """Add up times of layers by mini-batch, except for some mini-batches."""
    kept = np.ones(len(found["rank"]), bool)
    for rank, numbers in without.items():
        kept &= (found["rank"] != rank) | ~np.isin(found["minibatch"], numbers)
    columns = {name: column[kept] for name, column in found.items() if name != "minibatch"}
    key = np.zeros(int(kept.sum()), np.int64)
    for name in ("rank", "partition", "layer", "phase", "on_device"):
        column = _sortable(columns[name]).astype(np.int64)
        key = key * (int(column.max(initial=0)) + 2) + column + 1
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    summed = {name: column[first] for name, column in columns.items()}
    for name, add in (("count", np.add), ("total", np.add), ("longest", np.maximum)):
        summed[name] = np.zeros(len(first), np.int64)
        add.at(summed[name], group, columns[name].astype(np.int64))
    return summed


def layer_runs(events: Frame, fetch: Fetch, steps: Sequence[int]) -> LayerRuns:
    """Return the runs of layers in some steps, by begin."""
    chosen = events.filter((nw.col("phase") >= 0) & (nw.col("layer") != "") & nw.col("step").is_in(list(steps)))
    columns = ("rank", "step", "minibatch", "partition", "microbatch", "phase", "layer", "begin", "end")
    found = _on_device_if_any(fetch(chosen.select(*columns, _on_device())))
    return LayerRuns(
        **_sorted(found, "minibatch", "begin", "rank", "partition", "end", "microbatch", "phase", "layer", "step")
    )


def names(events: Frame, fetch: Fetch) -> NameTimes:
    """Return the time of each name, the longest first."""
    spans = events.select("category", "name", dur=nw.col("end") - nw.col("begin"))
    found = fetch(spans.group_by("category", "name").agg(count=nw.len(), total=nw.col("dur").sum()))
    columns = _sorted(found, "category", "name")
    longest = np.argsort(-columns["total"], kind="stable")
    return NameTimes(**{name: column[longest] for name, column in columns.items()})


def uses_devices(events: Frame, fetch: Fetch) -> bool:
    """Return whether any span was timed on a GPU."""
    return int(fetch(events.filter(nw.col("device") != "").select(count=nw.len()))["count"][0]) > 0


def count(events: Frame, fetch: Fetch) -> int:
    """Return the number of spans."""
    return int(fetch(events.select(count=nw.len()))["count"][0])


def steps(events: Frame, fetch: Fetch) -> Column:
    """Return the steps that have tasks or, if none has, spans of any kind, in order."""
    known = events.filter(nw.col("step") >= 0)
    found = fetch(known.group_by("step").agg(last=nw.col("phase").max()).select("step", "last"))
    with_tasks = found["last"] >= 0
    numbers = found["step"][with_tasks] if with_tasks.any() else found["step"]
    return np.sort(numbers.astype(np.int64))


def ranks(events: Frame, fetch: Fetch) -> Column:
    """Return the numbers of the ranks, in order."""
    found = fetch(events.group_by("rank").agg(count=nw.len()).select("rank", "count"))
    return np.sort(found["rank"].astype(np.int64))


def _within(events: Frame, wanted: range | None) -> Frame:
    if wanted is None:
        return events
    first, last = min(wanted, default=0), max(wanted, default=-1)
    return events.filter((nw.col("step") >= first) & (nw.col("step") <= last))


def _stepped(found: Mapping[str, Column], wanted: range | None) -> Mapping[str, Column]:
    """Keep the steps of a range with a step of more than 1."""
    if wanted is None or abs(wanted.step) == 1:
        return found
    rows = (found["step"] - min(wanted, default=0)) % abs(wanted.step) == 0
    return {name: column[rows] for name, column in found.items()}


def _on_device() -> nw.Expr:
    return (nw.col("device") != "").alias("on_device")


def _on_device_if_any(found: Mapping[str, Column]) -> dict[str, Column]:
    """Keep the times measured on a GPU, and those of the host for partitions without such."""
    columns = dict(found)
    on_device = columns.pop("on_device").astype(bool)
    if not on_device.any() or on_device.all():
        return columns
    partition = columns["rank"].astype(np.int64) << 32 | columns["partition"].astype(np.int64)
    rows = on_device | ~np.isin(partition, np.unique(partition[on_device]))
    return {name: column[rows] for name, column in columns.items()}


def _with_samples(found: Mapping[str, Column]) -> Mapping[str, Column]:
    """Give all tasks of a mini-batch its samples: those timed on a GPU do not have them."""
    known, on_device = found["samples"] >= 0, found["on_device"].astype(bool)
    if not known.any() or not on_device.any():
        return found
    _, which = np.unique(np.stack([found["rank"], found["minibatch"]]), axis=1, return_inverse=True)
    most = np.full(int(which.max()) + 1, -1, np.int64)
    np.maximum.at(most, which.ravel(), found["samples"].astype(np.int64))
    return {**found, "samples": most[which.ravel()]}


def _sorted(columns: Mapping[str, Column], *by: str) -> dict[str, Column]:
    """Sort by columns, most significant first, and give numbers the same width in every engine."""
    plain = {name: column if column.dtype.kind in "OU" else column.astype(np.int64) for name, column in columns.items()}
    keys = [_sortable(plain[name]) for name in by]
    rows = np.lexsort(keys[1::-1])
    if _has_ties(keys[:2], rows):  # rare; sorting by all columns takes five times as long
        rows = np.lexsort(keys[::-1])
    return {name: column[rows] for name, column in plain.items()}


def _sortable(column: Column) -> Column:
    return np.unique(column, return_inverse=True)[1] if column.dtype.kind == "O" else column


def _has_ties(keys: Sequence[Column], rows: Column) -> bool:
    same = np.ones(max(len(rows) - 1, 0), bool)
    for key in keys:
        ordered = key[rows]
        same &= ordered[1:] == ordered[:-1]
    return bool(same.any())
