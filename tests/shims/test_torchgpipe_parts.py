"""Parts of torchgpipe that programs use on their own, beside `GPipe`: batches, batch norms, profilers, skip classes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchgpipe import GPipe
from torchgpipe.balance.blockpartition import solve
from torchgpipe.balance.profile import detach, layerwise_sandbox, profile_sizes, profile_times
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.gpipe import BalanceError, recommend_auto_balance, split_module, verify_module
from torchgpipe.microbatch import Batch, check, gather, scatter
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.skippable import Skippable


def test_solve_cuts_a_sequence_into_blocks():
    """Blocks are consecutive, and no other cut has a smaller largest sum; too many or no blocks are refused."""
    assert solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert solve((0.5, 0.0), 2) == [[0.5], [0.0]]
    assert solve([3]) == [[3]]
    for sequence, partitions in (([], 1), ([1], 2), ([1], 0)):
        with pytest.raises(ValueError, match="partitions"):
            solve(sequence, partitions)


def test_a_profiler_made_of_the_parts():
    """Each layer is run as a copy in training mode; the model keeps mode and gradients, the batch its values."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    before = copy.deepcopy(model.state_dict())
    batch = Batch(torch.rand(4, 2, requires_grad=True))
    for layer in layerwise_sandbox(model, torch.device("cpu")):
        detach(batch)
        assert layer.training
        assert batch.tensor.is_leaf
        batch = batch.call(layer)
        batch.tensor.sum().backward()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module.training for module in model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batch_of_a_tensor_and_of_a_tuple():
    """A batch is a sequence whichever it holds, and stays what it was when its tensors are replaced."""
    x, y = torch.rand(2), torch.rand(3)
    one, two = Batch(x), Batch((x, y))
    assert (one.atomic, list(one), len(one), one.tensor is x, one.tensor_or_tensors is x) == (True, [x], 1, True, True)
    assert (two.atomic, list(two), len(two), two[1] is y, two.tensors) == (False, [x, y], 2, True, (x, y))
    with pytest.raises(AttributeError, match=r"use batch\.tensor$"):
        _ = one.tensors
    with pytest.raises(AttributeError, match=r"use batch\.tensors$"):
        _ = two.tensor
    one[0], two[1] = y, x
    assert (one.tensor is y, two.tensors) == (True, (x, x))
    one[:], two[:] = (x,), (y,)
    assert (one.atomic, one.tensor is x, two.atomic, two.tensors) == (True, True, False, (y,))
    with pytest.raises(IndexError, match="cannot be replaced by 2"):
        one[:] = (x, y)
    with pytest.raises(IndexError, match="index: 1"):
        one[1] = x
    with pytest.raises(NotImplementedError, match="slice"):
        two[:1] = (x,)
    assert not two.call(lambda tensors: tensors).atomic


def test_scatter_and_gather():
    """Micro-batches are cut along the first dimension, each tensor of a tuple alone, and joined again."""
    a, b = torch.rand(5, 2), torch.rand(10)
    parts = scatter((a, b), chunks=2)
    assert [[tuple(t.shape) for t in part] for part in parts] == [[(3, 2), (5,)], [(2, 2), (5,)]]
    assert all(torch.equal(joined, whole) for joined, whole in zip(gather(parts), (a, b), strict=True))
    assert torch.equal(gather(scatter(a, chunks=4)), a)
    check((a, b))
    for wrong in (1, "a", (a, 1), [a]):
        with pytest.raises(TypeError, match="must be a Tensor or a tuple of Tensors"):
            check(wrong)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_deferred_batch_norm_counts_chunks(kind, momentum):
    """Fed micro-batches by hand, the running statistics are those of a plain layer that saw the batch whole."""
    plain = kind(3, momentum=momentum).double()
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)
    shape = (16, 3) if kind is nn.BatchNorm1d else (16, 3, 5, 5)
    for scale in (1, 100):
        batch = 1000 + scale * torch.rand(shape, dtype=torch.float64)
        plain(batch)
        begun = deferred.running_mean.clone()
        for index, part in enumerate(batch.chunk(4)):
            assert torch.equal(deferred.running_mean, begun)
            assert deferred.tracked == index
            deferred(part)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(deferred.state_dict()[key], value)
    probe = torch.rand(shape, dtype=torch.float64)
    torch.testing.assert_close(deferred.eval()(probe), plain.eval()(probe))


def test_what_is_converted():
    """Layers that track nothing stay; equal chunks stay; other chunks do not; a shared layer stays shared."""
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    convert = DeferredBatchNorm.convert_deferred_batch_norm
    assert convert(untracked, chunks=2) is untracked
    built = DeferredBatchNorm(2, chunks=2)
    assert convert(built, chunks=2) is built
    again = convert(built, chunks=3)
    assert (again.chunks, again.weight is built.weight) == (3, True)
    assert again(torch.rand(4, 2)).shape == (4, 2)
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Linear(2, 2), nn.Sequential(shared))
    assert convert(model, 2) is model
    assert isinstance(model[0], DeferredBatchNorm)
    assert model[0] is model[2][0]


def test_deferred_batch_norm_in_a_pipeline():
    """A layer that was converted by hand follows the pipeline's micro-batches, also fewer than its chunks."""
    plain = nn.BatchNorm1d(3)
    pipe = GPipe(
        nn.Sequential(DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)),
        [1],
        devices=["cpu"],
        chunks=4,
        checkpoint="always",
    )
    for size in (16, 6):
        batch = torch.rand(size, 3)
        plain(batch)
        pipe(batch).sum().backward()
    torch.testing.assert_close(pipe[0].running_var, plain.running_var)
    assert pipe[0].num_batches_tracked == 2


def test_verify_module():
    """What GPipe would refuse is refused in torchgpipe's words."""
    layer = nn.Linear(2, 2)
    verify_module(nn.Sequential(layer))
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
        verify_module(layer)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        verify_module(nn.Sequential(layer, layer))


def test_split_module():
    """The layers go to their devices, under their names; a wrong balance is a BalanceError, which is a ValueError."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    x = torch.rand(3, 2)
    expected = model(x)
    partitions, balance, devices = split_module(model, iter([2, 1]), ["cpu", "cpu", "cpu"])
    assert (balance, devices) == ([2, 1], [torch.device("cpu")] * 2)
    assert [name for name, _ in partitions.named_parameters()] == ["0.0.weight", "0.0.bias", "1.2.weight", "1.2.bias"]
    assert torch.equal(partitions[1](partitions[0](x)), expected)
    for wrong in ([1], [3, 0], [4]):
        with pytest.raises(BalanceError, match="balance") as caught:
            split_module(model, wrong, ["cpu"] * 2)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(IndexError, match="devices: 1, partitions: 2"):
        split_module(model, [2, 1], ["cpu"])
    assert recommend_auto_balance("oh").startswith("oh\n\n")
    assert "from torchgpipe.balance import balance_by_time" in recommend_auto_balance("oh")


def test_profiles_of_layers():
    """Times are whole microseconds; sizes are a micro-batch's activations and ``param_scale`` times the parameters."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Identity(), nn.Linear(256, 256, bias=False))
    big, none, _ = times = profile_times(model, torch.rand(512, 256), 0.1, torch.device("cpu"))
    assert all(type(time) is int for time in times)
    assert big > none >= 0
    sizes = profile_sizes(model, torch.rand(32, 256), 4, 2.0, "cpu")
    kept, parameters = 4 * 8 * 256, 4 * 256 * 256
    assert sizes == [kept + 2 * (parameters + 4 * 256), 0, kept + 2 * parameters]


def test_skippable_classes_are_found():
    """Layers that skippable decorated are instances of Skippable, and no others are."""

    @skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, input):
            yield stash("skip", input)
            return input

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, input):
            return input + (yield pop("skip"))

    space, down, up = Namespace(), Down(), Up()
    assert isinstance(down.isolate(space), Skippable)
    assert (list(down.stashable()), list(down.poppable())) == ([(space, "skip")], [])
    assert (list(up.stashable()), list(up.poppable())) == ([], [(None, "skip")])
    assert issubclass(Up, Skippable)
    assert not isinstance(nn.Identity(), Skippable)


def test_phrases_of_torchgpipe_in_errors():
    """Programs and tests that look for torchgpipe's words in an error find them."""

    @skippable(stash=["skip"])
    class Down(nn.Module):
        pass

    with pytest.raises(TypeError, match="pairs of stash and pop do not match") as caught:
        GPipe(nn.Sequential(Down()), [1])
    assert "no module declared 'skip' as poppable but stashed" in str(caught.value)
    with pytest.raises(ValueError, match=r"balance is required(.|\n)*torchgpipe\.balance"):
        GPipe(nn.Sequential(nn.Identity()))
    with pytest.raises(ValueError, match=r"sum of balance(.|\n)*torchgpipe\.balance"):
        GPipe(nn.Sequential(nn.Identity()), [2])
