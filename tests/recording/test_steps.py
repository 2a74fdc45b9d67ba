"""Which step an event belongs to, and which steps are recorded."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

from pipesight import context
from pipesight.recording import observe
from pipesight.recording.step_sampling import StepSampling
from support.dftraced import run_script
from support.observed import STATS, description, events, learn, log_lines, pipeline, sgd, statistics, tasks, train

# Which step an event belongs to.


def test_steps_are_optimizer_steps(run):
    """A step ends with an optimizer's step; several mini-batches before one are of one step."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS):
        for _ in range(3):
            for _ in range(2):
                learn(model)
            optimizer.step()
    by_minibatch = {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run)}
    assert [step for _, step in sorted(by_minibatch.items())] == [0, 0, 1, 1, 2, 2]
    assert {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run, "backward")} == by_minibatch
    assert [e["args"]["step"] for e in events(run) if e["name"] == "step"] == [0, 1, 2]
    assert {record["iteration"] for record in statistics(run)} == {0, 1, 2}


def test_evaluation_belongs_to_the_step_that_it_precedes(run):
    """A pass without backward after step 0 is of step 1, and no statistics are of it."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS):
        learn(model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.full((8, 4), 1e6))
        model.train()
        learn(model)
        optimizer.step()
    by_minibatch = {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run)}
    assert [step for _, step in sorted(by_minibatch.items())] == [0, 1, 1]
    assert max(abs(r["value"]) for r in statistics(run) if r["tensor"] == "activation") < 1e3
    assert {record["iteration"] for record in statistics(run)} == {0, 1}


def test_two_optimizers_end_one_step(run):
    """Optimizers that step one after the other end one step."""
    model = pipeline()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.partitions]
    with observe(run) as observation:
        for _ in range(2):
            learn(model)
            for optimizer in halves:
                optimizer.step()
        assert observation.step_number == 1
    assert [e["args"]["step"] for e in events(run) if e["name"] == "step"] == [0, 0, 1, 1]


def test_loading_an_optimizer_is_no_step(run):
    """To load a checkpoint, torch has an optimizer without state step once: that ends no step."""
    model = pipeline()
    optimizer = torch.optim.AdamW(model.parameters())
    with observe(run) as observation:
        get_optimizer_state_dict(model, optimizer)
        assert optimizer.state
        for _ in range(2):
            learn(model)
            optimizer.step()
        assert observation.step_number == 1
    assert {e["args"]["step"] for e in events(run) if e["name"] == "forward"} == {0, 1}


def test_without_an_optimizer_backwards_end_steps(tmp_path):
    """A program that changes its parameters itself has a step for each backward, and its loss is a curve."""
    program = """
        import torch
        import pipesight
        model = torch.nn.Linear(4, 1)
        with pipesight.observe("RUN", logs=None) as observation:
            for _ in range(3):
                model.zero_grad()
                loss = model(torch.randn(8, 4)).square().mean()
                slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                (loss + sum(slope.square().sum() for slope in slopes)).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1 * parameter.grad)
                with torch.no_grad():
                    model(torch.randn(8, 4))
            assert observation.step_number == 3, observation.step_number
            for _ in range(2):
                torch.autograd.grad(model(torch.randn(8, 4)).sum(), list(model.parameters()))
            assert observation.step_number == 4, observation.step_number
    """
    run_script(program, tmp_path)
    forwards = [e["args"]["step"] for e in events(tmp_path / "RUN") if e["name"] == "forward"]
    assert forwards == [0, 1, 1, 2, 2, 3, 3, 4]


def test_program_numbers_its_steps(run):
    """A program that says which step begins is believed, whatever its optimizers do."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS) as observation:
        for number in (100, 200):
            observation.step(number)
            for _ in range(2):
                learn(model)
                optimizer.step()
    assert {e["args"]["step"] for e in tasks(run)} == {100, 200}
    assert {record["iteration"] for record in statistics(run)} == {100, 200}


def test_first_step(run):
    """Training that goes on after a checkpoint goes on counting."""
    with observe(run, stats=STATS, first_step=7):
        train(pipeline(), 2)
    assert {e["args"]["step"] for e in tasks(run)} == {7, 8}
    assert {record["iteration"] for record in statistics(run)} == {7, 8}


def test_step_that_a_scaler_skips_counts(run):
    """A step that a gradient scaler skips, because of an overflow, counts all the same."""
    model = pipeline()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    with observe(run) as observation:
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * factor
            assert observation.step_number == number
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def test_fetch_belongs_to_the_next_step(run):
    """A batch is fetched for the step that trains on it."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run):
        for (x,) in DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8):
            model(x).sum().backward()
            optimizer.step()
    assert [e["args"]["step"] for e in events(run) if e["name"] == "fetch"] == [0, 1, 2]


# Which steps are recorded.


def test_range_of_steps(run):
    """Steps outside of a window are left out of trace and statistics, and counted."""
    with observe(run, stats=STATS, steps=(2, 3)):
        train(pipeline(), 6)
    assert {e["args"]["step"] for e in tasks(run)} == {2, 3}
    assert {e["args"]["step"] for e in tasks(run, "backward")} == {2, 3}
    assert {e["args"]["step"] for e in events(run) if "step" in e["args"]} == {2, 3}
    assert {record["iteration"] for record in statistics(run)} == {2, 3}
    assert description(run)["left_out"]["steps"] == 4
    assert not any("[step 0 partition" in line or "[step 5 partition" in line for line in log_lines(run))


def test_range_of_steps_of_a_plain_model(run):
    """So it is with a model that is no pipeline, which nothing but its call announces."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with observe(run, stats=STATS, steps=(2, 3)):
        train(model, 6)
    modules = [(e["name"], e["args"]["step"]) for e in events(run) if e["args"].get("module")]
    assert modules == [("forward", 2), ("backward", 2), ("forward", 3), ("backward", 3)]
    assert {record["iteration"] for record in statistics(run)} == {2, 3}


def test_every_nth_step(run):
    """Each third step is recorded."""
    with observe(run, every=3):
        train(pipeline(), 7)
    assert {e["args"]["step"] for e in tasks(run)} == {0, 3, 6}
    assert description(run)["left_out"]["steps"] == 4


def test_steps_that_are_not_recorded_have_no_observers(run):
    """In a step that is left out, nobody observes the pass, and no module has a hook of ours."""
    from torch.nn.modules import module

    model = pipeline()
    optimizer = sgd(model)
    with observe(run, steps=(2, 2)):
        for step in range(4):
            learn(model)
            assert bool(context.observers()) == (step == 2)
            assert bool(module._global_forward_pre_hooks) == (step == 2)
            optimizer.step()


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        (None, 1, range(60)),
        (None, 7, range(0, 60, 7)),
        ((10, 20), 1, range(10, 21)),
        ((10, 20), 5, [10, 15, 20]),
        ((50, None), 1, range(50, 60)),
        (range(3, 6), 1, [3, 4, 5]),
        ([(30, 31), (1, 2)], 1, [1, 2, 30, 31]),
        ([range(2), range(4, 5)], 1, [0, 1, 4]),
    ],
)
def test_ranges_and_every_nth_step(steps, every, expected):
    """StepSampling include their first and last step; sampling counts from the first."""
    windows = StepSampling.of(steps, every=every)
    assert [step for step in range(60) if windows.include(step)] == list(expected)


@pytest.mark.parametrize(
    ("text", "same"),
    [("10:20", (10, 20)), ("10:", (10, None)), (":20", (0, 20)), ("15", (15, 15)), ("0:2,9", [(0, 2), (9, 9)])],
)
def test_ranges_on_a_command_line(text, same):
    """A command line names windows as Python does."""
    assert StepSampling.parse(text) == StepSampling.of(same)


@pytest.mark.parametrize("steps", [(), (3, 2), (-1, 2), 5, "1:2", [(1, 2, 3)], range(0, 9, 2), (1.5, 2), [None]])
def test_invalid_ranges(steps):
    """What names no steps is refused, with what would."""
    with pytest.raises(ValueError, match="steps"):
        StepSampling.of(steps)


@pytest.mark.parametrize("text", ["", "a:b", "1:2:3", "-1", "1;2", ":,"])
def test_invalid_ranges_on_a_command_line(text):
    """So it is on a command line."""
    with pytest.raises(ValueError, match="steps must"):
        StepSampling.parse(text if text != ":," else "1,,2")
