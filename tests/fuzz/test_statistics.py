"""Statistics of random tensors, against numbers decoded from their bytes and summed in long floats.

A tensor is made of runs (constants, noise, infinities, NaN, zeros, subnormal and huge numbers), of any dtype, behind
any view. The reference takes it apart byte by byte; it shares nothing with what is tested but torch's views.
"""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import account, fuzz
from pipesight.stats.moments import Moments, _exact, _rows, cpu_moments, merge_rows
from pipesight.stats.moments.blockwise_range import max_blockwise_dynamic_range, measure_blockwise
from pipesight.stats.moments.casting import measure_cast
from pipesight.stats.moments.cpu_moments import measure, measure_on_device
from pipesight.stats.moments.small_tensor_buffer import SmallRows
from pipesight.stats.moments.statistic_formulas import STATISTICS
from support.ways import measured

try:
    from pipesight.stats.moments import _compiled
except ImportError:  # numba is not installed
    _compiled = None

FUZZER = "statistics"
NUMPY = {name: getattr(np, name) for name in ("float64", "float32", "float16", "uint8", "uint16", "uint32", "uint64")}
NUMPY |= {name: getattr(np, name) for name in ("int8", "int16", "int32", "int64")}
# Exponent bits, mantissa bits, bias, and whether infinity is one of its numbers, or NaN is negative zero.
FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "uz"),
    "float8_e5m2fnuz": (5, 2, 16, "uz"),
}
DTYPES = (*NUMPY, "bfloat16", "bool", *FLOAT8)
EDGES = (1, 2, 255, 256, 257, 512, 513, 1023, 2048, 2049, 4096, 8192, 8193, 8448, 20_000)
LARGE = (32_767, 32_768, 32_769, 33_024, 40_960, 65_537)


# Making tensors.

KINDS = ("normal", "constant", "inf", "-inf", "nan", "zeros", "-0", "subnormal", "tiny", "huge", "near max", "two")
KINDS += ("shifted", "sorted", "mixed")


@st.composite
def cases(draw):
    """Draw what a tensor is made of."""
    small = draw(st.booleans())  # chunks: many of them in few elements
    size = draw(st.one_of(st.sampled_from(EDGES if small else LARGE + EDGES), st.integers(0, 600)))
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "size": size,
        "runs": draw(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40)), min_size=1, max_size=6)),
        "aligned": draw(st.booleans()),
        "view": draw(st.sampled_from(VIEWS)),
        "small": small,
        "splits": draw(st.lists(st.floats(0, 1), max_size=4)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def limits(dtype):
    """The greatest and the least positive number of a float dtype."""
    if dtype in FLOAT8:
        values = decode8(np.arange(256, dtype=np.uint8), dtype)
        values = values[np.isfinite(values) & (values > 0)]
        return float(values.max()), float(values.min())
    if dtype == "bfloat16":
        return 3.38e38, 9.2e-41
    info = np.finfo(NUMPY[dtype])
    return float(info.max), float(info.smallest_subnormal)


def run(kind, count, dtype, rng):
    """A run of numbers, as float64."""
    most, least = limits(dtype) if is_float(dtype) else (120.0, 1.0)
    scale = 2.0 ** rng.integers(-20, 20) if is_float(dtype) else 40.0
    normal = rng.standard_normal(count) * min(scale, most / 8)
    return {
        "normal": lambda: normal,
        "constant": lambda: np.full(count, rng.standard_normal() * min(scale, most / 8)),
        "inf": lambda: np.full(count, np.inf),
        "-inf": lambda: np.full(count, -np.inf),
        "nan": lambda: np.full(count, np.nan),
        "zeros": lambda: np.zeros(count),
        "-0": lambda: np.full(count, -0.0),
        "subnormal": lambda: least * rng.integers(-3, 4, count),
        "tiny": lambda: np.sqrt(least) * rng.standard_normal(count),
        "huge": lambda: np.sqrt(most) * rng.standard_normal(count),
        "near max": lambda: most * rng.uniform(0.5, 1.0, count) * rng.choice([-1, 1], count),
        "two": lambda: np.where(rng.random(count) < 0.5, 1.0, 1.0 + 2.0**-7),
        "shifted": lambda: 1e6 + rng.standard_normal(count) if most > 1e7 else 3 + normal / scale,
        "sorted": lambda: np.sort(normal),
        "mixed": lambda: np.where(rng.random(count) < 0.1, rng.choice([np.inf, -np.inf, np.nan, 0.0], count), normal),
    }[kind]()


def is_float(dtype):
    return "float" in dtype


def numbers(case):
    """The elements of a case, as float64 that the dtype may round."""
    rng, size = np.random.default_rng(case["seed"]), case["size"]
    shares = [weight for _, weight in case["runs"]]
    ends = np.round(np.cumsum(shares) / sum(shares) * size).astype(int)
    if case["aligned"]:
        ends[:-1] -= ends[:-1] % 512
    parts, start = [], 0
    for (kind, _), end in zip(case["runs"], ends, strict=True):
        parts.append(run(kind, max(0, end - start), case["dtype"], rng))
        start = max(start, end)
    return np.concatenate(parts)[:size]


def made(case):
    """A flat tensor of the case's dtype."""
    dtype, flat = case["dtype"], numbers(case)
    if dtype == "bool":
        return torch.from_numpy(flat > 0)
    if dtype == "bfloat16" or dtype in FLOAT8:
        most, _ = limits(dtype)
        return torch.from_numpy(np.where(np.isfinite(flat), np.clip(flat, -most, most), flat)).to(getattr(torch, dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        if is_float(dtype):
            return torch.from_numpy(flat.astype(NUMPY[dtype]))
        info = np.iinfo(NUMPY[dtype])
        whole = np.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
        wide = np.random.default_rng(case["seed"]).random() < 0.3  # use all of the range
        whole = whole * (float(info.max) / 200 if wide else 1.0)
        return torch.from_numpy(np.clip(whole, float(info.min) / 2, float(info.max) / 2).astype(NUMPY[dtype]))


VIEWS = (
    "flat",
    "matrix",
    "transposed",
    "every second",
    "offset",
    "expanded",
    "channels last",
    "overlapping",
    "negated",
)
VIEWS += ("0-d", "parameter", "sparse", "permuted")


def viewed(flat, view, seed):
    """A view of a flat tensor, or one of another kind; the flat one where the view does not fit."""
    rng = np.random.default_rng(seed)
    n, floats = flat.numel(), flat.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    width = int(rng.choice([d for d in (1, 2, 3, 5, 16, 64, 127) if not n % d])) if n else 1
    matrix = flat.view(-1, width) if n else flat
    if view == "matrix":
        return matrix
    if view == "transposed":
        return matrix.t() if n else flat
    if view == "every second":
        return flat[:: int(rng.integers(2, 5))]
    if view == "offset":
        return flat[1:]
    if view == "expanded" and n:
        return matrix[:, None].expand(matrix.size(0), int(rng.integers(2, 4)), width)
    if view == "channels last" and n and not n % 8:
        return flat.view(1, -1, 2, 4).permute(0, 2, 3, 1)
    if view == "permuted" and n and not n % 6:
        return flat.view(2, -1, 3).permute(2, 0, 1)[..., ::1]
    if view == "overlapping" and n > 4:
        return flat.as_strided((n // 2, 3), (1, 1))
    if view == "negated" and floats and n:
        return torch._neg_view(flat)
    if view == "0-d" and n:
        return flat[int(rng.integers(0, n))]
    if view == "parameter" and floats:
        return torch.nn.Parameter(flat)
    if view == "sparse" and floats and n and flat.dtype is not torch.bfloat16:
        return matrix.to_sparse()
    return flat


# The reference.


def decode8(codes, dtype):
    """The numbers that the bytes of a float8 stand for, by the definition of the format."""
    exponent_bits, mantissa_bits, bias, kind = FLOAT8[dtype]
    codes = codes.astype(np.int64)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    value = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if kind == "uz":
        return np.where(codes == 128, np.nan, value)
    if kind == "fn":
        return np.where(codes & 127 == 127, np.nan, value)
    top = exponent == (1 << exponent_bits) - 1
    return np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), value)


def decoded(flat, dtype):
    """The elements of a flat dense tensor, as float64."""
    if dtype == "bfloat16":
        bits = flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if dtype in FLOAT8:
        return decode8(flat.view(torch.uint8).numpy(), dtype)
    return flat.numpy().astype(np.float64)


def elements(tensor, dtype):
    """The elements of any of the tensors made here, as float64."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_neg():
        return -decoded(torch._neg_view(tensor).clone(memory_format=torch.contiguous_format).view(-1), dtype)
    return decoded(tensor.clone(memory_format=torch.contiguous_format).view(-1), dtype)


def truth(values):
    """The statistics, summed in long floats."""
    finite = values[np.isfinite(values)]
    n = finite.size
    result = {"nans": int(np.isnan(values).sum()), "infs": int(np.isinf(values).sum()), "numel": values.size}
    if not n:
        return result | {name: math.nan for name in STATISTICS if name not in result}
    x = finite.astype(np.longdouble)
    size = np.abs(x)
    mean = x.sum() / n
    centred = x - mean
    centred -= centred.sum() / n
    m2 = (centred * centred).sum()
    nonzero = size[size > 0]
    square_sum = (size * size).sum()
    equal = finite.min() == finite.max()
    result |= {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(mean),
        "std": (0.0 if equal else float(np.sqrt(m2 / (n - 1)))) if n > 1 else math.nan,
        "l1_norm": float(size.sum()),
        "l2_norm": float(np.sqrt(square_sum)),
        "rms": float(np.sqrt(square_sum / n)),
        "amax": float(size.max()),
        "cur_amax": float(size.max()),
        "dynamic_range": float(np.log2(size.max()) - np.log2(nonzero.min())) if nonzero.size else math.nan,
        "zeros%": 100 * (n - nonzero.size) / n,
        "kurtosis": math.nan if equal else float((centred**4).sum() * n / (m2 * m2)),
    }
    return result


def compare(moments, expected, dtype, values):
    """All statistics agree, to what is promised for the dtype."""
    finite = np.abs(values[np.isfinite(values)])
    wide = dtype in ("float64", "int64", "uint64", "int32", "uint32")
    tolerance = 1e-10 if wide else 1e-6
    # Squares of such numbers leave float64.
    unheld = dtype == "float64" and bool(((finite > 1e130) | ((finite > 0) & (finite < 1e-130))).any())
    for name, statistic in STATISTICS.items():
        found, wanted = statistic.formula(moments), expected[name]
        if math.isnan(found) and (
            (name in ("std", "l2_norm", "rms", "kurtosis") and unheld) or (statistic.powers and math.isnan(moments.m4))
        ):
            continue
        if math.isnan(wanted):
            assert math.isnan(found), (name, found, wanted)
        elif name in ("min", "max", "amax", "cur_amax", "nans", "infs", "numel") or math.isinf(wanted):
            assert found == wanted, (name, found, wanted)
        else:
            scale = float(finite.astype(np.longdouble).mean()) if name == "mean" else abs(wanted)
            # A deviation that is nothing beside the numbers is rounding, theirs or ours.
            floor = 1e-15 * float(finite.max()) if name == "std" else 1e-12 if name == "dynamic_range" else 0.0
            if name == "kurtosis":
                conditioning = float(finite.max()) / expected["std"] if expected["std"] else math.inf
                floor = abs(wanted) * 1e-15 * conditioning * 100
            assert abs(found - wanted) <= tolerance * scale + floor, (name, found, wanted)


@contextlib.contextmanager
def chunks(small):
    """Chunks and rows of a few elements, so that a few elements have many of them."""
    if not small:
        yield
        return
    with (
        mock.patch.object(_rows, "CHUNK", 512),
        mock.patch.object(_rows, "ROW", 256),
        mock.patch.object(_rows, "BLOCK", 4096),
        mock.patch.object(_exact, "CHUNK", 300),
        mock.patch.object(cpu_moments, "SMALL", 200),
        mock.patch.object(torch, "get_num_threads", return_value=1),
        mock.patch.object(_compiled, "BLOCK", 256) if _compiled else contextlib.nullcontext(),
        mock.patch.object(_compiled, "CHUNK", 512) if _compiled else contextlib.nullcontext(),
    ):
        yield


def raw(tensor):
    """The bytes of a tensor."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    base = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return base.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


@fuzz(few=150)
@given(cases())
def test_statistics(case):
    """Every statistic of every tensor is right, whole, in parts that are merged, and put aside; nothing is changed."""
    dtype = case["dtype"]
    tensor = viewed(made(case), case["view"], case["seed"])
    values, before = elements(tensor, dtype), raw(tensor)
    expected = truth(values)
    with chunks(case["small"]):
        for moments in (*measured(tensor), *measured(tensor, powers=True)):
            compare(moments, expected, dtype, values)
        compare(measure_on_device(tensor), expected, dtype, values)
        later = SmallRows().add(tensor, powers=True, smallest=True)
        if later is not None:
            compare(later.moments(), expected, dtype, values)
        if tensor.dim() and not tensor.is_sparse:
            cuts = sorted(round(cut * tensor.size(0)) for cut in case["splits"])
            sizes = np.diff([0, *cuts, tensor.size(0)]).tolist()
            parts = [measure(part, powers=True) for part in tensor.detach().split(sizes)]
            merged = Moments.EMPTY
            for part in parts:
                merged = merged.merge(part)
            compare(merged, expected, dtype, values)
            rows = torch.tensor([[part.row()] for part in parts], dtype=torch.float64)
            compare(Moments.from_row(merge_rows(rows)[0].tolist()), expected, dtype, values)
    assert raw(tensor) == before
    account(FUZZER, "agreed")


# Blocks and float8.

TABLES = {}
for name, of in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
    positive = decode8(np.arange(128, dtype=np.uint8), of)
    TABLES[name] = positive[np.isfinite(positive)]  # in order: the code is the place


def rounded(x, format):
    """The nearest float8 numbers, ties to even codes, those beyond the greatest cut off."""
    table = TABLES[format]
    size = np.minimum(np.abs(x), table[-1])
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    code = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    return np.copysign(table[code], x)


def blocks(rows, width):
    """The blocks of rows, the last of each shorter."""
    return [row[i : i + width] for row in rows for i in range(0, len(row), width)]


def fp8_truth(rows, recipe, format):
    """What a cast to float8 does to the finite elements, block by block."""
    most = TABLES[format][-1]
    result = {"count": 0, "nonzero": 0, "after": 0, "error": 0.0, "scales": []}
    finite = [row[np.isfinite(row)] for row in rows]
    result["count"] = sum(row.size for row in finite)
    parts = [np.where(np.isfinite(row), row, 0.0) for row in rows]
    width = {"fp8_block_scaling": 128, "mxfp8": 32}.get(recipe)
    whole = [np.concatenate(parts)] if parts else []
    for block in whole if width is None else blocks(parts, width):
        amax = np.abs(block).max(initial=0.0)
        if not amax:
            continue
        scale = max(amax / most, 5e-324)
        if width is not None:
            mantissa, exponent = math.frexp(scale)
            scale = 2.0 ** min(127, max(-127, exponent - (mantissa == 0.5)))
        cast = rounded((block / scale).astype(np.float32).astype(np.float64), format)
        result["scales"].append(scale)
        result["nonzero"] += int(np.count_nonzero(block))
        result["after"] += int(np.count_nonzero(cast))
        result["error"] += float(np.square((block / scale - cast) * scale).sum())
    return result


def ranges_truth(matrix, size, dims):
    """The greatest dynamic range of any block."""
    height = size if dims == 2 else 1
    worst = math.nan
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], size):
            block = np.abs(matrix[top : top + height, left : left + size])
            block = block[np.isfinite(block) & (block > 0)]
            if block.size:
                found = float(np.log2(block.max()) - np.log2(block.min()))
                worst = found if math.isnan(worst) else max(worst, found)
    return worst


@fuzz(few=60)
@given(cases(), st.sampled_from(["fp8_current_scaling", "fp8_block_scaling", "mxfp8"]), st.sampled_from(list(TABLES)))
def test_blocks(case, recipe, format):
    """Ranges of blocks and casts to float8 are what their definitions give."""
    case = {**case, "size": min(case["size"], 3000)}
    dtype = case["dtype"]
    tensor = viewed(made(case), case["view"], case["seed"])
    values, before = elements(tensor, dtype), raw(tensor)
    width = tensor.shape[-1] if tensor.dim() else 1
    matrix = values.reshape(-1, width) if width else values.reshape(0, 1)
    size = 1 + case["seed"] % 40
    for dims in (1, 2):
        wanted = ranges_truth(matrix, size, dims)
        found = max_blockwise_dynamic_range(measure_blockwise(tensor, block_size=size, dims=dims))
        assert math.isnan(wanted) == math.isnan(found), (wanted, found)
        assert math.isnan(wanted) or abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted)), (wanted, found)
    found = measure_cast(tensor, recipe=recipe, format=format)
    assert raw(tensor) == before
    finite = np.abs(values[np.isfinite(values)])
    if dtype == "float64" and ((finite > 1e130) | ((finite > 0) & (finite < 1e-130))).any():
        account("float8 and blocks", "excused: squared errors of float64 numbers beyond 1e±130 leave its range")
        return
    wanted = fp8_truth(list(matrix), recipe, format)
    assert found.count == wanted["count"]
    assert found.nonzero == wanted["nonzero"]
    assert found.nonzero_after == wanted["after"]
    assert math.isclose(found.squared_error, wanted["error"], rel_tol=1e-9, abs_tol=1e-300)
    if wanted["scales"]:
        assert math.isclose(found.scale_inv_min, min(wanted["scales"]), rel_tol=1e-12)
        assert math.isclose(found.scale_inv_max, max(wanted["scales"]), rel_tol=1e-12)
    account("float8 and blocks", "agreed")
