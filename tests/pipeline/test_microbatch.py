"""A mini-batch is cut as torch.chunk cuts, and put together to what it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipesight import GPipe
from pipesight.pipeline.microbatch import as_tuple, gather, scatter
from support.against_plain import Fn, rand

rows = st.integers(0, 30)
chunks = st.integers(1, 12)


@given(rows, chunks, st.integers(1, 3))
def test_cut_and_put_together(n, m, tensors):
    """Gathering what was scattered gives the mini-batch back, for any sizes and number of tensors."""
    batch = tuple(rand(n, *range(2, 2 + k)) for k in range(tensors))
    parts = scatter(batch, m)
    assert all(len(part) == tensors for part in parts)
    for whole, gathered in zip(batch, gather(parts), strict=True):
        assert torch.equal(whole, gathered)


@given(st.integers(1, 30), chunks)
def test_cut_as_chunk_does(n, m):
    """Micro-batches are those of torch.chunk: at most as many as asked for, none empty, the last one smallest."""
    sizes = [part[0].size(0) for part in scatter((torch.arange(n),), m)]
    assert sizes == [t.size(0) for t in torch.arange(n).chunk(m)]
    assert len(sizes) <= min(m, n)
    assert min(sizes) == sizes[-1] > 0
    assert sum(sizes) == n


@given(chunks)
def test_empty_batch(m):
    """An empty mini-batch is one empty micro-batch."""
    parts = scatter((rand(0, 3), rand(0)), m)
    assert [[tuple(t.shape) for t in part] for part in parts] == [[(0, 3), (0,)]]


@settings(deadline=None, max_examples=30)
@given(rows, chunks)
def test_the_pipeline_cuts_so(n, m):
    """Layers see these very micro-batches, in this order."""
    seen = []
    pipe = GPipe(nn.Sequential(Fn(lambda _, x: (seen.append(x.clone()), x)[1])), [1], chunks=m)
    with torch.no_grad():
        pipe(rand(n, 3))
    expected = rand(n, 3).chunk(m) if n else [rand(0, 3)]
    assert len(seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_micro_batches_share_memory():
    """Cutting copies nothing."""
    whole = rand(6, 3)
    assert all(
        part[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in scatter((whole,), 4)
    )


def test_a_lone_output_is_not_copied():
    """With one micro-batch there is nothing to put together, so its output is handed on, without its graph."""
    output = rand(4, 3, grad=True) * 2
    (gathered,) = gather([[output]])
    assert gathered.data_ptr() == output.data_ptr()
    assert not gathered.requires_grad


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_outputs_of_other_sizes(sizes):
    """Outputs may have other numbers of rows than inputs, also none."""
    parts = [(rand(n, 2), torch.arange(n)) for n in sizes]
    assert [t.size(0) for t in gather(parts)] == [sum(sizes)] * 2


def test_tensor_or_tuple():
    """A tensor is a tuple of one; anything else is an error that says what it was."""
    x = rand(2, 3)
    assert as_tuple(x, "input")[0] is x
    assert as_tuple((x, x), "input") == (x, x)
    with pytest.raises(TypeError, match="the label must be a Tensor or a tuple of Tensors, but got str"):
        as_tuple("x", "the label")
    with pytest.raises(TypeError, match="item 1 of the tuple is list"):
        as_tuple((x, [x]), "input")
