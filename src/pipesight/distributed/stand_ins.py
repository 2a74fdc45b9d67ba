"""Tensors without values that stand in, on one rank, for what other ranks compute.

They are on the meta device, and do not show it: a model that asks for the device of one gets that of the rank, so that
what it makes there (masks, positions) is real. A torch function with a stand-in among its arguments gives stand-ins.
One that needs a value cannot: whoever asks for it is named.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.operators import FakeTensorMode

__all__ = [
    "META",
    "ValueNeededError",
    "answers_of",
    "call",
    "changed_by",
    "known",
    "needs_values",
    "place",
    "rows_chosen",
]

META = torch.device("meta")


class ValueNeededError(RuntimeError):
    """A model asks for a value that another rank has: it branches on an activation, or on the shape that follows."""


def answers_of(device: torch.device) -> dict[Any, Any]:
    """Return what stand-ins answer when a model asks where they are."""
    return {
        Tensor.device.__get__: device,
        Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
        Tensor.is_cpu.__get__: device.type == "cpu",  # type: ignore[attr-defined]
        Tensor.is_cuda.__get__: device.type == "cuda",  # type: ignore[attr-defined]
    }


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Call a torch function that has a stand-in among its arguments.

    Raises:
        ValueNeededError: It cannot do without values; the message names the line that calls it.
    """
    if func is Tensor.cpu or func is Tensor.cuda:
        return args[0]
    if getattr(func, "__name__", "") == "_pack_padded_sequence":  # beside the packed values, numbers of known lengths
        return _call_with_zeros(func, args, kwargs, keeps_numbers=True)
    if func is Tensor.to:
        args = (args[0], *[META if _is_place(value) else value for value in args[1:]])
    given = args, kwargs
    args, kwargs = map_tensors(_on_meta, args), map_tensors(_on_meta, kwargs)
    args = tuple(META if isinstance(value, torch.device) else value for value in args)
    kwargs = {key: META if key == "device" and _is_place(value) else value for key, value in kwargs.items()}
    try:
        if torch.is_autocast_enabled(device.type):
            return _call_as_if_on(device, func, args, kwargs)
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if not _is_about_values(func, error):
            if isinstance(error, TypeError):
                raise
            return _call_with_zeros(func, *given, error=error)
        _refuse(func)


def _refuse(func: Any) -> NoReturn:
    raise ValueNeededError(
        f"{place()} asks for the values of a tensor that another rank computes ({getattr(func, '__name__', func)}), "
        "which are not there; let the model decide by its arguments instead, or do this inside a block that no cut "
        "goes through"
    ) from None


def known(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return what a function makes of a real tensor and the shape or type of a stand-in; None if it needs values."""
    name = getattr(func, "__name__", "")
    if len(args) == 2 and all(isinstance(tensor, Tensor) for tensor in args) and not args[0].is_meta:
        if name in _AS:
            shaped: Tensor = getattr(args[0], _AS[name])(args[1].shape)
            return shaped
        if name == "type_as":
            typed: Tensor = args[0].to(args[1].dtype)
            return typed
    return None


def rows_chosen(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return how many items a stand-in is asked for by real masks; nothing if it is not."""
    if getattr(func, "__name__", "") not in ("__getitem__", "masked_select"):
        return ()
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    masks = (t for t in index if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) and not t.is_meta)
    return tuple(int(mask.sum()) for mask in masks)


def needs_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function of real tensors tells Python of their values, so that it may branch on them."""
    name = getattr(func, "__name__", "")
    if name in _SHAPED_BY_VALUES or (name == "where" and len(args) == 1):
        return True
    if name == "repeat_interleave":
        return len(args) == 1 or isinstance(args[1], Tensor)
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in index)
    return name in _READS


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a function changes in place, if it does."""
    name = getattr(func, "__name__", "")
    target = kwargs.get("out")
    if target is None and (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
        target = args[0] if args else None
    return target if isinstance(target, Tensor) else None


def place() -> str:
    """Return the file and line that asked torch for something: the innermost that belongs neither to torch nor here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("torch", "pipesight"):
        frame = frame.f_back
    return "a program" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name},"


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(META)


def _is_place(value: Any) -> bool:
    return isinstance(value, (str, int, torch.device)) and not isinstance(value, bool)


def _call_as_if_on(device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as on another device than meta, which autocast does not know."""
    given: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        made.requires_grad_(tensor.requires_grad)
        given[id(made)] = tensor
        kept.append(made)
        return made

    def back(tensor: Tensor) -> Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
        return made.requires_grad_(tensor.requires_grad)

    kept: list[Tensor] = []
    with FakeTensorMode():
        args = tuple(device if value is META else value for value in args)
        kwargs = {key: device if value is META else value for key, value in kwargs.items()}
        output = func(*map_tensors(fake, args), **map_tensors(fake, kwargs))
    return map_tensors(back, output)


def _call_with_zeros(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    error: Exception | None = None,
    keeps_numbers: bool = False,
) -> Any:
    """Call a function that cannot do without values on zeros, for the shapes; raise ``error`` if that fails, too.

    Numbers that are known, such as lengths, stay, and ``keeps_numbers`` says that so do integers made of them.
    """
    given: dict[int, Tensor] = {}
    kept: list[Tensor] = []

    def zeros(tensor: Tensor) -> Tensor:
        made = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()
        given[id(made)] = tensor
        kept.append(made)
        return made

    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))

    def back(tensor: Tensor) -> Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        if keeps_numbers and not tensor.is_floating_point():
            return tensor
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
        return made.requires_grad_(learns and tensor.is_floating_point())

    args = tuple(torch.device("cpu") if value is META else value for value in args)
    kwargs = {key: torch.device("cpu") if value is META else value for key, value in kwargs.items()}
    try:
        with torch.no_grad():
            output = func(*map_tensors(zeros, args), **map_tensors(zeros, kwargs))
    except Exception as own:
        raise (error or own) from None
    return map_tensors(back, output)


def _is_about_values(func: Any, error: Exception) -> bool:
    name, text = getattr(func, "__name__", ""), str(error).lower()
    needs = any(words in text for words in ("no data", "data-dependent", "called on meta tensors"))
    return needs or name in _READS or name in _SHAPED_BY_VALUES


_AS = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"}
_READS |= {f"__{kind}__" for kind in ("bool", "int", "float", "complex", "index")}
_SHAPED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "histc"}
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", "__idiv__", *(f"__i{operator}__" for operator in _OPERATORS)}
