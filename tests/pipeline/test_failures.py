"""What goes wrong in a layer reaches the caller as itself, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import random
import textwrap
import threading
import time
import traceback
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from pipesight import GPipe, context
from pipesight.pipeline.local_graph import LocalGraph
from pipesight.pipeline.minibatch import MiniBatch
from support import warm
from support.against_plain import modes

PHASES = ["forward", "recompute", "backward"]
PARTITIONS = MICROBATCHES = 3


class Gate(torch.autograd.Function):
    """Visits its layer again in backward."""

    @staticmethod
    def forward(ctx, input, layer, i):
        ctx.layer, ctx.i = layer, i
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.visit(ctx.i, "backward")
        return gradient.clone(), None, None


class Trip(nn.Module):
    """Raises ``error`` when it comes to ``place``, a (micro-batch, phase)."""

    def __init__(self, nap=0.0):
        super().__init__()
        self.place = self.error = None
        self.nap = nap
        self.visits = []
        self.failed = 0.0

    def forward(self, input):
        where = context.current()
        i, phase = (None, None) if where is None else (where.microbatch, where.phase)
        self.visit(i, phase)
        return Gate.apply(input, self, i)

    def visit(self, i, phase):
        self.visits.append((time.perf_counter(), i, phase))
        time.sleep(self.nap)
        if self.place is not None and (i, phase) == self.place:
            self.failed = time.perf_counter()
            raise self.error  # the user's line


def layers(count=PARTITIONS, **kwargs):
    torch.manual_seed(0)
    blocks = [[nn.Linear(4, 4), Trip(**kwargs), nn.Tanh()] for _ in range(count)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).double()


def pipe(model, checkpoint="always", chunks=MICROBATCHES):
    return GPipe(model, [3] * (len(model) // 3), chunks=chunks, checkpoint=checkpoint)


def batch(rows=6):
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4)


def trips(model):
    return [layer for layer in model if isinstance(layer, Trip)]


def gradients(model, input):
    model.zero_grad()
    model(input).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_right_gradients(model, plain, input):
    for ours, theirs in zip(gradients(model, input), gradients(plain, input), strict=True):
        torch.testing.assert_close(ours, theirs)


def failure_of(function, *args):
    """Return what ``function`` raises."""
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def soon(condition, seconds=5.0):
    """Wait for what another thread does right after its last task."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def run_script(body, *args, timeout=60):
    """Run a script that shares the names of this module; a hang fails."""
    source = (
        "import faulthandler, sys; faulthandler.enable()\nfrom pipeline.test_failures import *\n"
        + textwrap.dedent(body)
    )
    done = warm.run("-c", source, *args, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# The exception itself.


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("i", range(MICROBATCHES))
@pytest.mark.parametrize("j", range(PARTITIONS))
def test_exception_is_itself_and_says_where(j, i, phase):
    """The caller gets the very exception, with the user's line and a note; the model works again afterwards."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    trip = trips(model)[j]
    trip.error, trip.place = ValueError("tripped"), (i, phase)

    error = failure_of(gradients, model, batch())

    assert error is trip.error
    frames = traceback.extract_tb(error.__traceback__)
    assert any(frame.filename == __file__ and "the user's line" in (frame.line or "") for frame in frames)
    (note,) = error.__notes__
    assert f"partition {j}" in note
    assert f"micro-batch {i}" in note
    assert phase in note
    assert all(parameter.grad is None for parameter in model.parameters())

    trip.place = None
    assert_right_gradients(model, plain, batch())


@pytest.mark.parametrize("phase", PHASES)
def test_note_names_the_layer(phase):
    """The note names the layer as the original model does."""
    model = pipe(layers())
    trip = trips(model)[1]
    trip.error, trip.place = ValueError("tripped"), (1, phase)
    error = failure_of(gradients, model, batch())
    assert "layer '4'" in error.__notes__[0]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt, BaseException, OSError]
)
def test_any_kind_of_exception(kind, phase):
    """Exceptions that Python treats in ways of their own arrive like the others."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    trip = trips(model)[1]
    trip.error, trip.place = kind(), (1, phase)
    assert failure_of(gradients, model, batch()) is trip.error
    assert f"partition 1, layer '4', micro-batch 1, {phase}"[:11] in trip.error.__notes__[0]
    trip.place = None
    assert_right_gradients(model, plain, batch())


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class NotelessError(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes please")


class OddNotesError(Exception):
    __notes__ = "not a list"


class SilentError(Exception):
    def __getattribute__(self, name):
        if name in ("__notes__", "add_note"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", [FrozenError(1), NotelessError(), OddNotesError(), SilentError()], ids=repr)
def test_exception_that_takes_no_note(error, phase):
    """An exception that cannot be annotated still arrives, without a hang."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    trip = trips(model)[1]
    trip.error, trip.place = error, (1, phase)
    caught = []
    caller = threading.Thread(target=lambda: caught.append(failure_of(gradients, model, batch())), daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert caught == [error]
    trip.place = None
    assert_right_gradients(model, plain, batch())


def test_singleton_gathers_no_notes():
    """One exception object that is raised again and again has one note: where it was raised last."""
    model = pipe(layers())
    singleton = ValueError("again")
    for _ in range(3):
        for j, trip in enumerate(trips(model)):
            trip.error = singleton
            for phase in PHASES:
                trip.place = (j, phase)
                assert failure_of(gradients, model, batch()) is singleton
                (note,) = singleton.__notes__
                assert f"partition {j}" in note
                assert phase in note
            trip.place = None


def test_users_own_notes_are_kept():
    """Notes that the user added stay, before ours."""
    model = pipe(layers())
    trip = trips(model)[0]
    trip.error, trip.place = ValueError("noted"), (0, "forward")
    trip.error.add_note("the user's own")
    error = failure_of(model, batch())
    assert error.__notes__[0] == "the user's own"
    assert len(error.__notes__) == 2


def test_chained_exceptions_stay_chained():
    """Cause and context of an exception are those that the layer gave it, without any of the engine's own."""
    model = pipe(layers())
    trip = trips(model)[0]
    trip.error, trip.place = ValueError("effect"), (0, "forward")
    trip.error.__cause__ = cause = KeyError("cause")
    error = failure_of(model, batch())
    assert error.__cause__ is cause

    trip.error = ValueError("alone")
    error = failure_of(model, batch())
    assert error.__cause__ is None
    assert error.__context__ is None


@modes
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward", "tensor", "parameter"])
def test_exception_in_a_hook(kind, checkpoint):
    """A hook may raise too."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    error = ValueError(kind)

    def fail(*_):
        raise error

    def hook_output(layer, inputs, output):
        if output.requires_grad:
            output.register_hook(fail)

    layer = model[3]
    hook = {
        "forward_pre": lambda: layer.register_forward_pre_hook(fail),
        "forward": lambda: layer.register_forward_hook(fail),
        "backward_pre": lambda: layer.register_full_backward_pre_hook(fail),
        "backward": lambda: layer.register_full_backward_hook(fail),
        "tensor": lambda: layer.register_forward_hook(hook_output),
        "parameter": lambda: layer.weight.register_hook(fail),
    }[kind]()
    assert failure_of(gradients, model, batch()) is error
    if kind != "parameter":  # that one sees the whole mini-batch, after the partitions
        assert "partition 1" in error.__notes__[0]
    assert all(p.grad is None for p in layer.parameters())
    hook.remove()
    assert_right_gradients(model, plain, batch())


def test_several_failures_at_once():
    """When several partitions fail, the caller gets one of their exceptions, and the model works again."""
    plain = layers(4)
    model = pipe(copy.deepcopy(plain), chunks=6)
    for trip in trips(model):
        trip.error = ValueError("mine")
    for _ in range(50):
        for trip in trips(model):
            trip.place = (random.randrange(3), random.choice(PHASES))
        error = failure_of(gradients, model, batch(12))
        assert error in [trip.error for trip in trips(model)]
    for trip in trips(model):
        trip.place = None
    assert_right_gradients(model, plain, batch(12))


# The other workers.


def starts_after_failure(model, error, input):
    """Return how many tasks each other partition started after the failure."""
    for trip in trips(model):
        trip.visits.clear()
    assert failure_of(gradients, model, input) is error
    moment = max(trip.failed for trip in trips(model))
    return [sum(t > moment for t, _, _ in trip.visits) for trip in trips(model)]


@pytest.mark.parametrize(
    ("j", "i", "phase"),
    [(0, 6, "forward"), (2, 0, "forward"), (2, 4, "backward"), (0, 11, "backward"), (2, 6, "recompute")],
)
def test_others_stop_within_one_task(j, i, phase):
    """A partition with work at hand starts at most one more task after the failure of another."""
    model = pipe(layers(), chunks=12)
    for k, trip in enumerate(trips(model)):
        trip.nap = 0.001 if k == j else 0.02
    failing = trips(model)[j]
    failing.error, failing.place = ValueError("stop"), (i, phase)
    started = starts_after_failure(model, failing.error, batch(12))
    assert started[j] == 0
    assert max(started) <= 1


@pytest.mark.parametrize("phase", PHASES)
def test_failed_backward_leaves_gradients_alone(phase):
    """A backward that fails adds to no ``.grad``, not even in the partitions that were done."""
    model = pipe(layers())
    gradients(model, batch())
    before = [p.grad.clone() for p in model.parameters()]
    trip = trips(model)[0]
    trip.error, trip.place = ValueError("late"), (0, phase)  # the very last task of the pass
    assert failure_of(lambda: model(batch()).sum().backward()) is trip.error
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, old)


def test_failed_backward_cannot_be_repeated_by_mistake():
    """After a failed backward, another one through the same output gives an error and no hang."""
    model = pipe(layers())
    trip = trips(model)[1]
    output = model(batch())
    trip.error, trip.place = ValueError("once"), (1, "backward")
    assert failure_of(lambda: output.square().sum().backward(retain_graph=True)) is trip.error
    trip.place = None
    with pytest.raises(RuntimeError, match="second time"):
        output.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm_tracks_after_a_failed_recomputation():
    """A recomputation that fails leaves batch normalisation and other buffers as it found them."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Trip(), nn.Linear(4, 4)).double()
    model = GPipe(copy.deepcopy(plain), [3, 1], chunks=2, checkpoint="always")
    trip = trips(model)[0]
    output = model(batch())
    state = copy.deepcopy(model.state_dict())
    trip.error, trip.place = ValueError("recompute"), (0, "recompute")
    assert failure_of(lambda: output.sum().backward()) is trip.error
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert model[1].track_running_stats
    trip.place = None
    model(batch()).sum().backward()
    assert model[1].num_batches_tracked == 4


# What is left behind.


def census():
    gc.collect()
    names = ("Tensor", "Parameter", "SimpleQueue", "Thread", "frame", "traceback", "Context")
    names += (MiniBatch.__name__, LocalGraph.__name__)
    kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {name: kinds[name] for name in names}, kinds.total(), resident, threading.active_count()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the memory in use from /proc")
@pytest.mark.parametrize("phase", PHASES)
def test_many_failures_leak_nothing(phase):
    """No thread, queue, tensor or memory remains of hundreds of failed passes."""
    model = pipe(layers(2), chunks=2)
    trip = trips(model)[1]
    trip.place = (1, phase)
    input = batch(4)

    def fail(times):
        for _ in range(times):
            trip.error = ValueError("again")
            trip.visits.clear()
            with contextlib.suppress(ValueError):
                model(input).sum().backward()
        trip.error = None

    times = 500
    fail(100)
    kinds, objects, resident, threads = census()
    fail(times)
    kinds_after, objects_after, resident_after, threads_after = census()
    assert kinds_after == kinds
    assert threads_after == threads
    assert objects_after - objects < times / 4
    assert resident_after - resident < 8 << 20


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch(nn.Module):
    """Keeps weak references to the activations that pass."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, input):
        output = input * 2
        self.seen += [weakref.ref(input), weakref.ref(output)]
        return output


def watched(checkpoint):
    torch.manual_seed(0)
    return GPipe(
        nn.Sequential(nn.Linear(4, 4), Watch(), Trip(), nn.Linear(4, 4), Watch(), Trip(), nn.Linear(4, 4)).double(),
        [3, 3, 1],
        chunks=3,
        checkpoint=checkpoint,
    )


def seen(model):
    return [ref for layer in model if isinstance(layer, Watch) for ref in layer.seen]


def none_alive(references):
    return soon(lambda: all(ref() is None for ref in references))


@modes
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("collector_off")
def test_dropped_exception_frees_activations(checkpoint, phase):
    """Once the exception is gone, so are the activations, without the garbage collector."""
    model = watched(checkpoint)
    trip = trips(model)[1]
    trip.error, trip.place = ValueError("drop me"), (0, phase)
    with contextlib.suppress(ValueError):
        model(batch()).sum().backward()
    trip.error = None
    assert len(seen(model)) > 4
    assert none_alive(seen(model))


@modes
@pytest.mark.usefixtures("collector_off")
def test_dropped_output_frees_activations(checkpoint):
    """An output that is dropped without a backward takes its activations along."""
    model = watched(checkpoint)
    output = model(batch())
    del output
    assert len(seen(model)) == 12
    assert none_alive(seen(model))


@modes
@pytest.mark.usefixtures("collector_off")
def test_backward_frees_activations(checkpoint):
    """Backward frees the activations, also while the output lives on."""
    model = watched(checkpoint)
    output = model(batch())
    output.sum().backward()
    assert none_alive(seen(model))
    assert output.grad_fn is not None


@modes
@pytest.mark.usefixtures("collector_off")
def test_retained_graph_frees_activations_with_the_output(checkpoint):
    """A graph that was retained goes with its output."""
    model = watched(checkpoint)
    output = model(batch())
    output.sum().backward(retain_graph=True)
    output.sum().backward(retain_graph=True)
    del output
    assert none_alive(seen(model))


@pytest.mark.usefixtures("collector_off")
def test_output_keeps_only_what_backward_needs():
    """With checkpointing, only the inputs of the partitions live on until backward."""
    model = watched("always")
    output = model(batch())
    inside = [ref for layer in model if isinstance(layer, Watch) for ref in layer.seen[::2]]
    assert none_alive(inside)
    output.sum().backward()


@pytest.mark.usefixtures("collector_off")
def test_inference_keeps_nothing():
    """Without grad, no activation outlives the forward, while its output does."""
    model = watched("except_last")
    with torch.no_grad():
        output = model(batch())
    assert none_alive(seen(model))
    assert output.shape == (6, 4)


@pytest.mark.usefixtures("collector_off")
def test_deleted_model_is_freed():
    """A model that failed is freed with its last reference, and its threads end."""
    others = set(threading.enumerate())
    model = watched("always")
    trip = trips(model)[0]
    trip.error, trip.place = ValueError("drop me"), (0, "forward")
    with contextlib.suppress(ValueError):
        model(batch())
    assert len(set(threading.enumerate()) - others) == 3
    trip.error = None
    ref = weakref.ref(model[0].weight)
    del model, trip
    assert soon(lambda: ref() is None)
    assert soon(lambda: set(threading.enumerate()) <= others)


# Ctrl-C.


INTERRUPTS = """
import signal

def sleepy():
    plain = layers()
    model = pipe(copy.deepcopy(plain), chunks=6)
    gradients(model, batch(12))
    model.zero_grad()
    return model, plain

def interrupted(function, *delays):
    "Call function, send SIGINT after each of the delays; return the seconds it took to end."
    def send():
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
    sender = threading.Thread(target=send)
    started = time.monotonic()
    try:
        try:
            sender.start()
            function()
            time.sleep(sum(delays) + 1)
        finally:
            while sender.is_alive():
                sender.join(0.05)
    except KeyboardInterrupt:
        return time.monotonic() - started
    raise AssertionError("not interrupted")

def nap(model, seconds, phases):
    for trip in trips(model):
        trip.visit = lambda i, phase: time.sleep(seconds if phase in phases else 0)
"""


@pytest.mark.alone
@pytest.mark.parametrize("phase", PHASES)
def test_interrupt_stops_the_pass(phase):
    """Ctrl-C in a forward or backward raises ``KeyboardInterrupt`` within a task; the model works afterwards."""
    run_script(
        INTERRUPTS
        + """
        phase = sys.argv[1]
        model, plain = sleepy()
        for _ in range(3):
            nap(model, 0.1, [phase])
            output = model(batch(12)) if phase != "forward" else None
            whole = interrupted(lambda: model(batch(12)) if output is None else output.square().sum().backward(), 0.15)
            assert whole < 0.6, whole  # a whole pass takes 8 naps or more
            assert all(p.grad is None for p in model.parameters())
            nap(model, 0, [])
            assert_right_gradients(model, plain, batch(12))
            model.zero_grad()
        assert threading.active_count() == 4
        """.replace("\n        ", "\n"),
        phase,
    )


@pytest.mark.alone
def test_interrupted_twice():
    """A second Ctrl-C while the workers still finish their tasks does no harm either."""
    run_script(
        INTERRUPTS
        + """
        model, plain = sleepy()
        for phase in ("forward", "backward"):
            for pause in (0.0, 0.001, 0.05):
                nap(model, 0.2, [phase])
                output = model(batch(12)) if phase != "forward" else None
                with contextlib.suppress(KeyboardInterrupt):
                    step = lambda: model(batch(12)) if output is None else output.square().sum().backward()
                    interrupted(step, 0.1, pause)
                nap(model, 0, [])
                assert_right_gradients(model, plain, batch(12))
                model.zero_grad()
        del model, output
        assert soon(lambda: threading.active_count() == 1)
        """.replace("\n        ", "\n"),
    )


@pytest.mark.alone
def test_interrupt_during_a_failure_frees_activations():
    """A Ctrl-C while a layer is about to fail leaves no cycle between the two exceptions and the activations."""
    run_script(
        INTERRUPTS
        + """
        gc.collect()
        gc.disable()
        model = watched("never")
        model(batch())  # the first call takes long
        assert none_alive(seen(model))
        for layer in model:
            if isinstance(layer, Watch):
                layer.seen.clear()
        trip = trips(model)[1]
        trip.error, trip.place, trip.nap = ValueError("late"), (0, "forward"), 0.3
        interrupted(lambda: model(batch()), 0.15)
        trip.error = None
        assert len(seen(model)) > 2
        assert none_alive(seen(model))
        """.replace("\n        ", "\n"),
    )


@pytest.mark.alone
@pytest.mark.parametrize("interrupts", [1, 2])
def test_interrupts_at_any_moment(interrupts):
    """Wherever a signal hits, or a second one right after it, the pass ends and the next one is right."""
    run_script(
        """
        import faulthandler, signal
        armed = 0
        def handle(*_):
            global armed
            if armed:
                armed -= 1
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4) if armed else 0)
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, handle)
        plain = layers()
        model = pipe(copy.deepcopy(plain), chunks=4)
        expected = gradients(plain, batch())
        gradients(model, batch())
        for trip in trips(model):
            trip.nap = 0.0005
        started = time.monotonic()
        gradients(model, batch())
        span = time.monotonic() - started
        hits = 0
        random.seed(int(sys.argv[1]))
        for number in range(400):
            faulthandler.dump_traceback_later(15, exit=True)
            try:
                armed = int(sys.argv[1])
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, span))
                model(batch()).square().sum().backward()
                armed = 0
            except KeyboardInterrupt:
                hits += 1
            armed = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            torch.set_grad_enabled(True)  # the end of PyTorch's own no_grad() can be interrupted too
            if number % 10 == 9:
                for ours, theirs in zip(gradients(model, batch()), expected):
                    torch.testing.assert_close(ours, theirs)
        assert hits > 100, hits
        assert threading.active_count() == 4
        """,
        str(interrupts),
    )


@pytest.mark.alone
def test_second_interrupt_on_the_way_out():
    """A second Ctrl-C that hits the first function the engine calls after the first one does not hang the next pass."""
    run_script(
        INTERRUPTS
        + """
        import faulthandler, pipesight
        folder = os.path.dirname(pipesight.__file__)
        first = second = False

        def handle(*_):
            global first
            first = True
            raise KeyboardInterrupt

        def trace(frame, event, _):
            global second
            if first and not second and frame.f_code.co_filename.startswith(folder):
                second = True
                raise KeyboardInterrupt

        model, plain = sleepy()
        signal.signal(signal.SIGINT, handle)
        output = model(batch(12))
        trips(model)[2].visit = lambda i, phase: time.sleep(0.1 if phase == "forward" else 0)
        other = threading.Thread(target=model, args=(batch(12),))  # keeps the last partition busy
        other.start()
        time.sleep(0.1)
        sys.settrace(trace)
        interrupted(lambda: output.square().sum().backward(), 0.2)
        sys.settrace(None)
        nap(model, 0, [])
        faulthandler.dump_traceback_later(15, exit=True)
        other.join()
        assert_right_gradients(model, plain, batch(12))
        """.replace("\n        ", "\n"),
    )


# Long, but an interrupt may come between any two lines, and nothing else tries them all.
def test_interrupts_at_every_line():
    """An interrupt at any one line of the engine, or at two in a row, neither hangs nor harms the next pass."""
    run_script(
        """
        import faulthandler, linecache
        import pipesight
        faulthandler.dump_traceback_later(80, exit=True)
        folder = os.path.dirname(pipesight.__file__)

        def interrupt_at(*numbers):
            "Trace this thread; raise at the given ones of the lines it runs in the engine."
            count = 0
            entered = set()
            def trace(frame, event, _):
                nonlocal count
                path, number = frame.f_code.co_filename, frame.f_lineno
                if not path.startswith(folder):
                    return None
                leaves = (frame, number) in entered  # Python lets no signal in before __exit__ is called
                if linecache.getline(path, number).lstrip().startswith("with "):
                    entered.add((frame, number))
                if event == "line" and not leaves:
                    count += 1
                    if count in numbers:
                        raise KeyboardInterrupt(f"{path}:{number}")
                return trace
            return trace

        plain = layers(2)
        expected = gradients(plain, batch(4))
        gradients(pipe(copy.deepcopy(plain)), batch(4))  # imports what the engine needs
        gc.collect()
        assert soon(lambda: threading.active_count() == 1)
        crowd = threading.active_count()
        line = 0
        random.seed(0)
        gc.collect()
        gc.freeze()  # or every collection would go over all of torch
        while True:
            line += 1
            model = pipe(copy.deepcopy(plain), chunks=2)
            second = line + random.randrange(1, 12) if line % 3 else 0
            try:
                sys.settrace(interrupt_at(line, second))
                model(batch(4)).square().sum().backward()
                sys.settrace(None)
                break
            except KeyboardInterrupt as error:
                sys.settrace(None)
                last = str(error)
            sys.settrace(None)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(20, exit=True)
            try:
                for ours, theirs in zip(gradients(model, batch(4)), expected):
                    torch.testing.assert_close(ours, theirs)
            except BaseException:
                print("interrupted at", last, flush=True)
                raise
            del model
            gc.collect()
            assert soon(lambda: threading.active_count() == crowd), f"threads are left after {last}"
        assert line > 100, line
        """,
        timeout=100,
    )
