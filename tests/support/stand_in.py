"""Stands for a process that `warm` forks, where only a command can be started: by torchrun, or on another host.

    python -I -S stand_in.py SOCKET train.py 3

The process has the streams, the folder, the environment and the namespaces of this one, gets its signals, and ends with
it. This one ends as the process did.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def stand_in(address: str, arguments: list[str]) -> None:
    """Have the process forked, and be there for it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "tied": True}
    text = json.dumps(request).encode() + b"\n"
    asked = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)  # until it is known who gets them
    socket.send_fds(connection, [text[:1]], [1, 2, *namespaces])
    connection.sendall(text[1:])
    with connection.makefile("r") as replies:
        pid = int(replies.readline())
        for number in asked:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
        status = int(replies.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    stand_in(sys.argv[1], [argument for argument in sys.argv[2:] if argument != "-u"])
