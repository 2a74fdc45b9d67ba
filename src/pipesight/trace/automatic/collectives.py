"""Record what ``torch.distributed`` communicates: collectives, point to point, and the waits for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist

from pipesight import context
from pipesight._nested import tensors_in
from pipesight._patches import Patches
from pipesight._torch.tensors import without_function_overrides
from pipesight.trace import _span_events
from pipesight.trace._pipeline_lines import carried
from pipesight.trace._span_events import Args, Place
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step
from pipesight.trace.node import Node

__all__ = ["group_name", "instrument_collectives", "is_inside"]

_CALLS: dict[str, tuple[str, str]] = {  # the event, and the argument that holds what is sent or received
    "all_reduce": ("all_reduce", "tensor"),
    "all_reduce_coalesced": ("all_reduce", "tensors"),
    "broadcast": ("bcast", "tensor"),
    "broadcast_object_list": ("bcast", ""),
    "reduce": ("reduce", "tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output_tensor"),  # the same, since torch 2.13; likewise below
    "all_gather_object": ("all_gather", ""),
    "gather": ("gather", "tensor"),
    "gather_object": ("gather", ""),
    "scatter": ("scatter", "tensor"),
    "scatter_object_list": ("scatter", ""),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier": ("barrier", ""),
    "send": ("send", "tensor"),
    "isend": ("send", "tensor"),
    "recv": ("receive", "tensor"),
    "irecv": ("receive", "tensor"),
}
_ASYNCHRONOUS = {"isend", "irecv"}


def instrument_collectives(patches: Patches) -> None:
    """Record ``comm.*``, each with its size, group and whether it is asynchronous, and the wait for it."""
    if not dist.is_available():
        return
    for name, (event, measured) in _CALLS.items():
        function = getattr(dist.distributed_c10d, name, None)
        if function is not None:
            arguments = tuple(inspect.signature(function).parameters)
            around = _around(name in _ASYNCHRONOUS, getattr(ai.comm, event), measured, arguments)
            patches.wrap(dist.distributed_c10d, name, around)
    patches.wrap(dist.Work, "wait", _wait)


def _around(asynchronous: bool, node: Node, measured: str, names: tuple[str, ...]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not node.recording or is_inside(node):
            return original(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        known: dict[str, Any] = {"group": group_name(given.get("group"))}
        known["async"] = asynchronous or bool(given.get("async_op"))
        if measured:
            with without_function_overrides():
                known["size"] = sum(tensor.nbytes for tensor in tensors_in(given.get(measured)))
        for end in ("src", "dst", "group_src", "group_dst"):
            if isinstance(given.get(end), int):
                known[end] = given[end]
        where = context.exchanging()
        if where is None:
            place, known = None, with_step(known)
        else:
            place = (where.step, where.serial, where.partition, where.microbatch)
            known["peer"] = where.peer
        span = _span_events.begin(node)
        try:
            work = original(*args, **kwargs)
        finally:
            _span_events.end(span, _args(node, known, place))
        if known["async"] and work is not None:
            if len(_waits) > 10_000:  # the program never waits for them
                _waits.clear()
            del known["async"]  # the wait itself is synchronous
            _waits[id(work)] = node.derive("wait"), known, place
        return work

    return around


_InPipeline: TypeAlias = tuple[int, int, int, int]
"""Step, mini-batch, partition and micro-batch of what a pipeline sends from rank to rank."""

_waits: dict[int, tuple[Node, dict[str, Any], _InPipeline | None]] = {}  # by the ID of the `Work` to be waited for


def _wait(original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
    node, known, place = _waits.pop(id(work), (ai.comm, {}, None))
    if not known or not node.recording:
        return original(work, *args, **kwargs)
    span = _span_events.begin(node)
    try:
        return original(work, *args, **kwargs)
    finally:
        _span_events.end(span, _args(node, known, place))


def _args(node: Node, known: dict[str, Any], place: _InPipeline | None) -> Args | Place:
    return {**node.args, **known} if place is None else (carried(node, known), 0, *place, None, 0, 0)


def is_inside(node: Node) -> bool:
    """Tell whether another collective makes this call: those for objects use those for tensors."""
    around = _span_events.current()[0]
    return around is not None and getattr(around, "category", None) == "comm" and node.category == "comm"


def group_name(group: Any) -> str:
    """Return ``"world"``, or the ranks of a group, as in ``"0,1"``."""
    if group is None or group is dist.group.WORLD:
        return "world"
    try:
        return ",".join(map(str, dist.get_process_group_ranks(group)))
    except Exception:
        return str(getattr(group, "group_name", group))
