"""Jobs of several nodes: one torchrun on each host, which meet over the network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from processes import STRICT_PYTHON


@dataclasses.dataclass(frozen=True, slots=True)
class Here:
    """This machine as a host, for nodes that share it."""

    name: str = "localhost"

    def command(self, arguments):
        """Return a command of this host."""
        return list(map(str, arguments))


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def environment_of(**more):
    """Return the environment of a program that finds this folder's modules, and leaves a core to the others."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings, **{key: str(value) for key, value in more.items()}}


def run_nodes(hosts, program, folder, *, ranks=1, port=None, options=(), through=(), timeout=150, **environment):
    """Run a program as a job of one node on each host; return what each node wrote to stdout.

    Args:
        hosts: Where the nodes are; all see the folder. The nodes meet at the first one.
        program: A script and its arguments.
        folder: Where it runs.
        ranks: How many there are on each node.
        port: Where the nodes meet; a free one by default.
        options: More options of torchrun.
        through: What runs the program, if not Python itself: ``("-m", "pipesight", "run", "--out", "RUN")``.
        timeout: Seconds that the job may take.
        **environment: More variables.
    """
    endpoint = f"{hosts[0].name}:{port or free_port()}"
    meet = ["--nnodes", len(hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *meet, *options]
    command += ["--no-python", *STRICT_PYTHON, *through, *program]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(Path(folder) / f"node-{k}.err", "w+")) for k in range(len(hosts))]
        nodes = [
            subprocess.Popen(
                host.command(command),
                env=environment_of(FOLDER=folder, **environment),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
            for host, file in zip(hosts, files, strict=True)
        ]
        until = time.monotonic() + timeout
        try:
            outputs = [node.communicate(timeout=max(1, until - time.monotonic()))[0] for node in nodes]
        finally:
            for node in nodes:
                if node.poll() is None:
                    node.terminate()  # torchrun ends its ranks
            for node in nodes:
                if node.poll() is None:
                    node.communicate(timeout=60)
        errors = [file.seek(0) or file.read() for file in files]
    codes = [node.returncode for node in nodes]
    assert codes == [0] * len(codes), "\n".join([f"exit codes {codes}", *outputs, *errors])
    return outputs
