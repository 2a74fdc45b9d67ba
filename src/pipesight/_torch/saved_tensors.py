"""What autograd nodes have saved for their backward, without unpacking it: that could run code of the program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipesight._torch.autograd import PythonNode, sequence_number

__all__ = [
    "CAN_BE_SEEN",
    "following_nodes",
    "hanging_weights",
    "saved_by",
    "saved_in_attributes",
    "saved_output",
    "waiting_bytes",
]

CAN_BE_SEEN: bool = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether this PyTorch tells which saved tensors hooks of the program have packed; old ones do not."""
_PREFIX = "_raw_saved_"
_names: dict[type, tuple[str, ...]] = {}


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node has saved, except those that hooks of the program have packed."""
    kind = type(node)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    for name in names:
        saved = getattr(node, name, None)
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            if one is not None and one.unpack_hook is None and isinstance(one.data, Tensor):
                yield one.data
    yield from _in_attributes(node)


def saved_in_attributes(ends: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield what functions of the program have put into attributes of their ``ctx``, which no hook sees, and the number
    of each one's node."""
    for node in _nodes_behind(ends):
        for tensor in _in_attributes(node):
            yield tensor, sequence_number(node)


def _in_attributes(node: Any) -> Iterator[Tensor]:
    for value in vars(node).values() if isinstance(node, PythonNode) else ():
        found = value if isinstance(value, (tuple, list)) else (value,)
        yield from (one for one in found if isinstance(one, Tensor))


def following_nodes(node: Any) -> Iterator[Any]:
    """Yield the nodes that the gradients of a node go to."""
    return (following for following, _ in node.next_functions if following is not None)


def hanging_weights(node: Any) -> tuple[list[Tensor], int]:
    """Return the leaves to which a node leads on a way of their own, as a matrix product does to its weight, and the
    bytes of the gradients that it gets."""
    leaves = []
    following = [*following_nodes(node)] if len(node.next_functions) > 1 else []
    for one in following:
        while len(one.next_functions) == 1 and one.next_functions[0][0] is not None:
            one = one.next_functions[0][0]
        if (leaf := getattr(one, "variable", None)) is not None:
            leaves.append(leaf)
    if not leaves:
        return [], 0
    return leaves, sum(math.prod(map(int, given.shape)) * given.dtype.itemsize for given in node._input_metadata)


def saved_output(node: Any, number: int) -> int:
    """Return the bytes of an output, if the node that makes it has saved it, as a ReLU does, and 0 if not."""
    metadata = node._input_metadata
    if number >= len(metadata):
        return 0
    shape, dtype = tuple(metadata[number].shape), metadata[number].dtype
    results = (t for t in saved_by(node) if t.grad_fn is None and not t.requires_grad)
    return next((t.nbytes for t in results if (tuple(t.shape), t.dtype) == (shape, dtype)), 0)


def waiting_bytes(ends: Iterable[Tensor], weights: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of gradients that weights, given by their addresses, get on a way of their own, and the number of
    the node that gets them."""
    for node in _nodes_behind(ends):
        leaves, size = hanging_weights(node)
        if any(leaf.untyped_storage().data_ptr() in weights for leaf in leaves):
            yield size, sequence_number(node)


def _nodes_behind(ends: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of a graph once each."""
    pending, seen = [end.grad_fn for end in ends if end.grad_fn is not None], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(following_nodes(node))
