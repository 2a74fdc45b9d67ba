"""Random models in a pipeline do what the plain model does: outputs, gradients, buffers, hooks, errors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import time

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

from fuzz.cases import account, fuzz
from fuzz.engine_layers import DEVICE, LAYERS, WIDTH, Bomb, Checkpointed, Pop, Stash, plain, twin_of
from fuzz.engine_steps import Log, Planted, Truth, arm, bring_in_line, defer, interrupted, take_step
from pipesight import GPipe

KINDS = ["train", "train", "train", "forward", "grad", "inputs", "retain", "twice", "fail", "interrupt", "thread"]


@dataclasses.dataclass
class Step:
    """What is done with the models."""

    kind: str = "train"
    training: bool = True
    mode: str = "grad"
    grad_input: bool = False
    used: int = 7  # which outputs the loss takes
    chosen: int = 0xFFFF  # for which parameters gradients are asked
    bomb: int = 0
    bomb_at: tuple[int, str] = (0, "forward")
    chunks: int = 2
    checkpoint: str = "never"
    how: str = "signal"


steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    training=st.sampled_from([True, True, True, False]),
    mode=st.sampled_from(["grad"] * 8 + ["no_grad", "inference"]),
    grad_input=st.booleans(),
    used=st.sampled_from([7, 7, 7, 1, 2]),
    chosen=st.integers(1, 0xFFFF),
    bomb=st.integers(0, 3),
    bomb_at=st.tuples(st.integers(0, 3), st.sampled_from(["forward", "backward", "recompute"])),
    chunks=st.integers(1, 6),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    how=st.sampled_from(["signal", "exception"]),
)


@st.composite
def models(draw):
    """Draw the names of layers that fit together."""
    first = draw(st.sampled_from(["T", "T", "T", "P", "I"]))
    state, names = first, []
    for _ in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from([n for n, (takes, _, _) in LAYERS.items() if takes in (state, "any")]))
        names.append(name)
        gives = LAYERS[name][1]
        state = state if gives == "same" else gives
    for _ in range(draw(st.integers(0, 2))):
        names.insert(draw(st.integers(0, len(names))), "bomb")
    return first, names


def build(names, skip, frozen, seed):
    """Return the model; a skip goes around some of its layers where these take one tensor."""
    torch.manual_seed(seed)
    layers = [Bomb() if name == "bomb" else LAYERS[name][2]() for name in names]
    if skip is not None:
        layers = [Stash(skip), *layers, Pop(skip)]
    model = nn.Sequential(*layers)
    for k, p in enumerate(model.parameters()):
        p.requires_grad_(not (frozen >> (k % 8)) & 1)
    return model


def makes_tensors(first, names):
    """Tell whether a model takes one tensor and gives one, for a skip to go around it."""
    state = first
    for name in names:
        if name != "bomb" and LAYERS[name][1] != "same":
            state = LAYERS[name][1]
    return first == state == "T"


def state_of(model):
    """Return parameters, gradients and buffers by the names of the plain model."""
    short = lambda n: n.split(".", 2)[2] if n.startswith("partitions.") else n.removeprefix("model.")
    found = {f"parameter {short(n)}": p for n, p in model.named_parameters()}
    found |= {f"gradient {short(n)}": p.grad for n, p in model.named_parameters()}
    found |= {f"buffer {short(n)}": b for n, b in model.named_buffers()}
    return {name: t if t is None or not t.is_sparse else t.to_dense() for name, t in found.items()}


def same(ours, theirs, what, loose):
    """Compare what two models gave."""
    if ours is None and isinstance(theirs, torch.Tensor) and not theirs.count_nonzero():
        raise Zeros(what)
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{what}: {ours} instead of a tensor"
        assert ours.dtype == theirs.dtype, what
        ours, theirs = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (ours, theirs))
        scale = theirs.abs().max().item() if theirs.numel() and theirs.is_floating_point() else 0
        rough = 5e-2 if loose else 1e-4 if ours.dtype == torch.float32 else 1e-6
        tolerance = {"rtol": rough, "atol": rough * (1 + scale)}
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{what}: {m}", equal_nan=True, **tolerance)
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs), f"{what}: {set(ours) ^ set(theirs)}"
        for key in theirs:
            same(ours[key], theirs[key], f"{what} {key}", loose)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), f"{what}: {len(ours)} instead of {len(theirs)}"
        for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{what} [{k}]", loose)
    else:
        assert ours == theirs, f"{what}: {ours} instead of {theirs}"


class Zeros(AssertionError):  # noqa: N818 (it names what was found)
    """There is no gradient where the plain model has zeros."""


def result_of(function, *args):
    """Return what a function returns, or the exception that it raises."""
    try:
        return function(*args)
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")  # torch warns of backward hooks without inputs, in either model
@fuzz(60)
@given(
    models(),
    st.data(),
    st.lists(steps, min_size=1, max_size=3),
    st.integers(0, 2**16),
    st.sets(st.sampled_from(["parameter", "scale", "after", "forward", "backward", "module"]), max_size=2),
)
def test_engine(model, data, sequence, seed, hooks):
    """Whatever the model and whatever is done with it, the pipeline is the plain model."""
    first, names = model
    threads = set(threading.enumerate())  # an earlier case that failed is kept, with its pipeline
    skip = data.draw(st.sampled_from([None, "add", "detach", "drop"])) if makes_tensors(first, names) else None
    frozen = data.draw(st.sampled_from([0, 0, 0, 1, 2, 0xAA, 0xFF]))
    batch = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
    dtype, autocast, deferred = data.draw(
        st.sampled_from(
            [(torch.float64, False, False)] * 3
            + [(torch.float32, False, False), (torch.float32, True, False), (torch.float64, False, True)]
        )
    )
    layers = build(names, skip, frozen, seed).to(DEVICE, dtype)
    count = len(layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    truth, twin = (Truth(defer(copy.deepcopy(layers)) if deferred else copy.deepcopy(layers), 1) for _ in range(2))
    twin_of(twin)
    pipe = GPipe(layers, balance, devices=[DEVICE] * len(balance), deferred_batch_norm=deferred)
    note(f"{names}, skip {skip}, balance {balance}")
    try:
        outcome = compare(pipe, truth, twin, Case(first, names, sequence, seed, hooks, batch, dtype, autocast))
    except Zeros:
        # Such a hook puts one node behind all outputs of its module. If one of them gets no gradient, None goes on from
        # there, and the next autograd.Function makes zeros of it.
        if not hooks & {"backward", "module"}:
            raise
        outcome = "excused: no gradient, where a full backward hook on several outputs makes the plain model give zeros"
    if any(step.kind in ("fail", "interrupt") for step in sequence):
        del pipe, layers, truth, twin  # the latter hold pipelines that are layers
        expect_no_threads(threads)
    account("engine", outcome)


@dataclasses.dataclass
class Case:
    first: str
    names: list[str]
    sequence: list[Step]
    seed: int
    hooks: set[str]
    batch: int
    dtype: torch.dtype
    autocast: bool


def expect_no_threads(before):
    """The workers end with their pipeline, whatever became of its passes."""
    gc.collect()
    for _ in range(500):
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        left = [name for name in names if name.startswith("pipesight-partition")]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"threads are left: {left}")


def inputs_of(case, k):
    """Return the input of step k."""
    generator = torch.Generator().manual_seed(case.seed + k)
    x = torch.randn(case.batch, WIDTH, generator=generator, dtype=case.dtype).to(DEVICE)
    if case.first == "T":
        return (x,)
    return (x, torch.randint(8, (case.batch,), generator=generator).to(DEVICE)) if case.first == "I" else (x, x.flip(1))


def compare(pipe, truth, twin, case):
    """Take the steps with all models; return the outcome."""
    plain.run = -1
    loose = case.autocast
    reentrant = {
        name
        for prefix, m in truth.model.named_modules()
        if isinstance(m, Checkpointed) and m.reentrant
        for name in (f"{prefix}.{n}" for n, _ in m.named_parameters())
    }
    layers = {name: (pipe[k], layer) for k, (name, layer) in enumerate(truth.model.named_children())}
    ours = Log(pipe, {name: pair[0] for name, pair in layers.items()}, case.hooks, reentrant)
    theirs = Log(truth, {name: pair[1] for name, pair in layers.items()}, case.hooks, reentrant)
    Log(twin, dict(twin.model.named_children()), case.hooks, reentrant)
    for k, step in enumerate(case.sequence):
        note(str(step))
        truth.chunks = twin.chunks = pipe.chunks = step.chunks
        pipe.checkpoint = step.checkpoint
        inputs = inputs_of(case, k)
        if step.kind in ("fail", "interrupt") and any(name == "bomb" for name in case.names):
            break_a_pass(pipe, step, inputs, case)
            bring_in_line(truth, pipe)
            ours.calls.clear()
            theirs.calls.clear()
            continue
        run = plain.run
        twin.load_state_dict(truth.state_dict())
        take = take_step_in_a_thread if step.kind == "thread" else take_step
        found = result_of(take, step, pipe, inputs, case.autocast)
        plain.run = run
        expected = result_of(take_step, step, truth, inputs, case.autocast)
        if isinstance(found, Exception) or isinstance(expected, Exception):
            plain.run = run
            return excuse_for(found, expected, truth, twin, step, inputs, case)
        same(found, expected, f"step {k}", loose)
        same(state_of(pipe), state_of(truth), f"step {k}", loose)
        if step.kind in ("grad", "inputs"):  # a pipeline runs its whole backward, also for the gradients of some
            for log in (ours, theirs):
                for key in [key for key in log.calls if "backward" in key[0]]:
                    del log.calls[key]
        compare_logs(ours.calls, theirs.calls, loose)
    return "agreed"


def compare_logs(ours, theirs, loose):
    """Hooks were called as often, with the same; each micro-batch by itself may come in any order."""
    for key in ours.keys() | theirs.keys():
        assert len(ours.get(key, ())) == len(theirs.get(key, ())), f"hook {key}"
    order = lambda call: [0.0 if t is None or not t.numel() else round(t.double().sum().item(), 3) for t in call]
    for key, calls in theirs.items():
        one, other = (sorted(c, key=order) if len(calls) > 1 else c for c in (ours[key], calls))
        same(one, other, f"hook {key}", loose)


def take_step_in_a_thread(*args):
    """Take a step in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(result_of(take_step, *args)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a step in a thread does not end"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def break_a_pass(pipe, step, inputs, case):
    """Make a pass fail, or interrupt it. It ends with that error, and a failure adds to no gradient."""
    before = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    kind, step.kind = step.kind, "train"
    if kind == "fail":
        bomb = arm(pipe, step)
        found = result_of(take_step, step, pipe, inputs, case.autocast)
        broken = isinstance(found, Planted)
        if bomb.fired:
            assert broken, f"{found!r} instead of what was raised"
            assert any("in partition" in text for text in found.__notes__)
        bomb.fired = 0
    else:
        outcomes = []

        def go(interrupt):
            arm(pipe, step, interrupt)
            outcomes.append(result_of(take_step, step, pipe, inputs, case.autocast))

        broken = interrupted(go, step.how) and not outcomes
    step.kind = kind
    for bomb in (m for m in pipe.modules() if isinstance(m, Bomb)):
        bomb.armed, bomb.fired = None, 0
    if broken:
        after = {name: p.grad for name, p in pipe.named_parameters()}
        if kind == "fail":
            same(after, before, "gradients after a failure", False)


def excuse_for(found, expected, truth, twin, step, inputs, case):
    """Return why a pipeline and the plain model may differ in that one of them raises; raise if they may not."""
    if type(found) is type(expected):
        return "agreed"
    if isinstance(found, RuntimeError) and "changed a tensor in place that" in str(found):
        return "excused: a change in place of a tensor that is shared between partitions is refused"
    if isinstance(found, RuntimeError) and "is used only inside torch.utils.checkpoint(use_reentrant" in str(found):
        return "excused: grad of what is not behind a reentrant checkpoint is refused, since all of backward runs"
    if isinstance(found, RuntimeError) and "inplace operation" in str(found) and step.kind in ("grad", "inputs"):
        result = result_of(take_step, dataclasses.replace(step, kind="train"), truth, inputs, case.autocast)
        if isinstance(result, RuntimeError) and "inplace operation" in str(result):
            return (
                "excused: grad of what is not behind an invalid change in place is refused, since all of backward runs"
            )
    if isinstance(expected, RuntimeError) and not isinstance(found, Exception):
        for word, excuse in (
            ("inplace", "excused: a change in place that the plain model refuses works, on a copy"),
            ("use_reentrant", "excused: grad behind a reentrant checkpoint, which the plain model refuses, works"),
        ):
            if word in str(expected):
                result = result_of(take_step, step, twin, inputs, case.autocast)
                same(found, result, "against a model that is not refused", case.autocast)
                return excuse
    raise AssertionError(f"{found!r} instead of {expected!r}") from (
        found if isinstance(found, Exception) else expected
    )
