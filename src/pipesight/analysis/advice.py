"""What to change, and what that would gain: the planner's word where it has one, else no more than what is lost.

A plan differs from what was recorded in one thing, and is compared with what the planner makes of the recording, as
`pipesight plan` does. So both promise the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipesight._plurals import count_of
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.measured_costs import SMALL_MESSAGE, Measured
from pipesight.analysis.rank_links import LinkReport, slow_connections
from pipesight.plan.balance_search import find_balance
from pipesight.plan.plans import (
    DISTRIBUTED_NAMES,
    UNPIPELINED,
    WORTH,
    Plan,
    best_plans,
    fastest_first,
    predict,
    settings,
)
from pipesight.schedule.costs import Costs
from pipesight.schedule.setting import Setting
from pipesight.schedule.stage_costs import StageCosts

__all__ = ["AT_LEAST", "AT_MOST", "SIMULATED", "Change", "Situation", "find_changes"]

MOST = 3
DOUBT = 0.5
"""What a gain that is an upper limit counts for, against one that was simulated."""

MUCH = 0.05
"""Of the step, from which on transfers make plans less sure."""

SIMULATED, AT_MOST, AT_LEAST = "simulated", "at most", "at least"


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do, and the share of the step that it would save."""

    what: str
    """What to do."""
    why: str
    """The finding behind it."""
    gain: float
    """Of the step, from 0 to 1."""
    promise: str
    """How sure that is: `SIMULATED`; `AT_MOST`, what there is to gain; or `AT_LEAST`, as tasks may take less."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What changes are judged by. Times in microseconds."""

    facts: DescribedPipeline
    measured: Measured | None
    """What plans are made of."""
    period: float
    """The mean of steps that were recorded to the next."""
    parts: Mapping[str, float]
    """Of these, by name."""
    turnaround: float = 0.0
    """Of the host gaps, what lies between forward and backward."""
    links: Sequence[LinkReport] = ()
    """Between ranks."""

    def share(self, time: float) -> float:
        """Return the share of the step that some time is."""
        return time / max(self.period, 1e-9)


def find_changes(situation: Situation) -> list[Change]:
    """Return at most three changes that gain more than 1% of the step each, the best first.

    Where more partitions compute than there are processors, to have fewer comes first. Gains do not add up: each is
    that of one change alone.
    """
    measured = situation.measured
    planned = [] if measured is None else _planned(measured)
    if situation.share(situation.parts.get("transfers", 0.0)) > MUCH and _small_messages(situation.links) is None:
        # Messages may get into each other's way, which is not simulated.
        planned = [replace(change, promise=AT_MOST) for change in planned]
    limits = [change for change in _limits(situation) if change.gain > WORTH]
    if not any(change.promise == AT_LEAST for change in planned):  # else there is a plan for larger tasks
        limits += [change for change in (_larger_tasks(situation),) if change.gain > WORTH]
    found = [*planned, *limits]
    found.sort(key=_weight, reverse=True)
    fewer = _fewer_partitions(situation, measured) if measured is not None else None
    if fewer is not None and fewer.gain > WORTH:
        found.insert(0, fewer)
    return found[:MOST]


# What the planner says.


def _planned(measured: Measured) -> list[Change]:
    """Return what one change of the setting gains or, if none does, several together."""
    found = []
    if measured.setting is not None:
        ways = (_balance(measured), _chunks(measured), _checkpoint(measured), _schedule(measured))
        found = [change for change in ways if change is not None and change.gain > WORTH]
    elif measured.schedule.devices < measured.devices:  # which share devices; plans give each one of its own
        return []
    return found or [change for change in (_together(measured),) if change is not None]


def _gain(measured: Measured, plan: Plan) -> float:
    return 1 - plan.step_seconds / max(measured.predicted_seconds, 1e-12)


def _fewer_partitions(situation: Situation, measured: Measured) -> Change | None:
    """Let no more partitions compute than there are processors.

    What they lose by sharing is more than the planner sees, which lets them share evenly, but a limit.
    """
    enough, setting = measured.processors, measured.setting
    if not measured.crowded or enough is None or setting is None or setting.rounds > 1 or not measured.layers_known:
        return None
    plan = _best(measured, replace(setting, partitions=enough))
    what = "ranks" if measured.facts.ranks is not None else "partitions"
    few = f"{enough} {what if enough > 1 else what[:-1]}"
    why = f"{setting.partitions} {what} share {count_of(enough, 'processor')}, and slow each other down"
    text = f"{few} instead of {setting.partitions}: balance={list(plan.balance)}"
    gain = _gain(measured, plan)
    if gain <= WORTH:
        return Change(text, why, situation.share(situation.parts.get("sharing", 0.0)), AT_MOST)
    return Change(text, why, gain, SIMULATED)


def _best(measured: Measured, setting: Setting) -> Plan:
    """Return a setting with its best balance."""
    return predict(measured.costs, setting, find_balance(StageCosts(measured.costs, setting)).balance)


def _balance(measured: Measured) -> Change | None:
    """Move layers between partitions."""
    setting = measured.setting
    assert setting is not None
    if setting.stages < 2 or not measured.layers_known:
        return None
    plan, now = _best(measured, setting), measured.balance
    if plan.balance == now:
        return None
    ends = [sum(now[: j + 1]) for j in range(len(now))]
    blocks = [measured.costs.layers[end - count : end] for end, count in zip(ends, now, strict=True)]
    times = [sum(layer.forward + layer.backward for layer in block) for block in blocks]
    worst = max(range(len(times)), key=times.__getitem__)
    why = f"partition {worst} takes {times[worst] * len(times) / max(sum(times), 1e-12):.2f} times the mean"
    what = f"balance={list(plan.balance)} instead of {list(now)}"
    return Change(what, why, _gain(measured, plan), SIMULATED)


def _chunks(measured: Measured) -> Change | None:
    """Cut mini-batches into more micro-batches, or fewer: less to fill and drain against fewer gaps."""
    setting = measured.setting
    assert setting is not None
    m = setting.chunks
    possible = settings(
        measured.costs,
        partitions=setting.partitions,
        schedules=(setting.schedule,),
        checkpoints=(setting.checkpoint,),
        recorded=m,
        rounds=setting.rounds,
    )
    plans = [predict(measured.costs, other, measured.balance) for other in possible if other.chunks != m]
    if not plans:
        return None
    best = fastest_first(plans)[0]
    chunks, gain = best.setting.chunks, _gain(measured, best)
    what = f"chunks={chunks} instead of {m}"
    if chunks > m:
        return Change(what, "fill and drain shrink, provided that smaller tasks take less time", gain, AT_MOST)
    why = "each task has a fixed cost, however few samples it has"
    if chunks == 1 and setting.partitions > 1:
        why = f"{UNPIPELINED}; {why}"
    return Change(f"larger micro-batches: {what}", why, gain, AT_LEAST)


def _checkpoint(measured: Measured) -> Change | None:
    """Keep activations instead of recomputing them."""
    setting = measured.setting
    assert setting is not None
    if setting.checkpoint == "never" or (setting.checkpoint == "except_last" and setting.chunks == 1):
        return None
    plan = predict(measured.costs, replace(setting, checkpoint="never"), measured.balance)
    why = "nothing is recomputed; activations of all micro-batches must fit in memory"
    what = f'checkpoint="never" instead of "{setting.checkpoint}"'
    return Change(what, why, _gain(measured, plan), SIMULATED)


def _schedule(measured: Measured) -> Change | None:
    """Run tasks in another order, where the engine can: over ranks."""
    setting = measured.setting
    assert setting is not None
    if measured.facts.ranks is None or setting.rounds > 1:
        return None
    found = []
    for name in ("gpipe", "1f1b", "zero-bubble"):
        if name == setting.schedule or not (other := replace(setting, schedule=name)).runs:
            continue
        gain = _gain(measured, predict(measured.costs, other, measured.balance))
        what = f'schedule="{DISTRIBUTED_NAMES[name]}" instead of "{measured.schedule_name}"'
        if name == "zero-bubble":  # what it costs to compute gradients in two parts is not known
            found.append(Change(what, "weight gradients fill the time that ranks would wait", gain, AT_MOST))
        else:
            found.append(Change(what, "ranks wait less for each other", gain, SIMULATED))
    return max(found, key=_weight, default=None)


def _weight(change: Change) -> float:
    """Return what a gain counts for."""
    return change.gain * (DOUBT if change.promise == AT_MOST else 1)


def _together(measured: Measured) -> Change | None:
    """Take the plan that `pipesight plan` would, if one change alone gains too little."""
    over_ranks = measured.facts.ranks is not None
    possible = settings(
        measured.costs,
        partitions=measured.devices,
        schedules=(*DISTRIBUTED_NAMES,) if over_ranks else ("gpipe",),
        recorded=measured.schedule.chunks,
        rounds=max(2, measured.schedule.stages // measured.devices),
    )
    plans = best_plans(measured.costs, possible)
    gain = _gain(measured, plans[0])
    if gain <= WORTH:
        return None
    best = plans[0].setting
    what = f'balance={list(plans[0].balance)}, chunks={best.chunks}, checkpoint="{best.checkpoint}"'
    what += f', schedule="{DISTRIBUTED_NAMES[best.schedule]}"' if over_ranks else ""
    why = "all of these together; each alone saves less"
    if best.chunks == 1 and best.partitions > 1:
        why = f"{why}; {UNPIPELINED}"
    return Change(what, why, gain, AT_MOST)


# What can only be limited.

_ADVICE = {
    "sharing": ("give each partition its own device", "partitions on one device take turns"),
    "transfers": ("send less data between partitions, or use faster links", "partitions wait for tensors in transit"),
    "jitter": ("find what slows some tasks", "tasks of the same kind vary in time"),
    "data_loading": (
        "load data in the background: DataLoader(num_workers=..., prefetch_factor=...)",
        "the pipeline waits for the next batch",
    ),
    "optimizer": ("a fused optimizer: fused=True, or foreach=True", "the pipeline waits for the optimizer"),
    "checkpoints": ("save checkpoints in the background, or less often", "the pipeline waits for the disk"),
    "communication": ("overlap communication with computing", "the main thread waits for other ranks"),
    "between_steps": (
        "check what the program does between steps: .item(), printing, logging",
        "the pipeline waits for the program's own code",
    ),
}


def _limits(situation: Situation) -> Iterator[Change]:
    for place in slow_connections(situation.links):
        what = f"check {place.what}; use larger micro-batches or fewer cuts there"
        # Between hosts, collectives go the same way.
        apart = place.slowest.source_host != place.slowest.target_host
        also = situation.share(situation.parts.get("communication", 0.0)) if apart else 0.0
        yield Change(what, _why(place.slowest), min(place.share + also, 1.0), AT_MOST)
    crowded = situation.measured is not None and situation.measured.crowded
    for part, (what, why) in _ADVICE.items():
        if part == "sharing" and crowded:  # for which there is a plan
            continue
        if part == "transfers":  # as far as it has not been said where
            if _small_messages(situation.links) is None:
                yield Change(what, why, _moved(situation), AT_MOST)
        else:
            yield Change(what, why, situation.share(situation.parts.get(part, 0.0)), AT_MOST)
    yield _loss_inside(situation)


def _moved(situation: Situation) -> float:
    """Return the share of transfers in the step, without those of links that are named."""
    named = sum(place.share for place in slow_connections(situation.links))
    return max(situation.share(situation.parts.get("transfers", 0.0)) - named, 0.0)


def _larger_tasks(situation: Situation) -> Change:
    """Give each task more to do: what it costs beside that stays the same, and so do small messages."""
    moved, small = _moved(situation), _small_messages(situation.links)
    gpu = any(name.startswith("cuda") for name in situation.facts.devices or ())
    gaps = situation.share(situation.parts.get("host_gaps", 0.0) - situation.turnaround)
    if small is not None and moved > gaps:
        what = "larger micro-batches: more samples each"
        why = f"messages of {small:,.0f} bytes take as long as larger ones, and tasks wait for them"
        return Change(what, why, gaps + moved, AT_MOST)
    what = (
        "larger tasks or torch.compile, so that kernel launches keep up" if gpu else "larger tasks: more samples each"
    )
    mean = _mean_task(situation.measured) if situation.measured is not None else None
    long = f" of {mean * 1e3:.3g} ms on average" if mean is not None else ""
    why = f"workers wait for Python, or for a processor, between tasks{long}"
    return Change(what, why, gaps + (moved if small is not None else 0.0), AT_MOST)


def _mean_task(measured: Measured) -> float:
    lengths = (measured.end - measured.begin)[measured.begin == measured.begin]
    return float(lengths.mean())


def _loss_inside(situation: Situation) -> Change:
    """Let the last partition compute the loss of each micro-batch, while others compute as well."""
    gain = situation.share(situation.turnaround)
    what = "shorten the work between forward and backward, such as the loss"
    why = "all partitions wait for it; the last one can compute the loss as its last layer"
    measured = situation.measured
    if measured is not None and measured.setting is not None:
        plan = predict(_with_loss(measured.costs), measured.setting, measured.balance)
        gain = min(gain, max(_gain(measured, plan), 0.0))
    return Change(what, why, gain, AT_MOST)


def _with_loss(costs: Costs) -> Costs:
    """Return the same with the loss as part of the last layer, half of it forward and half of it backward."""
    *others, last = costs.layers
    half = costs.loss / 2
    last = replace(last, forward=last.forward + half, backward=last.backward + half)
    return replace(costs, layers=(*others, last), loss=0.0)


def _small_messages(links: Sequence[LinkReport]) -> float | None:
    """Return the bytes of the mean message between ranks, if it is so small that its size does not matter."""
    messages = sum(link.messages for link in links)
    mean = sum(link.bytes for link in links) / messages if messages else SMALL_MESSAGE
    return mean if mean < SMALL_MESSAGE else None


def _why(link: LinkReport) -> str:
    assert link.time is not None
    others = f", and {link.others / 1000:.3g} ms on other links" if link.others is not None else ""
    return f"a message from rank {link.source} to rank {link.target} takes {link.time / 1000:.3g} ms{others}"
