"""Python processes that begin with torch imported: each is forked from one that did nothing but that.

Importing torch, and its compiler with the first forward, takes seconds; a fork takes milliseconds. What comes of it
is a process like any other: with a memory, an environment and a `__main__` of its own, an end by Python's own ending,
and nothing of pipesight in it yet. Its streams are not buffered. Only a test of how Python starts, or of when torch is
imported, needs another.

    process = warm.start("train.py", "3", cwd=tmp_path)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0

`command` is for those who start commands themselves, such as torchrun.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from support.processes import STRICT_PYTHON

__all__ = ["Process", "command", "run", "start", "torchrun"]

PRELOADED = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed", "torch.distributed.launcher.api"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"),
)


def start(
    *arguments: str, cwd: Path | str | None = None, env: Mapping[str, str] | None = None, merge: bool = False
) -> Process:
    """Start Python with arguments: a script, `-m` and a module, or `-c` and code; warnings are errors.

    Args:
        arguments: What would follow `python` on the command line.
        cwd: The folder to run in.
        env: The environment; what Python itself reads at its start is as it is here.
        merge: Whether stderr goes where stdout does.
    """
    return Process(list(map(str, arguments)), str(cwd or Path.cwd()), dict(os.environ if env is None else env), merge)


def run(*arguments: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Start Python, and wait until it ends."""
    process = start(*arguments, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.end()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def command(*arguments: str) -> list[str]:
    """Return a command that is as good as `python` with these arguments, but begins with torch imported."""
    stand_in = str(Path(__file__).with_name("stand_in.py"))
    return [sys.executable, "-I", "-S", stand_in, _server(), *map(str, arguments)]


def torchrun(
    count: int,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    stuck: Collection[int] = (),
    agent: bool = True,
    **options: Any,
) -> list[subprocess.CompletedProcess[str]]:
    """Start as many ranks, with the variables that torchrun has for them, and wait until all have ended.

    Those that get stuck are killed when the others have ended. Without an agent, the first rank keeps the store, as
    where other launchers start the ranks.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    if agent:
        shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    else:
        del store  # for the first rank to take its port
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        start(*arguments, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(count)
    ]
    try:
        until = time.monotonic() + timeout
        for k, rank in enumerate(ranks):
            if k not in stuck:
                rank.wait(max(0.0, until - time.monotonic()))
        for k in stuck:
            ranks[k].kill()
        outputs = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    return [
        subprocess.CompletedProcess(arguments, rank.returncode, *output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


class Process:
    """A process that was started: what `subprocess.Popen` would be for it."""

    def __init__(self, arguments: list[str], cwd: str, env: dict[str, str], merge: bool) -> None:
        self.arguments = arguments
        self.returncode: int | None = None
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115 - not a pipe, which may be full while nobody reads
        self._stderr = self._stdout if merge else tempfile.TemporaryFile()  # noqa: SIM115
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        request = json.dumps({"arguments": arguments, "cwd": cwd, "env": env}).encode() + b"\n"
        socket.send_fds(self._socket, [request[:1]], [self._stdout.fileno(), self._stderr.fileno()])
        self._socket.sendall(request[1:])
        self._replies = self._socket.makefile("r")
        self.pid = int(self._replies.readline())

    def communicate(self, *, timeout: float = 60) -> tuple[str, str]:
        """Wait for the end, and return what was written to stdout and stderr."""
        self.wait(timeout)
        texts = []
        for file in dict.fromkeys((self._stdout, self._stderr)):
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return texts[0], texts[1] if len(texts) > 1 else ""

    def wait(self, timeout: float) -> int:
        """Wait for the end, and return the exit code: negative for a signal."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.arguments, timeout)
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._socket.close()
        return self.returncode

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(60)

    def end(self) -> None:
        """Kill it, and let go of what it has written."""
        self.kill()
        self._stdout.close()
        self._stderr.close()


@functools.cache
def _server() -> str:
    """Start the process that forks, once; return its address. It ends when its input does."""
    folder = tempfile.mkdtemp(prefix="warm-")
    address = os.path.join(folder, "socket")
    command = [*STRICT_PYTHON, "-u", "-c", "exec(__import__('support.warm', fromlist=['serve']).serve())", address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_paths()])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    ending, owner = process.stdin, os.getpid()

    def end() -> None:
        if os.getpid() != owner:  # a test has forked
            return
        ending.close()
        process.wait()
        os.unlink(address)
        os.rmdir(folder)

    atexit.register(end)
    return address


def _paths() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def serve() -> CodeType:
    """Fork a process for every connection. This returns in those alone, with what they are to run."""
    for module in PRELOADED:
        __import__(module)
    _skip_static_destructors()
    gc.collect()
    gc.freeze()  # so that no collection in a fork, nor that at its end, has all of it to go through, and to copy
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    os.write(1, b"ready\n")
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            code = _fork_and_tell(connection)
            if code is None:
                os._exit(0)
            return code
        connection.close()
        _reap()
    _reap()  # so that the time they took is counted as that of the tests
    os._exit(0)


def _skip_static_destructors() -> None:
    """End a process as soon as Python has ended in it.

    The destructors of torch's libraries would take 0.13 s more, most of it to copy the pages that they write to.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # what is registered last is called first
    libc.__cxa_atexit(libc.fflush, None, None)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_and_tell(connection: socket.socket) -> CodeType | None:
    """Fork once more; return what to run in the child, and nothing in the parent when the child has ended."""
    first, descriptors, _, _ = socket.recv_fds(connection, 1, 5)
    with connection.makefile("rb") as file:
        request = json.loads(first + file.readline())
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{child}\n".encode())
        if request.get("tied"):
            ended = os.pidfd_open(child)
            if ended not in select.select([ended, connection], [], [])[0]:
                os.kill(child, signal.SIGKILL)  # who stands for it was killed
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(OSError):  # nobody may wait for it any more
            connection.sendall(f"{status}\n".encode())
        return None
    connection.close()
    _enter(descriptors[2:])
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((empty, *descriptors[:2])):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if (threads := request["env"].get("OMP_NUM_THREADS", "")).isdecimal():  # read when torch was imported
        sys.modules["torch"].set_num_threads(int(threads))
    return _code(request["arguments"])


def _enter(namespaces: list[int]) -> None:
    """Enter other namespaces than those of this process, which only root can."""
    for kind, descriptor in zip(("net", "uts", "mnt"), namespaces, strict=False):
        if not os.path.samestat(os.fstat(descriptor), os.stat(f"/proc/self/ns/{kind}")):
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
            if libc.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace")
        os.close(descriptor)


def _code(arguments: list[str]) -> CodeType:
    """Return what Python would run for these arguments, having set what a program sees of them."""
    kind, rest = (arguments[0], arguments[1:]) if arguments[0] in ("-c", "-m") else ("", arguments)
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest
    if os.environ.get("PYTHONSAFEPATH"):
        del sys.path[0]
    else:
        sys.path[0] = {"-c": "", "-m": os.getcwd()}[kind] if kind else os.path.dirname(os.path.abspath(rest[0]))
    if kind == "-c":
        return compile(rest[0], "<string>", "exec")
    if kind == "-m":
        running = f"import runpy; runpy.run_module({rest[0]!r}, run_name='__main__', alter_sys=True)"
        return compile(running, "<string>", "exec")
    sys.modules["__main__"].__file__ = os.path.abspath(rest[0])
    return compile(Path(rest[0]).read_bytes(), rest[0], "exec")
