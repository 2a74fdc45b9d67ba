"""The network that tests use: its delay, loss and rate are there, and nothing of it stays."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.network import ADDRESSES, HEADERS, INTERFACE, Link, two_hosts

DELAY, LOSS, RATE = 0.02, 0.1, 20e6


@pytest.fixture(scope="module")
def hosts():
    with two_hosts(Link(DELAY, LOSS, RATE)) as both:
        yield both


@contextlib.contextmanager
def connection(near, far):
    """Open a TCP connection; yield both ends of it, and how long it took."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(far.socket(socket.SOCK_STREAM))
        server.bind((far.address, 0))
        server.listen()
        client = stack.enter_context(near.socket(socket.SOCK_STREAM))
        for end in (server, client):
            end.settimeout(30)
        begin = time.monotonic()
        client.connect(server.getsockname())
        took = time.monotonic() - begin
        yield client, stack.enter_context(server.accept()[0]), took


def test_delay(hosts):
    """A round trip takes the delay of both ways, however often it is made."""
    with connection(*hosts) as (client, other, took):
        assert took >= 2 * DELAY
        for _ in range(3):
            begin = time.monotonic()
            client.sendall(b"?")
            other.sendall(other.recv(1))
            assert client.recv(1) == b"?"
            assert time.monotonic() - begin >= 2 * DELAY


def test_loss_and_rate(hosts):
    """Some packets are lost, most are not; those that arrive took as long as their bytes do."""
    near, far = hosts
    sent, size = 400, 1000
    with far.socket(socket.SOCK_DGRAM) as receiver, near.socket(socket.SOCK_DGRAM) as sender:
        receiver.bind((far.address, 0))
        receiver.settimeout(1)
        begin = time.monotonic()
        for number in range(sent):
            sender.sendto(number.to_bytes(size, "big"), receiver.getsockname())
        arrived, last = [], begin
        with contextlib.suppress(TimeoutError):
            while True:
                arrived.append(int.from_bytes(receiver.recv(2 * size), "big"))
                last = time.monotonic()
    assert sorted(set(arrived)) == arrived, "packets of one way keep their order"
    assert sent / 2 < len(arrived) < sent, f"{len(arrived)} of {sent} packets arrived"
    assert last - begin >= DELAY + 0.9 * len(arrived) * 8 * (size + HEADERS) / RATE


def test_tcp_gets_through(hosts):
    """What is sent over TCP arrives whole."""
    content = os.urandom(30_000)
    with connection(*hosts) as (client, other, _):
        client.sendall(content)
        received = b""
        while len(received) < len(content):
            received += other.recv(2**20)
    assert received == content


def test_hosts_have_names(hosts):
    """A program on a host sees that host's name, address and interface, and knows the other by name."""
    program = """
import socket
print(socket.gethostname(), *map(socket.gethostbyname, ("near", "far")), *dict(socket.if_nameindex()).values())
"""
    for host in hosts:
        ended = subprocess.run(host.command([sys.executable, "-c", program]), capture_output=True, text=True)
        name, *addresses = ended.stdout.split()
        assert (name, addresses[:2]) == (host.name, list(ADDRESSES)), ended
        assert INTERFACE in addresses[2:]


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_stays(killed, tmp_path):
    """At the end the hosts are gone, with the programs on them, also if the tests were killed."""
    begin = f"""
import subprocess, sys, time
from support.network import Link, two_hosts
with two_hosts(Link()) as hosts:
    left = [subprocess.Popen(host.command(["sleep", "1000"])) for host in hosts]
    time.sleep(0.5)
    print(*(host.namespace for host in hosts), *(process.pid for process in left), flush=True)
    if {killed}:
        time.sleep(1000)
for process in left:
    process.wait()
"""
    with two_hosts(Link()):
        pass  # skips where there are none
    with subprocess.Popen(
        [sys.executable, "-c", begin], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as job:
        *namespaces, first, second = job.stdout.readline().split()
        if killed:
            job.send_signal(signal.SIGKILL)
    assert job.returncode == (-signal.SIGKILL if killed else 0)
    until = time.monotonic() + 30
    there = ["the first look"]
    while there and time.monotonic() < until:
        time.sleep(0.1)
        there = [name for name in namespaces if os.path.exists(f"/run/netns/{name}")]
        there += [pid for pid in (first, second) if alive(pid)]
    assert there == []


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
