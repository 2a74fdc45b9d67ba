"""The web server of `pipesight view`: the page, its payload, events about news, and the trace for Perfetto.

It listens on this machine only, reads only, and answers only those who have the address, in which there is a secret::

    http://127.0.0.1:PORT/TOKEN/              the page
    http://127.0.0.1:PORT/TOKEN/payload.json  what it draws
    http://127.0.0.1:PORT/TOKEN/events        server-sent events: `changed`, `ended`
    http://127.0.0.1:PORT/TOKEN/trace         the trace
    http://127.0.0.1:PORT/TOKEN/metrics       numbers for Prometheus; also at /metrics, with the token as a credential
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import json
import logging
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pipesight.runs.trace_download import trace_download
from pipesight.view.live.metrics_text import CONTENT_TYPE
from pipesight.view.live.run_publisher import DrawingError, News, Publisher

__all__ = ["RunServer"]

logger = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
NAMES = (LOCAL, "localhost")
"""Hosts that a request may name. Another name that leads here belongs to a web site that tries to get in. Its port is
not looked at, since a tunnel has another one at its other end."""
MOST_CONNECTIONS = 64
"""That are being answered; and as many more that have not said yet what they want. Of those, the oldest makes room for
a new one, so that silent clients cannot keep others out."""
PATIENCE = 30.0  # seconds that a client may take to receive a response
SILENCE = 10.0  # seconds that it may take to send its request, in total
HEARTBEAT = 15.0  # seconds between comments that keep proxies from closing the connection
LOOK = 0.5  # seconds between checks whether a client is still connected
PARTING = 2.0  # seconds for requests that are still being answered when the server ends

NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
PAGE = f"{NOTHING}; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
"""What the page may load. The page itself restricts more, such as scripts."""
ALLOWED = {"Allow": "GET, HEAD"}
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address contains a secret
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RunServer:
    """Serves one run, from ``with`` to its end.

    Example::

        with Publisher(Path("RUN")) as publisher, RunServer(publisher, page=page) as server:
            print(server.address)

    Args:
        publisher: Follows the run.
        page: Makes the page.
        port: Where to listen; 0 takes a free one.
        token: The secret in the address, of letters, digits, ``-`` and ``_``; a random one by default.

    Raises:
        OSError: The port is in use.
    """

    def __init__(
        self, publisher: Publisher, *, page: Callable[[], str], port: int = 0, token: str | None = None
    ) -> None:
        self._token = secrets.token_urlsafe(24) if token is None else token
        self._publisher = publisher
        self._server = _Server((LOCAL, port), publisher=publisher, page=page, token=self._token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="pipesight-view", daemon=True
        )

    @property
    def address(self) -> str:
        """The address of the page. Whoever has it can see the run."""
        return f"http://{LOCAL}:{self._server.server_address[1]}/{self._token}/"

    def __enter__(self) -> RunServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.leave_all()


class _Server(ThreadingHTTPServer):
    """Keeps track of connections that are waited for or being answered, to close them all at the end."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], *, publisher: Publisher, page: Callable[[], str], token: str) -> None:
        self.publisher, self.page, self.token = publisher, page, token.encode()
        self.ending = threading.Event()
        self._lock = threading.Lock()  # of the next two
        self._silent: dict[threading.Thread, tuple[socket.socket, float]] = {}  # the oldest first
        self._answering: dict[threading.Thread, socket.socket] = {}
        super().__init__(address, _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, in a thread of its own."""
        me = threading.current_thread()
        with self._lock:
            if not self.ending.is_set():
                self._silent[me] = request, time.monotonic()
            crowd = [connection for connection, _ in self._silent.values()][:-MOST_CONNECTIONS]
        for connection in crowd:
            _hang_up(connection)
        try:
            if me in self._silent:
                super().process_request_thread(request, client_address)
            else:
                self.shutdown_request(request)
        finally:
            with self._lock:
                self._silent.pop(me, None)
                self._answering.pop(me, None)

    def let_in(self, request: socket.socket) -> bool:
        """Return whether there is room to answer one more request that has been read and has the token."""
        me = threading.current_thread()
        with self._lock:
            self._silent.pop(me, None)
            if len(self._answering) >= MOST_CONNECTIONS:
                return False
            self._answering[me] = request
            return True

    def service_actions(self) -> None:
        """Close connections that send no request; called repeatedly."""
        since = time.monotonic() - SILENCE
        with self._lock:
            late = [connection for connection, began in self._silent.values() if began < since]
        for connection in late:
            _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except from clients that hung up."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a request could not be answered")

    def leave_all(self) -> None:
        """Hang up on all clients, and wait for the requests in progress."""
        self.ending.set()
        self.server_close()
        until = time.monotonic() + PARTING
        with self._lock:
            silent = {thread: connection for thread, (connection, _) in self._silent.items()}
            everybody = {**silent, **self._answering}
        for thread, connection in everybody.items():
            _hang_up(connection)
            thread.join(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    timeout = PATIENCE
    server_version, sys_version = "pipesight", ""

    def _answer(self) -> None:
        if not self._is_local():
            self._refuse(HTTPStatus.FORBIDDEN, "unknown address; use the one that was printed")
            return
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        if (token, slash) == ("metrics", ""):  # where Prometheus looks, which sends the token in a header
            token, slash, name = self._credential(), "/", "metrics"
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.server.token):
            self._refuse(HTTPStatus.FORBIDDEN, "incomplete address; use the full one that was printed")
        elif self.command not in ("GET", "HEAD"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read-only", ALLOWED)
        elif not slash:
            self._refuse(
                HTTPStatus.PERMANENT_REDIRECT, "the address of the page ends with a slash", {"Location": f"/{token}/"}
            )
        elif name not in self._PLACES:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")
        elif not self.server.let_in(self.connection):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many viewers", {"Retry-After": "5"})
        else:
            self._PLACES[name](self)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _answer  # noqa: N815

    def _credential(self) -> str:
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    def _is_local(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        try:
            return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in NAMES
        except ValueError:
            return False

    # Addresses.

    def _page(self) -> None:
        self._send(self.server.page().encode(), "text/html; charset=utf-8", policy=PAGE)

    def _payload(self) -> None:
        try:
            packed = self.server.publisher.payload()
        except DrawingError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        if packed is None:  # no complete step yet: not an error, which a browser would report as one
            self._begin(HTTPStatus.NO_CONTENT, "application/json", headers={"Retry-After": "1"})
        elif "gzip" in (self.headers.get("Accept-Encoding") or ""):
            self._send(packed, "application/json", headers={"Content-Encoding": "gzip"})
        else:
            self._send(gzip.decompress(packed), "application/json")

    def _events(self) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream")
        if self.command == "HEAD":
            return
        self.wfile.write(b"retry: 2000\n\n")
        seen, heard = None, time.monotonic()
        while not self._is_over():
            news = self.server.publisher.wait(seen, timeout=LOOK)
            if news != seen:
                self.wfile.write(_event(news))
                seen, heard = news, time.monotonic()
                if news.ended:
                    return
            elif time.monotonic() - heard >= HEARTBEAT:
                self.wfile.write(b": still here\n\n")
                heard = time.monotonic()

    def _is_over(self) -> bool:
        """Return whether the client hung up, or the server is ending."""
        if self.server.ending.is_set() or self.server.publisher.closed:
            return True
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1024)

    def _trace(self) -> None:
        run = self.server.publisher.path
        try:
            trace = trace_download(run)
        except FileNotFoundError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
            return
        headers = {"Content-Disposition": f'attachment; filename="{run.absolute().name}.json.gz"'}
        self._begin(HTTPStatus.OK, "application/octet-stream", headers=headers)
        for chunk in () if self.command == "HEAD" else trace:
            if self.server.ending.is_set():
                return
            self.wfile.write(chunk)

    def _metrics(self) -> None:
        try:
            self._send(self.server.publisher.metrics().encode(), CONTENT_TYPE)
        except DrawingError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    _PLACES = {  # noqa: RUF012
        "": _page,
        "payload.json": _payload,
        "events": _events,
        "trace": _trace,
        "metrics": _metrics,
    }

    # Responses.

    def _begin(
        self, status: HTTPStatus, kind: str, *, policy: str = NOTHING, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Security-Policy": policy, "Connection": "close"}
        for name, value in {**HEADERS, **own, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(
        self,
        body: bytes,
        kind: str,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        policy: str = NOTHING,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        size = {"Content-Length": str(len(body))}
        self._begin(status, kind, policy=policy, headers={**size, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(f"{why}\n".encode(), "text/plain; charset=utf-8", status=status, headers=headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse malformed requests and unknown methods."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer()
        else:
            self._refuse(HTTPStatus(code), HTTPStatus(code).phrase.lower())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses contain the secret."""


def _hang_up(connection: socket.socket) -> None:
    """Close the connection of a client."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _event(news: News) -> bytes:
    told: dict[str, object] = {"revision": news.revision}
    if news.ended:
        told["outcome"] = news.outcome
    return f"event: {'ended' if news.ended else 'changed'}\ndata: {json.dumps(told)}\n\n".encode()
