"""Threads: the callers' and ours, what is carried from one to the other, and when they end."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import signal
import subprocess
import textwrap
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo  # the first forward does so, and in torch 2.6 it fails where the default device is "meta"
from torch import nn

from pipesight import GPipe, is_recomputing
from support import warm
from support.against_plain import modes


class Call(nn.Module):
    """Runs a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input):
        return self.function(input)


def layers(seed=0, count=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))).double()


def pipe(model, checkpoint="except_last", chunks=3):
    return GPipe(model, [1] * len(model), chunks=chunks, checkpoint=checkpoint)


def batch(seed=0, rows=6):
    return torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(model, input):
    """Return gradients without touching ``.grad``."""
    return torch.autograd.grad(model(input).square().sum(), list(model.parameters()))


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def soon(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def in_thread(function, seconds=30.0):
    """Return what ``function`` returns in a thread of its own; a hang fails, an exception is raised here."""
    results = []

    def call():
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the thread hangs"
    value, error = results[0]
    if error is not None:
        raise error
    return value


def start_script(body):
    code = "from pipeline.test_threads import *\n" + textwrap.dedent(body)
    return warm.start("-c", code, merge=True)


def finish(process, *codes):
    """Wait for a script; return what it printed."""
    try:
        output, _ = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("the process hangs: " + process.communicate()[0]) from None
    assert process.returncode in codes, output
    return output


# Several callers.


def test_two_models_in_two_threads():
    """Models in different threads do not get in each other's way."""
    plains = [layers(seed) for seed in range(2)]
    models = [pipe(copy.deepcopy(plain)) for plain in plains]

    def train(k):
        return all(
            torch.allclose(a, b)
            for step in range(50)
            for a, b in zip(gradients(models[k], batch(step)), gradients(plains[k], batch(step)), strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, range(2))) == [True, True]


@modes
def test_one_model_in_several_threads(checkpoint):
    """One model may be called from many threads at once, for inference and for training."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    together = threading.Barrier(4)

    def train(k):
        together.wait()
        for step in range(15):
            some = batch(k * 100 + step)[k:]  # each thread has another size
            assert_same(gradients(model, some), gradients(plain, some))

    def infer(k):
        together.wait()
        for step in range(15):
            with torch.no_grad():
                output = model(batch(k * 100 + step))
                torch.testing.assert_close(output, plain(batch(k * 100 + step)))
            assert not output.requires_grad

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(train if k % 2 else infer, k) for k in range(4)]
        for future in done:
            future.result(timeout=60)


def test_many_first_callers_start_the_workers_once():
    """Threads that race for the first call still leave one worker a partition."""
    for _ in range(5):
        others = set(threading.enumerate())
        model = pipe(layers())
        together = threading.Barrier(8)

        def call(_, model=model, together=together):
            together.wait()
            return model(batch()).sum()

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(call, range(8)))
        assert len({result.item() for result in results}) == 1
        del results
        workers = lambda others=others: [t for t in set(threading.enumerate()) - others if "Pool" not in t.name]
        assert soon(lambda workers=workers: len(workers()) == 3)


@modes
def test_backward_in_another_thread(checkpoint):
    """Forward and backward may be called from different threads, in any order of threads."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    expected = gradients(plain, batch())
    output = in_thread(lambda: model(batch()))
    assert_same(in_thread(lambda: torch.autograd.grad(output.square().sum(), list(model.parameters()))), expected)
    loss = model(batch()).square().sum()
    in_thread(loss.backward)
    assert_same([p.grad for p in model.parameters()], expected)


@modes
def test_one_output_backward_in_several_threads(checkpoint):
    """A retained graph may be differentiated in several threads at once, as in plain PyTorch."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    parameters, output = list(model.parameters()), model(batch())
    expected = gradients(plain, batch())
    together = threading.Barrier(4)

    def differentiate(k):
        together.wait()
        for _ in range(25):
            found = torch.autograd.grad(output.square().sum() * k, parameters, retain_graph=True)
            assert_same(found, [g * k for g in expected])

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(differentiate, k + 1) for k in range(4)]
        for future in done:
            future.result(timeout=60)


def test_failure_of_one_caller_is_not_the_others():
    """An exception in the pass of one thread does not disturb the passes of another."""
    plain = layers()

    def fail_if_big(input):
        if input.detach().abs().max() > 100:
            raise ValueError("too big")
        return input

    model = pipe(nn.Sequential(Call(fail_if_big), *copy.deepcopy(plain)))

    def fail():
        for _ in range(40):
            with pytest.raises(ValueError, match="too big"):
                model(batch() * 1000)

    def train():
        for step in range(40):
            assert_same(gradients(model, batch(step)), gradients(plain, batch(step)))

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(fail), pool.submit(train)]
        for future in done:
            future.result(timeout=60)


# Pipes in pipes.


@modes
@pytest.mark.parametrize("inner_checkpoint", ["always", "never"])
def test_pipe_in_a_layer_of_a_pipe(checkpoint, inner_checkpoint):
    """A layer may be a pipeline itself."""
    plain = layers(count=5)
    model = copy.deepcopy(plain)
    inner = pipe(nn.Sequential(*list(model)[1:4]), inner_checkpoint, chunks=2)
    outer = GPipe(nn.Sequential(model[0], inner, model[4]), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    for step in range(3):
        assert_same(in_thread(lambda: gradients(outer, batch(step))), gradients(plain, batch(step)))  # noqa: B023


def test_pipe_called_from_its_own_layer():
    """A layer that calls the pipeline it is part of gets an error instead of a hang; the model works afterwards."""
    recursive = True

    def call_again(input):
        return model(input) if recursive else input

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(call_again), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="own layers"):
        in_thread(lambda: model(torch.rand(4, 4)), 10)
    recursive = False
    assert in_thread(lambda: model(torch.rand(4, 4)), 10).shape == (4, 4)


def test_pipe_called_from_its_own_layer_through_another():
    """The error also comes when another pipeline stands in between."""
    recursive = True
    a = pipe(nn.Sequential(nn.Identity(), Call(lambda input: b(input) if recursive else input)))
    b = pipe(nn.Sequential(nn.Identity(), Call(lambda input: a(input))))
    with pytest.raises(RuntimeError, match="own layers"):
        in_thread(lambda: a(torch.rand(4, 4)), 10)
    recursive = False
    assert in_thread(lambda: a(torch.rand(4, 4)), 10).shape == (4, 4)


@modes
def test_backward_of_the_same_pipe_in_a_layer(checkpoint):
    """A layer that runs the pipeline's own backward gets an error instead of a hang."""
    losses = []

    def backward_inside(input):
        if losses:
            losses.pop().backward()
        return input

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(backward_inside)), checkpoint)
    losses.append(model(torch.rand(4, 4)).sum())
    with pytest.raises(RuntimeError, match="own layers"):
        in_thread(lambda: model(torch.rand(4, 4)), 10)


# The end.


def test_threads_start_with_use_and_end_with_the_model():
    """A model has a thread a partition from its first call on, none before, and none after it is deleted."""
    others = set(threading.enumerate())
    model = pipe(layers())
    assert set(threading.enumerate()) <= others
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    ours = set(threading.enumerate()) - others
    assert sorted(thread.name for thread in ours) == [f"pipesight-partition-{j}" for j in range(3)]
    del model
    gc.collect()
    assert soon(lambda: not any(thread.is_alive() for thread in ours))


def test_output_outlives_the_model():
    """Backward works after the model is deleted, and the threads end with the output."""
    others = set(threading.enumerate())
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    parameters = list(model.parameters())
    output = model(batch())
    del model
    gc.collect()
    found = in_thread(functools.partial(torch.autograd.grad, output.square().sum(), parameters))
    assert_same(found, gradients(plain, batch()))
    del output
    gc.collect()
    assert soon(lambda: set(threading.enumerate()) <= others)


@pytest.mark.slow
def test_model_deleted_by_its_own_layer():
    """The last reference to a model may go while it runs, even in one of its own threads."""
    others = set(threading.enumerate())
    models = []

    def drop(input):
        models.clear()
        gc.collect()
        return input * 2

    models.append(pipe(nn.Sequential(nn.Identity(), Call(drop), nn.Identity())))
    output = in_thread(lambda: models[0](torch.ones(6, 4)), 20)
    assert torch.equal(output, torch.full((6, 4), 2.0))
    gc.collect()
    assert soon(lambda: set(threading.enumerate()) <= others)


def test_process_ends_quickly():
    """The interpreter exits with the right code at once: after use, with an exception, and with a pass under way."""
    clock = "import atexit, sys\nstart = time.monotonic()\n"
    clock += "atexit.register(lambda: print('ended after', time.monotonic() - start, flush=True))\n"
    use = "model = pipe(layers())\nmodel(batch()).sum().backward()\noutput = model(batch())\n"
    nap = "napping = pipe(nn.Sequential(*(Call(lambda x: (time.sleep(30), x)[1]) for _ in range(3))), chunks=1)\n"
    nap += "threading.Thread(target=napping, args=(batch(),), daemon=True).start()\ntime.sleep(0.2)\n"
    train = textwrap.dedent("""
        training = pipe(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), chunks=16)
        def train():
            while True:
                training(torch.rand(4096, 256)).sum().backward()
        threading.Thread(target=train, daemon=True).start()
        time.sleep(0.5)
        """)
    cases = {
        "after use": (clock + use, {0}),
        "sys.exit": (clock + use + "sys.exit(3)\n", {3}),
        "an exception": (clock + use + "raise ValueError('unhandled')\n", {1}),
        "an exception in a layer": (clock + "pipe(nn.Sequential(Call(lambda x: 1 / 0)))(batch())\n", {1}),
        "a nap under way": (clock + use + nap, {0}),
        # The plain model aborts here: Python up to 3.13 ends daemon threads in the midst of PyTorch's C++.
        "a training loop under way": (clock + use + train, {0, -signal.SIGABRT}),
    }
    for pair in (list(cases)[k : k + 2] for k in range(0, len(cases), 2)):
        running = {name: start_script(cases[name][0]) for name in pair}
        for name, process in running.items():
            output = finish(process, *cases[name][1])
            assert float(output.split("ended after")[1].split()[0]) < 8, (name, output)
            assert ("Traceback" in output) == (1 in cases[name][1]), (name, output)


def test_use_at_exit():
    """Threads that outlive the main one, and exit handlers, can still use a model."""
    process = start_script(
        """
        import atexit
        atexit.register(lambda: (model(batch()).sum().backward(), print("at exit", flush=True)))
        model = pipe(layers())
        model(batch()).sum().backward()
        def train():
            time.sleep(0.5)
            for _ in range(20):
                model(batch()).sum().backward()
            pipe(layers())(batch()).sum().backward()
            print("in a thread", flush=True)
        threading.Thread(target=train).start()
        """
    )
    assert finish(process, 0).splitlines() == ["in a thread", "at exit"]


def test_threads_that_cannot_be_started(monkeypatch):
    """When the system is out of threads, the caller gets the error, nothing is left, and a later call works."""
    others = set(threading.enumerate())
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    start = threading.Thread.start

    def start_two(thread, left=[2]):  # noqa: B006
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        model(batch())
    monkeypatch.undo()
    assert soon(lambda: set(threading.enumerate()) <= others)
    assert_same(in_thread(lambda: gradients(model, batch())), gradients(plain, batch()))


def test_model_called_in_a_signal_handler():
    """A signal handler may use the model whose pass it interrupts."""
    process = start_script(
        """
        import random
        plain = layers()
        model = pipe(copy.deepcopy(plain))
        expected = gradients(plain, batch())
        handled = 0
        def handle(*_):
            global handled
            handled += 1
            with torch.enable_grad():  # a backward that is interrupted has it off
                assert_same(gradients(model, batch()), expected)
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))
        signal.signal(signal.SIGALRM, handle)
        random.seed(0)
        handle()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert_same(gradients(model, batch()), expected)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled > 50, handled
        """
    )
    finish(process, 0)


# What is carried into the workers.


@pytest.fixture
def intra_op_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@modes
@pytest.mark.parametrize(("count", "share"), [(8, 4), (5, 2), (2, 1), (1, 1)])
def test_workers_share_the_intra_op_threads(intra_op_threads, checkpoint, count, share):
    """Partitions on the CPU share the caller's intra-op threads; the caller and new threads keep theirs."""
    seen = []

    def note(input):
        seen.append(torch.get_num_threads())
        return input * 1

    def fail(input):
        raise ValueError

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(note)), checkpoint)
    failing = pipe(nn.Sequential(nn.Linear(4, 4), Call(fail)), checkpoint)
    intra_op_threads(count)
    model(torch.rand(6, 4)).sum().backward()
    with pytest.raises(ValueError):  # noqa: PT011
        failing(torch.rand(6, 4))
    assert set(seen) == {share}
    assert torch.get_num_threads() == count
    assert in_thread(torch.get_num_threads) == count

    seen.clear()
    intra_op_threads(count * 2)
    model(torch.rand(6, 4)).sum().backward()
    assert set(seen) == {count * 2 // 2}
    assert torch.get_num_threads() == count * 2
    assert in_thread(torch.get_num_threads) == count * 2


def test_intra_op_threads_after_a_pipe_in_a_pipe(intra_op_threads):
    """New threads have the caller's count, also when an inner pipeline first ran after the outer one."""
    intra_op_threads(8)
    calls = []
    inner = pipe(layers(count=2))
    outer = pipe(nn.Sequential(nn.Identity(), Call(lambda x: inner(x) if calls else x)))
    for _ in range(3):
        outer(batch())
        assert torch.get_num_threads() == 8
        assert in_thread(torch.get_num_threads) == 8
        calls.append(1)


def test_intra_op_threads_with_two_callers(intra_op_threads):
    """Several callers at once leave the counts as they were."""
    intra_op_threads(4)
    models = [pipe(layers(count=2)), pipe(layers(count=4))]
    together = threading.Barrier(4)

    def call(k):
        assert torch.get_num_threads() == 4
        together.wait()
        for _ in range(50):
            models[k % 2](batch()).sum().backward(inputs=list(models[k % 2].parameters()))
        return torch.get_num_threads()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(call, range(4))) == {4}
    assert torch.get_num_threads() == 4
    assert in_thread(torch.get_num_threads) == 4


setting = contextvars.ContextVar("setting", default="unset")


@modes
def test_context_variables(checkpoint):
    """Layers see the context variables of the caller at the time of the forward, also when recomputed."""
    seen = set()

    def note(input):
        seen.add((setting.get(), is_recomputing()))
        return input * 2

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(note)), checkpoint, chunks=1)
    token = setting.set("ours")
    output = model(torch.rand(6, 4))
    setting.reset(token)
    assert setting.get() == "unset"
    output.sum().backward()
    recomputed = {("ours", True)} if checkpoint == "always" else set()
    assert seen == {("ours", False)} | recomputed


def test_context_variable_set_by_a_layer():
    """What a layer sets is seen neither by the caller nor when the layer is recomputed."""
    seen = []

    def count(input):
        seen.append(setting.get())
        setting.set("set by a layer")
        return input * 2

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(count)), "always", chunks=1)
    model(torch.rand(6, 4)).sum().backward()
    assert seen == ["unset", "unset"]
    assert setting.get() == "unset"


@modes
def test_grad_mode(checkpoint):
    """Layers run in the caller's grad mode, also when they are checkpointed and recomputed."""
    seen = set()

    def note(input):
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_recomputing()))
        return input * 2

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(note)), checkpoint, chunks=1)
    input = torch.rand(6, 4)
    with torch.no_grad():
        assert not model(input).requires_grad
    assert seen == {(False, False, False)}
    seen.clear()
    with torch.inference_mode():
        output = model(input)
        assert output.is_inference()
    assert seen == {(False, True, False)}
    seen.clear()
    model(input).sum().backward()
    assert seen == {(True, False, False), (True, False, checkpoint == "always")}
    seen.clear()
    model.eval()
    assert model(input).requires_grad
    assert seen == {(True, False, False)}


def test_grad_mode_inside_a_layer():
    """A layer that turns grad off or on for itself does what it does in the plain model."""

    def frozen(input):
        with torch.no_grad():
            return input * 2

    for checkpoint in ("always", "never"):
        plain = nn.Sequential(nn.Linear(4, 4), Call(frozen), nn.Linear(4, 4)).double()
        model = pipe(copy.deepcopy(plain), checkpoint)
        plain(batch()).sum().backward()
        model(batch()).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


class Autocast(nn.Module):
    def __init__(self, enabled):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.enabled = enabled

    def forward(self, input):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.linear(input.float() if not self.enabled else input)


@modes
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
def test_autocast_around_the_model(checkpoint, cache, chunks):
    """Autocast around the call gives the dtypes and gradients of the plain model under autocast."""
    torch.manual_seed(0)
    dtypes = set()

    def note(input):
        dtypes.add(input.dtype)
        return input

    plain = nn.Sequential(nn.Linear(8, 8), Call(note), nn.LayerNorm(8), nn.Linear(8, 8), Call(note), nn.Linear(8, 8))
    model = GPipe(copy.deepcopy(plain), [2, 2, 2], chunks=chunks, checkpoint=checkpoint)
    input = torch.rand(6, 8)
    expected = actual = None
    for m in (plain, model):
        m.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            output = m(input)
        output.float().square().sum().backward()
        if m is plain:
            expected = output, [p.grad for p in m.parameters()]
        else:
            actual = output, [p.grad for p in m.parameters()]
    assert dtypes == {torch.bfloat16}
    assert actual[0].dtype == expected[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
    assert not torch.is_autocast_enabled("cpu")
    assert model(input).dtype == torch.float32


@modes
@pytest.mark.parametrize("around", [True, False])
def test_autocast_inside_layers(checkpoint, around):
    """Layers may turn autocast on and off for themselves, in forward and when recomputed."""
    torch.manual_seed(0)
    plain = nn.Sequential(Autocast(True), Autocast(False), Autocast(True), nn.LayerNorm(8))
    model = pipe(copy.deepcopy(plain), checkpoint)
    input = torch.rand(6, 8)
    outputs = []
    for m in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            outputs.append(m(input))
        outputs[-1].float().square().sum().backward()
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=5e-2, atol=5e-2)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@modes
def test_default_dtype(default_dtype, checkpoint):
    """Tensors that layers create have the default dtype."""
    default_dtype(torch.float64)
    seen = set()

    def add(input):
        noise = torch.ones(4)
        seen.add(noise.dtype)
        return input + noise

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(add)), checkpoint)
    output = model(torch.rand(6, 4))
    output.sum().backward()
    assert output.dtype == torch.float64
    assert seen == {torch.float64}


@modes
def test_default_device(checkpoint):
    """Tensors that layers create are on the device of ``with torch.device(...)`` around the call."""
    seen = []

    def note(input):
        seen.append(torch.empty(1).device.type)
        return input * 2

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(note)), checkpoint, chunks=1)
    input = torch.rand(6, 4)
    with torch.device("meta"):
        output = model(input)
    output.sum().backward()
    assert set(seen) == {"meta"}


@modes
def test_saved_tensor_hooks(checkpoint):
    """Saved-tensor hooks around the call, such as ``save_on_cpu``, see what the layers save."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model = pipe(copy.deepcopy(plain), checkpoint, chunks=2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(batch())
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    assert_same(found, gradients(plain, batch()))
    assert (3, 4) in packed


def test_innermost_saved_tensor_hooks():
    """Of nested saved-tensor hooks the innermost count, and after them those around; another thread's never do."""
    model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), "never", chunks=2)
    packed = {"outer": 0, "inner": 0}

    def counting(name):
        def pack(tensor):
            packed[name] += 1
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def call():
        before = packed.copy()
        model(torch.rand(6, 4))
        return [name for name in packed if packed[name] > before[name]]

    with counting("outer"):
        with counting("inner"):
            assert call() == ["inner"]
            with ThreadPoolExecutor(1) as other:
                assert other.submit(call).result() == []
        assert call() == ["outer"]
    assert call() == []


@modes
def test_warnings(checkpoint):
    """Warnings in layers go to the caller's filters: they can be recorded, ignored, or made errors."""

    def warn(input):
        warnings.warn("from a layer", UserWarning, stacklevel=1)
        return input * 2

    model = pipe(nn.Sequential(nn.Linear(4, 4), Call(warn)), checkpoint)
    input = torch.rand(6, 4)
    with pytest.warns(UserWarning, match="from a layer"):
        model(input).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="from a layer") as caught:
            model(input)
    assert "partition 1" in caught.value.__notes__[0]
