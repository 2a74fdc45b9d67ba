"""One pass over a CUDA tensor: the kernels.

A program walks over tiles of ``DEPTH`` rows and ``BLOCK`` columns. Each column keeps moments of its own in registers,
so that nothing crosses threads until the program ends: the rows of a tile are summed in float32 about the column's
first value, and the sums join the column's moments in float64 (Chan et al.). At its end a program merges its columns
into one row, and the last program of a tensor to end merges the rows of all.

    tile 0   x x x x ...  |        columns 0..BLOCK-1: mean, m2, l1, min, max, smallest, zeros
    tile 1   x x x x ...  |  -->   merged into one row a program
    ...                   v        merged into one row a tensor
    x x x                 -->      what is left is no tile: a program of its own measures it in float64

Where float32 cannot hold the squares (values beyond 2^55, or none above 2^-45), or something is not finite, the program
goes over its tiles again, in float64 and with each value looked at. So do dtypes that float32 does not hold.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["measure_kernel", "measure_many_kernel"]


@triton.jit
def _merge_pair(n_a, mean_a, m2_a, m3_a, m4_a, n_b, mean_b, m2_b, m3_b, m4_b):
    n = n_a + n_b
    whole = tl.where(n > 0, n, 1.0)
    share_a = n_a / whole
    share_b = n_b / whole
    d = mean_b - mean_a
    dd = d * d
    mean = mean_a + d * share_b
    m2 = m2_a + m2_b + dd * n_a * share_b
    m3 = m3_a + m3_b + d * dd * n_a * share_b * (share_a - share_b) + 3 * d * (share_a * m2_b - share_b * m2_a)
    m4 = (
        m4_a
        + m4_b
        + dd * dd * n_a * share_b * (share_a * share_a - share_a * share_b + share_b * share_b)
        + 6 * dd * (share_a * share_a * m2_b + share_b * share_b * m2_a)
        + 4 * d * (share_a * m3_b - share_b * m3_a)
    )
    return n, mean, m2, m3, m4


@triton.jit
def _merge_pair_2(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n = n_a + n_b
    share_b = n_b / tl.where(n > 0, n, 1.0)
    d = mean_b - mean_a
    return n, mean_a + d * share_b, m2_a + m2_b + d * d * n_a * share_b


@triton.jit
def _store(row, n, nans, infs, zeros, low, high, mean, m2, l1, small, m3, m4):
    tl.store(row + 0, n)
    tl.store(row + 1, nans)
    tl.store(row + 2, infs)
    tl.store(row + 3, zeros)
    tl.store(row + 4, low)
    tl.store(row + 5, high)
    tl.store(row + 6, mean)
    tl.store(row + 7, m2)
    tl.store(row + 8, l1)
    tl.store(row + 9, small)
    tl.store(row + 10, m3)
    tl.store(row + 11, m4)


@triton.jit
def _slowly(x_ptr, numel, first, stride, row, BLOCK: tl.constexpr, DEPTH: tl.constexpr, POWERS: tl.constexpr):
    """Measure tiles ``first, first + stride, ...``, the last of which may be ragged, in float64."""
    columns = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float64)
    n, mean, m2, m3, m4 = nothing, nothing, nothing, nothing, nothing
    l1, nans, infs, zeros = nothing, nothing, nothing, nothing
    low = nothing + float("inf")
    high = nothing - float("inf")
    small = nothing + float("inf")
    for tile in range(first, tl.cdiv(numel, BLOCK * DEPTH), stride):
        start = tile.to(tl.int64) * (BLOCK * DEPTH)
        for depth in range(DEPTH):
            at = start + depth * BLOCK + columns
            there = at < numel
            x = tl.load(x_ptr + at, mask=there, other=0).to(tl.float64)
            nan = there & (x != x)
            inf = there & (tl.abs(x) == float("inf"))
            valid = there & (x == x) & (tl.abs(x) != float("inf"))
            x = tl.where(valid, x, 0.0)
            one = tl.where(valid, 1.0, 0.0).to(tl.float64)
            nans += tl.where(nan, 1.0, 0.0)
            infs += tl.where(inf, 1.0, 0.0)
            zeros += tl.where(valid & (x == 0), 1.0, 0.0)
            low = tl.minimum(low, tl.where(valid, x, float("inf")))
            high = tl.maximum(high, tl.where(valid, x, -float("inf")))
            small = tl.minimum(small, tl.where(valid & (x != 0), tl.abs(x), float("inf")))
            l1 += tl.abs(x)
            if POWERS:
                n, mean, m2, m3, m4 = _merge_pair(n, mean, m2, m3, m4, one, x, nothing, nothing, nothing)
            else:
                n, mean, m2 = _merge_pair_2(n, mean, m2, one, x, nothing)
    if POWERS:
        n_, mean_, m2_, m3_, m4_ = tl.reduce((n, mean, m2, m3, m4), 0, _merge_pair)
    else:
        n_, mean_, m2_ = tl.reduce((n, mean, m2), 0, _merge_pair_2)
        m3_ = m2_ * float("nan")
        m4_ = m3_
    _store(
        row,
        n_,
        tl.sum(nans, 0),
        tl.sum(infs, 0),
        tl.sum(zeros, 0),
        tl.min(low, 0),
        tl.max(high, 0),
        mean_,
        m2_,
        tl.sum(l1, 0),
        tl.min(small, 0),
        m3_,
        m4_,
    )


@triton.jit
def _rest(x_ptr, numel, row, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Measure what the last whole tile leaves: once for the mean, and once more for what is about it."""
    start = x_ptr + (numel // (BLOCK * DEPTH)).to(tl.int64) * (BLOCK * DEPTH)
    left = (numel % (BLOCK * DEPTH)).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float64)
    total, l1, m2 = nothing, nothing, nothing
    n, nans, infs, zeros = columns * 0, columns * 0, columns * 0, columns * 0
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    small = tl.full([BLOCK], float("inf"), tl.float32)
    for depth in range(DEPTH):
        at = depth * BLOCK + columns
        there = at < left
        x = tl.load(start + at, mask=there, other=0).to(tl.float32)
        size = tl.abs(x)
        valid = there & (size < float("inf"))
        n += valid.to(tl.int32)
        nans += (x != x).to(tl.int32)
        infs += (size == float("inf")).to(tl.int32)
        zeros += (valid & (x == 0)).to(tl.int32)
        low = tl.minimum(low, tl.where(valid, x, float("inf")))
        high = tl.maximum(high, tl.where(valid, x, -float("inf")))
        small = tl.minimum(small, tl.where(valid & (x != 0), size, float("inf")))
        total += tl.where(valid, x, 0.0).to(tl.float64)
        l1 += tl.where(valid, size, 0.0).to(tl.float64)
    n_ = tl.sum(n, 0).to(tl.float64)
    mean_ = tl.sum(total, 0) / tl.where(n_ > 0, n_, 1.0)
    for depth in range(DEPTH):
        at = depth * BLOCK + columns
        there = at < left
        x = tl.load(start + at, mask=there, other=0).to(tl.float32)
        away = tl.where(there & (tl.abs(x) < float("inf")), x.to(tl.float64) - mean_, 0.0)
        m2 += away * away
    unknown = n_ * float("nan")
    _store(
        row,
        n_,
        tl.sum(nans, 0).to(tl.float64),
        tl.sum(infs, 0).to(tl.float64),
        tl.sum(zeros, 0).to(tl.float64),
        tl.min(low, 0).to(tl.float64),
        tl.max(high, 0).to(tl.float64),
        mean_,
        tl.sum(m2, 0),
        tl.sum(l1, 0),
        tl.min(small, 0).to(tl.float64),
        unknown,
        unknown,
    )


@triton.jit
def _halves(pair, dtype: tl.constexpr):
    """Take two values of 16 bits apart."""
    if dtype == tl.bfloat16:  # the upper half of a float32
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    first = pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _pairwise(a, b, c, operation: tl.constexpr, dtype: tl.constexpr):
    """Do something to both halves of each pair at once."""
    if dtype == tl.bfloat16:
        kind: tl.constexpr = "bf16x2"
    else:
        kind: tl.constexpr = "f16x2"
    if operation == "fma":
        asm: tl.constexpr = "fma.rn." + kind + " $0, $1, $2, $3;"
    elif operation == "is":  # 1 where they are equal, else 0
        asm: tl.constexpr = "{ .reg .b32 unused; mov.b32 unused, $3; set.eq." + kind + "." + kind + " $0, $1, $2; }"
    else:
        asm: tl.constexpr = "{ .reg .b32 unused; mov.b32 unused, $3; " + operation + "." + kind + " $0, $1, $2; }"
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _extremes(low, high, small, zeros, x):
    zero = x == 0
    small = tl.minimum(small, tl.where(zero, float("inf"), tl.abs(x)))
    return tl.minimum(low, x), tl.maximum(high, x), small, zeros + zero.to(tl.float32)


@triton.jit
def _range(
    x_ptr,
    numel,
    first,
    stride,
    row,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUICK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # Values of 16 bits are read two at a time: a column takes both, so that it keeps no more than one of 32 bits does.
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if dtype.primitive_bitwidth == 16 else 1
    PACKED: tl.constexpr = PAIRS and HALVES == 2
    TILE: tl.constexpr = BLOCK * DEPTH
    whole = numel // TILE
    good = False
    if QUICK:
        columns = tl.arange(0, BLOCK)
        mean = tl.zeros([BLOCK], tl.float64)
        m2 = tl.zeros([BLOCK], tl.float64)
        l1 = tl.zeros([BLOCK], tl.float64)
        low = tl.full([BLOCK], float("inf"), tl.float32)
        high = tl.full([BLOCK], -float("inf"), tl.float32)
        small = tl.full([BLOCK], float("inf"), tl.float32)
        zeros = tl.zeros([BLOCK], tl.float32)
        if PACKED:
            nothing = tl.zeros([BLOCK], tl.int32)
            if dtype == tl.bfloat16:
                lows = nothing + 0x7F807F80  # inf, and largest below the largest finite number
                highs = nothing - 0x007F0080
                largest = nothing + 0x7F7F7F7F
            else:
                lows = nothing + 0x7C007C00
                highs = nothing - 0x03FF0400
                largest = nothing + 0x7BFF7BFF
            smalls = largest
        k = tl.zeros([], tl.float64)
        for tile in range(first, whole, stride):
            start = x_ptr + tile.to(tl.int64) * TILE
            l1_here = tl.zeros([BLOCK], tl.float32)
            r = tl.zeros([BLOCK], tl.float32)
            q = tl.zeros([BLOCK], tl.float32)
            shift = tl.zeros([BLOCK], tl.float32)
            if PACKED:
                are_zero = nothing
            for level in tl.static_range(DEPTH // HALVES):
                if HALVES == 2:
                    pair = tl.load(start.to(tl.pointer_type(tl.int32)) + level * BLOCK + columns)
                    x, y = _halves(pair, dtype)
                else:
                    x = tl.load(start + level * BLOCK + columns).to(tl.float32)
                if level == 0:
                    shift = x
                if PACKED:
                    size = pair & 0x7FFF7FFF
                    zero = _pairwise(size, nothing, nothing, "is", dtype)
                    are_zero = _pairwise(are_zero, zero, nothing, "add", dtype)
                    lows = _pairwise(lows, pair, nothing, "min", dtype)
                    highs = _pairwise(highs, pair, nothing, "max", dtype)
                    smalls = _pairwise(smalls, _pairwise(zero, largest, size, "fma", dtype), nothing, "min", dtype)
                else:
                    low, high, small, zeros = _extremes(low, high, small, zeros, x)
                    if HALVES == 2:
                        low, high, small, zeros = _extremes(low, high, small, zeros, y)
                l1_here += tl.abs(x)
                d = x - shift
                r += d
                q += d * d
                if HALVES == 2:
                    l1_here += tl.abs(y)
                    d = y - shift
                    r += d
                    q += d * d
            if PACKED:
                first_zeros, second_zeros = _halves(are_zero, dtype)
                zeros += first_zeros + second_zeros
            l1 += l1_here.to(tl.float64)
            about = r * (1.0 / DEPTH)
            delta = shift.to(tl.float64) + about.to(tl.float64) - mean
            # k tiles before this one: each column has k * DEPTH values
            weight = 1.0 / (k + 1.0)
            mean += delta * weight
            m2 += (q - r * about).to(tl.float64) + delta * delta * (DEPTH * k * weight)
            k += 1.0
        if PACKED:
            x, y = _halves(lows, dtype)
            low = tl.minimum(x, y)
            x, y = _halves(highs, dtype)
            high = tl.maximum(x, y)
            x, y = _halves(smalls, dtype)
            small = tl.minimum(x, y)
        least = tl.min(low, 0)
        greatest = tl.max(high, 0)
        amax = tl.maximum(tl.abs(least), tl.abs(greatest))
        total = tl.sum(l1, 0)
        # 3.6e16 = 2^55; 2.9e-14 = 2^-45. Comparisons with NaN are false.
        good = (total < float("inf")) & (amax < 3.6e16) & ((amax > 2.9e-14) | (total == 0))
        if good:
            n_ = k * (DEPTH * BLOCK)  # columns have equally many
            anchor = least.to(tl.float64)  # among the numbers, so that what is next to a large one keeps its digits
            mean_ = anchor + tl.sum(mean - anchor, 0) / BLOCK
            away = mean - mean_
            m2_ = tl.sum(m2 + away * away * (k * DEPTH), 0)
            zero_ = tl.zeros([], tl.float64)
            zeros_ = tl.sum(zeros.to(tl.float64), 0)
            _store(
                row,
                n_,
                zero_,
                zero_,
                zeros_,
                least.to(tl.float64),
                greatest.to(tl.float64),
                mean_,
                m2_,
                total,
                tl.where(zeros_ == n_, float("inf"), tl.min(small, 0).to(tl.float64)),
                zero_ + float("nan"),
                zero_ + float("nan"),
            )
    if not good:
        _slowly(x_ptr, whole * TILE if QUICK else numel, first, stride, row, BLOCK, DEPTH, POWERS)


@triton.jit
def _measure(
    x_ptr,
    numel,
    program,
    programs,
    rows,
    done,
    out,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUICK: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Be one of the programs that measure a tensor; the last of them to end writes ``out``.

    Program p writes row p of ``rows``, which hold ``SIZE`` at most. ``done`` counts the programs that have ended and is
    0 again afterwards, so kernels that follow each other on a stream share both.
    """
    row = out if programs == 1 else rows + program * 12
    if QUICK:
        rest = numel % (BLOCK * DEPTH) != 0
        walkers = programs - rest.to(tl.int32)
        if program < walkers:
            _range(x_ptr, numel, program, walkers, row, BLOCK, DEPTH, POWERS, QUICK, PAIRS)
        else:
            _rest(x_ptr, numel, row, BLOCK, DEPTH)
    else:
        _range(x_ptr, numel, program, programs, row, BLOCK, DEPTH, POWERS, QUICK, PAIRS)
    if programs > 1:
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(done, 1, sem="acq_rel") == programs - 1:
            _merge(rows, programs, out, SIZE, POWERS)
            tl.store(done, 0)


@triton.jit(do_not_specialize=["numel"])
def measure_kernel(
    x_ptr,
    numel,
    rows,
    done,
    out,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUICK: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure one tensor into the row ``out``."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    _measure(x_ptr, numel, program, programs, rows, done, out, BLOCK, DEPTH, POWERS, QUICK, PAIRS, SIZE)


@triton.jit
def measure_many_kernel(
    table,
    rows,
    done,
    out,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUICK: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure several tensors of one dtype, whose addresses are multiples of 16: programs (p, i) serve tensor i.

    The table has four lines, with a column for each tensor: address, elements, programs, the programs before its own.
    """
    i, tensors = tl.program_id(1), tl.num_programs(1)
    program, programs = tl.program_id(0), tl.load(table + 2 * tensors + i).to(tl.int32)
    if program < programs:
        x_ptr = tl.multiple_of(tl.load(table + i).to(tl.pointer_type(DTYPE)), 16)
        numel = tl.load(table + tensors + i)
        rows += tl.load(table + 3 * tensors + i) * 12
        _measure(
            x_ptr,
            numel,
            program,
            programs,
            rows,
            done + i,
            out + i * 12,
            BLOCK,
            DEPTH,
            POWERS,
            QUICK,
            PAIRS,
            SIZE,
        )


@triton.jit
def _merge(rows, programs, out, SIZE: tl.constexpr, POWERS: tl.constexpr):
    at = tl.arange(0, SIZE)
    there = at < programs
    row = rows + at * 12
    # Other programs wrote the rows: they are in the cache that all share, not in the nearest.
    n = tl.load(row + 0, mask=there, other=0.0, cache_modifier=".cg")
    nans = tl.sum(tl.load(row + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
    infs = tl.sum(tl.load(row + 2, mask=there, other=0.0, cache_modifier=".cg"), 0)
    zeros = tl.sum(tl.load(row + 3, mask=there, other=0.0, cache_modifier=".cg"), 0)
    low = tl.min(tl.load(row + 4, mask=there, other=float("inf"), cache_modifier=".cg"), 0)
    high = tl.max(tl.load(row + 5, mask=there, other=-float("inf"), cache_modifier=".cg"), 0)
    mean = tl.load(row + 6, mask=there, other=0.0, cache_modifier=".cg")
    m2 = tl.load(row + 7, mask=there, other=0.0, cache_modifier=".cg")
    l1 = tl.sum(tl.load(row + 8, mask=there, other=0.0, cache_modifier=".cg"), 0)
    small = tl.min(tl.load(row + 9, mask=there, other=float("inf"), cache_modifier=".cg"), 0)
    if POWERS:
        m3 = tl.load(row + 10, mask=there, other=0.0, cache_modifier=".cg")
        m4 = tl.load(row + 11, mask=there, other=0.0, cache_modifier=".cg")
        n_, mean_, m2_, m3_, m4_ = tl.reduce((n, mean, m2, m3, m4), 0, _merge_pair)
    else:
        n_ = tl.sum(n, 0)
        anchor = tl.where(n_ > 0, low, 0.0)
        mean_ = anchor + tl.sum((mean - anchor) * n, 0) / tl.where(n_ > 0, n_, 1.0)
        away = tl.where(n > 0, mean - mean_, 0.0)
        m2_ = tl.sum(m2 + away * away * n, 0)
        m3_ = m2_ * float("nan")
        m4_ = m3_
    _store(out, n_, nans, infs, zeros, low, high, mean_, m2_, l1, small, m3_, m4_)
