"""Advice: each gain is what the change gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.pipelining import schedules

from pipesight.analysis.plan_outcome import make_plans
from pipesight.analysis.planned_changes import AT_LEAST, AT_MOST, SIMULATED, Change, planned_changes
from pipesight.analysis.report import Report
from pipesight.plan import settings as planned_settings
from pipesight.plan.plans import best_plans
from pipesight.schedule.argument_checks import SCHEDULES
from support.analysed import analysed, even
from support.synthetic import Made


def time_of(tmp_path: Path, name: str, balance: list[int], chunks: int, cost: Callable, **options) -> Report:
    """Analyse runs of 6 steps in which layer k takes ``cost(phase, k)`` for each sample of 16."""
    made = Made(tmp_path / name, balance=balance, chunks=chunks)
    made.pipeline |= options.pop("known", {})
    names = [f"l{k}" for k in range(sum(balance))]
    ends = np.cumsum(balance)
    own = [list(range(end - size, end)) for size, end in zip(balance, ends, strict=True)]
    at = 0
    for step in range(6):
        at = _gpipe_of_layers(made, step, at, own, names, lambda phase, k: cost(phase, k) * 16 // chunks, **options)
    return analysed(made)


def _gpipe_of_layers(made, step, at, own, names, cost, checkpointed=0):
    times = {}

    def time(phase, i, j):
        times[phase, i, j] = {names[k]: cost(phase, k) for k in own[j]}
        return sum(times[phase, i, j].values())

    before = len(made.events.get(0, []))
    end = made.gpipe(step, time, at=at, checkpointed=checkpointed)
    for event in made.events[0][before:]:
        args = event["args"]
        phase = {"forward": "forward", "forward.recompute": "recompute", "backward": "backward"}[event["name"]]
        begin = event["ts"]
        for name, dur in times[phase, args["microbatch"], args["partition"]].items():
            layer = {**event, "name": f"{event['name']}.layer", "ts": begin, "dur": dur}
            made.events[0].append({**layer, "args": {**args, "layer": name}})
            begin += dur
    return end


def change(report: Report, word: str) -> Change:
    (found,) = [change for change in report.verdict.changes if change.what.startswith(word)]
    return found


def test_gain_of_a_balance_is_what_it_gives(tmp_path):
    """The balance that is proposed gains what is said: a run with it is that much faster."""
    cost = lambda phase, k: [30_000, *[10_000] * 5][k] * (2 if phase == "backward" else 1)
    before = time_of(tmp_path, "before", [3, 1, 2], 4, cost)
    found = change(before, "balance")
    assert found.what == "balance=[1, 2, 3] instead of [3, 1, 2]"
    assert found.promise == SIMULATED
    after = time_of(tmp_path, "after", [1, 2, 3], 4, cost)
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean)
    assert not any(c.what.startswith("balance") for c in after.verdict.changes)


def test_bare_torch_is_advised_in_its_own_words(tmp_path):
    """A program with torch's schedules is told of its arguments and classes, and planned for those that there are."""
    known = {"engine": "torch.distributed.pipelining", "schedule": "gpipe"}
    cost = lambda phase, k: [30_000, *[10_000] * 5][k] * (2 if phase == "backward" else 1)
    report = time_of(tmp_path, "uneven", [3, 1, 2], 4, cost, known=known)
    assert change(report, "stages").what == "stages of 1, 2 and 3 layers instead of 3, 1 and 2"
    measured = replace(report.measured, facts=replace(report.measured.facts, ranks=((0,), (1,), (2,))))
    found = [change.what for change in planned_changes(measured)]
    assert [what for what in found if what.startswith("n_micro")] == ["n_microbatches=16 instead of 4"]
    assert "Schedule1F1B instead of ScheduleGPipe" in found
    outcome = make_plans(measured.costs, measured)
    calls = [(plan.schedule_name, call) for plan in outcome.plans if (call := outcome.call(plan)) is not None]
    assert {name for name, _ in calls} == {*SCHEDULES} - {"v-half", "v-min"}  # torch has no class for them
    names = {call.partition("(")[0] for _, call in calls}
    assert all(issubclass(getattr(schedules, name), schedules._PipelineSchedule) for name in names)
    small = [plan for plan in outcome.plans if plan.schedule_name == "1f1b" and plan.setting.chunks == 2]
    assert {outcome.call(plan) for plan in small} == {None}  # torch's needs as many micro-batches as stages
    best = outcome.fastest_to_run()
    assert f"n_microbatches={best.setting.chunks}, loss_fn=...)  # stages of " in outcome.call(best)


def test_gain_of_chunks_is_what_they_give(tmp_path):
    """More micro-batches gain what is said, if tasks take time in proportion to their samples."""
    cost = lambda phase, k: 160_000 if phase == "backward" else 80_000
    before = time_of(tmp_path, "before", [1, 1, 1, 1], 4, cost)
    found = change(before, "chunks")
    chunks = int(found.what.split("=")[1].split()[0])
    after = time_of(tmp_path, "after", [1, 1, 1, 1], chunks, cost)
    assert chunks > 4
    assert found.promise == AT_MOST
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean, abs=0.005)


def test_chunks_are_the_best_of_all_that_are_planned(tmp_path):
    """Tiny tasks cost the same for any samples, so that one micro-batch is best: not just half or a quarter as many."""
    layers = [{"name": f"l{k}", "class": "Linear", "partition": k, "operators": 4} for k in range(2)]
    known = {"operator_seconds": [5e-6, 1e-5], "layers": layers}
    report = time_of(tmp_path, "run", [1, 1], 16, lambda phase, k: 40 if phase == "backward" else 20, known=known)
    found = change(report, "larger micro-batches")
    assert found.what == "larger micro-batches: chunks=1 instead of 16"
    assert found.why.startswith("the tasks are too small for splitting to pay: ")
    assert found.promise == AT_LEAST
    measured = report.measured
    possible = planned_settings(measured.costs, partitions=2, schedules=["gpipe"], checkpoints=["never"], recorded=16)
    best = best_plans(measured.costs, possible)[0]
    assert found.gain == pytest.approx(1 - best.step_seconds / measured.predicted_seconds)


def test_one_micro_batch_is_not_advised_to_save_recomputation(tmp_path):
    """With `except_last`, a single micro-batch is not recomputed: that is `checkpoint="never"`, not larger tasks."""
    cost = lambda phase, k: (200_000 if phase == "backward" else 100_000) // (1 + 9 * k)  # nearly all in partition 0
    report = time_of(tmp_path, "run", [1, 1], 4, cost, checkpointed=3)
    change(report, 'checkpoint="never"')
    found = [entry.what for entry in report.verdict.changes if "chunks=" in entry.what]
    assert all("chunks=1 " not in what for what in found), found


def test_gain_without_checkpoints_is_what_it_gives(tmp_path):
    """Without recomputation, a run is faster by what is said."""
    cost = lambda phase, k: 160 if phase == "backward" else 80
    before = time_of(tmp_path, "before", [1, 1], 8, cost, checkpointed=7)
    found = change(before, "checkpoint")
    assert found.what == 'checkpoint="never" instead of "except_last"'
    after = time_of(tmp_path, "after", [1, 1], 8, cost)
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean)


def test_gain_of_the_optimizer_is_at_most_its_share(made):
    """No more is promised than the table shows, even if the last step, which has no next one, has no optimizer."""
    at = 0
    for step in range(3):
        at = made.gpipe(step, even, at=at)
        if step < 2:
            made.span("compute", "step", begin=at, dur=4000)
            at += 4000
    report = analysed(made)
    shown = report.overall.parts["optimizer"] / report.overall.time.mean
    assert shown == pytest.approx(8000 / (8000 + 3 * 900))
    assert change(report, "a fused optimizer").gain == pytest.approx(shown)


def test_nothing_to_change(tmp_path):
    """Where nothing gains more than 1%, nothing is proposed, and the verdict says so."""
    made = Made(tmp_path / "run", balance=[1], chunks=1)
    made.gpipe(1, even, at=made.gpipe(0, even))
    report = analysed(made)
    assert report.verdict.changes == ()
    assert "no change" in report.verdict.text


@pytest.mark.parametrize(
    ("category", "name", "words"),
    [
        ("dataloader", "fetch", "num_workers"),
        ("compute", "step", "fused"),
        ("checkpoint", "capture", "checkpoints"),
        ("comm", "all_reduce", "communication"),
    ],
)
def test_time_between_steps_is_to_be_gained(made, category, name, words):
    """What the main thread spends half of a step with is named first, with what there is to gain at most."""
    at = 0
    for step in range(4):
        end = made.gpipe(step, even, at=at)
        made.span(category, name, begin=end, dur=900)
        at = end + 900
    first = analysed(made).verdict.changes[0]
    assert words in first.what
    assert first.promise == AT_MOST
    assert first.gain == pytest.approx(0.5)


def test_at_most_three(made):
    """There are at most three changes."""
    at = 0
    for step in range(4):
        at = made.gpipe(step, lambda phase, i, j: even(phase, i, j) + 10 * j, at=at, checkpointed=1)
        for category, name in (("dataloader", "fetch"), ("compute", "step"), ("checkpoint", "capture")):
            made.span(category, name, begin=at, dur=500)
            at += 500
    assert len(analysed(made).verdict.changes) == 3


def test_a_slow_rank_is_named(tmp_path):
    """What replays find slow is what to look at, for what it costs: not a loss with an unknown cause."""
    report = with_tasks(tmp_path, lambda phase, i, j, rank: 2 if (rank, j) == (1, 0) else 1)
    found = change(report, "check ")
    assert "partition 0 of rank 1" in found.what
    assert found.promise == AT_MOST
    assert not any(one.what.startswith("find what slows") for one in report.verdict.changes)


def test_micro_batches_that_differ_are_named(tmp_path):
    """Removing what they differ by saves what is said: a run with even ones of the same work takes that much less."""
    report = with_tasks(tmp_path, lambda phase, i, j, rank: 4 if i == 1 else 1)
    found = change(report, "even micro-batches")
    evened = with_tasks(tmp_path / "even", lambda phase, i, j, rank: 7 / 4)
    assert found.gain == pytest.approx(1 - evened.overall.time.mean / report.overall.time.mean, rel=0.05)


def with_tasks(folder: Path, factor: Callable) -> Report:
    """Analyse two replicas of two partitions and 4 micro-batches; each task takes ``factor`` times the usual."""
    made = Made(folder / "run", balance=[1, 1], chunks=4)
    for rank in range(2):
        at = 0
        for step in range(4):
            time = lambda phase, i, j, r=rank: int(1000 * even(phase, i, j) * factor(phase, i, j, r))
            at = made.gpipe(step, time, rank=rank, at=at)
    return analysed(made)


def test_checkpoint_advice_says_whether_it_fits(tmp_path):
    """The memory that keeping activations takes is named; where devices have less, it is no advice but a remark."""
    from dataclasses import replace

    from pipesight._formatting import size
    from pipesight.analysis.memory_limit import MemoryLimit
    from pipesight.analysis.planned_changes import planned_changes, too_large
    from pipesight.plan import predict

    cost = lambda phase, k: 160 if phase == "backward" else 80
    measured = time_of(tmp_path, "before", [1, 1], 8, cost, checkpointed=7).measured
    counted = replace(measured, parameter_scale=4.0)
    # The second device holds 4 * 1000 bytes when seven micro-batches are left: an input and an output, 12.5 each.
    (unknown,) = [change for change in planned_changes(counted) if change.what.startswith("checkpoint")]
    assert unknown.why == "nothing is recomputed; a device needs 4.08 KiB instead of 4.00 KiB"
    large = replace(counted, limit=MemoryLimit(8192))
    (fits,) = [change for change in planned_changes(large) if "checkpoint" in change.what]
    assert fits.why == "nothing is recomputed; it fits; a device needs 4.08 KiB instead of 4.00 KiB, and has 8.00 KiB"
    small = replace(counted, limit=MemoryLimit(4150))
    assert not [change for change in planned_changes(small) if change.what.startswith("checkpoint=")]
    assert too_large(small).endswith("does not fit: a device needs 4.08 KiB instead of 4.00 KiB, and has 4.05 KiB")
    assert too_large(counted) is None
    assert too_large(large) is None
    # Of a machine, both partitions of both replicas take their part, beside all else.
    shared = MemoryLimit(2**15, shared=True, replicas=2, besides=1024)
    (fits,) = [change for change in planned_changes(replace(counted, limit=shared)) if "checkpoint" in change.what]
    never = predict(counted.costs, replace(counted.setting, checkpoint="never"), [1, 1], parameter_scale=4.0)
    assert 8000 < sum(never.memory_bytes) < 2 * 4.08 * 1024
    need = f"it fits; the program needs about {size(2 * sum(never.memory_bytes) + 1024)} instead of "
    assert need in fits.why
    assert fits.why.endswith(", and the machine has 32.0 KiB")
    assert too_large(replace(counted, limit=replace(shared, bytes=2**14))).endswith("and the machine has 16.0 KiB")
