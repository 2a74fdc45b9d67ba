"""Moments of a tensor on the CPU, or anywhere by ordinary operators.

small, or float64   `exact`, operations of NumPy in float64
large               `in_blocks`, a compiled kernel, if numba is installed and few threads would share the other way
large, elsewhere    `in_rows`, passes of torch and NumPy over chunks that stay in the cache

Example::

    moments = measure(activation)
    moments.mean, moments.min, moments.nans
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pipesight._torch.tensors import is_transformed
from pipesight.stats.moments._exact import exact
from pipesight.stats.moments._flat_pieces import ORDINARY, flat_pieces, plain
from pipesight.stats.moments._rows import FLOAT32, in_rows
from pipesight.stats.moments.moments import Moments
from pipesight.stats.moments.shards import LocalPart, local_part

__all__ = ["LocalPart", "is_ordinary", "local_part", "measure", "measure_on_device"]

SMALL = 1 << 15  # elements; below, an operation costs its call and float64 costs nothing
FEW_THREADS = 4  # with more, operations of torch take less time than the kernel, which has one


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but numbers in main memory, in rows and columns."""
    return (
        type(tensor) in ORDINARY
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_transformed(tensor)
        and bool(tensor.data_ptr())
    )


def measure(tensor: Tensor, *, powers: bool = False, smallest: bool = True, magnitudes: bool = True) -> Moments:
    """The moments of the finite elements of a tensor; NaNs and infinities are counted.

    Right to 1e-6 (relative, against float64) for every dtype up to float32, and to about 1e-14 for float64. The tensor
    is not changed, and neither it nor its graph is kept.

    Example::

        measure(torch.tensor([3.0, -4.0])).l1  # 7.0

    Args:
        tensor: of any real dtype, layout and kind. Integers beyond 2**53 are rounded to float64. What a sparse tensor
            does not store counts as zeros, what an expanded tensor repeats as often as it is repeated. Of a DTensor
            the part on this rank is measured; see :func:`local_part`.
        powers: also ``m3`` and ``m4``, in float64, which takes several times as long.
        smallest: also ``zeros`` and ``smallest``.
        magnitudes: also ``l1``, which is two of five passes over a large tensor.

    Raises:
        TypeError: for complex tensors, and for those that hold no numbers (meta, fake, inside of ``torch.func``).
    """
    if (
        is_ordinary(tensor)
        and tensor.dtype in FLOAT32
        and (tensor.is_contiguous() or 0 < tensor.numel() <= SMALL)
        and not tensor.is_neg()
    ):  # nothing below would find anything else to do
        return _flat(tensor.detach().reshape(-1), powers, smallest, magnitudes)
    if isinstance(tensor, Tensor) and tensor.is_cuda:
        raise RuntimeError("measure() is for tensors in main memory (got one on a GPU); use measure_on_device(x)")
    return measure_on_device(tensor, powers=powers, smallest=smallest, magnitudes=magnitudes)


def measure_on_device(
    tensor: Tensor, *, powers: bool = False, smallest: bool = True, magnitudes: bool = True
) -> Moments:
    """What :func:`measure` gives, with ordinary operations on the device of the tensor; waits for the device."""
    result = Moments.EMPTY
    with torch.no_grad():
        for piece, times in flat_pieces(plain(local_part(tensor).tensor)):
            result = result.merge(_flat(piece, powers, smallest, magnitudes).repeated(times))
    return result


def _flat(x: Tensor, powers: bool, smallest: bool, magnitudes: bool) -> Moments:
    """The moments of a flat contiguous tensor."""
    if x.numel() > SMALL and x.dtype in FLOAT32:
        in_blocks = _kernel(x.dtype) if x.is_cpu and torch.get_num_threads() <= FEW_THREADS else None
        if in_blocks is not None:
            return in_blocks(x, powers=powers, smallest=smallest, magnitudes=magnitudes)
        if not powers:
            return in_rows(x, smallest=smallest, magnitudes=magnitudes)
    return exact(x, powers=powers, smallest=smallest, magnitudes=magnitudes)


@functools.cache
def _kernel(dtype: torch.dtype) -> Callable[..., Moments] | None:
    """Return the compiled way, if numba is installed and can compile it."""
    if importlib.util.find_spec("numba") is None or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return None
    try:
        from pipesight.stats.moments._compiled import in_blocks

        one = torch.empty(1, dtype=dtype, device="cpu")
        in_blocks(one, powers=False, smallest=False, magnitudes=False)  # compiles it
    except Exception as error:  # of any version of numba, LLVM or NumPy
        warnings.warn(
            f"statistics on the CPU do without numba, which takes longer: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return in_blocks
