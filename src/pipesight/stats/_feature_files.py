"""Running the files of feature folders, so that what they register goes to the registry that asked."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipesight.stats.registry import Registry

__all__ = ["execute", "python_files", "target_of"]

# The registry that is loading a file, and the name of the module made of it.
_loading: ContextVar[tuple[Registry, str] | None] = ContextVar("loading", default=None)


def target_of() -> tuple[Registry, str] | None:
    """Return the registry that is loading a file, and that file's module name."""
    return _loading.get()


def python_files(dirs: str | Path | Iterable[str | Path] | None) -> list[Path]:
    """Return the Python files of folders and those in them, by name; ``FileNotFoundError`` if a folder is missing."""
    folders = [dirs] if isinstance(dirs, str | Path) else list(dirs or ())
    files: list[Path] = []
    for folder in folders:
        if not folder:  # an empty string stands for none
            continue
        if not isinstance(folder, str | Path):
            raise TypeError(f"feature_dirs must be paths of folders (found: {folder!r})")
        path = Path(folder).resolve()
        if not path.is_dir():
            raise FileNotFoundError(f"feature_dirs must be existing folders (missing: {folder}); correct the path")
        files += sorted(file for file in path.rglob("*.py") if file.is_file() and not _hidden(file.relative_to(path)))
    return list(dict.fromkeys(files))


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in file.parts)


def execute(file: Path, registry: Registry) -> None:
    """Run a file as a module of its own; ``ImportError``, with its error as the cause, if that fails."""
    name = f"pipesight_features_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look it up
    token = _loading.set((registry, name))
    try:
        with _importable(file.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise ImportError(
            f"cannot load the features in {file} ({type(error).__name__}: {error})", path=str(file)
        ) from error
    finally:
        _loading.reset(token)


# The folder that a module was imported from while a file of it was run, by the name of the module.
_imported: dict[str, Path] = {}


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the files of a folder import each other, as scripts do.

    A module of another such folder is not taken for one of this folder that has the same name.
    """
    for name in [name for name, home in _imported.items() if home != folder and (folder / f"{name}.py").is_file()]:
        sys.modules.pop(name, None)
        del _imported[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file) == folder / f"{name}.py":
                _imported[name] = folder
