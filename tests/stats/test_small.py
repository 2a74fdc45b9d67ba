"""Small tensors that are put aside have the moments that measuring them at once gives."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.moments import Moments
from pipesight.stats.moments.cpu_moments import measure
from pipesight.stats.moments.small_tensor_buffer import MOST, ROOM, SmallRows


def same(found: Moments, tensor: torch.Tensor, **flags: bool) -> bool:
    expected = measure(tensor, **flags)
    size = tensor.double().abs().mean().item()  # what the error of a mean is relative to
    return found.mean == pytest.approx(expected.mean, rel=1e-6, abs=1e-6 * size, nan_ok=True) and (
        replace(found, mean=0).row() == pytest.approx(replace(expected, mean=0).row(), rel=1e-6, abs=1e-12, nan_ok=True)
    )


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.booleans()), max_size=30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
)
def test_many(entries, dtype):
    """Each row is that of its own tensor, whatever lies beside it."""
    torch.manual_seed(len(entries))
    rows, kept = SmallRows(), []
    for size, powers, smallest in entries:
        tensor = (torch.randn(size) * 20).to(dtype)
        kept.append((rows.add(tensor, powers=powers, smallest=smallest), tensor, powers, smallest))
    for row, tensor, powers, smallest in kept:
        assert same(row.moments(), tensor, powers=powers, smallest=smallest)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3000),
            st.sampled_from([0.0, 1.0, 1e3, 1e6, -1e30, 1e-30]),
            st.sampled_from([0.0, 1.0, 1e-3, 1e25]),
            st.sampled_from([None, None, None, float("nan"), float("inf"), -float("inf")]),
        ),
        max_size=12,
    )
)
def test_many_by_segments(entries):
    """Without zeros and powers all are measured together, and odd ones do not disturb others."""
    torch.manual_seed(len(entries))
    rows, kept = SmallRows(), []
    for size, mean, deviation, odd in entries:
        tensor = torch.randn(size) * deviation + mean
        if odd is not None:
            tensor[size // 2] = odd
        kept.append((rows.add(tensor, powers=False, smallest=False), tensor.double()))
    for row, truth in kept:
        moments, finite = row.moments(), truth[truth.isfinite()]
        counts = len(finite), int(truth.isnan().sum()), int(truth.isinf().sum())
        assert (moments.count, moments.nans, moments.infs) == counts
        if len(finite):
            found = moments.min, moments.max, moments.m2, moments.l1
            expected = [finite.min(), finite.max(), finite.var(correction=0) * len(finite), finite.abs().sum()]
            assert found == pytest.approx([*map(float, expected)], rel=1e-6, abs=1e-60)
            assert moments.mean == pytest.approx(float(finite.mean()), rel=1e-6, abs=1e-6 * float(finite.abs().mean()))


def test_changed_afterwards():
    """What counts is the tensor as it was."""
    rows, tensor = SmallRows(), torch.arange(10.0)
    row = rows.add(tensor, powers=False, smallest=True)
    tensor.zero_()
    assert row.moments().mean == 4.5


def test_full():
    """A full buffer is measured, and goes on."""
    rows, size = SmallRows(), MOST
    tensors = [torch.full((size,), float(i)) + torch.arange(size) for i in range(2 * ROOM // size + 3)]
    found = [rows.add(tensor, powers=False, smallest=True) for tensor in tensors]
    assert all(same(row.moments(), tensor) for row, tensor in zip(found, tensors, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.zeros(MOST + 1), torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta")],
    ids=["empty", "large", "float64", "meta"],
)
def test_not_small(tensor):
    """What is not small, or holds what float32 does not, is left to others."""
    assert SmallRows().add(tensor, powers=False, smallest=True) is None


def test_layouts_and_graphs():
    """Views are copied as they are seen; no graph is kept."""
    rows = SmallRows()
    x = torch.randn(20, 30, requires_grad=True)
    views = [x.t(), x[:, ::3], x[1:, 1:], x.sin()]
    found = [rows.add(view, powers=False, smallest=True) for view in views]
    assert all(same(row.moments(), view) for row, view in zip(found, views, strict=True))
    assert not rows._buffer.requires_grad


def test_not_finite():
    """NaN and infinities are counted, beside others that have none."""
    rows = SmallRows()
    tensors = [torch.ones(3), torch.tensor([torch.nan, 2.0, torch.inf]), torch.tensor([1e38, -1e38])]
    found = [rows.add(tensor, powers=False, smallest=True).moments() for tensor in tensors]
    assert [(m.nans, m.infs) for m in found] == [(0, 0), (1, 1), (0, 0)]
    assert all(same(m, tensor) for m, tensor in zip(found, tensors, strict=True))


def test_threads():
    """Threads add at once, and each gets its own."""
    rows, wrong = SmallRows(), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            tensor = torch.randn(700, generator=generator)
            row = rows.add(tensor, powers=False, smallest=False)
            if seed % 2 and not same(row.moments(), tensor, smallest=False):
                wrong.append(tensor)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_negated_views(dtype):
    """A view that torch negates when it is read is negated."""
    x = torch._neg_view(torch.arange(1.0, 6.0).to(dtype))
    row = SmallRows().add(x, powers=False, smallest=True)
    assert (row.moments() if row else measure(x)).mean == -3
