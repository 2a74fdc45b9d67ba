"""Whether the process of a rank is there, asked without its help: it listens at a port, for which the kernel answers.

A process that was killed refuses connections. One that is stopped, or computes and does not get to answer anything,
takes them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Any

__all__ = ["Presence", "is_gone"]

_PATIENCE = 1.0  # seconds


class Presence:
    """A port that is open as long as this process is there."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        reference = weakref.ref(self._socket)

        def close() -> None:  # a child, such as a worker of a loader, may live longer
            if (mine := reference()) is not None:
                mine.close()

        os.register_at_fork(after_in_child=close)

    def address(self) -> dict[str, Any]:
        """Return where others find this process."""
        return {"host": socket.gethostname(), "ip": _own_ip(), "port": self._socket.getsockname()[1]}

    def close(self) -> None:
        """Close the port."""
        self._socket.close()


def is_gone(address: dict[str, Any]) -> bool:
    """Tell whether a process has certainly ended, given its address."""
    if address["ip"].startswith("127.") and address["host"] != socket.gethostname():
        return False  # not to be reached from here
    try:
        with socket.create_connection((address["ip"], address["port"]), timeout=_PATIENCE):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # its host may be down, or only the network


def _own_ip() -> str:
    """Return the address under which those see this host who reach it by way of the master's network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
