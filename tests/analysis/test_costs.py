"""Costs from runs and from models: what was recorded is found again, and its schedule is predicted."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from pipesight import GPipe, observe
from pipesight._torch.saved_tensors import CAN_BE_SEEN
from pipesight.analysis.analyse import NoTasksError, analyse
from pipesight.plan import (
    Costs,
    Layer,
    Link,
    Setting,
    gpipe,
    interleaved,
    measure,
    one_f_one_b,
    predict,
    profile,
    recomputed,
    recorded,
    simulate,
    with_sizes,
    zero_bubble,
)
from pipesight.runs.reading.run import open_run
from pipesight.schedule.memory import device_bytes
from pipesight.schedule.task_orders import KINDS
from support.synthetic import Made

PHASES = ("forward", "recompute", "backward")
TIMES = {"forward": (100, 140, 120), "recompute": (90, 120, 110), "backward": (200, 260, 180)}


def time_of(phase, i, j):
    return TIMES[phase][j]


def made(folder, *, steps=5, checkpointed=3, layers=True, pause=300, **description):
    """Make a run of 3 partitions of 2 layers and 4 micro-batches, with a pause after each step."""
    run = Made(folder, balance=[2, 2, 2], chunks=4, **description)
    at = 0
    names = (lambda j: [f"l{2 * j}", f"l{2 * j + 1}"]) if layers else None
    for step in range(steps):
        at = run.gpipe(step, time_of, at=at, checkpointed=checkpointed, layers=names) + pause
    return run


def whole(costs, *, chunks):
    """Return what each layer takes for a whole batch, forward and backward."""
    layers = costs.layers
    forward = [layer.forward + chunks * layer.forward_each for layer in layers]
    return forward, [layer.backward + chunks * layer.backward_each for layer in layers]


def measured(run):
    with open_run(run.write()) as opened:
        return measure(opened)


@pytest.mark.parametrize(("checkpointed", "mode"), [(0, "never"), (3, "except_last"), (4, "always")])
def test_recorded_schedule_is_predicted(tmp_path, checkpointed, mode):
    """Of a run without gaps, step and bubble are predicted to the microsecond."""
    found = measured(made(tmp_path / "run", checkpointed=checkpointed))
    assert found.checkpoint == mode
    assert found.setting is not None
    assert found.balance == (2, 2, 2)
    again = recomputed(mode, 4)
    times = np.array([*TIMES.values(), (0, 0, 0)])[:, :, None] * 1e-6
    window = float(simulate(gpipe(3, 4, recompute=again), times).makespan)
    assert found.window_seconds == pytest.approx(window)
    assert found.step_seconds == pytest.approx(window + 300e-6)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)
    assert found.predicted_bubble == pytest.approx(found.bubble)
    assert found.costs.outside == pytest.approx(300e-6)


def test_gaps_are_overhead_of_tasks(tmp_path):
    """Time between tasks that nobody waits for but the host is predicted too, and counts as bubble."""
    n, m, gap = 3, 4, 25
    run = Made(tmp_path / "run", balance=[1] * n, chunks=m)
    schedule = gpipe(n, m)
    times = np.array([(100, 140, 120), (0, 0, 0), (200, 260, 180), (0, 0, 0)])[:, :, None] * np.ones((1, 1, m))
    plan = simulate(schedule, times + gap)
    at = 0
    for step in range(3):
        for kind, s, i in schedule.order.reshape(-1, 3).tolist():
            begin = at + int(plan.begin[kind, s, i]) + gap
            phase = {"F": "forward", "B": "backward"}[KINDS[kind]]
            run.task(step, partition=s, microbatch=i, phase=phase, begin=begin, dur=int(times[kind, s, i]))
        at += int(plan.makespan) + 500
    found = measured(run)
    # The window begins with the first task, and what comes before it is outside.
    assert found.window_seconds == pytest.approx((float(plan.makespan) - gap) * 1e-6)
    assert found.predicted_seconds == pytest.approx(found.step_seconds, rel=0.02)
    assert found.costs.forward_gap == pytest.approx(gap * 1e-6, rel=0.15)
    assert found.costs.backward_gap == pytest.approx(gap * 1e-6, rel=0.15)
    assert found.bubble == pytest.approx(1 - times.sum() / n / (float(plan.makespan) - gap))


def test_layers_have_their_times(tmp_path):
    """A layer's cost is its time for a whole batch; what a task takes beside its layers is overhead."""
    run = Made(tmp_path / "run", balance=[2, 1], chunks=2)
    at = 0
    for step in range(3):
        for i in range(2):
            for j, layers in enumerate(({"l0": 30, "l1": 50}, {"l2": 70})):
                begin = at + 100 * (i + j)
                run.task(step, partition=j, microbatch=i, phase="forward", begin=begin, dur=90, layers=layers)
                back = at + 400 + 100 * (1 - i) + 100 * (1 - j)
                run.task(step, partition=j, microbatch=i, phase="backward", begin=back, dur=90, layers=layers)
        at += 1000
    costs = measured(run).costs
    assert [layer.name for layer in costs.layers] == ["l0", "l1", "l2"]
    assert whole(costs, chunks=2) == (pytest.approx([60e-6, 100e-6, 140e-6]),) * 2
    assert costs.forward_overhead == pytest.approx((10 + 20) / 2 * 1e-6)
    assert [layer.parameter_bytes for layer in costs.layers] == [1000] * 3
    assert [layer.output_bytes for layer in costs.layers] == [100] * 3
    assert costs.samples == 16


def test_layers_come_in_the_order_they_run(tmp_path):
    """Without a description, layers are in the order of their first forward, not of their names."""
    run = Made(tmp_path / "run", balance=[2], chunks=1, pipelines=[])
    for step in range(3):
        for phase, at in (("forward", 0), ("backward", 100)):
            names = {"embed": 40, "block": 50}
            run.task(step, partition=0, microbatch=0, phase=phase, begin=1000 * step + at, dur=90, layers=names)
    found = measured(run)
    assert [layer.name for layer in found.costs.layers] == ["embed", "block"]
    assert found.balance == (2,)
    assert any("memory is unknown" in note for note in found.costs.notes)


def test_layers_that_were_not_recorded(tmp_path):
    """Where there are tasks alone, layers share them evenly, and a note says so."""
    found = measured(made(tmp_path / "run", layers=False))
    assert whole(found.costs, chunks=4)[0][:2] == pytest.approx([200e-6, 200e-6])
    assert any("equal share" in note for note in found.costs.notes)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)


def test_usual_steps_count(tmp_path):
    """A step that takes ten times as long as the others changes nothing."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    at = 0
    for step in range(9):
        slow = 10 if step == 4 else 1
        at = run.gpipe(step, lambda phase, i, j, slow=slow: slow * 100, at=at) + 50
    found = measured(run)
    assert found.step_seconds == pytest.approx(650e-6)
    assert found.predicted_seconds == pytest.approx(650e-6)


def test_mini_batches_of_several_sizes(tmp_path):
    """Costs are those of the most common size, and the plan and the report say which others there are."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    at = 0
    for step in range(10):
        small = step % 5 < 2
        run.samples = 8 if small else 16
        at = run.gpipe(step, lambda phase, i, j, small=small: 100 if small else 200, at=at) + 50
    found = measured(run)
    assert whole(found.costs, chunks=2)[0] == pytest.approx([2 * 200e-6] * 2)
    said = "mini-batches have 8 to 16 samples, 16 most often"
    assert f"{said}; plans are about these" in found.costs.notes
    with open_run(run.folder) as opened:
        assert f"{said}; step times are those of all sizes" in [remark.text for remark in analyse(opened).remarks]


def test_mini_batches_of_a_step(tmp_path):
    """With gradients of two mini-batches in a step, a plan's step has both."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    at, number = 0, 0
    for step in range(4):
        for _ in range(2):
            number += 1
            for i in range(2):
                for j in range(2):
                    for phase, begin in (("forward", 100 * (i + j)), ("backward", 300 + 100 * (2 - i - j))):
                        run.task(
                            step, partition=j, microbatch=i, phase=phase, begin=at + begin, dur=100, minibatch=number
                        )
            at += 600
        at += 100
    found = measured(run)
    assert found.costs.minibatches == 2
    assert found.step_seconds == pytest.approx(1300e-6)
    assert found.predicted_seconds == pytest.approx(1300e-6)


@pytest.mark.parametrize("large", [True, False])
def test_transfers_become_a_link(tmp_path, large):
    """Plans have a link on which what is cut takes as long as recorded transfers did, unless another is given."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    layers = [{"name": f"l{j}", "partition": j, "output_bytes": 1_000_000} for j in range(2)]
    run.pipeline = {"layers": layers} if large else {}
    for step in range(3):
        at = 1000 * step
        for j, phase, begin in ((0, "forward", 0), (1, "forward", 150), (1, "backward", 250), (0, "backward", 400)):
            run.task(step, partition=j, microbatch=0, phase=phase, begin=at + begin, dur=100)
        run.transfer(step, partition=1, microbatch=0, begin=at + 100, dur=50, size=5000)
        run.transfer(step, partition=0, microbatch=0, begin=at + 350, dur=50, size=5000)
    path = run.write()
    with open_run(path) as opened:
        found = measure(opened)
    link = found.costs.link
    assert (link.bandwidth, link.latency) == pytest.approx((1e6 / 50e-6, 0) if large else (math.inf, 50e-6))
    assert found.costs.forward_gap == pytest.approx(0, abs=1e-9)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)
    with open_run(path) as opened:
        assert measure(opened, link=Link(1.0, 2.0)).costs.link == Link(1.0, 2.0)


def test_shared_devices_take_turns(tmp_path):
    """Partitions on one GPU are simulated in turns, as they ran; such a schedule is no setting of a plan."""
    device = "cuda:0"
    pipelines = [{"partitions": 2, "chunks": 2, "devices": [device, device], "schedule": "gpipe"}]
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2, pipelines=pipelines)
    schedule = gpipe(2, 2, device_of_stage=[0, 0])
    for step in range(3):
        for place, (kind, s, i) in enumerate(schedule.order[0].tolist()):
            phase = {"F": "forward", "B": "backward"}[KINDS[kind]]
            begin = 1000 * step + 100 * place
            run.task(step, partition=s, microbatch=i, phase=phase, begin=begin, dur=100, device=device)
    found = measured(run)
    assert found.schedule.device_of_stage == (0, 0)
    assert found.window_seconds == pytest.approx(800e-6)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)
    assert found.setting is None


def test_nothing_to_plan_by(tmp_path):
    """A run without tasks, and one without backwards, say so."""
    run = Made(tmp_path / "empty")
    run.span("dataloader", "fetch", begin=0, dur=10)
    with pytest.raises(NoTasksError, match="has no pipeline tasks"):
        measured(run)
    run = Made(tmp_path / "forwards", balance=[1], chunks=1)
    run.task(0, partition=0, microbatch=0, phase="forward", begin=0, dur=10)
    with pytest.raises(NoTasksError, match="no mini-batch with all its forwards and backwards"):
        measured(run)


def test_plan_of_the_recorded_setting_agrees(tmp_path):
    """Planning what was recorded gives what was recorded."""
    found = measured(made(tmp_path / "run"))
    plan = predict(found.costs, found.setting, found.balance)
    assert plan.step_seconds == pytest.approx(found.step_seconds)
    assert plan.bubble == pytest.approx(found.bubble)


# Without a run.


def test_profile_counts_bytes():
    """Bytes are those of the whole sample, and of all parameters."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    costs = profile(model, torch.rand(12, 8), timeout=0.0, device="cpu")
    assert costs.samples == 12
    assert costs.input_bytes == 12 * 8 * 4
    assert [layer.name for layer in costs.layers] == ["0", "1", "2"]
    assert [layer.output_bytes for layer in costs.layers] == [12 * 16 * 4, 12 * 16 * 4, 12 * 4 * 4]
    assert [layer.parameter_bytes for layer in costs.layers] == [(8 * 16 + 16) * 4, 0, (16 * 4 + 4) * 4]
    assert all(layer.forward + layer.forward_each > 0 for layer in costs.layers)
    assert all(math.isfinite(layer.backward + layer.backward_each) for layer in costs.layers)


@pytest.mark.skipif(not CAN_BE_SEEN, reason="this torch does not tell what autograd keeps")
def test_profiles_count_what_runs_do(tmp_path):
    """What layers of a model keep, share and wait for is what a recording of them counts."""

    def build():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)]
        return nn.Sequential(*blocks, nn.ReLU(), nn.Linear(16, 4))

    x = torch.randn(24, 16)
    pipe = GPipe(build(), [3, 3], devices=["cpu", "cpu"], chunks=4, checkpoint="never")
    with observe(tmp_path / "run", logs=None):
        for _ in range(2):
            pipe(x).sum().backward()
    with open_run(tmp_path / "run") as run:
        recorded = measure(run).costs
    profiled = profile(build(), x, timeout=0.0)
    names = ("kept_bytes", "shared_bytes", "waiting_bytes", "output_bytes", "parameter_bytes")
    for one, other in zip(recorded.layers, profiled.layers, strict=True):
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert recorded.input_bytes == profiled.input_bytes
    assert any(layer.kept_bytes for layer in profiled.layers[:4])


def test_profile_of_one_sample():
    """A single sample cannot be cut, so all of the time is taken to grow with it."""
    costs = profile(nn.Sequential(nn.Linear(4, 4)), torch.rand(1, 4), timeout=0.0, device="cpu")
    assert costs.layers[0].forward > 0
    assert costs.layers[0].forward_each == 0


def test_bytes_of_a_model_for_the_times_of_a_run(tmp_path):
    """A run's times and a model's bytes make costs with both; models with other layers are refused."""
    found = measured(made(tmp_path / "run"))
    profiled = Costs(tuple(Layer(str(k), 9, 9, kept_bytes=k, parameter_bytes=1) for k in range(6)), input_bytes=7)
    both = with_sizes(found.costs, profiled)
    assert [layer.forward for layer in both.layers] == [layer.forward for layer in found.costs.layers]
    assert [layer.kept_bytes for layer in both.layers] == [*range(6)]
    assert both.input_bytes == 7
    assert both.notes == ()
    with pytest.raises(ValueError, match="layers of the model: 1, of the run: 6"):
        with_sizes(found.costs, Costs((Layer("a", 1, 1),)))


def test_planning_needs_no_torch():
    """Neither schedules nor plans nor runs import torch."""
    code = "import sys, pipesight.plan, pipesight.cli.plan, json; print(json.dumps('torch' in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(ended.stdout) is False


# Runs over several ranks.

LETTERS = {"F": "forward", "R": "recompute", "B": "backward", "W": "weight"}


def over_ranks(folder, schedule, times, *, layers=1, name="1f1b", steps=4):
    """Make a run whose ranks are the devices of a schedule; ``times`` are those of a task of each letter."""
    lengths = np.array([times.get(letter, 0) for letter in KINDS], float)[:, None, None]
    found = simulate(schedule, lengths)
    run = Made(folder, balance=[layers] * schedule.stages, chunks=schedule.chunks)
    run.pipeline = {"schedule": name, "ranks": [[rank] for rank in schedule.device_of_stage]}
    at = 0
    for step in range(steps):
        for rank, tasks in enumerate(schedule.order):
            for kind, s, i in tasks[tasks[:, 0] >= 0].tolist():
                begin = at + round(float(found.begin[kind, s, i]))
                shares = {f"l{layers * s + k}": times[KINDS[kind]] // layers for k in range(layers)}
                where = {"partition": s, "microbatch": i, "rank": rank, "begin": begin, "layers": shares}
                run.task(step, phase=LETTERS[KINDS[kind]], dur=times[KINDS[kind]], **where)
        at += round(float(found.makespan))
    return run


def test_several_partitions_a_rank(tmp_path):
    """A run with two partitions a rank is planned for as many ranks as it had, and predicted."""
    found = measured(over_ranks(tmp_path / "run", interleaved(4, 4, devices=2), {"F": 100, "B": 200}))
    assert (found.schedule.stages, found.schedule.devices, found.devices) == (4, 2, 2)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)
    assert found.balance == (1, 1, 1, 1)
    assert whole(found.costs, chunks=4)[1] == pytest.approx([4 * 200e-6] * 4)


def test_backwards_in_two_parts(tmp_path):
    """Where gradients of weights have tasks of their own, the backward of a layer is both."""
    found = measured(over_ranks(tmp_path / "run", zero_bubble(2, 4), {"F": 100, "B": 120, "W": 60}, layers=2))
    assert whole(found.costs, chunks=4) == (
        pytest.approx([4 * 50e-6] * 4),
        pytest.approx([4 * (60 + 30) * 1e-6] * 2 + [4 * (60 + 30) / 1.04 * 1e-6] * 2),  # splitting costs 4%
    )
    assert found.costs.backward_overhead == pytest.approx(0, abs=1e-12)
    assert found.predicted_seconds == pytest.approx(found.step_seconds)


def test_memory_of_any_order(tmp_path):
    """What a recorded order holds is known, be it that of GPipe, or of one whose backwards begin with the first."""
    order = [[*tasks[:4], *sorted(tasks[4:])] for tasks in gpipe(2, 4).order.tolist()]
    assert order != gpipe(2, 4).order.tolist()
    for name, schedule in (("theirs", recorded(order)), ("1f1b", one_f_one_b(2, 4))):
        found = measured(over_ranks(tmp_path / name, schedule, {"F": 100, "B": 200}, layers=2, name="gpipe"))
        assert found.setting == Setting("1f1b" if name == "1f1b" else "gpipe", 2, 4, "never")
        # Two layers of 1000 bytes of parameters a rank, twice; 100 bytes go out of each layer, a quarter at a time.
        # When the gradients of parameters are there, the first micro-batch is not.
        kept = [3, 3] if name == "theirs" else [2, 1]
        expected = [4000 + kept[0] * 50, 4000 + kept[1] * (50 + 25)]
        assert device_bytes(found.schedule, found.costs, found.balance) == pytest.approx(expected)


@pytest.mark.parametrize("checkpointed", [0, 3, 4])
def test_memory_is_that_of_the_plan(tmp_path, checkpointed):
    """What a recorded schedule holds is what its setting is planned to hold."""
    found = measured(made(tmp_path / "run", checkpointed=checkpointed))
    plan = predict(found.costs, found.setting, found.balance)
    assert device_bytes(found.schedule, found.costs, found.balance) == pytest.approx(plan.memory_bytes)


def test_waits_for_a_late_rank_are_no_link(tmp_path):
    """A rank that waits for a task of another has a slow neighbour; the link is as slow as what was sent already."""
    run = over_ranks(tmp_path / "run", gpipe(2, 1), {"F": 100, "B": 200}, steps=3)
    for step in range(3):  # rank 1 waits for F0 from the beginning, rank 0 for B0 after its own; each arrives at once
        run.transfer(step, partition=1, microbatch=0, begin=600 * step, dur=100, rank=1, size=1000)
        run.transfer(step, partition=0, microbatch=0, begin=600 * step + 100, dur=300, rank=0, size=1000)
    found = measured(run)
    assert found.costs.link == Link()
    assert (found.costs.forward_gap, found.costs.backward_gap) == (0, 0)
    plan = predict(found.costs, Setting("gpipe", 2, 1, "never"), found.balance)
    assert plan.step_seconds == pytest.approx(found.step_seconds)


def test_a_link_between_ranks(tmp_path):
    """Messages that take 50 us make plans as long as the run was."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    run.pipeline = {"ranks": [[0], [1]]}
    for step in range(3):
        at = 700 * step
        for phase, j, begin, dur in (
            ("forward", 0, 0, 100),
            ("forward", 1, 150, 100),
            ("backward", 1, 250, 200),
            ("backward", 0, 500, 200),
        ):
            layers = {f"l{j}": dur}
            run.task(step, partition=j, microbatch=0, phase=phase, begin=at + begin, dur=dur, rank=j, layers=layers)
        run.transfer(step, partition=1, microbatch=0, begin=at, dur=150, rank=1, size=100)
        run.transfer(step, partition=0, microbatch=0, begin=at + 100, dur=400, rank=0, size=100)
    found = measured(run)
    assert found.costs.link == Link(latency=pytest.approx(50e-6))
    assert (found.costs.forward_gap, found.costs.backward_gap) == (0, 0)
    plan = predict(found.costs, Setting("gpipe", 2, 1, "never"), found.balance)
    assert plan.step_seconds == pytest.approx(found.step_seconds) == pytest.approx(700e-6)
