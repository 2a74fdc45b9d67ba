"""The file of results: one section per benchmark and kind of machine, each with where and when it was measured.

python -m benchmarks spans --json docs/benchmarks.json    replaces the section `spans` and leaves the others
"""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT
from benchmarks.tables import Table
from pipesight import __version__

__all__ = ["Section", "describe_machine", "describe_versions", "load", "merge", "now", "revision", "save"]

FORMAT = 1
PEERS = ("torch", "torchgpipe", "dftracer", "viztracer", "nvdlfw-inspect")


@dataclasses.dataclass(slots=True)
class Section:
    """What one run of one benchmark found."""

    benchmark: str
    title: str
    command: str
    """That runs it, less the paths of this machine."""
    date: str
    """When it began, UTC."""
    commit: str
    """With ``+`` behind it if files had been changed since."""
    size: str
    """``full``, ``brief``, or ``quick``, which shows that it runs and not how fast."""
    seconds: float
    """How long it took."""
    machine: dict[str, Any]
    versions: dict[str, str]
    tables: list[Table]

    @property
    def place(self) -> tuple[str, str]:
        """What a newer section replaces."""
        return self.benchmark, self.machine["gpu"] or ""


def load(path: Path) -> list[Section]:
    """Read a file of results; one that is missing has no sections."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["format"] != FORMAT:
        raise ValueError(f"{path} has format {found['format']}, not {FORMAT}")
    return [
        Section(**{**one, "tables": [Table.from_json(table) for table in one["tables"]]}) for one in found["sections"]
    ]


def merge(old: Iterable[Section], new: Iterable[Section], order: Sequence[str]) -> list[Section]:
    """Return all sections, the newer one of each benchmark and kind of machine, in the order of the benchmarks."""
    newest: dict[tuple[str, str], Section] = {}
    for section in [*old, *new]:
        known = newest.get(section.place)
        if known is None or known.date <= section.date:
            newest[section.place] = section
    listed = [section for section in newest.values() if section.benchmark in order]
    return sorted(listed, key=lambda section: (order.index(section.benchmark), section.place))


def save(path: Path, sections: Iterable[Section]) -> None:
    """Write a file of results, whole or not at all."""
    found = {"format": FORMAT, "sections": [dataclasses.asdict(section) for section in sections]}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")


def revision() -> str:
    """Return the commit that is measured, with ``+`` behind it if files were changed; empty outside of git."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if commit.returncode != 0:
        return ""
    # Results themselves may have been written already.
    paths = ["src", "benchmarks", "shims"]
    changed = subprocess.run([*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True).stdout
    return commit.stdout.strip() + "+" * bool(changed)


def describe_machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_versions(peers: Path | None) -> dict[str, str]:
    """Return versions of what is measured here, and of the packages that the peers' interpreter has."""
    versions = {"pipesight": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    if peers is None:
        return versions
    program = "import importlib.metadata as m, json\n"
    program += "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    found = json.loads(subprocess.run([peers, "-c", program], capture_output=True, text=True, check=True).stdout)
    theirs = {name.lower().replace("_", "-"): version for name, version in found.items()}
    for name in PEERS:
        if name in theirs and theirs[name] != versions.get(name):
            versions[f"{name} of the peers" if name in versions else name] = theirs[name]
    return versions
