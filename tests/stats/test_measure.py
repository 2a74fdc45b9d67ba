"""A tensor of any kind is measured right, against float64, or refused with a reason."""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import os
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from pipesight.stats.config.rules import StatisticRequest
from pipesight.stats.moments import Moments, _rows, cpu_moments
from pipesight.stats.moments.cpu_moments import measure, measure_on_device
from pipesight.stats.moments.quantity import combine, quantity
from pipesight.stats.moments.statistic_formulas import STATISTICS
from support import warm
from support.ways import WAYS, measured, way

SIX = ("min", "max", "mean", "std", "l1_norm", "l2_norm")
N = 1 << 20


def reference(x: torch.Tensor) -> dict[str, float]:
    """The statistics in float64, and longer floats where sums are long."""
    d = x.detach().to(torch.float64).numpy().reshape(-1)
    d = d[np.isfinite(d)]
    mean = d.mean(dtype=np.longdouble)
    return {
        "min": float(d.min()),
        "max": float(d.max()),
        "mean": float(mean),
        "std": float(np.sqrt(np.square(d - mean).sum() / (d.size - 1))),
        "l1_norm": float(np.abs(d).sum(dtype=np.longdouble)),
        "l2_norm": float(np.sqrt(np.square(d.astype(np.longdouble)).sum())),
    }


def assert_right(x: torch.Tensor, moments: Moments | None = None, rel: float = 1e-6) -> None:
    """All six are right to 1e-6, in every way, and so are the counts and the least magnitude."""
    d = x.detach().to(torch.float64)
    finite = d[d.isfinite()]
    nonzero = finite[finite != 0].abs()
    least = nonzero.min().item() if nonzero.numel() else math.inf
    counts = (finite.numel(), d.isnan().sum().item(), d.isinf().sum().item(), finite.numel() - nonzero.numel())
    expected = reference(x)
    for found in measured(x) if moments is None else [moments]:
        assert (found.count, found.nans, found.infs, found.zeros, found.smallest) == (*counts, least)
        for name in SIX:
            assert STATISTICS[name].formula(found) == pytest.approx(expected[name], rel=rel, abs=0), name


def normal(n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


HARD = {
    "normal": lambda: normal(),
    "constant": lambda: torch.full((N,), 0.1),
    "nearly constant": lambda: torch.full((N,), 0.1).index_fill_(0, torch.tensor([N // 3]), 0.2),
    "plus and minus": lambda: torch.where(normal() > 0, 0.1, -0.1),
    "mostly minus": lambda: torch.where(normal() > 2, 0.7, -0.7),
    "mean 2": lambda: normal() + 2,
    "mean 1e6": lambda: normal() + 1e6,
    "two neighbours": lambda: torch.where(normal() > 0, 1e6, 1e6 + 0.0625),
    "outlier first": lambda: normal().index_fill_(0, torch.tensor([0]), 1e6),
    "outlier last": lambda: normal().index_fill_(0, torch.tensor([N - 1]), -1e9),
    "1e25": lambda: normal() * 1e25,
    "1e-25": lambda: normal() * 1e-25,
    "1e25 and 1e-25": lambda: torch.where(normal() > 0, 1e25, 1e-25) * normal(),
    "1e25 then 1e-25": lambda: torch.cat([normal() * 1e25, normal() * 1e-25]),
    "subnormal": lambda: normal() * 1e-42,
    "near the greatest": lambda: normal().clamp(-1, 1) * 3e38,
    "sorted": lambda: (normal() + 0.5).sort().values,
    "sorted about 0": lambda: normal().sort().values,
    "steps": lambda: normal() + torch.arange(8).repeat_interleave(N // 8) * 1000,
    "exponential": lambda: (3 * normal()).exp(),
    "relu": lambda: normal().relu(),
    "nans and infs": lambda: torch.where(normal() > 3, math.nan, normal()).index_fill_(0, torch.tensor([5]), -math.inf),
    "every second far": lambda: torch.tensor([0.0, 1e4]).repeat(N // 2) + normal(),
}


@pytest.mark.parametrize("kind", HARD)
def test_float32(kind, monkeypatch):
    """Relative error is at most 1e-6, however the numbers lie."""
    monkeypatch.setattr(_rows, "CHUNK", 1 << 15)  # many chunks and several blocks
    monkeypatch.setattr(_rows, "BLOCK", 1 << 18)
    x = HARD[kind]()
    assert_right(x)
    assert_right(x[:-77])


@pytest.mark.parametrize("kind", HARD)
def test_float64(kind):
    """float64 is right to 1e-12."""
    assert_right(HARD[kind]().double(), rel=1e-12)


@pytest.mark.parametrize("kind", ["normal", "constant", "mean 2", "nans and infs", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_floats(kind, dtype):
    """Narrow floats are measured in wide ones: no sum beyond 65504 is lost, no value is rounded back."""
    x = (HARD[kind]() * 100).to(dtype)
    assert_right(x)
    assert_right(x[:1000])


SIGNS = {
    "both": lambda x: x,
    "positive": lambda x: x.abs() + 1,
    "negative": lambda x: -x.abs() - 1,
    "no negative": lambda x: x.relu(),
    "no positive": lambda x: -x.relu(),
    "a negative zero": lambda x: x.relu().index_fill_(0, torch.tensor([7]), -0.0),
    "subnormal": lambda x: (x * 1e-7).index_fill_(0, torch.tensor([7]), 1.0),
    "infinity": lambda x: x.abs().index_fill_(0, torch.tensor([7]), math.inf),
    "minus infinity": lambda x: -x.abs().index_fill_(0, torch.tensor([7]), math.inf),
    "NaN": lambda x: x.index_fill_(0, torch.tensor([7]), math.nan),
    "minus NaN": lambda x: (-x.abs()).index_fill_(0, torch.tensor([7]), math.nan).neg(),
}


@pytest.mark.parametrize("kind", SIGNS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ends_of_short_floats(kind, dtype, threads, monkeypatch):
    """The least and the greatest of short floats are found by their bits on one thread, whatever their signs."""
    monkeypatch.setattr(_rows, "CHUNK", 1 << 15)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = SIGNS[kind](normal(100_000)).to(dtype)
        assert_right(x)
        assert_right(x[:-77])
        assert_right(x.view(torch.int16).bitwise_xor(-(1 << 15)).view(dtype))  # the other sign, of a NaN too
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("n", [255, 32_768, 40_960, (1 << 21) + 300])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_only_one_infinity(value, n, dtype):
    """A tensor that overflowed everywhere has no finite element, and neither has a chunk of one; nothing warns."""
    x = torch.full((n,), value).to(dtype)
    assert measure_on_device(x) == Moments(infs=n)
    assert all(moments == Moments(infs=n) for moments in measured(x))
    assert measure(x.expand(3, n)) == Moments(infs=3 * n)
    assert_right(torch.cat([x, normal(300).to(dtype), x]))


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")])
@pytest.mark.parametrize("times", [1, 1000])
def test_every_float8(dtype, times):
    """Every one of the 256 numbers of a float8 counts as what it is."""
    x = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(times)
    assert_right(x.float(), measure(x))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no float4")
def test_float4():
    """A byte of two float4 numbers counts as two."""
    moments = measure(torch.arange(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert (moments.count, moments.zeros, moments.min, moments.max) == (512, 64, -6, 6)
    assert (moments.l1, moments.smallest) == (2 * 16 * 2 * 18.0, 0.5)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))],
)
def test_integers(dtype):
    """Integers are measured as the real numbers they are."""
    for n in (1000, 100_000):
        assert_right((normal(n).abs() * 50).to(dtype), rel=1e-7)


def test_integers_beyond_float64():
    """Integers beyond 2**53 are rounded to float64, no further."""
    x = torch.tensor([2**62 + 1, -(2**60), 3])
    assert (measure(x).min, measure(x).max) == (-(2.0**60), 2.0**62)
    assert measure(x).mean == pytest.approx((2**62 - 2**60 + 4) / 3, rel=1e-15)


def test_64m_elements():
    """Norms of 64M elements are as right as those of few."""
    x = normal().repeat(64)
    expected, moments = reference(x[:N]), measure(x, smallest=False)
    assert moments.count == 64 * N
    assert moments.l1 == pytest.approx(64 * expected["l1_norm"], rel=1e-6)
    assert STATISTICS["l2_norm"].formula(moments) == pytest.approx(8 * expected["l2_norm"], rel=1e-6)


def test_float64_beyond_squares():
    """Where the squares leave float64's range, std and l2 are unknown, not wrong; the rest is right."""
    for scale in (1e200, 1e-200):
        x = normal(100).double() * scale
        moments = measure(x)
        assert math.isnan(STATISTICS["std"].formula(moments))
        assert math.isnan(STATISTICS["l2_norm"].formula(moments))
        assert moments.mean == pytest.approx(x.mean().item(), rel=1e-12)
        assert moments.l1 == pytest.approx(x.abs().sum().item(), rel=1e-12)


@pytest.mark.parametrize("n", [1000, 100_000])
def test_powers(n):
    """The third and fourth powers are right to 1e-12, and only there when asked for."""
    x = normal(n).exp()
    d = x.double() - x.double().mean()
    for moments in measured(x, powers=True):
        assert moments.m3 == pytest.approx(d.pow(3).sum().item(), rel=1e-11)
        assert moments.m4 == pytest.approx(d.pow(4).sum().item(), rel=1e-11)
    assert all(math.isnan(moments.m4) for moments in measured(x))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("n", [1000, 300_000])
def test_without_smallest(n, how):
    """Zeros and the least magnitude are unknown unless asked for; nothing else changes."""
    with way(how):
        with_it, without = measure(normal(n)), measure(normal(n), smallest=False)
    assert math.isnan(without.zeros)
    assert math.isnan(without.smallest)
    assert without.row()[4:9] == with_it.row()[4:9]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1000, 300_000, 3_000_001])
def test_without_magnitudes(n, dtype, how):
    """The sum of magnitudes is unknown unless asked for; nothing else changes, in extremes neither."""
    for x in (normal(n).to(dtype), normal(n).mul(1e30).to(dtype), normal(n).index_fill(0, torch.tensor([7]), math.inf)):
        with way(how):
            with_it, without = measure(x), measure(x, magnitudes=False)
        assert math.isnan(without.l1)
        assert without.row()[:8] + without.row()[9:10] == with_it.row()[:8] + with_it.row()[9:10]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stats", [["min", "max", "mean", "std", "l2_norm"], ["l1_norm"], ["zeros%"], ["kurtosis"]])
def test_only_what_is_asked_for_is_measured(stats, how):
    """What a configuration does not ask for takes no pass over the tensor."""
    (source,) = combine([quantity(StatisticRequest(name), "activation") for name in stats])
    with way(how):
        moments = source.measure(normal(100_000))
    assert math.isnan(moments.l1) == ("l1_norm" not in stats)
    assert math.isnan(moments.zeros) == ("zeros%" not in stats)
    assert math.isnan(moments.m4) == ("kurtosis" not in stats)


BASE = normal(600 * 500).view(600, 500)
STRIDED = {
    "0-d": BASE[0, 0],
    "transposed": BASE.t(),
    "permuted": BASE.view(60, 10, 500).permute(2, 0, 1),
    "channels last": BASE.view(10, 60, 25, 20).contiguous(memory_format=torch.channels_last),
    "sliced": BASE[:, 3:400:2],
    "large and sliced": normal(3 << 20).view(3, 1 << 20)[:, ::2],
    "overlapping": BASE.unfold(1, 5, 2),
    "one repeated": BASE[0, 0].expand(70, 80),
    "transposed, small": BASE[:20, :30].t(),
    "negated view": torch.view_as_complex(BASE.view(600, 250, 2)).conj().imag,
    "negated view, small": torch.view_as_complex(BASE.view(600, 250, 2)).conj().imag[:5],
    "shifted": BASE.view(-1)[1:],
}


@pytest.mark.parametrize("kind", [kind for kind in STRIDED if kind not in ("0-d", "one repeated")])
def test_strided(kind):
    """How elements lie in memory does not matter."""
    assert_right(STRIDED[kind])


def test_single():
    """A tensor of one element has no deviation."""
    moments = measure(STRIDED["0-d"])
    assert moments.min == moments.max == moments.mean == BASE[0, 0].item()
    assert math.isnan(STATISTICS["std"].formula(moments))
    assert measure(torch.empty(0, 3)) == Moments.EMPTY


@pytest.mark.parametrize("x", [BASE[:, None].expand(600, 7, 500), BASE[:9, None].expand(9, 7, 500)])
def test_expanded(x):
    """Elements that are repeated without being stored count as elements."""
    assert_right(x)


def test_expanded_beyond_memory():
    """Counts are exact where there are more elements than memory."""
    assert measure(torch.ones(1, 3).expand(2**40, 3)).count == 3 * 2**40


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:Sparse invariant", "ignore:.*quantize:UserWarning", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse(1),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((5, 10)),
        lambda x: x.to_mkldnn(),
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 0, 3], [1, 1, 2]]), torch.tensor([1.0, -1.5, 3.0]), (9, 9)),
        lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
        lambda x: torch.quantize_per_channel(x, torch.rand(600) + 0.1, torch.zeros(600), 0, torch.qint8),
    ],
    ids=["coo", "hybrid", "csr", "csc", "bsr", "mkldnn", "uncoalesced", "quantized", "per channel"],
)
def test_layouts(make):
    """What a layout does not store counts as the number it stands for."""
    x = make(BASE.relu())
    dense = x.dequantize() if x.is_quantized else x.to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moments = measure(x)
    assert_right(dense, moments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested():
    """The padding of nested tensors does not count."""
    parts = [BASE[:3], BASE[3:10], BASE[10:11]]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    narrow = torch.nested.narrow(BASE, 1, torch.zeros(600).long(), torch.arange(600) % 500, layout=torch.jagged)
    assert_right(BASE[:11], measure(jagged))
    assert_right(BASE[:11], measure(jagged.clone().requires_grad_()))
    assert_right(BASE[:11], measure(torch.nested.nested_tensor(parts)))
    assert_right(torch.cat([row[: i % 500] for i, row in enumerate(BASE)]), measure(narrow))


class Token:
    """Lives as long as the graph that it was put in."""


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.parametrize("n", [1000, 100_000, 100_001])
def test_graph(n):
    """A tensor of a graph is measured; neither it nor its graph stays alive, and it is not changed."""
    parameter, token = nn.Parameter(normal(n)), Token()
    x = Double.apply(parameter, token)
    before, version = x.detach().clone(), x._version
    assert_right(x, measure(x))
    assert torch.equal(x, before)
    assert x._version == version
    assert x.requires_grad
    graph = weakref.ref(token)
    del x, token
    gc.collect()
    assert graph() is None
    assert_right(parameter)


def test_modes():
    """Inference mode, autocast, default dtypes and devices change nothing, now or for later calls."""
    with torch.inference_mode():
        made = normal(70_000)
        assert_right(made, measure(made))
    assert_right(made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_right(made)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        moments = [measure(made), measure(made[:100])]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert_right(made, moments[0])
    assert_right(made[:100], moments[1])


def test_numba_that_does_not_work(monkeypatch):
    """One warning says that numba cannot be used; the numbers are right."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "pipesight.stats.moments._compiled", None)
    monkeypatch.setattr(cpu_moments, "_kernel", functools.cache(cpu_moments._kernel.__wrapped__))
    monkeypatch.setattr(cpu_moments, "FEW_THREADS", 1 << 10)
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    x = normal(100_000)
    with pytest.warns(RuntimeWarning, match="do without numba, which takes longer: ModuleNotFoundError") as caught:
        moments = [measure(x), measure(x)]
    assert len(caught) == 1
    assert_right(x, moments[0])
    assert moments[0].row()[:10] == moments[1].row()[:10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flushed_subnormals(dtype):
    """Subnormal numbers are zeros in every way where the program has them flushed."""
    x = (normal(100_000) * 1e-42).index_fill_(0, torch.tensor([7]), 0.5).to(dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    try:
        found = [(m.zeros, m.smallest, m.l1, m.max) for m in measured(x)]
    finally:
        torch.set_flush_denormal(False)
    assert found == [(99_999, 0.5, 0.5, 0.5)] * len(WAYS)


NUMBA = """
import sys
import torch
from pipesight.stats import measure

measure(torch.randn(100))
print("numba" in sys.modules)
measure(torch.randn(100_000))
print("numba" in sys.modules)
"""


@pytest.mark.skipif("numba" not in WAYS, reason="needs numba")
@pytest.mark.parametrize(("disabled", "loaded"), [("0", "False\nTrue\n"), ("1", "False\nFalse\n")])
def test_numba_is_imported_for_large_tensors(disabled, loaded):
    """Only a large tensor imports numba, and none where its own switch turns it off."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NUMBA], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (loaded, 0), done.stderr


def test_random_state():
    """Measuring takes no random numbers."""
    before = torch.get_rng_state()
    measure(normal(1 << 22))
    assert torch.equal(torch.get_rng_state(), before)


def test_subclasses():
    """A subclass is measured as the tensor it is, a masked tensor where its mask says so."""

    class Mine(torch.Tensor):
        pass

    assert_right(BASE, measure(BASE.as_subclass(Mine)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(BASE, BASE > 0)
    assert_right(BASE[BASE > 0], measure(masked))


@pytest.mark.parametrize("how", WAYS)
def test_threads(how):
    """Threads measure at once without seeing each other's buffers."""
    with way(how):
        measure_in_threads()


def measure_in_threads():
    xs = [normal(200_000) * 10**i + i for i in range(4)]
    expected = [measure(x).row()[:10] for x in xs]
    wrong = []

    def work(i):
        wrong.extend(i for _ in range(20) if measure(xs[i]).row()[:10] != expected[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["normal", "mean 1e6", "nans and infs", "1e25 and 1e-25", "relu"])
def test_any_device(kind):
    """The operations for other devices give what those for the CPU give."""
    with way("numpy"):
        assert_right(HARD[kind](), measure_on_device(HARD[kind]()))


def lazy():
    return nn.LazyLinear(3).weight


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(BASE)


def freed():
    x = torch.randn(10)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.zeros(3, dtype=torch.complex64), TypeError, r"x.abs\(\).*torch.view_as_real\(x\)"),
        (lambda: torch.zeros(3, device="meta"), TypeError, "a meta tensor has no values"),
        (fake, TypeError, "a fake tensor has no values"),
        (lazy, TypeError, "a lazy parameter has no values"),
        (freed, ValueError, "storage of this tensor has been freed"),
        (lambda: [1.0, 2.0], TypeError, r"got list\); pass torch.as_tensor\(x\)"),
    ],
    ids=["complex", "meta", "fake", "lazy", "freed", "list"],
)
def test_refused(make, error, message):
    """What holds no real numbers is refused with a reason."""
    with pytest.raises(error, match=message):
        measure(make())


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_inside_of_a_transform(transform):
    """A tensor inside of a torch.func transform is refused."""

    def function(x):
        measure(x)
        return x.sum()

    with pytest.raises(TypeError, match=r"inside a torch\.func transform"):
        transform(function)(BASE[0])


RANKS = """
import time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from pipesight.stats.moments.cpu_moments import local_part, measure
from pipesight.stats.moments import Moments, merge_rows

def merged(tensor, ranks=None):
    part = local_part(tensor, ranks)
    row = (measure(part.tensor) if part.counts else Moments.EMPTY).row()[:10]
    rows = [None] * 4
    dist.all_gather_object(rows, row + [0.0, 0.0])
    chosen = range(4) if ranks is None else ranks
    return merge_rows(torch.tensor([[rows[rank]] for rank in chosen], dtype=torch.float64))[0, :10].tolist()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2))
x = torch.arange(35.0).view(5, 7)  # shards of different sizes
expected = measure(x).row()[:10]
for first in (Shard(0), Shard(1), Replicate()):
    for second in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(x, mesh, [first, second]).requires_grad_()
        got = merged(tensor)
        assert all(abs(a - b) < 1e-9 for a, b in zip(got, expected)), (first, second, got)
        assert measure(tensor).count == tensor.to_local().numel()

rows, columns = distribute_tensor(x, mesh, [Replicate(), Shard(1)]), [0, 1] if dist.get_rank() < 2 else [2, 3]
assert merged(rows, columns) == expected  # each half of the ranks has it all, and counts it

partial = DTensor.from_local(x, mesh, [Partial(), Shard(0)])
try:
    measure(partial)  # on one rank or on all: no rank waits for others
except ValueError as error:
    fix = "redistribute(placements=[Replicate(), Shard(dim=0)])"
    assert fix in str(error), error
else:
    raise AssertionError("a partial tensor was measured")
assert merged(eval("partial." + fix))[8] == 2 * 2 * x.sum()
dist.barrier()
time.sleep(0.2)  # torch may abort at exit if a thread of gloo's lets go of a tensor when Python is ending
dist.destroy_process_group()
print("right")
"""


def test_dtensor(tmp_path):
    """Of a DTensor each rank measures its part; merged, every element counts once; a sum not done is refused."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    ranks = warm.torchrun(4, str(script), timeout=150)
    assert [rank.stdout.count("right") for rank in ranks] == [1] * 4, [rank.stderr for rank in ranks]
