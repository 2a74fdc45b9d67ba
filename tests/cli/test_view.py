"""`pipesight view`: the page of a run, for who has its address, live."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pipesight.runs.trace_download import trace_download
from pipesight.view.live import web_server
from pipesight.view.live.run_publisher import Publisher
from support import browser
from support.commands import pipesight
from support.growing import LIMIT, GrowingRun, recorder, wait_for
from support.processes import STRICT_PYTHON


class View:
    """A `pipesight view` that is running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        parts = urlsplit(self.address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=LIMIT)

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a request as it is, and return status, headers and body."""
        connection = self.connect()
        try:
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def payload(self) -> dict[str, Any]:
        """Return the payload; wait for the first."""

        def look() -> bytes | None:
            status, _, body = self.ask(f"{self.path}payload.json")
            assert status in (200, 204)
            return body if status == 200 else None

        return json.loads(wait_for(look))

    @contextlib.contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        """Listen: yield what comes, name and data."""
        connection = self.connect()
        connection.request("GET", f"{self.path}events")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        try:
            yield _events(answer)
        finally:
            answer.close()
            connection.close()

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def interrupt(self) -> tuple[str, str]:
        """Press Ctrl-C; return what it said since the address."""
        self.process.send_signal(signal.SIGINT)
        said = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0, said
        return said


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    name = None
    while line := answer.readline().decode():
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            assert name is not None
            yield name, json.loads(line[6:])


@contextlib.contextmanager
def viewing(path: object, *options: object) -> Iterator[View]:
    command = [*STRICT_PYTHON, "-m", "pipesight", "view", str(path), "--no-browser", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield View(process)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def fail(*arguments: object) -> subprocess.CompletedProcess[str]:
    return pipesight("view", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that has ended, of two steps."""
    run = GrowingRun(tmp_path_factory.mktemp("view") / "run", balance=[1, 1], chunks=2).begin()
    run.step()
    run.step()
    run.end()
    return run.folder


@pytest.fixture(scope="module")
def view(finished) -> Iterator[View]:
    with viewing(finished) as view:
        yield view


# Who gets in.


def test_only_here(view):
    """It listens on 127.0.0.1 alone, and the address has a secret of 24 bytes in it."""
    assert view.host == "127.0.0.1"
    assert len(view.path.strip("/")) == 32
    with open(f"/proc/{view.process.pid}/net/tcp") as file:
        listening = [line.split()[1] for line in file if line.split()[3] == "0A" and f":{view.port:04X}" in line]
    assert listening == [f"0100007F:{view.port:04X}"]


@pytest.mark.parametrize("name", ["", "payload.json", "events", "trace", "metrics"])
@pytest.mark.parametrize("prefix", ["/", "/x/", "//", "/../", "http://127.0.0.1/"])
def test_no_token(view, prefix, name):
    """Without the secret there is nothing, whatever is asked for."""
    assert view.ask(prefix + name)[0] == 403


def test_wrong_token(view):
    """A secret that is nearly right is wrong."""
    for path in (view.path[:-2] + "/", view.path.upper(), view.path[:-1] + "x/", view.path[:-1] + "%00/"):
        if path != view.path:
            assert view.ask(path)[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1]:1", "", "a:b:c"])
def test_other_hosts(view, host):
    """A page of another site that leads its name here is refused, even with the secret."""
    assert view.ask(view.path, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST"])
def test_tunnels(view, host):
    """A tunnel from another port is fine."""
    assert view.ask(view.path, Host=host)[0] == 200


def test_two_hosts(view):
    """Nor is a request that names no host, or two."""
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection((view.host, view.port), timeout=LIMIT) as raw:
            raw.sendall(f"GET {view.path} HTTP/1.1\r\n".encode() + hosts + b"\r\n")
            assert b" 403 " in raw.makefile("rb").readline()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get"])
def test_methods(view, method):
    """Only GET and HEAD are answered: nothing can be changed."""
    status, headers, _ = view.ask(view.path, method=method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "../run.json",
        "trace/../run.json",
        "trace/rank-00000.pfw.gz",
        "..%2f..%2fetc/passwd",
        "%2e%2e/run.json",
        "trace%00",
        "/etc/passwd",
        "payload.json/..",
        "events/",
    ],
)
def test_no_other_paths(view, name):
    """There are five places, and no path leads anywhere else."""
    status, _, body = view.ask(view.path + name)
    assert status == 404
    assert body == b"not found\n"


def test_nonsense(view):
    """What is no request is refused, and does not stop the server."""
    for text in (
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xc3\xa9/ HTTP/1.0\r\n\r\n",
        b"\xff\xfe\x00\r\n\r\n",
        b"A" * 100_000,
    ):
        with socket.create_connection((view.host, view.port), timeout=LIMIT) as raw, contextlib.suppress(OSError):
            raw.sendall(text)
            raw.shutdown(socket.SHUT_WR)
            assert b" 200 " not in raw.makefile("rb").readline()
    assert view.ask(view.path)[0] == 200


# What is served.


@pytest.mark.parametrize("name", ["", "payload.json", "trace", "nothing"])
def test_headers(view, name):
    """No answer is kept, guessed at, framed, or tells other sites the address."""
    _, headers, _ = view.ask(view.path + name)
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("name", ["", "payload.json", "metrics"])
def test_head(view, name):
    """HEAD gives the headers of GET, and no body."""
    status, headers, body = view.ask(view.path + name, method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(view.ask(view.path + name)[2])


def test_page(view):
    """The page asks for what is new by itself; an address without its last slash leads there too."""
    status, headers, body = view.ask(view.path)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b'content="payload.json"' in body
    assert b'content="events"' in body
    status, headers, _ = view.ask(view.path.rstrip("/"))
    assert (status, headers["Location"]) == (308, view.path)


def test_payload(view):
    """The payload is JSON, compressed for those who can take it."""
    payload = view.payload()
    assert payload["revision"] == 1
    assert payload["live"] is False
    _, headers, body = view.ask(f"{view.path}payload.json", Accept_Encoding="gzip, br")
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body)) == payload


def test_metrics(view):
    """Prometheus gets the numbers of the last step in its format, at the address or with the token as a credential."""
    status, headers, body = view.ask(f"{view.path}metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    bearer = f"Bearer {view.path.strip('/')}"
    assert view.ask("/metrics", Authorization=bearer)[::2] == (200, body)
    for wrong in ("Bearer x", "Basic x", bearer[:-1], "Bearer "):
        assert view.ask("/metrics", Authorization=wrong)[0] == 403
    assert view.ask("/payload.json", Authorization=bearer)[0] == 403
    found, told = {}, set()
    for line in body.decode().splitlines():
        if line.startswith("#"):
            _, word, name, meaning = line.split(" ", 3)
            assert (word, meaning) == ("TYPE", "gauge") or word == "HELP"
            told.add((word, name))
            continue
        name, labels, value = re.fullmatch(r'(pipesight_[a-z_]+)((?:{[a-z]+="[^"\\\n]*"})?) (\S+)', line).groups()
        assert {("HELP", name), ("TYPE", name)} <= told
        assert (name, labels) not in found
        found[name, labels] = float(value)
    # With two partitions and two micro-batches, each partition is idle for one of three tasks.
    assert found["pipesight_last_step", ""] == 0
    assert found["pipesight_step_seconds", '{of="last"}'] == pytest.approx(
        sum(value for (name, _), value in found.items() if name == "pipesight_step_part_seconds")
    )
    assert found["pipesight_schedule_bubble_ratio", '{of="last"}'] == pytest.approx(1 / 3)
    assert found["pipesight_partition_bubble_ratio", '{partition="1"}'] == pytest.approx(1 / 3)
    assert found["pipesight_run_phase", '{phase="ended"}'] == 1
    assert found["pipesight_alarm", '{kind="failed"}'] == 0


def test_token_file(tmp_path, finished):
    """The secret stays the same with a file for it, which others cannot read, and is refused where they can."""
    file = tmp_path / "token"
    with viewing(finished, "--token-file", file) as view:
        assert view.path == f"/{file.read_text().strip()}/"
        assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("x" * 16)
    with viewing(finished, "--token-file", file) as view:
        assert view.path == f"/{'x' * 16}/"
    file.write_text("short")
    assert "16 or more letters" in fail(finished, "--token-file", file).stderr
    file.chmod(0o644)
    assert "chmod 600" in fail(finished, "--token-file", file).stderr


def test_trace_of_ranks(tmp_path):
    """Traces of several ranks are handed over as one, that viewers read."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2, world_size=2).begin()
    run.step(ranks=2)
    run.end()
    with viewing(run.folder) as view:
        status, headers, body = view.ask(f"{view.path}trace")
    assert status == 200
    assert 'filename="run.json.gz"' in headers["Content-Disposition"]
    events = json.loads(gzip.decompress(body))["traceEvents"]
    assert events == run.events[0] + run.events[1]


def test_trace_of_ranks_has_one_clock(tmp_path):
    """What is handed over has the times of all ranks by the clock of rank 0, as the report has."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2, world_size=2).begin()
    run.step(ranks=2)
    run.end()
    since = run.events[1][0]["ts"]
    clock = {"offset_correction_ns": -3_000_000, "drift": 0.5, "drift_since_ns": since * 1000}
    (run.folder / "ranks").mkdir(exist_ok=True)
    (run.folder / "ranks/rank-00001.json").write_text(json.dumps({"rank": 1, "clock": clock}))
    events = json.loads(gzip.decompress(b"".join(trace_download(run.folder))))["traceEvents"]
    moved = [{**event, "ts": event["ts"] - 3000 + round((event["ts"] - since) / 2)} for event in run.events[1]]
    assert moved[0]["ts"] == since - 3000
    assert events == run.events[0] + moved


def test_trace_elsewhere(tmp_path):
    """A link that leads out of the run is not followed: neither served nor drawn."""
    elsewhere = GrowingRun(tmp_path / "elsewhere", balance=[1, 1], chunks=2).begin()
    elsewhere.step()
    elsewhere.end()
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    run.trace_of(0).symlink_to(elsewhere.trace_of(0))
    with viewing(run.folder) as view:
        assert view.ask(f"{view.path}trace")[0] == 404
        run.trace_of(0).unlink()
        run.trace_of(0).symlink_to("/etc/passwd")
        assert view.ask(f"{view.path}trace")[0] == 404
        run.trace_of(0).unlink()
        run.step()
        assert json.loads(gzip.decompress(view.ask(f"{view.path}trace")[2]))["traceEvents"] == run.events[0]


def test_finished(view):
    """Who listens to a run that has ended is told so at once, and no more."""
    with view.events() as events:
        assert list(events) == [("ended", {"revision": 1, "outcome": "ok"})]


# Live.


def steps_of(payload: dict[str, Any]) -> list[int]:
    return payload["steps"]["number"]


def test_recorded_live(tmp_path):
    """A step that a traced process has written is told of, and the payload has it."""
    with recorder(tmp_path / "run") as process:
        process.step()
        process.step()
        with viewing(tmp_path / "run") as view, view.events() as events:
            assert steps_of(view.payload()) == [0]
            process.step()
            revisions = []
            for name, news in events:
                assert name == "changed"
                revisions.append(news["revision"])
                if steps_of(view.payload()) == [0, 1]:
                    break
            assert revisions == sorted(set(revisions))
            assert view.payload()["live"] is True
            process.end()
            *_, (name, news) = events
            assert name == "ended"
            assert news["outcome"] == "ok"
            assert steps_of(view.payload()) == [0, 1, 2]
            assert view.payload()["live"] is False


def test_killed(tmp_path):
    """A run whose process was killed ends too, with all that it left."""
    with recorder(tmp_path / "run") as process, viewing(tmp_path / "run") as view, view.events() as events:
        process.step()
        process.kill()
        *_, (name, news) = events
        assert name == "ended"
        assert "killed" in news["outcome"]
        assert steps_of(view.payload()) == [0]


def test_two_clients(tmp_path):
    """All who listen hear the same, and one of them that leaves takes nothing from the others."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    run.step()
    with viewing(run.folder) as view, view.events() as first:
        next(first)
        with view.events() as second:
            assert next(second)[0] == "changed"
        run.end("ValueError: no")
        *_, last = first
        assert last[0] == "ended"
        assert last[1]["outcome"] == "ValueError: no"


def test_clients_leave(tmp_path):
    """A client that hangs up, or never says anything, leaves no thread behind."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    run.step()
    with viewing(run.folder) as view:
        view.ask(view.path)
        with view.events() as events:
            next(events)
        before = min(view.threads() for _ in range(10) if not time.sleep(0.05))  # those that answered end meanwhile
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                next(stack.enter_context(view.events()))
            assert view.threads() >= before + 8
        wait_for(lambda: view.threads() <= before)


def test_crowd(tmp_path):
    """Clients beyond a number are turned away, and those who are in stay."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    with viewing(run.folder) as view, contextlib.ExitStack() as stack:
        first = stack.enter_context(view.events())
        next(first)
        for _ in range(80):
            stack.enter_context(socket.create_connection((view.host, view.port), timeout=LIMIT))
        run.end()
        assert [name for name, _ in first][-1] == "ended"


def test_idle_connections(tmp_path):
    """However many connect and say nothing, or never come to an end of it, whoever has the address is answered."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    run.step()
    run.end()
    with viewing(run.folder) as view, contextlib.ExitStack() as stack:
        for k in range(200):
            idle = stack.enter_context(socket.create_connection((view.host, view.port), timeout=LIMIT))
            with contextlib.suppress(OSError):  # some have been hung up on
                idle.sendall([b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 60_000][k % 3])
        for _ in range(5):
            assert view.ask(view.path)[0] == 200
        assert view.threads() < 150


def test_silence_ends(tmp_path, monkeypatch):
    """Whoever sends a byte now and then, and never the whole of a request, is hung up on after a while."""
    monkeypatch.setattr(web_server, "SILENCE", 0.3)
    publisher = Publisher(tmp_path / "run", draw=lambda _: None)
    with publisher, web_server.RunServer(publisher, page=str) as server:
        address = urlsplit(server.address)
        with socket.create_connection((address.hostname, address.port), timeout=LIMIT) as slow:
            wait_for(lambda: _is_hung_up(slow))


def _is_hung_up(connection: socket.socket) -> bool:
    """Send one more byte, and tell whether the other side wants none."""
    try:
        connection.sendall(b"G")
        connection.settimeout(0.05)
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_not_there_yet(tmp_path):
    """A run that has not appeared is waited for; the page is there before it."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2)
    with viewing(run.folder) as view, view.events() as events:
        assert view.ask(view.path)[0] == 200
        status, headers, _ = view.ask(f"{view.path}payload.json")
        assert (status, headers["Retry-After"]) == (204, "1")
        assert view.ask(f"{view.path}trace")[0] == 404
        assert view.process.stderr is not None
        assert view.process.stderr.readline() == f"waiting for a recording in {run.folder}\n"
        run.begin()
        assert view.process.stderr.readline() == f"{run.folder} is running\n"
        run.step()
        run.end()
        assert "ended: ok" in view.process.stderr.readline()
        assert [name for name, _ in events][-1] == "ended"
        assert steps_of(view.payload()) == [0]


def test_cannot_draw(tmp_path, caplog):
    """A run that cannot be drawn is an error that the browser reports, unlike one without a complete step."""

    def draw(_: object) -> None:
        raise ArithmeticError("no such number")

    publisher = Publisher(tmp_path / "run", draw=draw)
    with publisher, web_server.RunServer(publisher, page=str) as server:
        address = urlsplit(server.address)
        connection = http.client.HTTPConnection(address.netloc, timeout=LIMIT)
        connection.request("GET", f"{address.path}payload.json")
        answer = connection.getresponse()
        assert answer.status == 500
        assert answer.read() == b"cannot draw the run; `pipesight view` printed the reason\n"
        connection.close()
    assert "no such number" in caplog.text


# In a browser.


@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_page_lives(tmp_path):
    """The page of a run that goes on gains steps without being loaded again, and keeps step and zoom."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=4).begin()
    for _ in range(4):
        run.step()
    with browser.open_browser(tmp_path / "profile") as page, viewing(run.folder) as view:
        page.open(view.address)
        page.wait("window.pipesight.inspect().steps.length == 3", seconds=LIMIT)
        assert page.inspect()["live"]
        page.run("window.stillTheSame = true")
        page.focus("#timeline")
        page.click("#step-previous")
        page.click("#zoom-in")
        page.wait("(i => i.view.to - i.view.from < i.view.end)(window.pipesight.inspect())", seconds=LIMIT)
        before = page.inspect()
        assert before["step"] < 2
        assert before["blocks"] == 16
        run.step()
        run.step()
        page.wait("window.pipesight.inspect().steps.length == 5", seconds=LIMIT)
        after = page.inspect()
        assert after["revision"] > before["revision"]
        assert (after["step"], after["view"]) == (before["step"], before["view"])
        run.end()
        page.wait("window.pipesight.inspect().steps.length == 6", seconds=LIMIT)
        page.wait("!/live/i.test(window.pipesight.inspect().live ?? '')", seconds=LIMIT)
        assert page.inspect()["view"] == before["view"]
        assert page.run("window.stillTheSame")
        assert page.complaints() == []
        asked = {address for address in page.requests() if not address.startswith(("data:", "chrome:"))}
        assert {address.partition("?")[0] for address in asked} == {
            view.address,
            f"{view.address}events",
            f"{view.address}payload.json",
        }


@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_page_before_run(tmp_path):
    """The page that is opened before the run appears draws it when it does."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2)
    with viewing(run.folder) as view, browser.open_browser(tmp_path / "profile") as page:
        page.driver.get(view.address)
        page.wait("window.pipesight !== undefined", seconds=LIMIT)
        assert page.inspect()["steps"] == []
        run.begin()
        run.step()
        run.end()
        page.wait("window.pipesight.inspect().steps.length == 1", seconds=LIMIT)
        assert page.inspect()["blocks"] == 8


# How it ends, and what it refuses.


@pytest.mark.parametrize("listening", [False, True])
def test_interrupt(listening, tmp_path):
    """Ctrl-C ends it, whoever listens, with exit code 0 and not a word."""
    run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
    run.step()
    with viewing(run.folder) as view, view.events() if listening else contextlib.nullcontext() as events:
        assert not listening or next(events)
        assert view.process.stderr.readline() == f"{run.folder} is running\n"
        assert view.interrupt() == ("", "")
        assert not listening or list(events) == []


def test_port(tmp_path, finished):
    """A port that is in use is named, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = fail(finished, "--port", port)
    assert ended.returncode == 1
    assert ended.stderr == f"pipesight view: error: port {port} is in use; omit --port to use a free one\n"
    with viewing(finished, "--port", port) as view:
        assert view.port == port


@pytest.mark.parametrize("port", ["x", "65536", "-1"])
def test_no_port(port, finished):
    """What is no port is refused in one line."""
    ended = fail(finished, f"--port={port}")
    assert ended.returncode == 2
    assert f"a port must be a number from 0 to 65535 (port: '{port}')" in ended.stderr


def test_no_run(tmp_path):
    """A file, or a folder with other things in it, is no run."""
    (tmp_path / "notes.txt").write_text("hello")
    for path, why in ((tmp_path, "no run.json and no trace"), (tmp_path / "notes.txt", "is a file")):
        ended = fail(path, "--no-browser")
        assert ended.returncode == 2
        assert ended.stderr.startswith("pipesight view: error: not a run: ")
        assert why in ended.stderr
        assert ended.stderr.count("\n") == 1
        assert ended.stdout == ""


def test_browser(tmp_path, finished):
    """The browser is opened at the address, unless told not to."""
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.partial\nmv {opened}.partial {opened}\n')
    browser.chmod(0o755)
    command = [*STRICT_PYTHON, "-m", "pipesight", "view", str(finished)]
    environment = {**os.environ, "BROWSER": str(browser)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            address = process.stdout.readline()
            wait_for(opened.exists)
            assert opened.read_text() == address
        finally:
            process.kill()
            process.communicate(timeout=LIMIT)
