"""A shim in one folder with the package it stands for: found at the import, since either has overwritten the other."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

__all__ = ["refuse_beside"]


def refuse_beside(package_file: str, shim: str, *real: str) -> None:
    """Raise ``ImportError`` if a distribution in ``real`` has files in the folder of ``package_file``.

    Args:
        package_file: ``__file__`` of the shim's package.
        shim: The distribution of the shim.
        *real: The distributions it stands for. Those installed elsewhere do no harm.
    """
    folder = Path(package_file).resolve().parent
    mixed = [name for name in real if folder in _folders(name)]
    if mixed:
        source = shim.removeprefix("pipesight-").replace("-", "_")
        raise ImportError(
            f"{' and '.join(mixed)} and {shim} are both installed into {folder}, and each overwrites files of the "
            "other. Uninstall both, then install the one you want:\n\n"
            f"    pip uninstall --yes {' '.join(real)} {shim}\n"
            f"    pip install ./shims/{source}  # in a clone of pipesight; or: pip install {real[0]}\n"
        )


def _folders(name: str) -> set[Path]:
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return set()
    return {Path(str(file.locate())).resolve().parent for file in files if file.suffix == ".py"}
