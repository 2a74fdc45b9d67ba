"""The page while a run goes on: a server says that there is more, and the page shows it, where the reader is."""

from __future__ import annotations

import json
import queue
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.runs.reading.run import open_run
from pipesight.view.page import Served, page_html, page_payload
from support import browser
from support.synthetic import Made

pytestmark = pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)


class Server(ThreadingHTTPServer):
    """Has a page, a payload, and news for whoever listens."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.payload = None
        self.news: queue.Queue[str | None] = queue.Queue()

    def publish(self, payload, revision, event="changed", **more):
        self.payload = {**payload, "revision": revision, "live": event == "changed"}
        self.news.put(f"event: {event}\ndata: {json.dumps({'revision': revision, **more})}\n\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/events":
            self.answer(200, "text/event-stream", b"")
            while (news := self.server.news.get()) is not None:
                self.wfile.write(news.encode())
                self.wfile.flush()
        elif self.path == "/payload.json" and self.server.payload is None:
            self.answer(204, "application/json", b"", **{"Retry-After": "1"})
        elif self.path == "/payload.json":
            self.answer(200, "application/json", json.dumps(self.server.payload).encode())
        elif self.path == "/":
            self.answer(200, "text/html; charset=utf-8", page_html(None, served=Served()).encode())
        else:
            self.answer(404, "text/plain", b"")

    def answer(self, status, kind, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def serving():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.news.put(None)
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def payloads(tmp_path_factory):
    """The run after 3, 4 and 5 steps."""
    made = Made(tmp_path_factory.mktemp("live") / "run", balance=[1, 1], chunks=2)
    found = []
    for step in range(5):
        made.gpipe(step, lambda phase, i, j: {"forward": 100, "backward": 200}[phase], at=step * 1000)
        if step >= 2:
            with open_run(made.write()) as run:
                found.append(page_payload(run, analyse(run)))
    return found


def test_a_page_follows_a_run(tmp_path, payloads):
    """It waits for the first payload, shows each that comes, keeps step, zoom and block, and says when the run ends."""
    with serving() as server, browser.open_browser(tmp_path / "profile") as page:
        page.driver.get(f"http://127.0.0.1:{server.server_port}/")
        page.wait("window.pipesight && window.pipesight.inspect().revision === null")
        server.publish(payloads[0], 1)
        page.wait("window.pipesight.inspect().revision === 1")
        assert page.inspect()["live"] == "live"

        page.focus("#timeline")
        page.keys("\ue00e", "\ue00e")  # page up: to the first step
        page.keys("+", "+", "\ue014", "\ue007")
        before = page.inspect()
        assert (before["step"], before["steps"]) == (0, [0, 1, 2])
        server.publish(payloads[1], 2)
        page.wait("window.pipesight.inspect().revision === 2")
        after = page.inspect()
        assert after["steps"] == [0, 1, 2, 3]
        assert {key: after[key] for key in ("step", "view", "selected")} == {
            key: before[key] for key in ("step", "view", "selected")
        }
        assert after["selected"] is not None

        page.run("document.getElementById('step').value = 3")
        page.run("document.getElementById('step').dispatchEvent(new Event('input'))")
        server.publish(payloads[2], 3, "ended", outcome="ok")
        page.wait("window.pipesight.inspect().revision === 3")
        page.wait("window.pipesight.inspect().live === 'ended'")
        assert page.inspect()["step"] == 4  # who looks at the last step goes on to the new last one
        assert page.complaints() == []


def test_update_takes_a_payload(tmp_path, payloads):
    """Whoever has a payload can show it: the page that is a file, too."""
    path = tmp_path / "page.html"
    path.write_text(page_html(payloads[0]))
    with browser.open_browser(tmp_path / "profile") as page:
        page.open(path)
        page.run("window.pipesight.update(arguments[0])", payloads[2])
        assert page.inspect()["steps"] == [0, 1, 2, 3, 4]
        assert page.inspect()["live"] is None
        assert page.complaints() == []


def test_the_trace_is_handed_to_perfetto(tmp_path, payloads):
    """The page opens Perfetto, asks until it answers, and posts the trace; nothing is opened before the click."""
    with serving() as server, browser.open_browser(tmp_path / "profile") as page:
        server.payload = {**payloads[0], "revision": 1}
        page.driver.get(f"http://127.0.0.1:{server.server_port}/")
        page.wait("window.pipesight && window.pipesight.inspect().revision === 1")
        # Perfetto is not to be reached from here: another window stands for it, and hears what is posted to it.
        page.run("""(() => {
            window.heard = [];
            window.open = (address) => ({ address, postMessage: (message, origin) => {
                window.heard.push([origin, message]);
                const pong = { data: "PONG", origin: "https://ui.perfetto.dev" };
                if (message === "PING" && window.heard.length > 2)
                    window.dispatchEvent(new MessageEvent("message", pong));
            } });
            window.fetch = async (address) => new Response(new Uint8Array([address.length, 2, 3]));
        })()""")
        assert page.run("window.heard.length") == 0
        page.click("#perfetto")
        page.wait("window.heard.at(-1)?.[1]?.perfetto")
        posted = page.run(
            "(([origin, { perfetto: { title, buffer } }]) => [origin, title, [...new Uint8Array(buffer)]])"
            "(window.heard.at(-1))"
        )
        assert posted == ["https://ui.perfetto.dev", "run", [len("trace"), 2, 3]]
        assert page.run("window.heard.slice(0, -1).every(([, message]) => message === 'PING')")
