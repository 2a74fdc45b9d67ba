"""Read the part of one rank from safetensors files, as ``save_pretrained`` of transformers writes them.

A file begins with a table of its tensors, so that only those of this rank are read::

    FOLDER/model.safetensors                     or
    FOLDER/model.safetensors.index.json          which tensor is in which file
    FOLDER/model-00001-of-00002.safetensors      ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_tensors"]


def read_tensors(
    folder: str | os.PathLike[str], wanted: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]], prefix: str
) -> None:
    """Copy the values of tensors from files, whatever dtype they have there.

    ``aliases`` are other names of each tensor: tied weights are in the files under one of them. The ``prefix`` is what
    a name may lack in the files, or have more: files of a model without its head, or of one with it.

    Raises:
        ValueError: A tensor is in no file, or has another shape there.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("reading safetensors files needs the package: pip install safetensors") from error
    places = _places(Path(folder), safe_open)
    by_file: dict[Path, list[tuple[str, str]]] = {}
    missing = []
    for name in wanted:
        names = [name, *aliases.get(name, ())]
        found = next((other for one in names for other in _spellings(one, prefix) if other in places), None)
        if found is None:
            missing.append(name)
        else:
            by_file.setdefault(places[found], []).append((name, found))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"{folder} has no values of {shown}, which the model has")
    with torch.no_grad():
        for path, pairs in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name, found in pairs:
                    _copy(file.get_tensor(found), wanted[name], name, path)


def _copy(value: Tensor, target: Tensor, name: str, path: Path) -> None:
    if value.shape != target.shape:
        raise ValueError(f"{name} has the shape {list(value.shape)} in {path}, but {list(target.shape)} in the model")
    target.copy_(value)


def _places(folder: Path, safe_open: Any) -> dict[str, Path]:
    """Return the file that each tensor is in."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in files.items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"there are no safetensors files in {folder}")
    places: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _spellings(name: str, prefix: str) -> list[str]:
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
