"""What PyTorch builds on autograd and modules works with a pipeline: DDP, jacobian, functional_call, threads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipesight import GPipe, Pipeline
from support.against_plain import (
    Fn,
    assert_same,
    assert_same_pass,
    assert_same_state,
    error_of,
    mlp,
    modes,
    rand,
    total,
)


def both(checkpoint, layers=4):
    """Return a pipeline and its plain twin."""
    plain = mlp(layers)
    return GPipe(copy.deepcopy(plain), [2] * (layers // 2), chunks=2, checkpoint=checkpoint), plain


@pytest.fixture
def process_group(tmp_path):
    """Be a distributed job of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_shards_around_a_pipeline_and_not_inside(process_group):
    plain, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), torch.randn(4, 3)
    whole, inside = (Pipeline(copy.deepcopy(plain), ["2"], devices=["cpu", "cpu"], chunks=2) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(whole, mesh=mesh)
    for model in (plain, whole):
        model(x).square().mean().backward()
    for truth, parameter in zip(plain.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), truth.grad)
    fully_shard(inside.module[1], mesh=mesh)
    with pytest.raises(TypeError, match=r"FSDP shards '1' inside the pipeline"):
        inside(x)
    with pytest.raises(TypeError, match=r"FSDP shards '1' inside the pipeline"):
        Pipeline(inside.module, ["2"])


@modes
def test_distributed_data_parallel(checkpoint, process_group):
    """DDP around a pipeline reduces each gradient once, and not at all under no_sync."""
    pipe, plain = both(checkpoint)
    parallel = DistributedDataParallel(pipe)
    reduced = []

    def count(_, bucket):
        reduced.extend(bucket.parameters())
        done = torch.futures.Future()
        done.set_result(bucket.buffer() * 2)
        return done

    parallel.register_comm_hook(None, count)
    with parallel.no_sync():
        total(parallel(rand(4, 3))).backward()
    assert not reduced
    total(plain(rand(4, 3))).backward()
    assert_same_state(pipe, plain)
    pipe.zero_grad()
    plain.zero_grad()
    for _ in range(2):
        reduced.clear()
        total(parallel(rand(4, 3))).backward()
        assert sorted(map(id, reduced)) == sorted(map(id, pipe.parameters()))
    (2 * total(plain(rand(4, 3)))).backward()
    for parameter in plain.parameters():
        parameter.grad *= 3  # (g * 2 + g) * 2, as DDP reduces what has been accumulated
    assert_same_state(pipe, plain)


@modes
@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian(vectorize, checkpoint):
    """torch.autograd.functional.jacobian is the plain model's."""
    pipe, plain = both(checkpoint)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(pipe, rand(3, 3), vectorize=vectorize),
        torch.autograd.functional.jacobian(plain, rand(3, 3)),
    )


@modes
def test_gradcheck(checkpoint):
    """torch.autograd.gradcheck, which compares with finite differences, is content."""
    pipe, _ = both(checkpoint)
    assert torch.autograd.gradcheck(pipe, [rand(4, 3, grad=True)])


@modes
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection(checkpoint):
    """Under detect_anomaly all is the same, and a NaN in the backward of a layer is found."""
    pipe, plain = both(checkpoint)
    with torch.autograd.detect_anomaly():
        assert_same_pass(pipe, plain, rand(4, 3, grad=True))
    pipe = GPipe(nn.Sequential(Fn(lambda s, x: (x * s.a * 0).sqrt()), nn.Identity()), [1, 1], checkpoint=checkpoint)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values"):
        pipe(rand(4, 3, grad=True)).sum().backward()


@modes
@pytest.mark.parametrize("leaves", [True, False])
def test_functional_call(leaves, checkpoint):
    """functional_call runs the pipeline with other parameters, which get the gradients; checkpoints are refused."""
    pipe, plain = both(checkpoint)
    if checkpoint != "never":
        state = {name: p.detach() * 2 for name, p in pipe.named_parameters()}
        for value in state.values():
            value.requires_grad_()
        output = torch.func.functional_call(pipe, state, (rand(4, 3),))
        with pytest.raises(RuntimeError, match="was replaced between forward and backward"):
            total(output).backward()
        return
    found = []
    for model in (pipe, plain):
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        state = {name: p.detach() * (2.0 if leaves else scale) for name, p in model.named_parameters()}
        for value in state.values() if leaves else ():
            value.requires_grad_()
        output = torch.func.functional_call(model, state, (rand(4, 3),))
        total(output).backward()
        found.append([output.detach(), *(value.grad for value in state.values())] if leaves else [output, scale.grad])
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(*found)


@modes
def test_parameters_changed_between_forward_and_backward(checkpoint):
    """A step of the optimizer before backward is an error, as in the plain model, or does no harm."""
    pipe, plain = both(checkpoint)
    total(plain(rand(4, 3))).backward()
    loss = total(pipe(rand(4, 3)))
    with torch.no_grad():
        pipe[2].weight.add_(1)
    error = error_of(loss.backward)
    if error is not None:
        assert "inplace" in str(error) or "in place" in str(error)
    else:
        torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@modes
def test_parametrization_added_later(checkpoint):
    """A weight may be parametrized after passes."""
    pipe, plain = both(checkpoint)
    for model in (pipe, plain):
        total(model(rand(4, 3)))
        nn.utils.parametrizations.weight_norm(model[2])
    assert_same_pass(pipe, plain, rand(4, 3, grad=True))


@modes
def test_lazy_layers(checkpoint):
    """Lazy layers get their shape in the first forward, and their gradients in the first backward."""
    pipe = GPipe(nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2)).double(), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(4, 5)
    output = pipe(x)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double()
    plain.load_state_dict(pipe.plain_state_dict())
    expected = plain(x)
    torch.testing.assert_close(output, expected)
    total(output).backward()
    total(expected).backward()
    assert_same_state(pipe, plain)


@modes
def test_gradient_within_forward(checkpoint):
    """A layer may differentiate something in its forward, and be differentiated through it."""

    def descend(s, x):
        with torch.enable_grad():
            here = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((here * s.a).sin().sum(), here, create_graph=True)
        return x - slope

    assert_same(nn.Sequential(Fn(descend), nn.Tanh()), rand(4, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_named_tuples(checkpoint):
    """A named tuple that a layer returns, as torch.max does, is one for the next layer, wherever that is."""
    model = nn.Sequential(Fn(lambda s, x: torch.max(x * s.a, 1)), Fn(lambda s, x: x.values[:, None] * s.a))
    assert_same(model, rand(4, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


class Pair(tuple):
    """A tuple that is made in a way of its own."""

    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


@modes
def test_tuples_of_other_classes(checkpoint):
    """Any kind of tuple may pass between partitions."""
    model = nn.Sequential(Fn(lambda s, x: Pair(x * s.a, x)), Fn(lambda s, x: x[0] * x[1]))
    assert_same(model, rand(4, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_input_from_inference_mode(checkpoint):
    """What was computed under inference_mode may be the input of a layer that copies it, as in the plain model."""
    with torch.inference_mode():
        x = rand(4, 3)
    model = nn.Sequential(Fn(lambda s, x: x.clone() * s.a), nn.Tanh())
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    total(pipe(x)).backward()
    total(plain(x)).backward()
    assert_same_state(pipe, plain)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@modes
def test_higher_order_operators(checkpoint):
    """Layers may use operators that take functions, such as those behind autograd functions under vmap."""
    model = nn.Sequential(Fn(lambda s, x: torch.vmap(Doubled.apply)(x) * s.a), nn.Tanh())
    assert_same(model, rand(4, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)
