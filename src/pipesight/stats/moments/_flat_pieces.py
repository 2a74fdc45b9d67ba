"""Whatever PyTorch calls a tensor becomes flat, dense, plain pieces, or a clear error.

sparse      what is stored, and zeros for the rest
nested      the values of its parts
quantized   the real values it stands for
strided     a view where its elements lie close together in any order, small copies where they do not;
            repeated elements (stride 0) are read once and counted as often as they are repeated
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipesight._torch.tensors import is_fake, is_functional, is_instance, is_transformed, without_subclass_overrides
from pipesight.stats.moments._scratch import take

__all__ = ["ORDINARY", "flat_pieces", "matrices", "plain"]

ORDINARY = (Tensor, torch.nn.Parameter)  # classes that are nothing but their elements
PIECE = 1 << 19  # elements: the most that is copied at a time
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
REAL = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16", "bool"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def plain(tensor: Tensor) -> Tensor:
    """The same elements with no graph and no subclass around them.

    Raises:
        TypeError: where there are no numbers to be read.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor (got {type(tensor).__name__}); pass torch.as_tensor(x)")
    if is_transformed(tensor):
        raise TypeError("a tensor inside a torch.func transform has no values of its own; log it outside the transform")
    if is_fake(tensor) or is_functional(tensor):
        raise TypeError("a fake tensor has no values; log statistics when the model runs, not while it is traced")
    if is_instance(tensor, "torch.nn.parameter", "UninitializedTensorMixin"):
        raise TypeError("a lazy parameter has no values before the first forward; log it after that")
    if tensor.is_meta:
        raise TypeError("a meta tensor has no values; move the module with to_empty(device=...) and initialise it")
    if tensor.dtype not in REAL and not tensor.is_quantized:
        if tensor.is_complex():
            raise TypeError(
                f"statistics need real numbers (dtype: {tensor.dtype}); "
                "pass x.abs() for magnitudes or torch.view_as_real(x) for real and imaginary parts"
            )
        raise TypeError(f"statistics of {tensor.dtype} are not defined; pass its values as a float tensor")
    with torch.no_grad():
        if is_instance(tensor, "torch.masked", "MaskedTensor"):
            return plain(tensor.get_data()[tensor.get_mask()])  # type: ignore[attr-defined]
        if type(tensor) is Tensor or tensor.is_nested:
            return tensor.detach()
        with without_subclass_overrides():
            if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
                return tensor.detach().as_subclass(Tensor)
            try:  # a wrapper: only its own code knows the values
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                copy = copy.copy_(tensor)
            except Exception as error:
                raise _unreadable(tensor) from error
        if type(copy) is not Tensor:
            raise _unreadable(tensor)
        return copy


def _unreadable(tensor: Tensor) -> TypeError:
    return TypeError(
        f"the values of a {type(tensor).__name__} cannot be read; "
        "pass a plain tensor, such as x.dequantize() or x.to_dense()"
    )


def flat_pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The elements of a plain tensor as flat contiguous pieces, each with how often its elements count."""
    if tensor.layout is torch.sparse_coo or tensor.layout in COMPRESSED:
        values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
        yield from flat_pieces(values)
        if absent := tensor.numel() - values.numel():
            yield torch.zeros(1, dtype=torch.float32, device="cpu"), absent
    else:
        for part in _dense(tensor):
            yield from _strided(part)


def matrices(tensor: Tensor, height: int = 1, width: int = 1) -> Iterator[Tensor]:
    """The elements of a plain tensor as matrices with its last dimension for rows; blocks stay in one matrix."""
    for part in _dense(tensor):
        columns = part.size(-1) if part.dim() else 1
        across = min(columns, max(1, PIECE // (height * width)) * width)
        down = max(1, PIECE // (across * height)) * height
        for band in part.reshape(-1, columns).split(down):
            yield from band.split(across, 1)


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a plain tensor as strided tensors that have elements."""
    if tensor.is_nested:
        for part in _nested(tensor):
            yield from _dense(part.detach())
    elif tensor.is_quantized:
        yield tensor.dequantize()
    elif tensor.layout is not torch.strided:
        yield from _dense(tensor.to_dense())
    elif tensor.numel():
        if not tensor.data_ptr():
            raise ValueError("the storage of this tensor has been freed (FSDP does that); log it while it is in use")
        yield _unpacked(tensor) if "float4" in str(tensor.dtype) else tensor


def _nested(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.layout is torch.jagged and tensor.lengths() is None:  # type: ignore[attr-defined]
        offsets = tensor.offsets()  # type: ignore[attr-defined]
        yield tensor.values()[int(offsets[0]) : int(offsets[-1])]
    else:
        yield from tensor.unbind()


def _unpacked(tensor: Tensor) -> Tensor:
    """Float4 numbers, of which a byte holds two: a sign and three bits each, the lower half first."""
    values = torch.tensor([*FLOAT4, *(-value for value in FLOAT4)], dtype=torch.float32, device=tensor.device)
    codes = tensor.view(torch.uint8)
    return values[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(-2)


def _strided(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    times = 1
    if not tensor.is_contiguous():
        for dim in range(tensor.dim() - 1, -1, -1):
            if not tensor.stride(dim) and tensor.size(dim) > 1:
                times *= tensor.size(dim)
                tensor = tensor.select(dim, 0)
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
        tensor = tensor.permute(order)  # the order of the elements does not matter
    if tensor.is_contiguous() and not tensor.is_neg():
        yield tensor.view(-1), times
    else:
        for piece in _copies(tensor):
            yield piece, times


def _copies(tensor: Tensor) -> Iterator[Tensor]:
    """Copies of a few elements each, which are overwritten when the next one is asked for."""
    if tensor.numel() <= PIECE:
        piece = take(f"piece of {tensor.dtype}", tensor.numel(), tensor.device, tensor.dtype)
        piece.view(tensor.shape).copy_(tensor)
        yield piece
    else:
        rows = PIECE * tensor.size(0) // tensor.numel()
        for part in tensor.split(rows) if rows else tensor:
            yield from _copies(part)
