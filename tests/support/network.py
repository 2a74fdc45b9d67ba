"""Two hosts on one machine, with a bad network between them.

Each is a network namespace with a name and an address of its own; both see the same files. The link between them is a
pair of veth devices with netem where the kernel has that, and else two TUN devices with a relay in Python::

    near 10.77.0.1 ── link0 ══ delay, loss, rate ══ link0 ── 10.77.0.2 far

A process of its own, the keeper, makes all that, relays, and removes it when its stdin ends. That happens however the
tests end, a kill included.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import pytest

INTERFACE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("near", "far")
HEADERS = 28  # bytes of IP and UDP in a packet


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What the way between the hosts is like, in each direction."""

    delay: float = 0.0  # seconds
    loss: float = 0.0  # the share of packets
    rate: float = 1e9  # bits a second


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One end of the link."""

    name: str
    address: str
    namespace: str
    hosts_file: Path
    kind: str  # of the link: "netem" or "tun"

    def command(self, arguments):
        """Return the command that runs another one on this host, as the process it starts."""
        setting = f'mount --bind {self.hosts_file} /etc/hosts && echo "$0" >/proc/sys/kernel/hostname && exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts"]
        return [*enter, "sh", "-c", setting, self.name, *map(str, arguments)]

    def socket(self, kind):
        """Return a new socket of this host, for any process to use."""
        return inside(self.namespace, lambda: socket.socket(socket.AF_INET, kind))


@contextlib.contextmanager
def two_hosts(link):
    """Make two hosts and the link between them; remove them at the end. Skip the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip(f"network namespaces are made by root only (user: {os.geteuid()})")
    missing = [program for program in ("ip", "unshare", "mount") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here, from iproute2 and util-linux")
    with tempfile.TemporaryDirectory() as folder:
        hosts_file = Path(folder) / "hosts"
        lines = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        keeper = subprocess.Popen(
            [sys.executable, __file__, json.dumps(dataclasses.asdict(link))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        with keeper:
            answer = json.loads(keeper.stdout.readline() or '{"error": "see its stderr"}')
            if "skip" in answer:
                keeper.communicate()
                pytest.skip(answer["skip"])
            assert "error" not in answer, f"the keeper of the network died: {answer['error']}"
            try:
                yield tuple(
                    Host(name, address, namespace, hosts_file, answer["kind"])
                    for name, address, namespace in zip(NAMES, ADDRESSES, answer["namespaces"], strict=True)
                )
            finally:
                keeper.communicate(timeout=30)
        assert keeper.returncode == 0, f"the keeper of the network ended with {keeper.returncode}; see its stderr"


def inside(namespace, function):
    """Return what a function returns in a network namespace. What it opens there stays there."""
    result, errors = [], []

    def enter():
        try:
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
            with open(f"/run/netns/{namespace}") as file:
                if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                    raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
            result.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)  # the namespace is that of a thread, which ends here
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


# The keeper.


class CannotBeError(Exception):
    """This machine lacks something."""


def keep(link):
    """Make the hosts, say so on stdout, and be their link until stdin ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    namespaces = [f"pipesight-{os.getpid()}-{name}" for name in NAMES]
    try:
        try:
            for namespace in namespaces:
                made = run("ip", "netns", "add", namespace)
                if made.returncode != 0:
                    raise CannotBeError(f"no network namespace can be made here: {made.stderr.strip()}")
                check("ip", "-n", namespace, "link", "set", "lo", "up")
            kind, relay = connect(namespaces, link)
        except CannotBeError as error:
            print(json.dumps({"skip": str(error)}), flush=True)
            return
        print(json.dumps({"kind": kind, "namespaces": namespaces}), flush=True)
        relay()
    finally:
        for namespace in namespaces:
            left = run("ip", "netns", "pids", namespace).stdout.split()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "delete", namespace)


def connect(namespaces, link):
    """Make the link; return its kind, and what is to be done while it is in use."""
    probe = run("tc", "-n", namespaces[0], "qdisc", "add", "dev", "lo", "root", "netem") if shutil.which("tc") else None
    if probe is not None and probe.returncode == 0:
        check("tc", "-n", namespaces[0], "qdisc", "delete", "dev", "lo", "root")
        first, second = namespaces
        ends = ["name", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        check("ip", "link", "add", *ends)
        for namespace in namespaces:
            bad = [f"{link.delay * 1e6:.0f}us", "loss", f"{link.loss:%}", "rate", f"{link.rate:.0f}bit"]
            check("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", "netem", "delay", *bad)
        kind, relay = "netem", sys.stdin.read
    else:
        if not os.path.exists("/dev/net/tun"):
            raise CannotBeError("this kernel has neither netem nor /dev/net/tun")
        devices = [inside(namespace, open_tun) for namespace in namespaces]
        kind, relay = "tun", lambda: forward(devices, link)
    for namespace, address in zip(namespaces, ADDRESSES, strict=True):
        check("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
        check("ip", "-n", namespace, "link", "set", INTERFACE, "up")
    return kind, relay


def open_tun():
    """Return a device whose reads are the packets that are sent, and whose writes are received."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise CannotBeError(f"/dev/net/tun cannot be opened: {error.strerror}") from None
    iff_tun, iff_no_pi, tunsetiff = 0x0001, 0x1000, 0x400454CA
    fcntl.ioctl(device, tunsetiff, struct.pack("16sH22x", INTERFACE.encode(), iff_tun | iff_no_pi))
    return device


class Way:
    """One direction. A packet waits until the wire is free, takes its size to pass, and then the delay to arrive.

    ::

        read       wire is free     passed           due
         | waits       | size / rate  | delay          |
    """

    LIMIT = 1000  # packets that wait, as netem's; more are lost

    def __init__(self, source, target, link, dice):
        self.source, self.target, self.link, self.dice = source, target, link, dice
        self.free = 0.0
        self.waiting = deque()

    def take(self):
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(self.source, 65536):
                now = time.monotonic()
                if self.dice.random() < self.link.loss or len(self.waiting) >= self.LIMIT:
                    continue
                self.free = max(now, self.free) + 8 * len(packet) / self.link.rate
                self.waiting.append((self.free + self.link.delay, packet))

    def give(self):
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            with contextlib.suppress(BlockingIOError):  # its queue is full
                os.write(self.target, self.waiting.popleft()[1])


def forward(devices, link):
    """Carry packets between two devices until stdin ends."""
    dice = random.Random(0)
    ways = [Way(*devices, link, dice), Way(*reversed(devices), link, dice)]
    while True:
        dues = [way.waiting[0][0] for way in ways if way.waiting]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select([*devices, sys.stdin], [], [], wait)
        for way in ways:
            if way.source in ready:
                way.take()
            way.give()
        if sys.stdin in ready:
            return


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def check(*command):
    ended = run(*command)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")


if __name__ == "__main__":
    keep(Link(**json.loads(sys.argv[1])))
