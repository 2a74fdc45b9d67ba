"""Moments of parts merge into the moments of the whole."""

from __future__ import annotations

import functools
import math

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pipesight.stats.moments import FIELDS, Moments, merge_rows
from pipesight.stats.moments.cpu_moments import measure

VALUES = st.floats(-1e6, 1e6).filter(lambda value: not 0 < abs(value) < 1e-30) | st.sampled_from(
    [0.0, math.nan, math.inf, -math.inf, 1e6 + 1]
)
ARRAYS = arrays.arrays(np.float64, st.integers(0, 40), elements=VALUES)
whole = functools.partial(measure, powers=True)


def reference(x: np.ndarray) -> Moments:
    """The moments, by sums that do not round."""
    finite = [float(value) for value in x[np.isfinite(x)]]
    n, nans = len(finite), int(np.isnan(x).sum())
    counts = (n, nans, x.size - n - nans)
    if not n:
        return Moments(*counts)
    mean = math.fsum(finite) / n
    powers = [math.fsum((value - mean) ** k for value in finite) for k in (2, 3, 4)]
    sizes = [abs(value) for value in finite]
    return Moments(
        *(*counts, sizes.count(0.0), min(finite), max(finite), mean, powers[0], math.fsum(sizes)),
        *(min((size for size in sizes if size), default=math.inf), powers[1], powers[2]),
    )


def assert_close(got: Moments, expected: Moments, tolerance: float = 1e-12) -> None:
    """Sums are compared beside what was summed: a mean of 0 of large numbers is no worse than their mean."""
    for name in ("count", "nans", "infs", "zeros", "min", "max", "smallest"):
        assert getattr(got, name) == getattr(expected, name), name
    if expected.count:
        size = max(abs(expected.min), abs(expected.max))
        for name, power in (("mean", 1), ("l1", 1), ("m2", 2), ("m3", 3), ("m4", 4)):
            scale = size**power * (1 if name == "mean" else expected.count)
            assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=tolerance * scale), name


@given(ARRAYS)
def test_against_exact_sums(x):
    """Each field is what its definition says, to the last digits."""
    assert_close(whole(torch.from_numpy(x)), reference(x))


@given(ARRAYS, st.lists(st.integers(0, 40), max_size=5))
def test_any_split(x, cuts):
    """RankMerging the parts of any split, empty ones too, equals measuring the whole."""
    parts = np.split(x, sorted(min(cut, x.size) for cut in cuts))
    merged = functools.reduce(Moments.merge, [whole(torch.from_numpy(part)) for part in parts], Moments.EMPTY)
    assert_close(merged, reference(x))


@given(ARRAYS, ARRAYS, ARRAYS)
def test_order_of_merging(x, y, z):
    """Neither the order of the parts nor that of the merges matters."""
    a, b, c = (whole(torch.from_numpy(part)) for part in (x, y, z))
    expected = reference(np.concatenate([x, y, z]))
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b), b.merge(c.merge(a))):
        assert_close(merged, expected)


@given(ARRAYS)
def test_empty_is_neutral(x):
    """RankMerging with nothing changes nothing."""
    moments = whole(torch.from_numpy(x))
    assert moments.merge(Moments.EMPTY) == moments == Moments.EMPTY.merge(moments)


@pytest.mark.slow
@given(st.lists(st.lists(ARRAYS, min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=40)
def test_rows(ranks):
    """RankMerging rows of ranks equals merging them one by one, and rows bring moments back."""
    measured = [[whole(torch.from_numpy(x)) for x in rank] for rank in ranks]
    rows = torch.tensor([[moments.row() for moments in rank] for rank in measured], dtype=torch.float64)
    merged = [Moments.from_row(row) for row in merge_rows(rows).tolist()]
    for got, parts, arrays_ in zip(merged, zip(*measured, strict=True), zip(*ranks, strict=True), strict=True):
        assert_close(got, functools.reduce(Moments.merge, parts))
        assert_close(got, reference(np.concatenate(arrays_)))


def test_pooled_variance():
    """Parts with different means add the distance between them to the variance."""
    x, y = torch.randn(1000, dtype=torch.float64), torch.randn(3000, dtype=torch.float64) + 5
    moments = measure(x).merge(measure(y))
    assert moments.m2 / 3999 == pytest.approx(torch.cat([x, y]).var().item(), rel=1e-12)


def test_fields_not_asked_for():
    """A field that one part does not know is not known of the whole, however they are merged."""
    known, unknown = whole(torch.tensor([1.0, 2.0])), measure(torch.tensor([0.0, 4.0]), smallest=False)
    merged = merge_rows(torch.tensor([[known.row()], [unknown.row()]], dtype=torch.float64))
    for moments in (known.merge(unknown), unknown.merge(known), Moments.from_row(merged[0].tolist())):
        assert (moments.count, moments.mean, moments.l1) == (4, 1.75, 7)
        assert all(math.isnan(getattr(moments, name)) for name in ("zeros", "smallest", "m3", "m4"))


def test_repeated():
    """Elements that are repeated count as often."""
    x = torch.tensor([1.0, 0.0, -3.0, math.nan, math.inf], dtype=torch.float64)
    assert_close(whole(x).repeated(7), reference(x.repeat(7).numpy()))
    assert whole(x).repeated(0) == Moments.EMPTY


def test_equal_parts_stay_equal():
    """However many equal constants are merged, the mean is that constant and the deviation 0."""
    part = measure(torch.full((1000,), 0.1))
    merged = functools.reduce(Moments.merge, [part] * 999)
    assert (merged.mean, merged.m2) == (part.mean, 0.0)


def test_numbers_without_squares():
    """Where no float64 holds the sum of squares it is unknown; the mean is right all the same."""
    tiny = [measure(torch.tensor([value], dtype=torch.float64)) for value in (1e-200, 2e-200)]
    rows = torch.tensor([[moments.row()] for moments in tiny], dtype=torch.float64)
    assert math.isnan(tiny[0].merge(tiny[1]).m2)
    assert math.isnan(Moments.from_row(merge_rows(rows)[0].tolist()).m2)
    assert tiny[0].merge(tiny[1]).mean == pytest.approx(1.5e-200)
    merged = measure(torch.tensor([1e200] * 2, dtype=torch.float64)).merge(Moments(1, min=0, max=0))
    assert math.isnan(merged.m2)
    assert merged.mean == pytest.approx(2e200 / 3)
    extremes = [measure(torch.tensor([sign * 1.7e308], dtype=torch.float64)) for sign in (1, -1)]
    assert extremes[0].merge(extremes[1]).mean == 0


def test_wrong_rows():
    """Rows of another length or dtype are refused with the shape they should have."""
    with pytest.raises(ValueError, match="must have 12 numbers"):
        Moments.from_row([1.0])
    with pytest.raises(ValueError, match=r"float64 \[ranks, n, 12\]"):
        merge_rows(torch.zeros(2, 3, 4))
    assert merge_rows(torch.zeros(0, 2, len(FIELDS), dtype=torch.float64)).tolist() == [Moments.EMPTY.row()] * 2
