"""Run benchmarks and print their tables.

For example, the last where pipesight is not installed and torchgpipe cannot be:

    python -m benchmarks --peers .venv-peers/bin/python
    python -m benchmarks cpu_step soak --peers .venv-peers/bin/python --quick
    PYTHONPATH=src python3 -m benchmarks gpu --torchgpipe-path DIR_THAT_HOLDS_TORCHGPIPE
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import (
    cpu_step,
    distributed,
    empty_task,
    frames,
    gpu,
    observing,
    planning,
    reading,
    soak,
    spans,
    statistics,
)
from benchmarks.harness import Options

__all__ = ["main"]

BENCHMARKS: dict[str, tuple[Callable[[Options], bool], str]] = {
    module.__name__.rpartition(".")[2]: (module.run, str(module.__doc__).partition("\n")[0])
    for module in (cpu_step, distributed, empty_task, frames, gpu, observing, planning, reading, soak, spans, statistics)
}


def main(arguments: list[str]) -> int:
    """Run the named benchmarks; 0 unless a contender crashes or the soak is not flat."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks and print their tables.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:12}{line}" for name, (_, line) in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PYTHON",
        help="an interpreter that has the peers; make bench makes it",
    )
    parser.add_argument(
        "--torchgpipe-path",
        type=Path,
        metavar="DIR",
        help="a folder that holds torchgpipe, for this interpreter; goes before --peers",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is named {name} (benchmarks: {', '.join(BENCHMARKS)})")
    if chosen.peers is not None and not chosen.peers.exists():
        parser.error(f"--peers must name an interpreter ({chosen.peers} is missing); run: make bench")
    options = Options(
        # Made absolute, not resolved: the target of the link is an interpreter without the peer's packages.
        peers=None if chosen.peers is None else chosen.peers.absolute(),
        torchgpipe_path=None if chosen.torchgpipe_path is None else chosen.torchgpipe_path.absolute(),
        quick=chosen.quick,
    )
    print(f"$ {shlex.join(['python', '-m', 'benchmarks', *arguments])}")
    print(machine())
    sound = True
    for name in chosen.names or BENCHMARKS:
        benchmark, line = BENCHMARKS[name]
        print(f"\n== {name}: {line}", flush=True)
        sound &= benchmark(options)
    return 0 if sound else 1


def machine() -> str:
    parts = [
        processor(),
        f"{os.cpu_count()} cores",
        f"load {os.getloadavg()[0]:.1f}",
        platform.system(),
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
