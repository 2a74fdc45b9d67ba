"""Models are balanced by the time and the memory of their layers, and come out of it untouched."""

from __future__ import annotations

import functools
import inspect
import threading
import time

import pytest
import torch
from torch import nn

import pipesight.balance
from pipesight.balance import balance_by_size, balance_by_time
from pipesight.pipeline.profiling import profile_size, profile_time
from pipesight.skip import pop, skippable, stash

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
by_time = functools.partial(balance_by_time, timeout=0)
BOTH = pytest.mark.parametrize("balance", [by_time, balance_by_size], ids=["time", "size"])
ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


class Sleep(nn.Module):
    """Takes 20 ms; the other layers here take a small part of one."""

    def forward(self, input):
        time.sleep(0.02)
        return input


class SleepInBackward(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            return input.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.02)
            return gradient

    def forward(self, input):
        return self.Function.apply(input)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input):
        return self.function(input)


def linears(count, width=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def fingerprint(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(t), t.device, t.requires_grad, t._version) for name, t in tensors.items()},
        "values": {name: t.detach().clone().tolist() for name, t in tensors.items()},
        "grads": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "state": {name: sorted(module.__dict__) for name, module in model.named_modules()},
    }


def test_public_names():
    """The public module offers the balancing functions, those that choose cuts, `pack`, and nothing else."""
    balance, cuts = ["balance_by_size", "balance_by_time", "balance_cost"], ["cuts_by_size", "cuts_by_time"]
    assert sorted(pipesight.balance.__all__) == [*balance, *cuts, "pack"]


@pytest.mark.alone
@BOTH
def test_call_forms(balance):
    """The order of the guide and that of torchgpipe 0.0.7 mean the same, by position and by name."""
    # The last layer is the costly one in both senses, so that the answer is certain.
    model = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Sequential(Sleep(), nn.Linear(4, 64)))
    x = torch.rand(2, 4)
    calls = [
        balance(model, x, partitions=2),
        balance(model, x, 2),
        balance(2, model, x),
        balance(partitions=2, model=model, sample=x),
        balance(model, partitions=2, sample=x),
        balance(2, model=model, sample=x),
        balance(2, model, sample=x, device="cpu"),
        balance(2, module=model, sample=x),
        balance(module=model, sample=x, partitions=2),
    ]
    assert calls == [[2, 1]] * len(calls)


def test_size_takes_its_sample_as_input():
    """The sample of balance_by_size is also called `input`, as in torchgpipe, in both orders."""
    model, x = linears(4), torch.rand(2, 4)
    assert balance_by_size(2, model, input=x) == [2, 2]
    assert balance_by_size(model, input=x, partitions=2) == [2, 2]
    assert balance_by_size(partitions=2, model=model, input=x) == [2, 2]
    with pytest.raises(TypeError, match="input"):
        balance_by_size(model, sample=x, input=x, partitions=2)


@BOTH
def test_missing_and_unknown_arguments(balance):
    """Arguments that are missing, unknown or given twice raise TypeError, as in any Python call."""
    model, x = linears(2), torch.rand(2, 4)
    with pytest.raises(TypeError, match="partitions"):
        balance(model, x)
    with pytest.raises(TypeError, match="sample"):
        balance(2, model)
    with pytest.raises(TypeError, match="model"):
        balance()
    with pytest.raises(TypeError, match="chunk_size"):
        balance(model, x, 2, chunk_size=3)
    with pytest.raises(TypeError, match=r"unexpected argument parts; expected model, sample, partitions, .*device"):
        balance(model, x, parts=2)
    with pytest.raises(TypeError, match="partitions"):
        balance(2, model, x, partitions=2)


@BOTH
def test_wrong_order_is_shown(balance):
    """Arguments in another order are a TypeError that shows the right one, and the types given."""
    model, x = linears(2), torch.rand(2, 4)
    for wrong, got in (
        ((x, model, 2), "(Tensor, Sequential, int)"),
        ((x, 2, model), "(Tensor, int, Sequential)"),
        ((model, 2, x), "(Sequential, int, Tensor)"),
        ((2, x, model), "(int, Tensor, Sequential)"),
        (((x, x), model, 2), "(tuple, Sequential, int)"),
    ):
        with pytest.raises(TypeError) as caught:
            balance(*wrong)
        kwargs = ", timeout=int" if "timeout" in str(caught.value) else ""
        assert str(caught.value) == f"expected (model, sample, partitions), but got {got[:-1]}{kwargs})"


def test_signatures_are_those_of_the_guide():
    """What help() shows has names, types and defaults."""
    assert list(inspect.signature(balance_by_time).parameters) == ["model", "sample", "partitions", "timeout", "device"]
    parameters = inspect.signature(balance_by_size).parameters
    assert list(parameters) == ["model", "sample", "partitions", "chunks", "param_scale", "device"]
    assert (parameters["chunks"].default, parameters["param_scale"].default) == (1, 2.0)


@BOTH
def test_model_must_be_sequential(balance):
    """A module that is not nn.Sequential is rejected in both orders, by name."""
    for call in (lambda m, x: balance(m, x, 1), lambda m, x: balance(1, m, x)):
        with pytest.raises(TypeError, match="non-sequential module cannot be partitioned"):
            call(nn.Linear(4, 4), torch.rand(2, 4))


@BOTH
@pytest.mark.parametrize(
    ("sample", "got"),
    [([1.0], "list"), (None, "NoneType"), ({}, "dict"), ((torch.rand(2, 4), 3), "int in a tuple")],
)
def test_sample_must_be_tensors(balance, sample, got):
    """A sample that is no tensor and no tuple of tensors is rejected with its type."""
    with pytest.raises(TypeError, match=f"^expected Tensor or tuple of Tensors, but got {got}$"):
        balance(linears(2), sample, 2)


@BOTH
@pytest.mark.parametrize("partitions", [0, True, 1.5, 3])
def test_partitions_are_checked_before_anything_runs(balance, partitions):
    """Partitions that the layers cannot fill raise ValueError, not after minutes of profiling."""

    def never(input):
        raise AssertionError("a layer ran")

    with pytest.raises(ValueError, match="partitions"):
        balance(partitions, nn.Sequential(Lambda(never), Lambda(never)), torch.rand(2, 4))


def test_options_are_checked():
    """Numbers that make no sense are rejected with their values."""
    model, x = linears(2), torch.rand(2, 4)
    with pytest.raises(ValueError, match=r"timeout must be finite and not negative \(timeout: inf\)"):
        balance_by_time(model, x, 2, timeout=float("inf"))
    with pytest.raises(ValueError, match=r"chunks must be a positive integer \(chunks: 0\)"):
        balance_by_size(model, x, 2, chunks=0)
    with pytest.raises(ValueError, match=r"param_scale must be finite and not negative \(param_scale: -1\)"):
        balance_by_size(model, x, 2, param_scale=-1)
    with pytest.raises(ValueError, match=r"cpu and cuda only \(device: meta\)"):
        balance_by_time(model, x, 2, device="meta")


@pytest.mark.alone
@ON_EACH_DEVICE
@pytest.mark.parametrize("slow", [Sleep, SleepInBackward])
def test_slow_layer_gets_a_partition_of_its_own(slow, device):
    """A layer whose forward, or backward, takes far longer than the others is left alone."""
    model = nn.Sequential(*linears(3), slow(), *linears(2))
    assert balance_by_time(model, torch.rand(2, 4), partitions=3, timeout=0.1, device=device) == [3, 1, 2]


@pytest.mark.alone
@ON_EACH_DEVICE
def test_time_is_seconds_of_one_run(device):
    """The profile is in seconds and does not grow with the number of repeats."""
    short = profile_time(nn.Sequential(Sleep()), torch.rand(2, 4), timeout=0, device=device)
    long = profile_time(nn.Sequential(Sleep()), torch.rand(2, 4), timeout=0.3, device=device)
    assert 0.02 <= short[0] < 0.2
    assert 0.02 <= long[0] < 0.2


def test_each_layer_runs_at_least_four_times():
    """Without any budget, a layer is still warmed up once and timed three times."""
    runs = []
    balance_by_time(nn.Sequential(Lambda(lambda x: runs.append(0) or x)), torch.rand(2, 4), 1, timeout=0, device="cpu")
    assert len(runs) == 4


@pytest.mark.alone
def test_slow_first_run_does_not_count():
    """What only the first call of a layer costs is not part of its time."""
    calls = []

    def slow_once(input):
        calls.append(0)
        time.sleep(1 if len(calls) == 1 else 0)
        return input

    [seconds] = profile_time(nn.Sequential(Lambda(slow_once)), torch.rand(2, 4), timeout=0)
    assert seconds < 0.5


@pytest.mark.parametrize("sample_requires_grad", [False, True])
def test_inputs_require_grad_where_those_of_the_plain_model_do(sample_requires_grad):
    """Gradients are computed for exactly the tensors for which the plain model computes them."""
    seen = []

    def spy(input):
        tensors = input if isinstance(input, tuple) else (input,)
        seen.append([t.requires_grad for t in tensors])
        return input

    frozen = nn.Linear(4, 4).requires_grad_(False)
    split = Lambda(lambda x: (x, x.detach() * 2, x.argmax(1)))
    model = nn.Sequential(Lambda(spy), frozen, Lambda(spy), nn.Linear(4, 4), Lambda(spy), split, Lambda(spy))
    x = torch.rand(2, 4, requires_grad=sample_requires_grad)
    model(x)
    plain = list(seen)
    assert [True, False, False] in plain

    seen.clear()
    profile_time(model, x, timeout=0)
    assert seen[::4] == plain  # each layer has run four times
    seen.clear()
    profile_size(model, x)
    assert seen == plain
    assert x.grad is None


ODD_LAYERS = {
    "no parameters": nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(4, 4)),
    "in-place first": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "integers out": nn.Sequential(nn.Linear(4, 4), Lambda(lambda x: x.argmax(1)), nn.Embedding(4, 4)),
    "no gradient": nn.Sequential(nn.Linear(4, 4), Lambda(torch.Tensor.detach), nn.ReLU()),
    "tuples": nn.Sequential(Lambda(lambda x: (x, x)), Lambda(lambda xs: (xs[0] + xs[1], xs[1])), Lambda(sum)),
    "all frozen": linears(3).requires_grad_(False),
    "sparse constant": nn.Sequential(Lambda(lambda x: torch.eye(2).to(x.device).to_sparse() @ x), *linears(2)),
    "a layer twice": nn.Sequential(*[nn.Linear(4, 4)] * 3),
    "complex": nn.Sequential(nn.Linear(4, 4), Lambda(torch.fft.fft), Lambda(torch.abs)),
}


@BOTH
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", ODD_LAYERS)
def test_odd_layers(balance, device, name):
    """Layers without parameters, gradients or float outputs are profiled; the sample stays as it is."""
    x = torch.rand(2, 4) - 0.5
    before = x.clone()
    assert sum(balance(ODD_LAYERS[name], x, 2, device=device)) == 3
    assert torch.equal(x, before)
    assert not x.requires_grad


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_do_not_matter(balance, mode):
    """Under no_grad and inference_mode, the backward is profiled all the same."""
    if balance is by_time:
        model = nn.Sequential(nn.Linear(4, 4), SleepInBackward(), nn.Linear(4, 4))
    else:
        model = nn.Sequential(nn.Linear(4, 4), *[Lambda(lambda x: x.exp().sin().cos().exp())], nn.Linear(4, 4))
    with mode():
        assert balance(model, torch.rand(64, 4), 3, device="cpu") == [1, 1, 1]
        x = torch.rand(64, 4)
        profile = profile_time(model, x, timeout=0) if balance is by_time else profile_size(model, x)
    assert profile[1] >= (0.02 if balance is by_time else max(profile))


FLOATS = 4


def test_size_formula():
    """Bytes are outputs and saved tensors, each memory once, plus param_scale times the parameters."""
    model = nn.Sequential(
        nn.Linear(8, 4),  # saves its input; keeps its output
        nn.Sigmoid(),  # saves its output
        Lambda(lambda x: x.exp().sin().cos()),  # saves exp(x) twice and sin(...); keeps its output
        nn.Flatten(),  # a view
        nn.ReLU(inplace=True),  # in the memory of its input
        nn.BatchNorm1d(4),  # saves mean and deviation, and its buffers
        Lambda(lambda x: (x.exp().sin(), x.detach())[1]),  # a branch that leads nowhere
        nn.Linear(4, 2).requires_grad_(False),
    )
    output = 16 * 4 * FLOATS
    kept = [output, output, 3 * output, 0, 0, output + 2 * 4 * FLOATS, 0, output // 2]
    parameters = [(8 * 4 + 4) * FLOATS, 0, 0, 0, 0, 2 * 4 * FLOATS, 0, (4 * 2 + 2) * FLOATS]
    for scale in (0, 1.5, 2.0):
        sizes = profile_size(model, torch.rand(16, 8), param_scale=scale, device="cpu")
        assert sizes == [k + scale * p for k, p in zip(kept, parameters, strict=True)]
    assert profile_size(model, torch.rand(16, 8), device="cpu") == sizes


def test_size_of_a_micro_batch():
    """The first micro-batch is measured, cut as torch.chunk cuts; the parameters are whole."""
    model = nn.Sequential(Lambda(lambda xs: xs[0] + xs[1]), nn.Linear(8, 4))
    sample = (torch.rand(10, 8), torch.rand(10, 8))
    for chunks, rows in ((1, 10), (4, 3), (100, 1)):
        sizes = profile_size(model, sample, chunks=chunks, param_scale=1)
        assert sizes == [rows * 8 * FLOATS, rows * 4 * FLOATS + 36 * FLOATS]


def test_large_layer_gets_a_partition_of_its_own():
    """Both many parameters and many activations count."""
    x = torch.rand(2, 4)
    big = nn.Sequential(nn.Linear(4, 500), nn.Linear(500, 4))
    assert balance_by_size(nn.Sequential(*linears(2), big, *linears(3)), x, 3) == [2, 1, 3]
    wide = Lambda(lambda x: x.repeat(1, 1000).exp()[:, :4].contiguous())
    assert balance_by_size(nn.Sequential(*linears(3), wide, *linears(2)), x, 3) == [3, 1, 2]


def test_param_scale_and_chunks_decide():
    """Parameters weigh more with a larger param_scale, activations less with more chunks."""
    x = torch.rand(64, 64)
    model = nn.Sequential(*(nn.Sigmoid() for _ in range(5)), nn.Linear(64, 64))
    assert balance_by_size(model, x, 2, param_scale=0) == [3, 3]
    assert balance_by_size(model, x, 2, param_scale=1) == [4, 2]
    assert balance_by_size(model, x, 2, param_scale=1, chunks=64) == [5, 1]


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_size_is_what_cuda_allocates():
    """On CUDA, the bytes kept are those that the allocator sees, up to its rounding."""
    # Each layer saves its input, so that no output is freed early.
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU())
    x = torch.rand(512, 256)
    sizes = profile_size(model, x, param_scale=0, device="cuda")
    model.cuda()(x.cuda()).sum().backward()
    x = x.cuda()
    before = torch.cuda.memory_allocated()
    output = model(x)
    assert torch.cuda.memory_allocated() - before == pytest.approx(sum(sizes), rel=0.01)
    del output


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@BOTH
def test_cuda_memory_is_freed(balance):
    """Nothing stays allocated on the device."""
    model, x = linears(4, width=512), torch.rand(512, 512)
    balance(model, x, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    balance(model, x, 2, device="cuda")
    assert torch.cuda.memory_allocated() == before
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@BOTH
@ON_EACH_DEVICE
def test_model_is_left_exactly_as_it_was(balance, device):
    """Parameters, buffers, gradients, requires_grad and training modes stay; they are the very same objects."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
        nn.Dropout(),
        nn.Linear(8, 8).requires_grad_(False),
        nn.BatchNorm1d(8).eval(),
        nn.ReLU(inplace=True),
        nn.Linear(8, 2),
    )
    model[0][1].eval()
    model(torch.rand(8, 4)).sum().backward()
    model[5].zero_grad()
    before = fingerprint(model)
    balance(model, torch.rand(8, 4), 3, device=device)
    assert fingerprint(model) == before
    model.eval()
    before = fingerprint(model)
    balance(model, torch.rand(8, 4), 3, device=device)
    assert fingerprint(model) == before


@BOTH
@ON_EACH_DEVICE
def test_layers_run_in_train_mode(balance, device):
    """A model in eval mode is profiled as it will be trained."""
    modes = []

    class Spy(nn.Module):
        def forward(self, input):
            modes.append(self.training)
            return input

    balance(nn.Sequential(Spy(), nn.Sequential(Spy())).eval(), torch.rand(2, 4), 2, device=device)
    assert set(modes) == {True}


@BOTH
@ON_EACH_DEVICE
def test_random_states_are_left_as_they_were(balance, device):
    """What is drawn after balancing is what would have been drawn without."""

    def draw():
        return [torch.rand(3, device=d).tolist() for d in DEVICES]

    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 4), nn.Dropout())
    torch.manual_seed(7)
    expected = draw()
    torch.manual_seed(7)
    balance(model, torch.rand(2, 4, generator=torch.Generator()), 2, device=device)
    assert draw() == expected


@BOTH
def test_hooks_see_the_copy_only(balance):
    """Hooks run, since some layers need them, but never with a layer, or a parameter, of the user's model."""
    model, seen, gradients = linears(2), [], []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    model[0].weight.register_hook(gradients.append)
    balance(model, torch.rand(2, 4), 2)
    assert seen
    assert all(module is not model[0] for module in seen)
    assert gradients == []


@BOTH
def test_parametrized_and_lazy_layers(balance):
    """Layers that compute or create their parameters on the way are profiled, and stay lazy."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(normed, nn.LazyLinear(4), nn.Linear(4, 4))
    assert sum(balance(model, torch.rand(2, 4), 3)) == 3
    assert model[1].has_uninitialized_params()


@BOTH
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_failing_layer_is_named(balance, phase):
    """The layer's own exception comes out, with a note that names the layer and its input."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            if phase == "forward":
                raise ZeroDivisionError("broken")
            return input.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("broken")

    if phase == "backward" and balance is balance_by_size:
        pytest.skip("needs no backward")
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("second", Lambda(Fail.apply))
    with pytest.raises(ZeroDivisionError, match="broken") as error:
        balance(model, torch.rand(2, 4), 2)
    assert error.value.__notes__ == ["while profiling layer 'second' (Lambda) with input torch.float32 (2, 8)"]


@BOTH
def test_wrong_shape_is_located(balance):
    """Layers that do not fit together are found."""
    with pytest.raises(RuntimeError) as error:
        balance(nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4)), torch.rand(2, 4), 2)
    assert "layer '1' (Linear)" in error.value.__notes__[-1]


@BOTH
def test_layer_that_cannot_be_copied_is_named(balance):
    """So is a layer that holds something that deepcopy rejects."""
    layer = nn.Identity()
    layer.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock") as error:
        balance(nn.Sequential(nn.Linear(4, 4), layer), torch.rand(2, 4), 2)
    assert "layer '1' (Identity)" in error.value.__notes__[-1]


@BOTH
def test_layer_that_returns_no_tensor_is_named(balance):
    """So is a layer whose output no pipeline can carry."""
    with pytest.raises(TypeError, match="must be a Tensor or a tuple of Tensors, but got dict") as error:
        balance(nn.Sequential(nn.Linear(4, 4), Lambda(lambda x: {"x": x})), torch.rand(2, 4), 2)
    assert "layer '1' (Lambda)" in error.value.__notes__[-1]


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, input):
        yield stash("skip", input * 3)
        return input * 2


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, input):
        skip = yield pop("skip")
        return skip.add_(input)


@skippable(stash=["nothing"])
class StashNothing(nn.Module):
    def forward(self, input):
        yield stash("nothing", None)
        return input


@skippable(pop=["nothing"])
class PopNothing(nn.Module):
    def forward(self, input):
        nothing = yield pop("nothing")
        assert nothing is None
        return input


@BOTH
@ON_EACH_DEVICE
def test_skips(balance, device):
    """Stashed tensors reach the layers that pop them, in other layers and in the same one."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        Down(),
        StashNothing(),
        nn.Linear(4, 4),
        PopNothing(),
        Up(),
        nn.Sequential(Down(), Up()),
    )
    x = torch.rand(2, 4)
    expected = model(x)
    assert sum(balance(model, x, 3, device=device)) == 7
    assert torch.equal(model(x), expected)


@pytest.mark.alone
def test_backward_of_a_stash_counts():
    """The gradient that a skip brings back is computed by the layer that stashed it."""

    @skippable(stash=["skip"])
    class SlowDown(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = SleepInBackward()

        def forward(self, input):
            yield stash("skip", self.branch(input))
            return input

    model = nn.Sequential(nn.Linear(4, 4), SlowDown(), nn.Linear(4, 4), Up())
    seconds = profile_time(model, torch.rand(2, 4), timeout=0)
    assert seconds[1] >= 0.02
    assert max(seconds) == seconds[1]


def test_size_of_skips():
    """A stash counts where it is stashed, once; a popped tensor does not count again."""
    model = nn.Sequential(nn.Linear(4, 4), Down(), nn.Linear(4, 4), Up())
    output = 8 * 4 * FLOATS
    sizes = profile_size(model, torch.rand(8, 4), param_scale=0)
    assert sizes == [output, 2 * output, output, 0]
