"""Jobs of several nodes: one torchrun on each host, which meet over the network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import time
from pathlib import Path

from support import warm


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
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings, **{key: str(value) for key, value in more.items()}}


class Job:
    """The nodes of a job that runs, and what they write."""

    def __init__(self, processes, files):
        self.processes, self._files = processes, files

    def outputs(self):
        """Return what each node has written to stdout up to now."""
        return [file.with_suffix(".out").read_text() for file in self._files]

    def errors(self):
        """Return what each node has written to stderr up to now."""
        return [file.with_suffix(".err").read_text() for file in self._files]

    def wait_for(self, text, timeout=120):
        """Wait until a node has written it; fail if the job ends before."""
        until = time.monotonic() + timeout
        while not any(text in output for output in self.outputs()):
            assert time.monotonic() < until, self.told(f"{text!r} was not written within {timeout} s")
            assert any(node.poll() is None for node in self.processes), self.told(f"ended without {text!r}")
            time.sleep(0.02)

    def ends_well(self, timeout=150):
        """Wait for all nodes; return what each wrote to stdout."""
        until = time.monotonic() + timeout
        codes = [node.wait(timeout=max(1, until - time.monotonic())) for node in self.processes]
        assert codes == [0] * len(codes), self.told(f"exit codes {codes}")
        return self.outputs()

    def told(self, what):
        return "\n".join([what, *self.outputs(), *self.errors()])


@contextlib.contextmanager
def nodes(hosts, program, folder, *, ranks=1, port=None, options=(), through=(), **environment):
    """Start a program as a job of one node on each host; end what is left of it at the end.

    Args:
        hosts: Where the nodes are; all see the folder. The nodes meet at the first one.
        program: A script and its arguments.
        folder: Where it runs.
        ranks: How many there are on each node.
        port: Where the nodes meet; a free one by default.
        options: More options of torchrun.
        through: What runs the program, if not Python itself: ``("-m", "pipesight", "run", "--out", "RUN")``.
        **environment: More variables.
    """
    endpoint = f"{hosts[0].name}:{port or free_port()}"
    meet = ["--nnodes", len(hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, *meet, *options, "--no-python"]
    command = warm.command(*launcher, *warm.command(*through, *program))
    commands = [host.command(command) for host in hosts]
    with started(commands, folder, FOLDER=folder, **environment) as job:
        yield job


@contextlib.contextmanager
def started(commands, folder, **environment):
    """Start commands side by side; end what is left of them at the end."""
    files = [Path(folder) / f"node-{k}" for k in range(len(commands))]
    settings = {"env": environment_of(**environment), "cwd": folder}
    processes = []
    try:
        for command, file in zip(commands, files, strict=True):
            with open(file.with_suffix(".out"), "w") as output, open(file.with_suffix(".err"), "w") as errors:
                processes.append(subprocess.Popen(command, **settings, stdout=output, stderr=errors))
        yield Job(processes, files)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
        for process in processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
