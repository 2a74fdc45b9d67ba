"""Programs without a pipeline: their steps, where the time goes, modules, curves, advice, and the way to a pipeline."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.report import Report
from pipesight.runs.reading.run import open_run
from support.synthetic import START, Made

STEP = 1_000
FACTS = {
    "loaders": [{"batch_size": 4, "num_workers": 0, "pin_memory": False}],
    "optimizers": [{"class": "Adam", "module": "torch.optim.adam", "fused": None, "tensors": 6}],
    "models": [
        {
            "class": "Net",
            "parameter_bytes": 300,
            "units": [
                {"name": name, "calls": 1, "parameter_bytes": 100, "output_bytes": 8} for name in ("a", "b", "c")
            ],
        }
    ],
}


def point(made: Made, kind: str, name: str, *, at: int, rank: int = 0, **values: object) -> None:
    """Add a counter or an instant."""
    phase = {"counter": "C", "instant": "i"}[kind]
    line = {"id": 0, "name": name, "cat": kind, "pid": 4000 + rank, "tid": 4000 + rank, "ts": START + at, "ph": phase}
    made.events.setdefault(rank, []).append({**line, "args": values, "point": values})


def step(made: Made, number: int, *, modules: bool = True, numbered: bool = True, rank: int = 0) -> None:
    """Add a step: 100 loading, 200 forward, 50 loss, 100 in a span, 300 backward, 50 optimizer, 200 between."""
    at = number * STEP
    known = {"step": number} if numbered else {}
    made.span("dataloader", "fetch", begin=at, dur=100, rank=rank, **known)
    made.span("compute", "forward", begin=at + 100, dur=200, rank=rank, module="Net", depth=0, samples=4, **known)
    for k, name in enumerate("abc" if modules else ""):
        more = {"module": "Linear", "layer": name, "depth": 1, **known}
        made.span("compute", "forward", begin=at + 110 + 50 * k, dur=50, rank=rank, **more)
        made.span("compute", "backward", begin=at + 450 + 100 * (2 - k), dur=100, rank=rank, **more)
    made.span("compute", "forward", begin=at + 300, dur=50, rank=rank, module="MSELoss", depth=0, **known)
    made.span("mine", "metrics", begin=at + 350, dur=100, rank=rank)
    made.span("mine", "inner", begin=at + 360, dur=30, rank=rank)
    made.span("compute", "backward", begin=at + 450, dur=300, rank=rank, module="Net", depth=0, **known)
    made.span("compute", "step", begin=at + 750, dur=50, rank=rank, **known)


def report_of(made: Made) -> Report:
    with open_run(made.write()) as run:
        return analyse(run)


def program_of(made: Made) -> ProgramReport:
    found = report_of(made).program
    assert found is not None
    return found


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "run", pipelines=[], program=FACTS)


@pytest.mark.parametrize("numbered", [True, False])
def test_parts(made, numbered):
    """Each moment of a step counts once, for the innermost span; what none covers is between. Numbers may lack."""
    for number in range(6):
        step(made, number, numbered=numbered)
    program = program_of(made)
    assert program.parts == {
        "data_loading": 100,
        "forward": 200,
        "loss": 50,
        "backward": 300,
        "optimizer": 50,
        "own:inner": 30,
        "own:metrics": 70,
        "between": 200,
    }
    assert (program.count, program.time.median, program.trains) == (5, STEP, True)  # the last has no known end
    assert program.samples_per_second == pytest.approx(4 / STEP * 1e6)


def test_closure(made):
    """What an optimizer's step calls is not its own time: it would be promised to a faster optimizer."""
    for number in range(4):
        at = number * STEP
        made.span("compute", "step", begin=at, dur=900, step=number)
        made.span("compute", "step.closure", begin=at + 50, dur=700, step=number)
        made.span("compute", "forward", begin=at + 100, dur=200, module="Net", depth=0, step=number)
        made.span("compute", "backward", begin=at + 400, dur=300, module="Net", depth=0, step=number)
    assert program_of(made).parts == {"forward": 200, "backward": 300, "optimizer": 200, "between": 300}


def test_spans_around_many_steps(made):
    """A span around an epoch says nothing about a step; one around the body of a step has what is left of it."""
    for number in range(4):
        step(made, number)
        made.span("mine", "body", begin=number * STEP + 100, dur=800)
    made.span("mine", "epoch", begin=0, dur=4 * STEP)
    made.span("pipeline", "train", begin=0, dur=4 * STEP)
    parts = program_of(made).parts
    assert (parts["own:body"], parts["between"]) == (100, 100)
    assert "own:epoch" not in parts


def test_modules(made):
    """Times of modules are those in each alone, of the steps that show all of them."""
    for number in range(6):
        step(made, number, modules=number == 2)
    found = program_of(made).modules
    assert found.steps == 1
    times = {module.name: (module.model, module.forward, module.backward) for module in found.modules}
    assert times == {
        "a": ("Net", 50, 100),
        "b": ("Net", 50, 100),
        "c": ("Net", 50, 100),
        "Net": ("Net", 50, 0),
        "MSELoss": ("MSELoss", 50, 0),
    }


def test_evaluation_is_not_training(made):
    """Calls without gradients are no forwards, and their samples no throughput."""
    for number in range(5):
        step(made, number)
    made.span("compute", "forward", begin=2 * STEP + 820, dur=90, module="Net", grad=False, step=2, samples=64)
    program = program_of(made)
    assert program.parts["evaluation"] == pytest.approx(90 / 4)
    assert program.parts["forward"] == 200
    assert (program.evaluations, program.samples_per_second) == (1, pytest.approx(4 / STEP * 1e6))


def test_recomputation(made):
    """A module that is called during a backward is recomputed."""
    for number in range(3):
        step(made, number, modules=False)
        made.span("compute", "forward", begin=number * STEP + 500, dur=40, module="Linear", depth=0, step=number)
    parts = program_of(made).parts
    assert (parts["recompute"], parts["backward"], parts["forward"]) == (40, 260, 200)


def test_inference(made):
    """A program without a backward has a step for each batch."""
    for number in range(4):
        made.span("compute", "forward", begin=100 * number, dur=60, module="Net", grad=False, step=0, samples=2)
    program = program_of(made)
    assert (program.trains, program.count, program.time.median) == (False, 3, 100)


def test_ranks(made):
    """A step takes as long as its slowest rank; parts are means over ranks, samples sums."""
    for rank in range(2):
        for number in range(5):
            step(made, number, rank=rank)
    program = program_of(made)
    assert (program.ranks, program.count) == (2, 4)
    assert sum(program.parts.values()) == pytest.approx(STEP)
    assert program.samples_per_second == pytest.approx(2 * 4 / STEP * 1e6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2_900), st.integers(0, 900), st.sampled_from(["x", "y"])), max_size=12))
def test_parts_add_up(tmp_path_factory, spans):
    """Whatever spans overlap, the parts of every step add up to it, and none is negative."""
    made = Made(tmp_path_factory.mktemp("runs") / "run", pipelines=[])
    for number in range(4):
        step(made, number)
    for begin, length, name in spans:
        made.span("mine", name, begin=begin, dur=length)
    steps = program_of(made).steps
    assert steps.parts.sum(axis=0).tolist() == pytest.approx(steps.period.tolist())
    assert (steps.parts >= 0).all()


def test_curves(made):
    """A counter's value in a step is the mean of those recorded in it, by time; not finite where one is not."""
    for number in range(3):
        step(made, number)
    for at, loss in ((-5, 9.0), (300, 4.0), (700, 2.0), (1_300, "NaN"), (2_300, 1.0)):
        point(made, "counter", "loss", at=at, loss=loss)
    point(made, "counter", "memory", at=1_500, allocated=3, reserved=5)
    point(made, "instant", "dropped", at=1_600, lr=0.1)
    report = report_of(made)
    loss, *others = report.curves
    assert (loss.name, loss.steps, loss.values[::2]) == ("loss", (0, 1, 2), (3.0, 1.0))
    assert math.isnan(loss.values[1])
    assert [(curve.name, curve.steps, curve.values) for curve in others] == [
        ("memory allocated", (1,), (3.0,)),
        ("memory reserved", (1,), (5.0,)),
    ]
    assert report.verdict.text.startswith(
        "The loss is not finite in step 1. Which tensor was so first, pipesight run --stats tells."
    )
    (moment,) = report.moments
    assert (moment.name, moment.step, json.loads(moment.values)) == ("dropped", 1, {"lr": 0.1})


def test_advice(made):
    """Each change gains at most what its part takes, and is only advised where it is not done already."""
    for number in range(5):
        step(made, number)
    gains = {change.what.partition(":")[0]: change.gain for change in report_of(made).verdict.changes}
    assert gains["load data in the background"] == pytest.approx(0.1)
    assert gains["a fused optimizer"] == pytest.approx(0.05)
    made.description["program"] = {**FACTS, "optimizers": [{**FACTS["optimizers"][0], "fused": True}]}
    changes = report_of(made).verdict.changes
    assert not any("fused" in change.what for change in changes)


@pytest.mark.parametrize(("operators", "advised"), [(100, True), (10, False)])
def test_launching(made, operators, advised):
    """Where operators take little longer than ones without work do, fewer of them would help."""
    model = {**FACTS["models"][0], "operators": operators, "operator_seconds": [1e-6, 2e-6]}
    made.description["program"] = {"models": [model]}
    for number in range(5):
        step(made, number)
    gains = [change.gain for change in report_of(made).verdict.changes if "torch.compile" in change.what]
    assert gains == ([pytest.approx(0.55)] if advised else [])


def test_advice_on_recomputation(made):
    """It gains at most what is computed again."""
    for number in range(5):
        step(made, number)
        made.span("compute", "forward", begin=number * STEP + 460, dur=80, module="Linear", layer="c", depth=0)
    gains = {change.what.partition(",")[0]: change.gain for change in report_of(made).verdict.changes}
    assert gains["checkpoint fewer modules"] == pytest.approx(0.08)


def test_what_runs_in_the_background(made):
    """All-reduces that are waited for later have a row of their own; what is hidden is not part of the step."""
    for number in range(5):
        step(made, number)
        known = {"step": number, "group": "world"}
        for at, size in ((500, 60), (600, 60)):
            made.span("comm", "all_reduce", begin=number * STEP + at, dur=1, size=size, **known)
        for at, length in ((700, 20), (720, 20)):
            made.span("comm", "all_reduce.wait", begin=number * STEP + at, dur=length, size=60, **known)
    report = report_of(made)
    beside = report.program.background
    assert (beside.begin[:2] - beside.begin[0]).tolist() == [0, 220]  # one after the other
    assert (beside.end[:2] - beside.begin[0]).tolist() == [220, 240]
    (change,) = (change for change in report.verdict.changes if "all-reduces" in change.what)
    assert change.gain == pytest.approx(0.042)  # starting them takes time, too
    assert "collectives take 240 µs of a step, of which 82.5% is hidden" in change.why


def test_a_rank_that_comes_late(tmp_path):
    """Who waits for a late rank is told so, and what that does; collectives at once and in the background are apart."""
    clock = {"error_ns": 0, "ranks": {"1": {"error_ns": 0}}}
    made = Made(tmp_path / "run", pipelines=[], program={}, world_size=2, clock=clock)
    for number in range(6):
        at = number * STEP
        for rank in range(2):
            known = {"rank": rank, "step": number}
            peers = {"group": "world", **known}
            made.span("compute", "backward", begin=at, dur=400, module="Net", depth=0, **known)
            made.span("comm", "all_reduce", begin=at + 200, dur=2, size=60, **peers, **{"async": True})
            made.span("comm", "all_reduce.wait", begin=at + 350, dur=50, size=60, **peers)
            made.span("compute", "step", begin=at + 400, dur=50, **known)
            # Rank 1 sleeps before it reduces the loss, which takes 40 once both are there.
            ready = 800 if rank else 450
            made.span("comm", "all_reduce", begin=at + ready, dur=840 - ready, size=4, **peers, **{"async": False})
    report = report_of(made)
    assert [(one.bytes, one.calls, one.time, one.wait, one.last) for one in report.collectives] == [
        (4, 5, 40, 350, 1),
        (60, 5, 200, 0, None),
    ]
    (held,) = report.held
    assert (held.rank, held.doing, held.ranks, held.wait, held.steps) == (1, "between", (0,), 350, 5)
    waits = report.program.waits
    assert (waits.late, waits.exposed, waits.direct) == (175, 52, 40)
    assert sum((waits.late, waits.exposed, waits.direct)) == report.program.parts["communication"]
    gains = {change.what.split(":")[0]: change.gain for change in report.verdict.changes}
    assert gains["as little work on rank 1 as on the others"] == pytest.approx(0.35)
    assert "Look at rank 1: rank 0 waits for its code that no span covers." in report.verdict.text


@pytest.mark.parametrize("cause", [None, "always", "rarely"])
def test_ranks_that_come_late_by_chance(tmp_path, cause):
    """Ranks of a busy machine that are late by turns are not blamed; one that is late each time, or much later, is."""
    clock = {"error_ns": 0, "ranks": {"1": {"error_ns": 0}}}
    made = Made(tmp_path / "run", pipelines=[], program={}, world_size=2, clock=clock)
    drawn, at = np.random.default_rng(3), 0
    for number in range(60):
        known = {"step": number, "group": "world", "async": False}
        ready = (20 + drawn.exponential(120, 2) * (drawn.random(2) < 0.4)).astype(int)
        if cause == "always":
            ready[1] += 100
        elif cause == "rarely" and number % 6 == 0:
            ready[1] += 900
        for rank in range(2):
            made.span("compute", "backward", begin=at, dur=200, module="Net", depth=0, rank=rank, step=number)
            made.span("compute", "step", begin=at + 200, dur=int(ready[rank]), rank=rank, step=number)
            wait = int(ready.max() - ready[rank]) + 10
            made.span("comm", "all_reduce", begin=at + 200 + int(ready[rank]), dur=wait, size=4, rank=rank, **known)
        at += 210 + int(ready.max())
    report = report_of(made)
    assert report.program.waits.late > 0.05 * report.program.time.median
    assert [(one.rank, one.doing) for one in report.held] == ([] if cause is None else [(1, "optimizer")])
    assert ("as little work on rank 1" in str(report.verdict.changes)) == (cause is not None)


@pytest.mark.parametrize(
    ("workers", "loading", "rest", "advised"),
    [
        (0, 700, 300, "DataLoader(num_workers=3)"),  # each batch takes 700
        (2, 600, 400, "DataLoader(num_workers=5,"),  # two side by side take 1000 for one each
        (1, 990, 10, "DataLoader(num_workers=...,"),  # a hundred workers
        (2, 0, 300, None),
    ],
)
def test_workers_that_keep_up(made, workers, loading, rest, advised):
    """So many workers are advised as load batches as fast as the rest of a step uses them."""
    made.description["program"] = {"loaders": [{"num_workers": workers}]}
    for number in range(6):
        at = number * (loading + rest)
        if loading:
            made.span("dataloader", "fetch", begin=at, dur=loading, step=number)
        made.span("compute", "backward", begin=at + loading, dur=rest - 5, module="Net", depth=0, step=number)
        made.span("compute", "step", begin=at + loading + rest - 5, dur=5, step=number)
    changes = [change.what for change in report_of(made).verdict.changes if "DataLoader" in change.what]
    assert [advised in change for change in changes] == ([True] if advised else [])


def test_lead_into_pipelining(made):
    """The planner says what a pipeline would give at most, from the modules as they were recorded."""
    for number in range(6):
        step(made, number)
    lead = report_of(made).lead
    assert lead is not None
    assert (lead.refusal, lead.units, lead.cuts, lead.parameter_bytes) == (
        None,
        ("a", "b", "c"),
        ("b", "c"),
        (100,) * 3,
    )
    # Three partitions and m micro-batches take (m + 2) / 3 m of what the modules take; the rest stays.
    inside, m = 450, lead.chunks
    assert lead.step == pytest.approx(STEP - inside + inside * (m + 2) / (3 * m), rel=1e-6)


def test_no_lead_where_modules_repeat(made):
    """A model whose modules are called several times in a step gets no plan, but a reason."""
    made.description["program"] = json.loads(json.dumps(FACTS).replace('"calls": 1', '"calls": 2', 1))
    for number in range(6):
        step(made, number)
    lead = report_of(made).lead
    assert lead is not None
    assert lead.refusal == "a module is called more than once in a step: a"
