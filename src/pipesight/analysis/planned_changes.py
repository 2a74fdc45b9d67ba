"""Changes of a pipeline's settings, and the share of the step that the planner says each would save.

A plan differs from the recorded settings in one thing, and is compared with the planner's prediction for the recorded
settings, as `pipesight plan` does. So both promise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipesight._formatting import size, time
from pipesight._plurals import count_of
from pipesight.analysis.measured_costs import Measured
from pipesight.analysis.plan_outcome import make_plans
from pipesight.analysis.setting_words import SettingWords
from pipesight.plan.balance_search import find_balance
from pipesight.plan.plans import (
    WORTH,
    Plan,
    fastest_first,
    predict,
)
from pipesight.plan.possible_settings import settings
from pipesight.schedule.argument_checks import SCHEDULES
from pipesight.schedule.setting import Setting
from pipesight.schedule.stage_costs import StageCosts

__all__ = [
    "AT_LEAST",
    "AT_MOST",
    "SIMULATED",
    "Change",
    "fewer_partitions",
    "gain_of",
    "mean_task",
    "planned_changes",
    "too_large",
]

DOUBT = 0.5
"""How much an upper limit weighs against a simulated gain."""

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

    @property
    def weight(self) -> float:
        """The gain as changes are sorted by it."""
        return self.gain * (DOUBT if self.promise == AT_MOST else 1)


def planned_changes(measured: Measured) -> list[Change]:
    """Return the single changes that gain more than 1% of the step or, if none does, several together."""
    found = []
    if measured.setting is not None:
        ways = (_balance(measured), _chunks(measured), _checkpoint(measured), _schedule(measured))
        found = [change for change in ways if change is not None and change.gain > WORTH]
    elif measured.schedule.devices < measured.devices:  # which share devices; plans give each one of its own
        return []
    return found or [change for change in (_together(measured),) if change is not None]


def gain_of(plan: Plan, measured: Measured) -> float:
    """Return the share of the step that a plan saves."""
    return 1 - plan.step_seconds / max(measured.predicted_seconds, 1e-12)


def fewer_partitions(measured: Measured, *, lost: float) -> Change | None:
    """Let no more partitions compute than there are processors.

    ``lost`` is the share of the step that partitions lose to sharing processors. It is the limit where the planner sees
    no gain: it assumes that they share evenly, which costs less.
    """
    enough, setting = measured.processors, measured.setting
    if not measured.crowded or enough is None or setting is None or setting.rounds > 1 or not measured.layers_known:
        return None
    plan = _best(measured, replace(setting, partitions=enough))
    what = "ranks" if measured.facts.ranks is not None else "partitions"
    few = f"{enough} {what if enough > 1 else what[:-1]}"
    why = f"{setting.partitions} {what} share {count_of(enough, 'processor')}, and slow each other down"
    text = f"{few} instead of {setting.partitions}: {SettingWords.of(measured).balance(plan.balance)}"
    gain = gain_of(plan, measured)
    if gain <= WORTH:
        return Change(text, why, lost, AT_MOST)
    return Change(text, why, gain, SIMULATED)


def _best(measured: Measured, setting: Setting) -> Plan:
    """Return a setting with its best balance."""
    scale = measured.parameter_scale or 2.0
    found = find_balance(StageCosts(measured.costs, setting, parameter_scale=scale))
    return predict(measured.costs, setting, found.balance, parameter_scale=scale)


def _balance(measured: Measured) -> Change | None:
    """Move layers between partitions."""
    setting = measured.setting
    assert setting is not None
    if setting.stages < 2 or not measured.layers_known:
        return None
    plan, now = _best(measured, setting), measured.balance
    if plan.balance == now or not _fits(plan, measured):
        return None
    ends = [sum(now[: j + 1]) for j in range(len(now))]
    blocks = [measured.costs.layers[end - count : end] for end, count in zip(ends, now, strict=True)]
    times = [sum(layer.forward + layer.backward for layer in block) for block in blocks]
    worst = max(range(len(times)), key=times.__getitem__)
    why = f"partition {worst} takes {times[worst] * len(times) / max(sum(times), 1e-12):.2f} times the mean"
    what = SettingWords.of(measured).balance(plan.balance, instead_of=now)
    return Change(what, why, gain_of(plan, measured), SIMULATED)


def _chunks(measured: Measured) -> Change | None:
    """Cut mini-batches into more micro-batches, or fewer: less to fill and drain against fewer gaps."""
    setting = measured.setting
    assert setting is not None
    m, words = setting.chunks, SettingWords.of(measured)
    possible = settings(
        measured.costs,
        partitions=setting.partitions,
        schedules=(setting.schedule,),
        checkpoints=(setting.checkpoint,),
        recorded=m,
        rounds=setting.rounds,
    )
    plans = fastest_first(
        plan
        for other in possible
        if other.rounds == setting.rounds  # the balance has a part for each stage
        if other.chunks != m and not (other.chunks == 1 and _splitting_pays(measured))
        if words.runs(other)
        if _fits(plan := _kept_setting(measured, other), measured)
    )
    if not plans:
        return None
    chunks, gain = plans[0].setting.chunks, gain_of(plans[0], measured)
    what = f"{words.chunks(chunks)} instead of {m}"
    if chunks > m:
        why = "fill and drain shrink, provided that smaller tasks take less time"
        if measured.parameter_scale is not None:
            why += f"; {_need(plans[0], measured)}"
        return Change(what, why, gain, AT_MOST)
    why = f"each task, of {time(mean_task(measured) * 1e6)} on average, has a fixed cost, however few samples it gets"
    if chunks == 1 and setting.partitions > 1:
        why = f"the tasks are too small for splitting to pay: {why}"
    elif setting.checkpoint == "except_last":
        why += f", and {chunks - 1} of {chunks} micro-batches are recomputed instead of {m - 1} of {m}"
    return Change(f"larger micro-batches: {what}", why, gain, AT_LEAST)


def _splitting_pays(measured: Measured) -> bool:
    """Return whether some pipelined plan beats a single micro-batch that is recomputed as the others are.

    With ``except_last``, a single micro-batch is never recomputed. What it gains by that is a matter of checkpointing,
    not of splitting.
    """
    setting = measured.setting
    assert setting is not None
    if setting.partitions == 1:
        return False
    checkpoint = "always" if setting.checkpoint == "except_last" else setting.checkpoint
    alone = predict(measured.costs, replace(setting, chunks=1, checkpoint=checkpoint), measured.balance)
    halves = predict(measured.costs, replace(setting, chunks=2), measured.balance)
    return min(halves.step_seconds, measured.predicted_seconds) < alone.step_seconds


def _checkpoint(measured: Measured) -> Change | None:
    """Keep activations instead of recomputing them."""
    setting = measured.setting
    assert setting is not None
    if setting.checkpoint == "never" or (setting.checkpoint == "except_last" and setting.chunks == 1):
        return None
    plan = _kept_setting(measured, replace(setting, checkpoint="never"))
    if not _fits(plan, measured):
        return None
    why = "nothing is recomputed; activations of all micro-batches must fit in memory"
    if measured.parameter_scale is not None:
        fits = "; it fits" if measured.limit is not None else ""
        why = f"nothing is recomputed{fits}; {_need(plan, measured)}"
    what = f'checkpoint="never" instead of "{setting.checkpoint}"'
    return Change(what, why, gain_of(plan, measured), SIMULATED)


def too_large(measured: Measured) -> str | None:
    """Say so if nothing but memory speaks against keeping all activations."""
    setting = measured.setting
    if setting is None or setting.checkpoint == "never":
        return None
    plan = _kept_setting(measured, replace(setting, checkpoint="never"))
    if _fits(plan, measured) or (gain := gain_of(plan, measured)) <= WORTH:
        return None
    return f'checkpoint="never" would save {gain:.0%} of a step, but does not fit: {_need(plan, measured)}'


def _kept_setting(measured: Measured, setting: Setting) -> Plan:
    """Predict another setting with the recorded balance."""
    return predict(measured.costs, setting, measured.balance, parameter_scale=measured.parameter_scale or 2.0)


def _fits(plan: Plan, measured: Measured) -> bool:
    """Whether the devices have the memory, as far as both are known."""
    known = measured.parameter_scale is not None
    return measured.limit is None or not known or measured.limit.allows(plan.memory_bytes)


def _need(plan: Plan, measured: Measured) -> str:
    """Say what memory a plan needs, beside what the recorded setting is predicted to need."""
    assert measured.setting is not None
    now = _kept_setting(measured, measured.setting).memory_bytes
    if measured.limit is not None:
        return measured.limit.told(plan.memory_bytes, now)
    return f"a device needs {size(max(plan.memory_bytes))} instead of {size(max(now))}"


def _schedule(measured: Measured) -> Change | None:
    """Run tasks in another order, where the engine can: over ranks, and in the steps of a `Pipeline`."""
    setting = measured.setting
    assert setting is not None
    in_steps = measured.facts.workers is not None  # of a pipeline in one process
    if not (measured.facts.ranks or in_steps) or setting.rounds > 1:
        return None
    who = "partitions" if in_steps else "ranks"
    found, words = [], SettingWords.of(measured)
    for name in ("gpipe", "1f1b", "zero-bubble"):
        if name == setting.schedule or not words.runs(other := replace(setting, schedule=name)):
            continue
        plan = _kept_setting(measured, other)
        if not _fits(plan, measured):
            continue
        gain = gain_of(plan, measured)
        what = words.schedule(other, instead_of=measured.schedule_name)
        if name == "zero-bubble":  # what it costs to compute gradients in two parts is not known
            found.append(Change(what, f"weight gradients fill the time that {who} would wait", gain, AT_MOST))
        else:
            found.append(Change(what, f"{who} wait less for each other", gain, SIMULATED))
    return max(found, key=lambda change: change.weight, default=None)


def _together(measured: Measured) -> Change | None:
    """Take the plan that `pipesight plan` would, if one change alone gains too little."""
    if measured.facts.workers is not None and measured.setting is None:  # of steps in an order without a name
        return None
    named = measured.facts.ranks is not None or measured.facts.workers is not None  # the engine has schedules
    schedules = SCHEDULES if named else ("gpipe",)
    scale = measured.parameter_scale or 2.0
    outcome = make_plans(measured.costs, measured, schedules=schedules, parameter_scale=scale)
    plan = outcome.fastest_to_run()
    if plan is None or outcome.keep() is not None or (gain := gain_of(plan, measured)) <= WORTH:
        return None
    best, words = plan.setting, SettingWords.of(measured)
    parts = [words.balance(plan.balance), words.chunks(best.chunks), words.checkpoint(best.checkpoint)]
    what = ", ".join([*filter(None, parts), *([words.schedule(best)] if named else [])])
    why = "all of these together; each alone saves less"
    if best.chunks == 1 and best.partitions > 1:
        why = f"{why}; with one micro-batch, partitions take turns"
    return Change(what, why, gain, AT_MOST)


def mean_task(measured: Measured) -> float:
    """Return how long a task of a usual mini-batch takes, in seconds."""
    lengths = (measured.end - measured.begin)[measured.begin == measured.begin]
    return float(lengths.mean())
