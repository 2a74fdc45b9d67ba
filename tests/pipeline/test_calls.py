"""The arguments of any call are cut into micro-batches, and outputs of any class put together to those of the batch."""

from __future__ import annotations

import collections
import copy
import inspect
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipesight.pipeline.batch_dims import BatchDims
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.outputs import Merge, Weights, flatten_output
from support.against_plain import rand


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    item: Any
    note: str = "x"


@dataclass(slots=True)
class Slotted:
    item: Any


class Output(collections.OrderedDict[str, Any]):
    """A mapping whose items are attributes, too, as the outputs of some libraries are."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Cache:
    """Holds tensors in objects in a list, as the caches of generating models do."""

    def __init__(self):
        self.layers: list[types.SimpleNamespace] = []

    def put(self, number, key):
        if number == len(self.layers):
            self.layers.append(types.SimpleNamespace(key=key, batch_size=len(key)))
        else:
            self.layers[number].key = torch.cat([self.layers[number].key, key], 1)


def wrap(kind, value):
    """Return ``value`` in a container."""
    return {
        "list": lambda: [value, 1],
        "tuple": lambda: (None, value),
        "dict": lambda: {"a": value, 3: "text"},
        "pair": lambda: Pair(value, 2.5),
        "frozen": lambda: Frozen(value),
        "slotted": lambda: Slotted(value),
        "namespace": lambda: types.SimpleNamespace(value=value),
        "output": lambda: Output(first=value, second=None),
    }[kind]()


KINDS = ["list", "tuple", "dict", "pair", "frozen", "slotted", "namespace", "output"]


def plain(value):
    """Describe a value by nothing but lists and strings."""
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        attributes = plain(vars(value)) if hasattr(value, "__dict__") else None
        return [type(value).__name__, [[str(k), plain(v)] for k, v in value.items()], attributes]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [plain(v) for v in value]]
    if isinstance(value, Slotted):
        return ["Slotted", plain(value.item)]
    if isinstance(value, (Frozen, types.SimpleNamespace)):
        return [type(value).__name__, plain(vars(value))]
    return repr(value)


def merged(call, outputs, weigh=None):
    """Put outputs together."""
    flats = [flatten_output(output, call.dims) for output in outputs]
    merge = Merge(flats, call) if weigh is None else Merge(flats, call, weigh)
    return merge.rebuild([merge.join(k, [flat.tensors[k] for flat in flats]) for k in range(merge.count)])


def run(model, *args, chunks, batch_dim=None, **kwargs):
    """Call a model micro-batch by micro-batch."""
    dims = BatchDims(batch_dim, inspect.signature(model))
    call = split_call(args, kwargs, chunks, dims)
    return merged(call, [model(*mine, **named) for mine, named in call.calls])


leaves = st.sampled_from(["batch", "table", "number"])
nested = st.recursive(leaves, lambda inner: st.tuples(st.sampled_from(KINDS), inner))


def leaf(kind, n):
    return {"batch": rand(n, 2), "table": rand(31, 3), "number": 7}[kind]


def build(shape, n):
    return leaf(shape, n) if isinstance(shape, str) else wrap(shape[0], build(shape[1], n))


@pytest.mark.filterwarnings("ignore:.*has as many items as the batch has samples")
@given(
    st.lists(nested, max_size=3), st.dictionaries(st.sampled_from("abc"), nested), st.integers(1, 12), st.integers(1, 6)
)
def test_cut_and_put_together(positional, named, n, chunks):
    """A model that returns its arguments returns those of the whole batch, in the same classes."""
    args = [rand(n), *(build(shape, n) for shape in positional)]
    kwargs = {name: build(shape, n) for name, shape in named.items()}
    call = split_call(args, kwargs, chunks)
    assert call.sizes == [len(part) for part in torch.arange(n).chunk(chunks)]
    output = merged(call, [copy.deepcopy([list(mine), named]) for mine, named in call.calls])
    assert plain(output) == plain([args, kwargs])


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2), st.booleans())
def test_gradients_are_transposed(n, chunks, dim, whole):
    """Splitting a gradient is the transpose of joining, and joining gradients that of cutting: autograd agrees."""
    shape = [3, 4, 5]
    shape[dim] = n + 6  # of no other size
    x = rand(*shape, grad=True)
    call = split_call((x,), {"n": 1}, chunks, {0: dim})
    parts = [piece[0].clone().requires_grad_() for piece in call.pieces]
    assert [part.size(dim) for part in parts] == call.sizes
    outputs = [{"y": part * 2, "loss": part.square().mean(), "same": rand(31)} for part in parts]
    call.dims._rules["output.y"] = dim
    flats = [flatten_output(output, call.dims) for output in outputs]
    merge = Merge(flats, call)
    assert merge.count == 3
    joined = [merge.join(k, [flat.tensors[k] for flat in flats]) for k in range(3)]
    assert torch.equal(joined[0], x * 2)
    torch.testing.assert_close(joined[1], x.square().mean())
    weights = [torch.randn_like(joined[0]), torch.randn_like(joined[1]), None]
    expected = torch.autograd.grad(joined[:2], parts, weights[:2], retain_graph=True)
    split = [merge.split_gradient(k, weight) for k, weight in enumerate(weights)]
    assert split[2] == [None] * len(parts)
    found = [
        torch.autograd.grad([flat.tensors[0], flat.tensors[1]], part, [split[0][i], split[1][i]])[0]
        for i, (flat, part) in enumerate(zip(flats, parts, strict=True))
    ]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    plainly = torch.autograd.grad([x * 2, x.square().mean()], x, weights[:2])[0]
    torch.testing.assert_close(call.join_gradients(0, found), plainly)


def test_gradients_of_what_goes_whole():
    """The gradient of a tensor that each micro-batch gets whole is the sum of theirs; None stands for zeros."""
    x, table = rand(5, 2, grad=True), rand(7, grad=True)
    call = split_call((x, table), {}, 2)
    assert call.sizes == [3, 2]
    assert [t.shape for t in call.pieces[1]] == [(2, 2), (7,)]
    assert call.calls[1][0][1] is call.pieces[1][1]
    assert torch.equal(call.join_gradients(1, [rand(7), rand(7)]), 2 * rand(7))
    assert torch.equal(call.join_gradients(1, [None, rand(7)]), rand(7))
    assert torch.equal(call.join_gradients(0, [None, rand(2, 2)]), torch.cat([torch.zeros(3, 2), rand(2, 2)]))
    assert call.join_gradients(0, [None, None]) is None


def test_pieces_are_detached():
    """Micro-batches get views of the caller's memory, without graph and with version counters of their own."""
    x = rand(4, 3, grad=True) * 1
    call = split_call((x,), {"y": nn.Parameter(rand(4))}, 2, {"y": 0})
    one, other = call.calls[0][0][0], call.calls[1][0][0]
    assert one.grad_fn is None
    assert not one.requires_grad
    assert one.data_ptr() == x.data_ptr()
    one.zero_()
    assert (other._version, x._version) == (0, 0)
    assert type(call.calls[0][1]["y"]) is Tensor


def test_a_cache_is_the_callers():
    """Each micro-batch fills a cache of its own; the caller's is filled with all, and returned."""

    def model(x, cache=None):
        cache.put(0, x.unsqueeze(1))
        return {"y": cache.layers[0].key.sum(1), "cache": cache}

    cache = Cache()
    for step in range(3):
        output = run(model, rand(5, 2) + step, chunks=2, cache=cache)
        assert output["cache"] is cache
    torch.testing.assert_close(output["y"], 3 * rand(5, 2) + 3)
    assert torch.equal(cache.layers[0].key, torch.stack([rand(5, 2) + step for step in range(3)], 1))
    assert cache.layers[0].batch_size == 5


def test_a_cache_that_is_changed_in_place():
    """Each micro-batch counts in a tensor of its own; the caller's cache counts as with the plain model."""

    def model(x, cache):
        cache.rows[:, int(cache.length)] = x
        cache.length.add_(1)
        return x * cache.length, cache

    caches = [types.SimpleNamespace(rows=torch.zeros(5, 3).double(), length=torch.tensor(0)) for _ in range(2)]
    held = [(cache.rows, cache.length) for cache in caches]
    for step in range(3):
        mine, cache = run(model, rand(5) + step, caches[0], chunks=2)
        assert torch.equal(mine, model(rand(5) + step, caches[1])[0])
        assert cache is caches[0]
    assert torch.equal(cache.rows, caches[1].rows)
    assert cache.length == 3
    assert cache.rows is held[0][0]
    assert cache.length is held[0][1]


def test_a_changed_argument_that_is_not_returned():
    """A cache that a model fills and does not return stays empty, with a warning; one that it only reads does not."""

    def model(x, cache, batch_size, nested):
        if cache.layers == []:
            cache.put(0, x)
        return x * 1

    cache, dims = Cache(), BatchDims(None, inspect.signature(model))

    def call(cache):
        split = split_call((rand(4), cache, 4), {"nested": {"cache": [cache], "batch_size": 4, "x": rand(4)}}, 2, dims)
        return merged(split, [model(*args, **kwargs) for args, kwargs in split.calls])

    with pytest.warns(RuntimeWarning, match=r"changes its argument 'cache.layers' and does not return it"):
        call(cache)
    assert cache.layers == []
    cache.put(0, rand(4))
    call(cache)  # nothing is changed


def test_what_is_given_back_is_the_callers():
    """A model that returns an argument returns the caller's tensor."""
    x, table = rand(4, grad=True), rand(3)
    output = run(lambda x, table: (x, table), x, table, chunks=2)
    assert output[0] is x
    assert output[1] is table


def test_one_tensor_twice():
    """A tensor that is passed or returned twice stays one."""

    def model(a, b):
        assert a is b
        y = a + 1
        return y, [y]

    x = rand(4)
    first, (second,) = run(model, x, x, chunks=2)
    assert first is second


@pytest.mark.parametrize("batch_dim", [1, {"x": 1, "output": 1}, {0: 1, "output": 1}])
def test_batch_in_another_dimension(batch_dim):
    """The batch dimension is what the user says, for all or by name or position; what has none stays whole."""
    seen = []

    def model(x, scale):
        seen.append((tuple(x.shape), tuple(scale.shape)))
        return x * scale

    x = rand(3, 5, 2)
    assert torch.equal(run(model, x, rand(2), chunks=2, batch_dim=batch_dim), x * rand(2))
    assert seen == [((3, 3, 2), (2,)), ((3, 2, 2), (2,))]


def test_nested_names():
    """Dotted names reach into arguments and outputs; the longest one counts."""

    def model(x, more):
        assert more["mask"].shape == (4, 4)
        assert more["deep"][0].shape == (2, 3)
        return {"same": more["mask"] * 1, "x": x}

    more = {"mask": rand(4, 4), "deep": [rand(4, 3)]}
    batch_dim = {"more": 0, "more.mask": None, "output.same": None}
    output = run(model, rand(4), chunks=2, batch_dim=batch_dim, more=more)
    assert torch.equal(output["same"], more["mask"])


def test_lists_are_cut_if_named():
    """Lists go whole to each micro-batch, unless they are named as lists with one item for each sample."""

    def model(x, names, images=None):
        return [f"{name}{len(names)}" for name in names], x

    names = list("abcde")
    by_items = {"names": "items", "images": "items", "output.0": "items"}
    output, _ = run(model, rand(5), names, chunks=2, batch_dim=by_items, images=[rand(3, k) for k in range(5)])
    assert output == ["a3", "b3", "c3", "d2", "e2"]
    output, _ = run(model, rand(5), names, chunks=2, batch_dim={"names": None})
    assert output == ["a5", "b5", "c5", "d5", "e5"]
    only = split_call((), {"names": names}, 2, {"names": "items"})  # no tensor at all
    assert [named["names"] for _, named in only.calls] == [list("abc"), list("de")]


def test_output_rules():
    """Outputs are added up, or taken from the first micro-batch, where the user says so."""

    def model(x):
        return {"count": len(x), "right": (x > 0).sum(), "flat": x.reshape(-1), "size": x.shape, "odd": x.sum().item()}

    batch_dim = {
        "output.count": "sum",
        "output.right": "sum",
        "output.flat": 0,
        "output.size": 0,
        "output.odd": "first",
    }
    x = rand(5, 3)
    output = run(model, x, chunks=2, batch_dim=batch_dim)
    assert output.pop("odd") == x[:3].sum().item()
    assert plain(output) == plain({k: v for k, v in model(x).items() if k != "odd"})


@pytest.mark.parametrize(("rule", "count"), [("items", 5), ("first", 3)])
def test_lists_of_tensors_with_a_graph(rule, count):
    """They come back, to be looked at: the gradients of single items do not go back into the model."""
    weight = rand(4, grad=True)
    x = rand(5, 4)
    batch_dim = {"output.list": rule}
    output = run(
        lambda x: {"list": {"of": [*(x * weight)]} if rule == "first" else [*(x * weight)]},
        x,
        chunks=2,
        batch_dim=batch_dim,
    )
    items = output["list"]["of"] if rule == "first" else output["list"]
    torch.testing.assert_close(torch.stack(items), (x * weight)[:count])
    with pytest.raises(RuntimeError, match=r"a tensor in 'output\.list', which batch_dim says is"):
        items[0].sum().backward()


def test_one_micro_batch():
    """One micro-batch returns what the model does, of whatever kind; without a batch, there is one."""
    assert run(lambda n: torch.arange(n), 3, chunks=1).tolist() == [0, 1, 2]
    assert run(lambda x: (x.sum(), x.T, len(x)), rand(4, 2), chunks=1)[1].shape == (2, 4)
    assert split_call((rand(0, 3),), {}, 4).sizes == [0]
    assert split_call((rand(3, 1),), {}, 8).sizes == [1, 1, 1]


def linear(x, mask=None, *, table=None):
    return x


@pytest.mark.parametrize(
    ("args", "kwargs", "batch_dim", "words"),
    [
        ((), {"n": 3, "scale": torch.tensor(1.0)}, None, ["batch dimension", "n, scale", "chunks: 2"]),
        ((rand(4), rand(3)), {}, {1: 0}, ["'1'", "4 samples", "[3]", "size of '0'", "None"]),
        ((rand(4), ["a"]), {}, {1: "items"}, ["items: 1", "batch size: 4"]),
        ((rand(4), ["a"]), {}, {"1.0": 0}, ["'1.0'", "str", "'items'"]),
        ((rand(4), [rand(2, grad=True)] * 4), {}, {1: "items"}, ["must not require grad"]),
        ((rand(4),), {}, {0: "both"}, ["batch_dim[0]", "'both'"]),
        ((rand(4),), {}, -1, ["batch_dim", "-1"]),
        ((rand(4),), {}, True, ["batch_dim", "True"]),
        ((rand(4),), {}, {0: "sum"}, ["batch_dim[0]", "'sum'", "an argument"]),
    ],
)
def test_calls_that_are_refused(args, kwargs, batch_dim, words):
    """Errors name the argument, the sizes and the fix."""
    with pytest.raises(ValueError, match=r"must|no tensor") as error:
        split_call(args, kwargs, 2, batch_dim)
    assert all(word in str(error.value) for word in words), error.value


def test_one_tensor_cut_in_two_ways():
    """A tensor that is passed twice cannot be cut in two ways."""
    x = rand(4, 4)
    with pytest.raises(ValueError, match=r"'x' and 'y' are one tensor.*y.clone"):
        split_call((), {"x": x, "y": x}, 2, {"y": None})


def test_unknown_names():
    """A name in ``batch_dim`` that forward does not have is refused, or, where it takes any, warned of."""
    with pytest.raises(ValueError, match=r"'maks'.*mask, table, x"):
        BatchDims({"maks": 0}, inspect.signature(linear))
    BatchDims({"mask": None, "output.logits": 1}, inspect.signature(linear))  # not passed: fine
    dims = BatchDims({"maks": 0, "mask.deep": 1}, inspect.signature(lambda x, mask=None, **more: x))
    with pytest.warns(RuntimeWarning, match=r"'maks'.*x"):
        split_call((rand(4),), {}, 2, dims)
    with pytest.warns(RuntimeWarning, match=r"'mask.deep'"):
        split_call((rand(4),), {"mask": {"other": rand(4)}}, 2, dims)
    split_call((rand(4),), {}, 2, dims)  # once


def test_a_guess_that_changes():
    """A tensor that has the size of the batch by accident is noticed at the first batch of another size."""
    dims = BatchDims(None, inspect.signature(linear))
    assert split_call((rand(4, 2),), {"table": rand(4, 3)}, 2, dims).calls[0][1]["table"].shape == (2, 3)
    with pytest.warns(RuntimeWarning, match=r"'table'.*had 4 .*\[4, 3\].*had 6.*batch_dim=\{'table': None\}"):
        split_call((rand(6, 2),), {"table": rand(4, 3)}, 2, dims)
    assert split_call((rand(4, 2),), {"table": rand(4, 3)}, 2, dims).calls[0][1]["table"].shape == (4, 3)
    split_call((rand(4, 2),), {"mask": rand(1, 3)}, 2, dims)  # of size 1: broadcast, whatever it is in other calls
    split_call((rand(4, 2),), {"mask": rand(4, 3)}, 2, dims)
    said = BatchDims({"table": None}, inspect.signature(linear))
    for n in (4, 6):
        assert split_call((rand(n, 2),), {"table": rand(4, 3)}, 2, said).calls[0][1]["table"].shape == (4, 3)


def test_an_output_that_changes():
    """So it is with outputs."""
    dims = BatchDims()
    for n, warns in ((8, False), (6, True)):
        call = split_call((rand(n),), {}, 2, dims)
        with pytest.warns(RuntimeWarning, match=r"'output.1'.*had 8.*had 6") if warns else pytest.MonkeyPatch.context():
            merged(call, [(args[0], rand(4)) for args, _ in call.calls])


@pytest.mark.parametrize(
    ("outputs", "batch_dim", "words"),
    [
        ([{"y": rand(3, 3)}, {"y": rand(3, 2)}], None, ["'output.y'", "[3, 3] of 3 samples, [3, 2] of 2", "'first'"]),
        ([{"y": rand(3, 3)}, {"y": rand(2, 2)}], None, ["'output.y'", "same shape", "pad"]),
        ([{"y": rand(3)}, {"z": rand(2)}], None, ["same structure", "'output.y'", "'output.z'"]),
        ([[rand(3), 1], [rand(2)]], None, ["list of 2", "list of 1", "'items'"]),
        ([rand(3).sum() > 0, rand(3).sum() <= 0], None, ["'output'", "depends on the micro-batch"]),
        ([rand(3), rand(2)], {"output": 1}, ["must have a dimension 1", "[2] of 2 samples"]),
        ([rand(3, 4), rand(4, 4)], None, ["batch_dim={'output': 0}"]),
        ([3, 2], None, ["'output'", "is 3, 2", "'sum'"]),
        ([torch.Size([3, 1]), torch.Size([2, 1])], None, ["torch.Size", "[3, 1], [2, 1]"]),
        ([torch.distributions.Normal(0, 1), torch.distributions.Normal(0, 1)], None, ["'output'", "Normal"]),
        ([["a"] * 3, ["a"] * 3], {"output": "items"}, ["items by micro-batch: [3, 3], samples: [3, 2]"]),
    ],
)
def test_outputs_that_are_refused(outputs, batch_dim, words):
    """What cannot be put together is refused, with the name of the field, its sizes and the fix."""
    call = split_call((rand(5),), {}, 2, batch_dim)
    with pytest.raises(ValueError, match=r"must|depends|may") as error:
        merged(call, outputs)
    assert all(word in str(error.value) for word in words), error.value


def test_outputs_packed_without_padding():
    """What is named is put together with any number of rows for each sample, and so is its gradient."""
    call = split_call((rand(5),), {}, 2, {"output": 0})
    torch.testing.assert_close(merged(call, [rand(7, 2), rand(4, 2)]), torch.cat([rand(7, 2), rand(4, 2)]))


def test_samples_that_are_scored_against_each_other():
    """Scores of all pairs of samples, by rows and by columns, lack those of samples in different micro-batches."""
    dims = BatchDims()
    call = split_call((rand(4, 3),), {}, 2, dims)
    scores = [args[0] @ (args[0] + 1).T for args, _ in call.calls]
    with pytest.warns(RuntimeWarning, match=r"'output.0' and 'output.1' score.*against each other"):
        merged(call, [(one, one.T) for one in scores], lambda *losses: Weights([]))
    call = split_call((rand(4, 3),), {}, 2, dims)
    merged(call, [(one, one + 1) for one in scores], lambda *losses: Weights([]))  # as many classes as samples
    call = split_call((rand(4, 3),), {}, 2)
    merged(call, [(one, one.T) for one in scores])  # by samples, as the user says


def test_packed_sequences_are_refused():
    """The samples of a PackedSequence are woven into each other."""
    packed = nn.utils.rnn.pack_sequence([rand(3), rand(2)])
    with pytest.raises(TypeError, match=r"PackedSequence.*padded"):
        split_call((packed,), {}, 2)


def test_weights_of_losses():
    """Losses are added with the weights that are given; one of weight 0 does not count, even if it is NaN."""
    call = split_call((rand(5),), {}, 2)
    losses = [torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(float("nan"), dtype=torch.bfloat16)]
    flats = [flatten_output({"loss": loss}, call.dims) for loss in losses]
    merge = Merge(flats, call, lambda name, parts, sizes: Weights([0.5, 0.0]))
    assert merge.join(0, losses) == 1
    assert merge.join(0, losses).dtype == torch.bfloat16
    assert merge.split_gradient(0, torch.tensor(4.0)) == [2.0, None]


def test_cycles():
    """Objects may refer to each other."""
    parent = types.SimpleNamespace(x=rand(4))
    parent.child = types.SimpleNamespace(parent=parent)
    found = run(lambda tree: types.SimpleNamespace(y=tree.x * 2, tree=tree), parent, chunks=2)
    assert found.tree is parent
    call = split_call((parent,), {}, 2)
    mine = call.calls[1][0][0]
    assert mine.child.parent is mine
    assert mine.x.shape == (2,)
