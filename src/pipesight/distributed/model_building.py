"""Build the model of a factory on one rank: without memory where that works, else whole on the CPU.

A model that looks at values while it is built, or leaves a tensor without any, cannot be built without memory. The
ranks of a machine build it on the CPU one after the other: each keeps its own layers and frees the others before the
next one begins, so that a machine holds one whole model at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipesight.distributed.rank_initialisation import Recipe, build_on_meta

__all__ = ["build_model", "keep_layers"]

logger = logging.getLogger(__name__)


def build_model(
    factory: Callable[[], nn.Module], free: Callable[[nn.Module], None], *, first: bool
) -> tuple[nn.Module, Recipe | None]:
    """Return the model that a factory builds, and the recipe for its weights unless it already has them.

    ``free`` frees what belongs to other ranks, of a model that had to be built whole. The ``first`` rank logs a warning
    if that is on the CPU.
    """
    states = _generators()
    try:
        module, recipe = build_on_meta(factory)
        if not isinstance(module, nn.Module):
            return module, recipe
        name = recipe.without_values(module)
        why = None if name is None else f"leaves '{name}' without values"
    except Exception as error:
        why = f"needs values ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    if why is None:
        return module, recipe
    if first:
        logger.warning(
            "the model %s when it is built on the meta device, so the ranks of each machine build it on the CPU, one "
            "after the other",
            why,
        )
    for restore in states:
        restore()
    with _turn(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(torch.initial_seed())
        module = factory()
        if isinstance(module, nn.Module):
            free(module)
    return module, None


def keep_layers(module: nn.Sequential, own: set[int]) -> None:
    """Free the memory of all layers but some."""
    mine = {id(t) for k, layer in enumerate(module) if k in own for t in (*layer.parameters(), *layer.buffers())}
    hollow: dict[int, Tensor] = {}
    for k, layer in enumerate(module):
        for child in () if k in own else layer.modules():
            places: list[dict[str, Any]] = [child._parameters, child._buffers]
            for values in places:
                for key, tensor in values.items():
                    if tensor is not None and id(tensor) not in mine:
                        values[key] = hollow.setdefault(id(tensor), _hollow(tensor))


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _generators() -> list[Callable[[], Any]]:
    """Return functions that reset the generators of Python and NumPy, for a second attempt to draw the same."""
    state = random.getstate()
    found: list[Callable[[], Any]] = [lambda: random.setstate(state)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        theirs = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(theirs))
    return found


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Hold a lock between the ranks of this job on this machine."""
    path = Path(tempfile.gettempdir()) / f"pipesight-{os.getuid()}-{os.environ.get('MASTER_PORT', '0')}.lock"
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_there(path, descriptor):  # the rank before has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
