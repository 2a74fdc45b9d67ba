"""The model and the sample batch that options name: ``--model`` and ``--sample``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipesight.schedule.costs import Costs, Link

__all__ = ["ModelError", "find_model", "find_sequential", "make_sample", "profile_model"]


class ModelError(ValueError):
    """The model cannot be imported or built."""


def find_model(name: str) -> nn.Module:
    """Return the model that ``module:factory`` returns, or is.

    Raises:
        ModelError: There is none.
    """
    from torch import nn

    found = _find(name)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ModelError(f"--model must name a function or a module (--model {name}: {type(found).__name__})")
    try:
        with _own_arguments(name.partition(":")[0]):
            model = found()
    except (Exception, SystemExit) as error:
        raise ModelError(f"--model {name} failed: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model must return an nn.Module (--model {name} returned: {type(model).__name__})")
    return model


def find_sequential(name: str) -> nn.Sequential:
    """Return the ``nn.Sequential`` that ``module:factory`` returns, or is; for a ``GPipe``, the one it was built from.

    Raises:
        ModelError: There is none.
    """
    from torch import nn

    from pipesight.pipeline.gpipe import GPipe

    found = find_model(name)
    if isinstance(found, GPipe):
        return nn.Sequential(OrderedDict(child for part in found.partitions for child in part.named_children()))
    if not isinstance(found, nn.Sequential):
        raise ModelError(f"--model must return an nn.Sequential (--model {name} returned: {type(found).__name__})")
    return found


def make_sample(text: str) -> Tensor:
    """Return a tensor of a shape and type such as ``32x128:int64``: random numbers from 0 to 1, or zeros for integers.

    Raises:
        ValueError: It is not a shape and type.
    """
    import torch

    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(part.isdecimal() and int(part) for part in sizes):
        raise ValueError(
            f"--sample must be a shape, optionally with a type: 32x3x224x224, or 32x128:int64 (--sample: {text!r})"
        )
    numbers = [int(part) for part in sizes]
    return torch.rand(numbers).to(dtype) if dtype.is_floating_point else torch.zeros(numbers, dtype=dtype)


def profile_model(name: str, sample: str, *, link: Link | None) -> Costs:
    """Run a batch through the model, layer by layer, and return the costs.

    Raises:
        ValueError: The model cannot be found, or does not take the batch.
    """
    from pipesight.pipeline.profiled_costs import profile

    model, batch = find_sequential(name), make_sample(sample)
    try:
        return profile(model, batch, link=link)
    except Exception as error:
        if not (notes := getattr(error, "__notes__", [])):
            raise
        cause = " ".join(" ".join([f"{type(error).__name__}: {error},", *notes]).split())
        raise ValueError(
            f"--sample must be a batch that the model takes (--model {name}, --sample {sample}: {cause}); "
            "give the shape and type of its input, or fix that layer"
        ) from error


def _find(name: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ModelError(f"--model must be module:factory, such as train:build_model (--model {name})")
    if module_name.endswith(".py"):
        *folders, file = Path(module_name).with_suffix("").parts
        if Path(module_name).is_absolute():
            fix = f"write --model {file}:{attribute}, in {Path(*folders)}"
        else:
            fix = f"write --model {'.'.join([*folders, file])}:{attribute}"
        raise ModelError(f"--model needs the name of a module, without .py (--model {name}); {fix}")
    sys.path.insert(0, os.getcwd())
    try:
        with _own_arguments(module_name):
            found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(f"--model {name}: cannot import {module_name!r}: {_one_line(error)}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            from pipesight.stats.config_errors import nearest

            close = nearest(part, [word for word in dir(found) if not word.startswith("_")])
            raise ModelError(f"--model {name}: no attribute {part!r}{close}") from None
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
