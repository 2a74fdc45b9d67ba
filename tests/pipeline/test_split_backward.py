"""A backward in two parts gives the gradients of one in one part: first those of the inputs, later those of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipesight.pipeline.split_backward import run_input_backward
from support.against_plain import rand


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = nn.Parameter(rand(3, 4).float())


def plain(net: Net, x: Tensor) -> list[Tensor]:
    return [net.b(torch.tanh(net.a(x))), net.norm(x)]


def one_weight_twice(net: Net, x: Tensor) -> list[Tensor]:
    return [net.a(torch.tanh(net.a(x))) @ net.a.weight]


def an_output_without_input(net: Net, x: Tensor) -> list[Tensor]:
    """As the embedding of a decoder has none in the partition of an encoder's last block."""
    return [net.a(x), net.b(net.table), net.table * 2]


def shared_by_several(net: Net, x: Tensor) -> list[Tensor]:
    """As relative positions are, which a model normalises once and uses in each block."""
    shared = net.norm(net.b(net.table))
    return [torch.tanh(x @ shared.T) @ shared + net.a(x), shared.sum(0)]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, None, x.T @ gradient


def a_function_of_its_own(net: Net, x: Tensor) -> list[Tensor]:
    return [Product.apply(net.a(Product.apply(x, "note", net.a.weight)), "note", net.b.weight)]


def one_weight_twice_in_one_call(net: Net, x: Tensor) -> list[Tensor]:
    return [torch.addcmul(net.a(x), net.table, net.table)]


def shared_behind_one_node(net: Net, x: Tensor) -> list[Tensor]:
    shared = net.norm(net.b(net.table))
    return [torch.addcmul(net.a(x), shared * 2, shared.exp())]


def in_parts(net: Net, x: Tensor) -> list[Tensor]:
    left, right = net.a(x).split(2, -1)
    return [torch.cat([right * net.table[:, :2], left], -1), right]


def hooked(net: Net, x: Tensor) -> list[Tensor]:
    y = net.a(x)
    scale = net.norm(net.table)
    for tensor in (y, scale, x * 1):
        tensor.register_hook(lambda gradient: 3 * gradient)
    return [net.b(torch.tanh(y)) * scale]


def of_weights_alone(net: Net, x: Tensor) -> list[Tensor]:
    return [net.b(net.table)]


def nothing(net: Net, x: Tensor) -> list[Tensor]:
    return [x * 2]


@pytest.mark.parametrize(
    "forward",
    [
        plain,
        one_weight_twice,
        an_output_without_input,
        shared_by_several,
        a_function_of_its_own,
        one_weight_twice_in_one_call,
        shared_behind_one_node,
        in_parts,
        hooked,
        of_weights_alone,
        nothing,
    ],
)
def test_same_gradients(forward):
    torch.manual_seed(0)
    net, found = Net(), []
    net.b.weight.register_hook(lambda gradient: 5 * gradient)
    for split in (False, True):
        net.zero_grad()
        x = rand(3, 4).float().requires_grad_()
        for _ in range(2):  # gradients add up
            ends = forward(net, x)
            gradients = [
                torch.randn(end.shape, generator=torch.Generator().manual_seed(k)) for k, end in enumerate(ends)
            ]
            if split:
                x.grad = None
                rest = run_input_backward(ends, gradients, [x])
                assert rest.is_whole or x.grad is not None
                rest.run()
            else:
                x.grad = None
                torch.autograd.backward(ends, gradients)
        found.append([x.grad, *(p.grad for p in net.parameters())])
    for whole, halves in zip(*found, strict=True):
        assert (whole is None) == (halves is None)
        if whole is not None:
            torch.testing.assert_close(halves, whole)


def test_weights_come_later():
    """The first part leaves no gradient in weights, and runs no more of the graph than it must."""
    net, x, ran = Net(), rand(3, 4).float().requires_grad_(), []
    y = net.a(x)
    outside = net.norm(net.table)
    outside.register_hook(lambda gradient: ran.append("outside"))
    end = y * outside
    rest = run_input_backward([end], [torch.ones_like(end)], [x])
    assert x.grad is not None
    assert all(p.grad is None for p in net.parameters())
    assert ran == []
    rest.run()
    assert "outside" in ran
    assert net.table.grad is not None


def test_a_compiled_function_runs_once():
    """It may free what it saved; so all of its graph runs in the first part."""
    calls = []

    class CompiledFunction(Product):
        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return Product.backward(ctx, gradient)

    net, x = Net(), rand(3, 4).float().requires_grad_()
    rest = run_input_backward([CompiledFunction.apply(x, "note", net.a.weight)], [torch.ones(3, 4)], [x])
    assert x.grad is not None
    rest.run()
    assert (len(calls), net.a.weight.grad is None) == (1, False)


def test_all_hooks_of_weights_are_called_once():
    net, x, calls = Net(), rand(3, 4).float().requires_grad_(), []
    net.a.weight.register_hook(lambda gradient: calls.append("before"))
    net.a.weight.register_post_accumulate_grad_hook(lambda weight: calls.append("after"))
    rest = run_input_backward(one_weight_twice(net, x), [torch.ones(3, 4)], [x])
    assert calls == []
    rest.run()
    assert calls == ["before", "after"]
