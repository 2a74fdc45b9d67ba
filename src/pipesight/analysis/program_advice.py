"""What would make a program without a pipeline faster, and what it could gain: mostly at most the time lost there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipesight._formatting import percent, time
from pipesight._plurals import count_of
from pipesight.analysis.planned_changes import AT_LEAST, AT_MOST, Change
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.program_steps import WHOLE_PASSES
from pipesight.analysis.program_time import OWN, REST, part_title
from pipesight.analysis.run_remarks import doing_title, with_ending
from pipesight.analysis.verdict import MUCH, Verdict
from pipesight.plan.plans import WORTH
from pipesight.runs.reading.run import Run

__all__ = ["NOT_ANNOTATED", "facts_about", "program_changes", "program_verdict"]

_FUSED = {"torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd", "torch.optim.adagrad"}
"""Optimizers that have a fused form on every device."""
LAUNCHING = 0.3
"""The share of the time in modules from which that of launching operators is worth a word."""
MOST = 4
"""How many changes are listed."""
MOST_WORKERS = 64
"""How many workers of a loader are advised at most."""
NOT_ANNOTATED = (
    "The bubble cannot be computed: torch's schedule has annotated no tasks, as Schedule1F1B never does, and those of "
    "several stages a rank only since torch 2.9; record the program with pipesight run."
)
"""What is said of a profile of torch's schedules without their tasks."""


def facts_about(description: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Return what `run.json` says of the program's ``loaders``, ``optimizers`` or ``models``, if it does."""
    program = description.get("program")
    entries = program.get(what) if isinstance(program, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def program_verdict(program: ProgramReport, changes: Sequence[Change], run: Run) -> Verdict:
    """Say what a step takes, and what most of it is."""
    total = max(sum(program.parts.values()), 1e-9)
    largest = sorted(program.parts, key=lambda part: -program.parts[part])
    # What is between the others comes after them.
    largest = sorted(largest[:4], key=lambda part: part == REST)
    largest = [part for part in largest if program.parts[part] / total >= MUCH]
    between = "in code that no span covers" if largest == [REST] else "between these"
    named = [
        f"{percent(program.parts[part] / total)} {between if part == REST else part_title(part)}" for part in largest
    ]
    what = "step" if program.trains else "batch"
    often = f"median of {count_of(program.count, what, 'batches' if what == 'batch' else None)}"
    text = f"A {what} takes {time(program.time.median)} ({often}). Of the mean {what}: {', '.join(named)}."
    if not run.description and run.profiled_schedule:
        return with_ending(Verdict(f"{NOT_ANNOTATED} {text}", ()), run)  # of waits for ranks, some are the bubble
    if not changes:
        text += " The trace shows no change that would save more than 1%."
    return with_ending(Verdict(text, tuple(changes)), run)


def program_changes(program: ProgramReport, description: Mapping[str, Any]) -> list[Change]:
    """Return the changes that could gain more than 1% of the step, the largest first."""
    total = max(sum(program.parts.values()), 1e-9)
    shares = {part: spent / total for part, spent in program.parts.items()}
    found = [change for change in _changes(shares, program, description) if change.gain > WORTH]
    return sorted(found, key=lambda change: -change.gain)[:MOST]


def _changes(shares: Mapping[str, float], program: ProgramReport, description: Mapping[str, Any]) -> Iterator[Change]:
    if (loading := shares.get("data_loading", 0.0)) > WORTH:
        yield Change(*_about_loading(description, program), loading, AT_MOST)
    if (stepping := shares.get("optimizer", 0.0)) > WORTH:
        slow = [one for one in facts_about(description, "optimizers") if one.get("module") in _FUSED]
        slow = [one for one in slow if not one.get("fused")]
        if slow:
            names = ", ".join(dict.fromkeys(str(one.get("class")) for one in slow))
            count = sum(int(one.get("tensors") or 0) for one in slow)
            why = f"{names} updates {count_of(count, 'tensor')} with several operations each"
            yield Change("a fused optimizer: fused=True", why, stepping, AT_MOST)
    yield from _about_launching(shares, program, description)
    if (again := shares.get("recompute", 0.0)) > WORTH:
        why = (
            "activations that checkpointing does not keep are computed again, and checkpointing itself takes time; "
            "keeping them needs their memory"
        )
        yield Change("checkpoint fewer modules, if they fit into memory", why, again, AT_LEAST)
    if (saving := shares.get("checkpoints", 0.0)) > WORTH:
        what = "save checkpoints in the background (torch.distributed.checkpoint.async_save), or less often"
        yield Change(what, "training waits for the disk", saving, AT_MOST)
    yield from _about_communication(program, total=sum(program.parts.values()))
    if (copying := shares.get("copies", 0.0)) > WORTH:
        pinned = any(one.get("pin_memory") for one in facts_about(description, "loaders"))
        first = "" if pinned else "DataLoader(pin_memory=True) and "
        why = "the main thread copies tensors between devices"
        yield Change(f"copy in the background: {first}.to(device, non_blocking=True)", why, copying, AT_MOST)
    for part, share in shares.items():
        if part.startswith(OWN) and share > MUCH and part.removeprefix(OWN) not in WHOLE_PASSES:
            why = "training waits for it in every step"
            yield Change(f"{part_title(part)} (a span of yours): less often, or in the background", why, share, AT_MOST)


def _about_launching(
    shares: Mapping[str, float], program: ProgramReport, description: Mapping[str, Any]
) -> Iterator[Change]:
    """Advise to launch fewer operators, where launching them takes most of the time in the model."""
    models = [model for model in facts_about(description, "models") if model.get("operator_seconds")]
    if not models or not program.trains:
        return
    total = sum(program.parts.values())
    inside = sum(shares.get(part, 0.0) for part in ("forward", "loss", "backward"))
    calls = sum(module.calls for module in program.modules.modules if module.name == module.model)
    model = max(models, key=lambda entry: int(entry["operators"]))
    forward, backward = (float(seconds) * 1e6 for seconds in model["operator_seconds"])
    operators = int(model["operators"]) * max(round(calls), 1)
    launching = operators * (forward + backward) / max(total, 1e-9)
    if inside > WORTH and launching > inside * LAUNCHING:
        what = "fewer and larger operators: torch.compile(model)"
        each = inside * total / max(operators, 1)
        why = (
            f"{model['class']} runs {count_of(operators, 'operator')} a step, {time(each)} each, forward and backward; "
            f"those with next to nothing to compute take {time(forward + backward)}, so larger batches would take "
            "little longer"
        )
        yield Change(what, why, inside, AT_MOST)


def _about_communication(program: ProgramReport, *, total: float) -> Iterator[Change]:
    """Advise on ranks that come late, on what is exposed of collectives in the background, and on the others."""
    waits, beside = program.waits, program.background
    late: dict[int, float] = {}
    for held in waits.held:
        late[held.rank] = late.get(held.rank, 0.0) + held.wait
    first, *others = sorted(late, key=lambda rank: -late[rank]) or [-1]
    # Ranks that come late by turns are no reason to look at one.
    if late and late[first] - sum(late[rank] for rank in others) > total * MUCH:
        named = next(held for held in waits.held if held.rank == first)
        who = "the others wait" if len(named.ranks) > 1 else f"rank {named.ranks[0]} waits"
        what = f"as little work on rank {first} as on the others: less {doing_title(named.doing)}"
        yield Change(what, f"{who} for it in collectives, {time(late[first])} of a step", late[first] / total, AT_MOST)
    if (exposed := waits.exposed / total) > WORTH:
        steps = program.steps.where(program.counted)
        begins, ends = np.sort(steps.begin), np.sort(steps.begin + steps.period)
        within = np.searchsorted(begins, beside.begin, side="right") > np.searchsorted(ends, beside.begin, side="right")
        mean = float((beside.end - beside.begin)[within].sum()) / max(len(steps), 1)
        hidden = max(1 - waits.exposed / max(mean, 1e-9), 0.0)
        what = "smaller buckets, which are sent earlier (bucket_cap_mb of DDP), or fewer all-reduces (no_sync())"
        why = f"collectives take {time(mean)} of a step, of which {percent(hidden)} is hidden behind computing"
        yield Change(what, why, exposed, AT_MOST)
    if (direct := waits.direct / total) > WORTH:
        why = "the main thread waits for collectives that do not run in the background"
        yield Change("overlap communication with computing, or send less", why, direct, AT_MOST)


def _about_loading(description: Mapping[str, Any], program: ProgramReport) -> tuple[str, str]:
    """Say what to change about loading, and why."""
    loaders = facts_about(description, "loaders")
    workers = {int(loader.get("num_workers") or 0) for loader in loaders}
    first = "load data in the background"
    if not loaders:
        return f"{first}: DataLoader(num_workers=...)", "training waits for the next batch"
    most = max(workers)
    enough = _workers_that_keep_up(program, most) if len(workers) == 1 else None
    number = enough or "..."
    text = "" if enough is None else f"; {count_of(enough, 'worker')} should keep up, if each has a core"
    if most == 0:
        why = f"the main thread loads each batch itself (num_workers=0){text}"
        return f"{first}: DataLoader(num_workers={number})", why
    change = f"more workers, or less work for each batch: DataLoader(num_workers={number}, prefetch_factor=...)"
    if not all(loader.get("persistent_workers") for loader in loaders):
        change += "; persistent_workers=True, if epochs are short"
    loads = "1 worker loads them" if most == 1 else f"{most} workers load them"
    return change, f"training waits for the next batch, although {loads}{text}"


def _workers_that_keep_up(program: ProgramReport, workers: int) -> int | None:
    """Return how many workers load batches as fast as the rest of a step uses them; ``None`` if that is not known.

    Without workers, loading takes what the main thread spends on it. With them, a step that waits takes as long as
    they need for its batches side by side.
    """
    steps = program.steps.where(program.counted)
    loading = steps.parts[steps.names.index("data_loading")]
    waits, rest = float(np.median(loading)), float(np.median(steps.period - loading))
    if rest <= 0 or waits < MUCH * (waits + rest):  # few steps wait long, as the first of an epoch does
        return None
    enough = math.ceil(waits / rest if workers == 0 else workers * (waits + rest) / rest)
    return enough if workers < enough <= MOST_WORKERS else None
