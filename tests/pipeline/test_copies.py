"""A pipeline is an ordinary module: it can be copied, saved, sent to other processes, compiled and wrapped."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import signal
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from pipesight import GPipe
from pipesight.skip import pop, skippable, stash
from support import warm
from support.against_plain import modes

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))).double()


def pipe(model, checkpoint="except_last", chunks=3):
    return GPipe(model, [1] * len(model), chunks=chunks, checkpoint=checkpoint)


def batch(seed=0, rows=6):
    return torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(model, input):
    model.zero_grad()
    model(input).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_like_plain(model, plain, input=None):
    input = batch() if input is None else input
    torch.testing.assert_close(model(input), plain(input))
    for ours, theirs in zip(gradients(model, input), gradients(plain, input), strict=True):
        torch.testing.assert_close(ours, theirs)


def run_script(body, *args, timeout=90):
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])  # for what it spawns
    source = "import warnings; warnings.simplefilter('default')  # from 3.12 on, of forks beside threads\n"
    source += "from pipeline.test_copies import *\n" + textwrap.dedent(body)
    done = warm.run("-c", source, *args, env={**os.environ, "PYTHONPATH": path}, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_fork(function, seconds=20):
    """Run ``function`` in a forked child; return its exit code: 0, or 1 for an exception. A hang fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# Copies.


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_file])


@modes
@COPIES
@pytest.mark.parametrize("used", [False, True], ids=["before use", "after use"])
def test_copies_are_independent(copied, used, checkpoint):
    """A copy has weights and workers of its own; original and copy work side by side."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    output = model(batch()) if used else None
    twin = copied(model)
    assert_like_plain(model, plain)
    assert_like_plain(twin, plain)
    assert (twin.balance, twin.devices, twin.chunks, twin.checkpoint) == ([1] * 3, model.devices, 3, checkpoint)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_like_plain(model, plain)
    assert not twin(batch()).any()
    if output is not None:
        output.sum().backward()


@COPIES
def test_copy_of_a_copy_outlives_the_original(copied):
    """A copy keeps working after its original is gone."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    model(batch())
    model = copied(copied(model))
    assert_like_plain(model, plain)


@COPIES
def test_copy_with_deferred_batch_norm(copied):
    """Deferred batch normalisation is copied with its statistics."""
    torch.manual_seed(0)
    model = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), [1, 1], chunks=2, deferred_batch_norm=True
    )
    model(batch())
    twin = copied(model)
    for module in (model, twin):
        module(batch(1))
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert twin[1].num_batches_tracked == 2


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, input):
        yield stash("skip", input)
        return input * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input):
        skip = yield pop("skip")
        return input + skip


def test_copy_of_a_model_with_hooks():
    """Hooks on parameters and layers do not keep a used model from being copied."""
    model = pipe(layers())
    calls = []
    model[0][0].weight.register_hook(calls.append)
    model[1].register_forward_hook(count_calls)
    gradients(model, batch())
    assert len(calls) == 1
    twin = copy.deepcopy(model)
    gradients(twin, batch())
    gradients(model, batch())
    assert len(calls) == 2


def count_calls(layer, inputs, output):
    """A forward hook that pickle can find."""


def test_state_dict_travels():
    """A state dict loads into another pipeline, and back into the plain model."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    model(batch()).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = pipe(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double())
    other.load_state_dict(torch.load(file))
    assert_like_plain(other, plain)
    fresh = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    fresh.load_state_dict(model.plain_state_dict())
    assert_like_plain(other, fresh)
    fresh = pipe(copy.deepcopy(fresh))
    fresh.load_state_dict(plain.state_dict())
    assert_like_plain(fresh, plain)


# Training.


@modes
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ],
    ids=["SGD", "Adam"],
)
def test_loss_curve(optimizer, checkpoint):
    """Twenty steps of an optimizer, with clipping and a schedule, give the losses of the plain model."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    curves = []
    for m in (plain, model):
        steps = optimizer(m.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, 20)
        curves.append([])
        for step in range(20):
            steps.zero_grad(set_to_none=step % 2 == 0)
            loss = F.mse_loss(m(batch(step)), batch(step).sin())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            steps.step()
            schedule.step()
            curves[-1].append(loss.item())
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_accumulate():
    """Backward after backward adds to ``.grad``, and a gradient handed out is not changed by the next."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    first = None
    for step in range(4):
        for m in (plain, model):
            m(batch(step)).square().sum().backward()
        if first is None:
            first = [p.grad for p in model.parameters()]
            kept = [g.clone() for g in first]
            for p in model.parameters():
                p.grad = p.grad.clone()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(map(torch.equal, first, kept))


# Other processes.


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("used", [False, True], ids=["before use", "after use"])
def test_fork(used):
    """A forked child uses the model, used before or not, and so does the parent afterwards."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    if used:
        assert_like_plain(model, plain)
    threads = threading.active_count()
    for _ in range(2):
        assert in_fork(lambda: assert_like_plain(model, plain)) == 0
        assert_like_plain(model, plain)
    assert in_fork(lambda: in_fork_again(model, plain)) == 0
    assert threading.active_count() - threads == (0 if used else 3)


def in_fork_again(model, plain):
    assert_like_plain(model, plain)
    assert in_fork(lambda: assert_like_plain(model, plain)) == 0
    assert_like_plain(copy.deepcopy(model), plain)


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@modes
def test_backward_in_a_fork(checkpoint):
    """A child that runs the backward of an output made before the fork gets gradients or an error, no hang."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    output = model(batch())

    def backward():
        try:
            output.square().sum().backward()
        except RuntimeError as error:
            assert "fork" in str(error)  # noqa: PT017
            return
        ours = [p.grad for p in model.parameters()]
        for mine, theirs in zip(ours, gradients(plain, batch()), strict=True):
            torch.testing.assert_close(mine, theirs)

    assert in_fork(backward, 10) == 0
    output.square().sum().backward()


@NEEDS_FORK
def test_fork_during_a_pass():
    """A child forked while another thread runs a pass can use the model too."""
    run_script(
        """
        plain = layers()
        model = pipe(nn.Sequential(*copy.deepcopy(plain), nn.Dropout(0.0)))
        assert_like_plain(model, plain)
        stop = False
        def train():
            while not stop:
                torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
        trainer = threading.Thread(target=train)
        trainer.start()
        codes = [in_fork(lambda: assert_like_plain(model, plain), 10) for _ in range(40)]
        stop = True
        trainer.join()
        assert codes == [0] * 40, codes
        """
    )


class Predictions(Dataset):
    """Holds a model, as a dataset with hard examples would."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(batch(index)), torch.get_num_threads()


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return batch(index, rows=1)[0]


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("used", [False, True], ids=["before use", "after use"])
def test_data_loader_with_the_model_in_its_dataset(used):
    """The workers of a ``DataLoader`` that fork can call the model."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    if used:
        model(batch()).sum().backward()
    loader = DataLoader(Predictions(model), num_workers=2, multiprocessing_context="fork", timeout=20)
    with torch.no_grad():
        for index, (output, _) in enumerate(loader):
            torch.testing.assert_close(output[0], plain(batch(index)))
    assert_like_plain(model, plain)


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_beside_the_model():
    """A ``DataLoader`` that forks workers each epoch feeds a model in use."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    for _ in range(2):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=20)
        for input in loader:
            assert_like_plain(model, plain, input)


def test_spawned_process():
    """A model, used before, goes to a spawned process as an argument; its weights are shared."""
    run_script(
        """
        import torch.multiprocessing as mp
        from pipeline import test_copies

        plain = layers()
        model = pipe(copy.deepcopy(plain))
        assert_like_plain(model, plain)
        model.zero_grad()
        worker = mp.get_context("spawn").Process(target=test_copies.check_in_spawned, args=(model, plain))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0, worker.exitcode
        assert not model[0][0].weight.any()  # the child's zeros
        """
    )


def check_in_spawned(model, plain):
    assert_like_plain(model, plain)
    with torch.no_grad():
        model[0][0].weight.zero_()


DDP = """
    import sys
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from pipeline import test_copies

    mp.start_processes(test_copies.train_in_ddp, args=(sys.argv[1], sys.argv[2]), nprocs=2, start_method="fork")
"""


def train_in_ddp(rank, address, checkpoint):
    """Train as one of two ranks; compare with the plain model on the whole batch."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(rank)  # DDP has to make the weights equal
    model = GPipe(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double(), [1, 1, 1], chunks=2, checkpoint=checkpoint
    )
    parallel = DistributedDataParallel(model, find_unused_parameters=False, bucket_cap_mb=0.0001)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    plain.load_state_dict(model.plain_state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        whole = batch(step, rows=8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        parallel(whole.chunk(2)[rank]).square().mean().backward()
        plain(whole).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()

    for optimizer in optimizers:
        optimizer.zero_grad()
    for step in range(3):
        whole = batch(10 + step, rows=8)
        plain(whole).square().mean().backward()
        if step < 2:
            with parallel.no_sync():
                parallel(whole.chunk(2)[rank]).square().mean().backward()
        else:
            parallel(whole.chunk(2)[rank]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    dist.barrier()
    os._exit(0)  # torch may hang as it ends the group: it waits, with the GIL, for a thread that lets go of a tensor


@NEEDS_FORK
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_distributed_data_parallel(tmp_path, checkpoint):
    """Two ranks of DDP around a pipeline get the gradients of the plain model on the whole batch, also accumulated."""
    run_script(DDP, f"file://{tmp_path}/rendezvous", checkpoint)


# The compiler.


# The compiler silences its own warnings with ``warnings.catch_warnings``, which is of no use in threads.
# The last one is of inductor in torch 2.6.
QUIET_COMPILER = pytest.mark.filterwarnings(
    "ignore:The .grad attribute", "ignore::DeprecationWarning", "ignore:Skipping serialization of"
)


class Compiler:
    """Compiles layers for real, and counts the calls of what it made."""

    def __init__(self, name):
        torch._dynamo.reset()  # or the layers of earlier tests count towards the limit of recompilations
        self.backend = torch._dynamo.lookup_backend(name)
        self.calls = 0

    def __call__(self, graph, inputs):
        run = self.backend(graph, inputs)

        def counted(*args):
            self.calls += 1
            return run(*args)

        return counted

    def compile(self, layer):
        return torch.compile(layer, backend=self)


@pytest.mark.slow
@QUIET_COMPILER
@modes
def test_compiled_layers(checkpoint):
    """Layers compiled with ``torch.compile`` give the gradients of the plain model, in every mode."""
    plain = layers(4)
    compiler = Compiler("aot_eager")
    compiled = nn.Sequential(*map(compiler.compile, copy.deepcopy(plain)))
    model = GPipe(compiled, [2, 2], chunks=2, checkpoint=checkpoint)
    for step in range(2):
        assert_like_plain(model, plain, batch(step, rows=8))
    for rows in (6, 2):
        assert_like_plain(model, plain, batch(rows=rows))
    assert compiler.calls >= 32


@pytest.mark.slow
@QUIET_COMPILER
@modes
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_a_compiled_layer(checkpoint, backend):  # inductor takes long, but has random numbers of its own
    """Compiled dropout drops the same values when recomputed, others in other micro-batches, all by the seed."""
    compiler = Compiler(backend)
    block = compiler.compile(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.1)))
    model = GPipe(nn.Sequential(nn.Identity(), block), [1, 1], chunks=2, checkpoint=checkpoint)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        input = torch.ones(16, 16, requires_grad=True)
        output = model(input)
        output.sum().backward()
        assert torch.equal(input.grad, output)
        assert not torch.equal(output[:8], output[8:])
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert compiler.calls >= 3 * 2


@modes
def test_compile_around_the_model(checkpoint):
    """``torch.compile`` around a pipeline changes nothing: no warning, no wrong gradient, no long step."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    torch._dynamo.reset()
    around = torch.compile(model, backend="eager")
    for step in range(3):
        assert_like_plain(around, plain, batch(step))
    started = time.perf_counter()
    for step in range(3):
        gradients(around, batch(step))
    assert time.perf_counter() - started < 0.3


# Module.


def test_module_api():
    """Names, modes, buffers and the rest of ``nn.Module`` are those of an ordinary module."""
    plain = layers()
    plain[1].register_buffer("scale", torch.ones(4, dtype=torch.float64))
    model = pipe(plain)
    names = [f"partitions.{j}.{j}.0.{kind}" for j in range(3) for kind in ("weight", "bias")]
    assert [name for name, _ in model.named_parameters()] == names
    assert dict(model.named_buffers()).keys() == {"partitions.1.1.scale"}
    assert (len(model), model[1], list(model)) == (3, plain[1], list(plain))

    visited = []
    assert model.apply(lambda module: visited.append(type(module).__name__)) is model
    assert visited.count("Linear") == 3
    assert visited[-1] == "GPipe"

    assert model.training
    assert not any(module.training for module in model.eval().modules())
    assert all(module.training for module in model.train().modules())

    gradients(model, batch())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    assert math.isclose(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), 1e-3, rel_tol=1e-2)
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    text = repr(model)
    assert text.startswith("GPipe(")
    assert text.count("Linear(in_features=4") == 3


def test_frozen_model():
    """``requires_grad_`` freezes and thaws a model that is in use."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    assert model(batch()).requires_grad
    assert model.requires_grad_(False) is model
    assert not model(batch()).requires_grad
    model.partitions[1].requires_grad_(True)
    plain.requires_grad_(False)
    plain[1].requires_grad_(True)
    for m in (plain, model):
        m(batch()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@modes
def test_model_changed_in_use(checkpoint):
    """New dtypes, replaced layers and re-initialised parameters are seen by the next pass."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    assert_like_plain(model, plain)
    for m in (model, plain):
        m.to(torch.float32)
    assert_like_plain(model, plain, batch().float())
    for m in (model, plain):
        m.double()
    torch.manual_seed(1)
    new = nn.Linear(4, 4).double()
    model.partitions[1][0] = copy.deepcopy(new)
    plain[1] = new
    assert_like_plain(model, plain)
    for m in (model, plain):
        nn.init.constant_(next(m.parameters()), 0.5)
    assert_like_plain(model, plain)
    assert model.chunks == 3
    model.chunks = 2
    assert_like_plain(model, plain)


@modes
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_functional_call(checkpoint, used, frozen):
    """``functional_call`` gives the gradients of the given parameters, or a clear error where it recomputes."""
    plain = layers()
    model = pipe(copy.deepcopy(plain), checkpoint)
    if used:
        gradients(model, batch())
        model.zero_grad()
    model.requires_grad_(not frozen)
    given = {name: torch.rand_like(p).requires_grad_() for name, p in model.named_parameters()}
    theirs = {name.split(".", 2)[2]: p for name, p in given.items()}
    expected = torch.func.functional_call(plain, theirs, batch())
    output = torch.func.functional_call(model, given, batch())
    torch.testing.assert_close(output, expected)
    expected = torch.autograd.grad(expected.square().sum(), list(given.values()))
    try:
        found = torch.autograd.grad(output.square().sum(), list(given.values()))
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "functional_call" in str(error)  # noqa: PT017
    else:
        for ours, mine in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, mine)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "derive",
    [
        lambda m, x: torch.autograd.functional.hessian(lambda y: m(y).square().sum(), x),
        lambda m, x: torch.func.grad(lambda y: m(y).square().sum())(x),
        lambda m, x: torch.func.vmap(m)(x[None]),
        lambda m, x: torch.func.jvp(m, (x,), (x,)),
    ],
    ids=["hessian", "grad", "vmap", "jvp"],
)
def test_functional_transforms_are_rejected(derive):
    """What a pipeline cannot do raises an error, rather than give zeros; the model works afterwards."""
    plain = layers()
    model = pipe(copy.deepcopy(plain))
    derive(plain, batch())
    with pytest.raises((RuntimeError, NotImplementedError)):
        derive(model, batch())
    assert_like_plain(model, plain)


def test_averaged_model():
    """An averaged copy (SWA, EMA) of a pipeline follows it."""
    model = pipe(layers())
    average = torch.optim.swa_utils.AveragedModel(model)
    gradients(model, batch())
    average.update_parameters(model)
    torch.testing.assert_close(average(batch()), model(batch()))
