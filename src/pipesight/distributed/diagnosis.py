"""Which rank keeps the others waiting, or broke its connections: from their answers, and whether they are alive.

Whether the process of a rank is alive is asked without its help: it listens on a port, for which the kernel answers. A
process that was killed refuses connections. One that is stopped, or computes and does not get to answer anything, takes
them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answers", "LivenessPort", "broken", "is_gone", "late"]

_PATIENCE = 1.0  # seconds for a connection
_RULE = "every rank must call step, eval_step and predict equally often; give each the same number of batches"


@dataclass(slots=True)
class Answers:
    """What one rank, the asker, has found out about all of them."""

    asker: int
    waited_for: str
    calls: int
    """Of the pipeline that the asker has begun."""
    call: str
    """The last of them."""
    states: Mapping[int, Mapping[str, Any]]
    """Of ranks that answered, or left a note when they exited: what they wait for, where they are, their calls."""
    silent: Collection[int]
    gone: Collection[int]
    """Those of the silent ranks whose process has ended."""

    def behind(self) -> dict[int, int]:
        """Return the numbers of calls of ranks that made fewer than the asker and are not in one."""
        return {rank: s["calls"] for rank, s in self.states.items() if s["calls"] < self.calls and not s["in_call"]}

    def rule(self) -> str:
        """Return the part of the message about ranks that made fewer calls."""
        behind = self.behind()
        if not behind:
            return ""
        who = ", ".join(f"rank {rank} made {calls}" for rank, calls in behind.items())
        return f"; rank {self.asker} made call {self.calls} of the pipeline, {self.call}, but {who}: {_RULE}"


def broken(answers: Answers, error: str) -> str:
    """Name the ranks that died, or else those that exited, after a connection broke."""
    me = f"rank {answers.asker} waited for {answers.waited_for}"
    if answers.gone:
        gone = "; ".join(f"rank {rank} died without an exception" for rank in sorted(answers.gone))
        return f"{gone}: {me}; torchrun reports its exit code or signal"
    left = [rank for rank, state in answers.states.items() if state["left"]]
    if left := left or [rank for rank in answers.behind() if not answers.states[rank]["waits"]]:
        return f"{'; '.join(f'rank {rank} has exited' for rank in sorted(left))}: {me}{answers.rule()}"
    if answers.silent:
        return f"{'; '.join(f'rank {rank} does not answer' for rank in sorted(answers.silent))}: {me}"
    return f"a connection between ranks broke, but all of them are alive: {me}, and got: {error}"


def late(answers: Answers, seconds: float | None) -> str:
    """Name the ranks that keep the others waiting: those that do not wait themselves or do not answer."""
    idle = {rank: state for rank, state in answers.states.items() if not state["waits"]}
    if not idle and not answers.silent:  # one may wait for something else than the others, outside the pipeline
        idle = {rank: answers.states[rank] for rank in answers.behind()}
    if not idle and not answers.silent:
        everyone = "; ".join(f"rank {rank} waits for {state['waits']}" for rank, state in answers.states.items())
        return f"all ranks wait for each other: {everyone}{answers.rule()}"
    named = [f"rank {rank} died without an exception" for rank in sorted(answers.gone)]
    named += [f"rank {rank} {'has exited' if s['left'] else 'hangs ' + s['where']}" for rank, s in idle.items()]
    named += [f"rank {rank} does not answer" for rank in sorted(set(answers.silent) - set(answers.gone))]
    long = "too long" if seconds is None else f"{seconds:g} s"
    waited = f"rank {answers.asker} waited {long} for {answers.waited_for}"
    return f"{'; '.join(named)} ({waited}){answers.rule()}"


class LivenessPort:
    """A port that is open as long as this process is alive."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        reference = weakref.ref(self._socket)

        def close() -> None:  # a child, such as a data loader worker, may outlive this process
            if (mine := reference()) is not None:
                mine.close()

        os.register_at_fork(after_in_child=close)

    def address(self) -> dict[str, Any]:
        """Return host, IP address and port, for `is_gone`."""
        return {"host": socket.gethostname(), "ip": _own_ip(), "port": self._socket.getsockname()[1]}

    def close(self) -> None:
        """Close the port."""
        self._socket.close()


def is_gone(address: dict[str, Any]) -> bool:
    """Return whether a process has certainly ended, given its address."""
    if address["ip"].startswith("127.") and address["host"] != socket.gethostname():
        return False  # unreachable from here
    try:
        with socket.create_connection((address["ip"], address["port"]), timeout=_PATIENCE):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # its host may be down, or only the network


def _own_ip() -> str:
    """Return the address of this host in the network of ``MASTER_ADDR``."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
