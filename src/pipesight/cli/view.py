"""`pipesight view`: the page of a run in a browser, live while the run is going."""

from __future__ import annotations

import argparse
import errno
import os
import re
import secrets
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight.cli._failures import FAILED, fail, failing_in_one_line

if TYPE_CHECKING:
    from pipesight.view.live.run_publisher import Publisher

__all__ = ["add_to", "run"]

LAST_PORT = 65535


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "view",
        help="show a run in the browser, live while it is running",
        description="Serve the page of a run to browsers on this machine, and update it while the run is going. If the "
        "run does not exist yet, wait for it. Only those who have the printed address can see the page. Press Ctrl-C "
        "to stop.",
    )
    add = parser.add_argument
    add("run_path", type=Path, metavar="RUN", help="a run directory, a folder of traces, or one trace")
    add("--port", type=_port, default=0, metavar="N", help="the port to listen on, on 127.0.0.1 (default: a free one)")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="take the secret in the address from FILE, or write a new one there (default: a new one each time)",
    )
    add("--no-browser", action="store_true", help="do not open a browser, only print the address")
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"a port must be a number from 0 to {LAST_PORT} (port: {text!r})")
    return int(text)


@failing_in_one_line("view")
def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, and return the exit code."""
    try:
        token = None if options.token_file is None else _token(options.token_file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--token-file: {error}") from None
    try:
        return _serve(options.run_path, port=options.port, browser=not options.no_browser, token=token)
    except KeyboardInterrupt:
        return 0


def _token(path: Path) -> str:
    """Read the secret in a file, which only its owner may read; without one, write it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ValueError(f"others can read the secret in {str(path)!r}; run: chmod 600 {path}") from None
        token = path.read_text(encoding="ascii").strip()
        if not re.fullmatch(r"[\w-]{16,}", token, re.ASCII):
            raise ValueError(
                f"the secret in {str(path)!r} must be 16 or more letters, digits, - and _; delete the file to get one"
            ) from None
        return token
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        token = secrets.token_urlsafe(24)
        file.write(f"{token}\n")
    return token


def _serve(path: Path, *, port: int, browser: bool, token: str | None) -> int:
    from pipesight.runs.following.follower import check_place
    from pipesight.view.live.live_page import draw, empty_page
    from pipesight.view.live.run_publisher import Publisher
    from pipesight.view.live.web_server import RunServer

    check_place(path)
    with Publisher(path, draw=draw) as publisher:
        try:
            server = RunServer(publisher, page=empty_page, port=port, token=token)
        except OSError as error:
            return fail("view", _port_trouble(port, error), FAILED)
        with server:
            print(server.address, flush=True)
            if browser:
                _open(server.address)
            _print_states(publisher)
    return 0


def _port_trouble(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; omit --port to use a free one"
    return f"cannot listen on port {port}: {error.strerror or error}; omit --port to use a free one"


def _open(address: str) -> None:
    """Open a browser, unless it would be one that runs in the terminal."""
    import webbrowser

    windows = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if windows or os.environ.get("BROWSER"):
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _print_states(publisher: Publisher) -> None:
    """Print the state of the run whenever it changes, until Ctrl-C."""
    news = None
    said = ""
    while True:
        news = publisher.wait(news, timeout=1.0)
        state = publisher.state
        words = {
            "waiting": f"waiting for a recording in {publisher.path}",
            "running": f"{publisher.path} is running",
            "ended": f"{publisher.path} ended: {state.outcome}; press Ctrl-C to stop serving it",
        }[state.phase]
        if words != said:
            print(words, file=sys.stderr, flush=True)
            said = words
