"""The units of a model: the modules that a pipeline treats as layers, and where it can be cut.

Of a GPT-2, these are ``transformer.wte``, ``transformer.wpe``, ``transformer.drop``, ``transformer.h.0`` and so on,
``transformer.ln_f`` and ``lm_head``. What contains a cut or a list of blocks is no unit itself, but opened: its
children are looked at instead.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

__all__ = ["check_cuts", "find_units", "guess_parts", "is_callable", "is_repeated", "refuse_shards"]


def find_units(model: nn.Module, cuts: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Return the units of a model by name, in the order in which it registers them."""
    cut_names = list(cuts)
    total = _size(model)
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:  # under another name
            continue
        seen.add(module)
        if name and not _is_opened(name, module, cut_names, total):
            units[name] = module
        else:
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            waiting += reversed(children)
    return units


def is_repeated(unit: nn.Module) -> bool:
    """Tell whether checkpointing runs a unit again: others save little, such as a ``Linear`` its input."""
    return next(unit.children(), None) is not None


def refuse_shards(model: nn.Module) -> None:
    """Raise if FSDP shards modules of a model: their weights are replaced in hooks, and have no gradients here."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for name, module in model.named_modules() if kinds else ():
        if isinstance(module, kinds):
            raise TypeError(
                f"FSDP shards {f'{name!r}' if name else 'the model'} inside the pipeline, where its weights get no "
                "gradients; shard a pipeline in one process as a whole, fully_shard(Pipeline(...))"
            )


def check_cuts(model: nn.Module, cuts: Sequence[str] | None) -> list[str]:
    """Return the names of the modules that begin partitions 1, 2 and so on; raise if a model cannot be cut there."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, but got {type(model).__name__}")
    refuse_shards(model)
    if cuts is None:
        units = list(find_units(model))
        example = f"cuts=[{units[len(units) // 2]!r}]" if len(units) > 1 else "cuts=['name.of.a.module']"
        raise TypeError(
            f"say where the model is cut: {example}, the modules that begin partitions 1, 2 and so on, or "
            "partitions=2, sample=(args, kwargs) to choose them by a call; cuts=[] makes one partition"
        )
    if isinstance(cuts, str):
        raise TypeError(f"cuts must be a list of names of modules, but got the string {cuts!r}: cuts=[{cuts!r}]")
    modules = dict(model.named_modules())
    names: list[str] = []
    for cut in cuts:
        if not isinstance(cut, str):
            example = next((name for name, module in modules.items() if module is cut), "transformer.h.4")
            numbers = type(cut) is int and f"; numbers of layers are a balance: GPipe(model, balance={list(cuts)})"
            raise TypeError(
                f"cuts must be names of modules, such as {example!r}, but got {type(cut).__name__}{numbers or ''}"
            )
        if cut not in modules:
            near = difflib.get_close_matches(cut, modules, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; model.named_modules() lists them"
            raise ValueError(f"{type(model).__name__} has no module {cut!r} to be cut at{hint}")
        if cut == "":
            raise ValueError("a cut begins partition 1, so it cannot be the whole model ''; name a module inside it")
        if cut in names:
            raise ValueError(f"cuts must be different modules, but {cut!r} is given twice (cuts: {list(cuts)})")
        if not is_callable(modules[cut]):
            first = next(iter(modules[cut].named_children()), None)
            instead = "" if first is None else f"; cut at {f'{cut}.{first[0]}'!r} instead"
            raise ValueError(
                f"cannot cut at {cut!r}: {type(modules[cut]).__name__} has no forward of its own, so that it is never "
                f"called{instead}"
            )
        names.append(cut)
    return names


def is_callable(module: nn.Module) -> bool:
    """Tell whether a module has a forward: an ``nn.ModuleList`` has none."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented" or "forward" in vars(module)


def _is_opened(name: str, module: nn.Module, cuts: Sequence[str], total: int) -> bool:
    if not is_callable(module) or any(cut.startswith(f"{name}.") for cut in cuts):
        return True
    if _is_list_of_blocks(module, total):
        return True
    in_list = name.rpartition(".")[2].isdecimal()  # a block; the lists inside are its own business
    return not in_list and any(_is_list_of_blocks(inner, total) for inner in module.modules() if inner is not module)


def _is_list_of_blocks(module: nn.Module, total: int) -> bool:
    """Tell whether a module lists blocks one after the other: those have modules inside, or most of the weights."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return False
    return any(next(child.children(), None) is not None for child in module) or 2 * _size(module) > total > 0


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def guess_parts(names: Iterable[str], cuts: Sequence[str]) -> dict[str, int]:
    """Return the partition of each module, if the model calls its modules in the order in which it registers them.

    The cuts are in the order in which they are called, so that those around them are, too.

    >>> guess_parts(["", "embed", "blocks", "blocks.0", "blocks.1", "head"], ["blocks.1"])
    {'': 0, 'embed': 0, 'blocks': 0, 'blocks.0': 0, 'blocks.1': 1, 'head': 1}
    >>> guess_parts(["", "text", "text.0", "text.1", "image", "image.0", "image.1"], ["image.1", "text.1"])
    {'': 0, 'image': 0, 'image.0': 0, 'image.1': 1, 'text': 1, 'text.0': 1, 'text.1': 2}
    """
    children: dict[str, list[str]] = {}
    for name in names:
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    first = {cut: k for k, cut in enumerate(cuts, start=1)}
    earliest: dict[str, int] = {}  # of the cuts in a module
    for cut, k in first.items():
        parts = cut.split(".")
        for size in range(1, len(parts) + 1):
            earliest.setdefault(".".join(parts[:size]), k)
    found: dict[str, int] = {}
    waiting, part = [""], 0
    while waiting:
        name = waiting.pop()
        part = found[name] = first.get(name, part)
        siblings = children.get(name, [])
        called = iter(sorted(filter(earliest.__contains__, siblings), key=earliest.__getitem__))
        waiting += [next(called) if child in earliest else child for child in siblings][::-1]
    return found
