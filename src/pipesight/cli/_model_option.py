"""The model and the sample batch that options name: ``--model`` and ``--sample``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipesight.schedule.costs import Costs, Link

__all__ = ["ModelError", "find_model", "make_sample", "profile_model"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
_FUNCTION = re.compile(r"[^\W\d][\w./\\-]*:[^\W\d][\w.]*")
"""A module and what is in it; shapes begin with a digit, and named ones have an equals sign."""


class ModelError(ValueError):
    """The model, or the batch, cannot be imported or made."""


def find_model(name: str) -> nn.Module:
    """Return the model that ``module:factory`` returns, or is; `ModelError` if there is none."""
    from torch import nn

    found = _find(name, "--model")
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ModelError(f"--model must name a function or a module (--model {name}: {type(found).__name__})")
    model = _called(found, name, "--model")
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model must return an nn.Module (--model {name} returned: {type(model).__name__})")
    return model


def _sequential(found: nn.Module) -> nn.Sequential | None:
    """Return an ``nn.Sequential`` as it is, that of a ``GPipe``, and nothing of any other model."""
    from torch import nn

    from pipesight.pipeline.gpipe import GPipe

    if isinstance(found, GPipe):
        return nn.Sequential(OrderedDict(child for part in found.partitions for child in part.named_children()))
    return found if isinstance(found, nn.Sequential) and type(found).forward is nn.Sequential.forward else None


def make_sample(text: str) -> Call:
    """Return the arguments of a call of the model.

    They are given as shapes and types, positional ones first: ``32x3x224x224``, or ``32x128:int64,mask=32x128:bool``.
    Such tensors have random numbers from 0 to 1, or zeros if they are integers. Or a function without arguments makes
    them, ``train:make_batch``, and returns a tensor, a tuple of tensors, ``(args, kwargs)``, or ``kwargs``.

    Raises:
        ValueError: It is neither.
        ModelError: The function cannot be imported, or fails.
    """
    if _FUNCTION.fullmatch(text):
        return _made_sample(text)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for part in text.split(","):
        name, equals, tensor = part.strip().rpartition("=")
        if (equals and (not name.isidentifier() or name in kwargs)) or (kwargs and not equals):
            raise _wrong_sample(text)
        if equals:
            kwargs[name] = _tensor(tensor, text)
        else:
            args.append(_tensor(tensor, text))
    return tuple(args), kwargs


def _tensor(text: str, whole: str) -> Tensor:
    import torch

    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(part.isdecimal() and int(part) for part in sizes):
        raise _wrong_sample(whole)
    numbers = [int(part) for part in sizes]
    return torch.rand(numbers).to(dtype) if dtype.is_floating_point else torch.zeros(numbers, dtype=dtype)


def _wrong_sample(text: str) -> ValueError:
    return ValueError(
        "--sample must be shapes, optionally with types and names, positional ones first: 32x3x224x224, or "
        f"32x128:int64,mask=32x128:bool; or a function that returns the batch: train:make_batch (--sample: {text!r})"
    )


def _made_sample(name: str) -> Call:
    """Return the arguments that a function makes."""
    from torch import Tensor

    found = _find(name, "--sample")
    if not callable(found):
        raise ModelError(f"--sample must name a function (--sample {name}: {type(found).__name__})")
    made = _called(found, name, "--sample")
    if isinstance(made, Tensor):
        return (made,), {}
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, (tuple, list)) and made:
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping):
            return tuple(made[0]), dict(made[1])
        if all(isinstance(item, Tensor) for item in made):
            return tuple(made), {}
    raise ModelError(
        f"--sample must return a tensor, a tuple of tensors, (args, kwargs), or kwargs (--sample {name} returned: "
        f"{type(made).__name__})"
    )


def profile_model(name: str, sample: str, *, link: Link | None) -> Costs:
    """Run a batch through the model, layer by layer, and return the costs.

    Raises:
        ValueError: The model cannot be found, or does not take the batch.
    """
    from pipesight.pipeline.call_costs import profile_call
    from pipesight.pipeline.profiled_costs import profile

    found, (args, kwargs) = find_model(name), make_sample(sample)
    model = _sequential(found)
    if model is None:
        try:
            return profile_call(getattr(found, "module", found), args, kwargs, link=link)
        except Exception as error:
            raise ValueError(
                f"--sample must be what the model takes (--model {name}, --sample {sample}: {_one_line(error)}); "
                "give its arguments with their names, or a function that makes them"
            ) from error
    if kwargs:
        raise ValueError(
            f"an nn.Sequential takes no keyword arguments (--sample {sample}: {', '.join(kwargs)}); "
            "give its inputs without names"
        )
    try:
        return profile(model, args[0] if len(args) == 1 else args, link=link)
    except Exception as error:
        if not (notes := getattr(error, "__notes__", [])):
            raise
        cause = " ".join(" ".join([f"{type(error).__name__}: {error},", *notes]).split())
        raise ValueError(
            f"--sample must be a batch that the model takes (--model {name}, --sample {sample}: {cause}); "
            "give the shape and type of its input, or fix that layer"
        ) from error


def _called(function: Callable[[], object], name: str, option: str) -> object:
    try:
        with _own_arguments(name.partition(":")[0]):
            return function()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{option} {name} failed: {_one_line(error)}") from error


def _find(name: str, option: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ModelError(f"{option} must be module:factory, such as train:build_model ({option} {name})")
    if module_name.endswith(".py"):
        *folders, file = Path(module_name).with_suffix("").parts
        if Path(module_name).is_absolute():
            fix = f"write {option} {file}:{attribute}, in {Path(*folders)}"
        else:
            fix = f"write {option} {'.'.join([*folders, file])}:{attribute}"
        raise ModelError(f"{option} needs the name of a module, without .py ({option} {name}); {fix}")
    sys.path.insert(0, os.getcwd())
    try:
        with _own_arguments(module_name):
            found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{option} {name}: cannot import {module_name!r}: {_one_line(error)}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            from pipesight.stats.config_errors import nearest

            close = nearest(part, [word for word in dir(found) if not word.startswith("_")])
            raise ModelError(f"{option} {name}: no attribute {part!r}{close}") from None
    return found


@contextlib.contextmanager
def _own_arguments(module_name: str) -> Iterator[None]:
    """Let a module that parses the command line find its own name there, and no arguments."""
    before = sys.argv
    sys.argv = [module_name]
    try:
        with contextlib.suppress(ImportError, ValueError):  # the import reports it better
            spec = importlib.util.find_spec(module_name)
            sys.argv = [(spec and spec.origin) or module_name]
        yield
    finally:
        sys.argv = before


def _one_line(error: BaseException) -> str:
    """Return an error and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
