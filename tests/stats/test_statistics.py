"""Each statistic is what its formula says, against float64 and against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

from pipesight.stats.moments import FIELDS, Moments
from pipesight.stats.moments.cpu_moments import measure
from pipesight.stats.moments.statistic_formulas import STATISTICS, needs


def compute(name: str, x: torch.Tensor) -> float:
    """The statistic, from no more than it says it needs."""
    return STATISTICS[name].formula(measure(x, **needs([name])))


X = torch.cat([torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3 + 1, torch.zeros(50)])
D = X.double()
EXPECTED = {
    "min": D.min(),
    "max": D.max(),
    "mean": D.mean(),
    "std": D.std(),
    "l1_norm": D.abs().sum(),
    "l2_norm": D.square().sum().sqrt(),
    "rms": D.square().mean().sqrt(),
    "amax": D.abs().max(),
    "cur_amax": D.abs().max(),
    "dynamic_range": D.abs().max().log2() - D[D != 0].abs().min().log2(),
    "zeros%": 100 * (D == 0).double().mean(),
    "nans": 0,
    "infs": 0,
    "numel": 5050,
    "kurtosis": (D - D.mean()).pow(4).mean() / (D - D.mean()).square().mean() ** 2,
}


def test_names():
    """Every statistic is tested here."""
    assert set(STATISTICS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_value(name):
    """The value is a plain float and right to 1e-12."""
    value = compute(name, X)
    assert type(value) is float
    assert value == pytest.approx(float(EXPECTED[name]), rel=1e-12)


@pytest.mark.parametrize("name", EXPECTED)
def test_nonfinite_elements(name):
    """NaNs and infinities are counted, and left out of everything else."""
    bad = torch.cat([X, torch.tensor([math.nan, math.inf, -math.inf])])
    expected = {"nans": 1, "infs": 2, "numel": 5053}.get(name, EXPECTED[name])
    assert compute(name, bad) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("x", [torch.empty(0), torch.full((3,), math.nan)], ids=["empty", "nan"])
def test_no_finite_element(name, x):
    """Without a finite element all but the counts are NaN."""
    expected = {"nans": float(x.numel()), "infs": 0.0, "numel": float(x.numel())}.get(name, math.nan)
    assert compute(name, x) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("x", "undefined"),
    [(torch.tensor(2.0), {"std", "kurtosis"}), (torch.zeros(4), {"kurtosis", "dynamic_range"})],
    ids=["one element", "zeros"],
)
def test_undefined(x, undefined):
    """What one element or zeros leave undefined is NaN, as in PyTorch; the rest is a number."""
    assert {name for name in STATISTICS if math.isnan(compute(name, x))} == undefined


@pytest.mark.parametrize("name", EXPECTED)
def test_says_what_it_needs(name):
    """A formula reads only the fields it names, and says in words what it computes."""
    statistic = STATISTICS[name]
    moments = measure(X, powers=True)
    row = [value if field in statistic.fields else math.nan for field, value in zip(FIELDS, moments.row(), strict=True)]
    assert statistic.formula(Moments.from_row(row)) == statistic.formula(moments)
    assert statistic.doc.endswith(".")


def test_normal_kurtosis():
    """Kurtosis is 3 for a normal distribution: it is not the excess."""
    assert compute("kurtosis", torch.randn(100_000, generator=torch.Generator().manual_seed(0))) == pytest.approx(
        3, 0.05
    )
