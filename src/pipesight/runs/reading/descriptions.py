"""What a run says of itself: ``run.json`` of rank 0, and a file of each other rank in ``ranks``.

own, ranks = read_description(run), read_ranks(run)
description = merged(own, ranks)
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesight._plurals import count_of
from pipesight.runs.format import RANKS, RUN_FILE, TRACE, version_note
from pipesight.runs.reading.clock_shift import ClockShift
from pipesight.runs.reading.safe_open import check_plain, read_json_object, without_refused

__all__ = ["folder_of_runs", "merged", "processes_of", "read_description", "read_ranks", "runs_inside", "shifts_of"]

_ATTEMPT = ("launch", "restart")
"""What the ranks of a node have in common, unless the file of one is of an earlier attempt."""
_END = ("host", "pid", "ended", "outcome")


def runs_inside(folder: Path) -> list[Path]:
    """Return the runs in a folder that is not a run itself; read as one, they would be mixed."""
    if not folder.is_dir() or (folder / RUN_FILE).exists() or (folder / TRACE).is_dir():
        return []
    return sorted(child for child in folder.iterdir() if (child / RUN_FILE).is_file())


def folder_of_runs(folder: Path, runs: Sequence[Path]) -> str:
    """Return the message of an error: a folder has runs in it."""
    first, *others = (shlex.quote(str(run)) for run in runs)
    remedy = f"give one, or compare some: pipesight report {first} {others[0]}" if others else f"give {first}"
    return f"{str(folder)!r} is not a run, but has {count_of(len(runs), 'run')} in it; {remedy}"


def read_description(run: Path, note: Callable[[Path, str], None] | None = None) -> dict[str, Any]:
    """Return what ``run.json`` says; ``note`` takes a warning about its version.

    Raises:
        RefusedError: It is not a plain file of this run.
        OSError: It is not there, or cannot be read.
        ValueError: It is not a JSON object.
    """
    path = run / RUN_FILE
    check_plain(path, run)
    facts = read_json_object(path)
    if note is not None and (warning := version_note(facts)) is not None:
        note(path, warning)
    return facts


def read_ranks(run: Path, note: Callable[[Path, str], None] | None = None) -> dict[int, dict[str, Any]]:
    """Return what the other ranks say of themselves, by rank; ``note`` takes warnings about their files."""
    found: dict[int, dict[str, Any]] = {}

    def warn(path: Path, text: str) -> None:
        if note is not None:
            note(path, text)

    for path in without_refused(sorted((run / RANKS).glob("*.json")), run, warn):
        try:
            facts = read_json_object(path)
            rank = facts.get("rank")
            if type(rank) is not int:
                raise ValueError("it does not say which rank it is of")
        except (OSError, ValueError) as error:
            warn(path, f"skipped: {error}")
            continue
        if (warning := version_note(facts)) is not None:
            warn(path, warning)
        found[rank] = facts
    return dict(sorted(found.items()))


def processes_of(own: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Return the rank of each process, as far as the descriptions say."""
    everyone = [own, *ranks.values()]
    pairs = [(facts.get("pid"), facts.get("rank")) for facts in everyone]
    return {pid: rank for pid, rank in pairs if isinstance(pid, int) and isinstance(rank, int)}


def shifts_of(own: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, ClockShift]:
    """Return what to add to the times of ranks whose clocks were compared with that of rank 0."""
    everyone = [(own.get("rank"), own), *ranks.items()]
    found = [(rank, ClockShift.of(facts)) for rank, facts in everyone]
    return {rank: shift for rank, shift in found if isinstance(rank, int) and shift is not None}


def merged(own: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``run.json`` says, completed by what other ranks know."""
    description = copy.deepcopy({key: value for key, value in own.items() if key != "ends"})  # only known from others
    for _, other in sorted(ranks.items()):
        _complete(description, other)
    return description


def _complete(description: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what another rank knows: its host, how it ended, and of a pipeline over several ranks, its own layers."""
    hosts, by_rank = description.get("hosts"), description.get("host_of_rank")
    if not isinstance(hosts, list):
        hosts = description["hosts"] = [description.get("host")]
    if other.get("host") not in hosts:
        hosts.append(other.get("host"))
    if not isinstance(by_rank, dict):
        rank = description.get("rank")
        by_rank = description["host_of_rank"] = {rank if type(rank) is int else 0: description.get("host")}
    if type(rank := other.get("rank")) is int:
        by_rank[rank] = other.get("host")
        if other.get("host") != description.get("host") or all(other.get(k) == description.get(k) for k in _ATTEMPT):
            description.setdefault("ends", {})[rank] = {key: other.get(key) for key in _END}
    for ours, theirs in zip(_dicts(description, "pipelines"), _dicts(other, "pipelines"), strict=False):
        if "ranks" not in ours:
            continue  # a pipeline of one rank: the other has one of its own
        if "engine" in ours:
            _complete_torch_pipeline(ours, theirs)
            continue
        for layer, same in zip(_dicts(ours, "layers"), _dicts(theirs, "layers"), strict=False):
            if layer.get("name") == same.get("name"):
                known = {key: same[key] for key in ("output_bytes", "operators") if key in same}
                layer |= {key: value for key, value in known.items() if layer.get(key) is None}


def _complete_torch_pipeline(ours: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Add another rank's part of a pipeline of bare torch, if it is one of the same pipeline or of a replica of it."""
    if any(ours.get(key) != theirs.get(key) for key in ("engine", "schedule", "partitions", "chunks")):
        return
    rows, others = ours.get("ranks"), theirs.get("ranks")
    if not (isinstance(rows, list) and isinstance(others, list) and len(rows) == len(others)):
        return
    for row, other in zip(rows, others, strict=True):
        if isinstance(row, list) and isinstance(other, list):
            row += [rank for rank in other if rank not in row]
    for key in ("balance", "devices"):
        known, more = ours.get(key), theirs.get(key)
        if isinstance(known, list) and isinstance(more, list):
            ours[key] = [b if a is None else a for a, b in zip(known, more, strict=False)]
    if ours.get("batch_size") is None or ours["batch_size"] == 0:
        ours["batch_size"] = theirs.get("batch_size")
    layers = [*_dicts(ours, "layers")]
    known_partitions = {layer.get("partition") for layer in layers}
    layers += [layer for layer in _dicts(theirs, "layers") if layer.get("partition") not in known_partitions]
    ours["layers"] = sorted(layers, key=lambda layer: j if type(j := layer.get("partition")) is int else 0)


def _dicts(facts: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    entries = facts.get(key)
    return (entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else iter(())
