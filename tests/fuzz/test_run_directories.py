"""Run directories as no recorder leaves them: damaged, edited, made by somebody who means harm.

The truth is the run before it was damaged. What reads it must give the same steps or say which file it could not trust,
or refuse in one line; it must never raise, wait, read what lies elsewhere, or let a name become markup.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fuzz.broken_runs import BASES, EDITS, SECRET, Change, changes, do, files_of, secret
from fuzz.cases import account, fuzz
from pipesight.cli.command import main
from pipesight.runs.following.follower import Follower, check_place
from pipesight.runs.reading.run import NotARunError
from pipesight.view.live.live_page import draw

PATIENCE = 60  # seconds for one command


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Each run as it was, and what is right about it."""
    root = tmp_path_factory.mktemp("bases")
    made = {name: make(root / name.replace(" ", "-")) for name, make in BASES.items()}
    return {name: (run, key_of(json.loads(command("report", run, "--json")[1]))) for name, run in made.items()}


def key_of(report: dict[str, Any]) -> Any:
    """What damage must not change without a word: the steps, and the first tensor that is not finite."""
    steps = [(s["replica"], s["step"], s["window"], s["bubble"], s["minibatches"]) for s in report["steps"]]
    names = [(name["name"], name["count"], name["total"]) for name in report["names"]]
    return steps, names, report["nonfinite"], [(layer["name"], layer["runs"]) for layer in report["layers"]]


# What is asked of them.

opened: list[str] | None = None  # what was opened in this process, while it is a list


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        opened.append(os.fspath(arguments[0]))


sys.addaudithook(_heard)


class HungError(BaseException):
    """A command took too long."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Let nothing take too long, nor open what lies elsewhere."""
    global opened

    def hung(*_: object) -> None:
        raise HungError(f"no end after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(PATIENCE)
    opened = []
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        paths, opened = opened, None
    assert str(secret()) not in {os.path.realpath(path) for path in paths}, "read what lies outside of the run"


def command(*arguments: object) -> tuple[int, str, str]:
    """Call a command in this process; return its exit code, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with watched(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert "Traceback" not in err.getvalue()
    assert SECRET not in out.getvalue() + err.getvalue()
    if code:
        first, *others = reversed(err.getvalue().splitlines())
        assert first.startswith(f"pipesight {arguments[0]}: error: "), err.getvalue()
        assert all(line.startswith("pipesight convert: ") for line in others), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def in_terminal(run: Path, scratch: Path) -> None:
    _, out, _ = command("report", run)
    assert "\x1b" not in out


def as_page(run: Path, scratch: Path) -> None:
    page = scratch / "page.html"
    if command("report", run, "--json", "--html", page)[0] == 0:
        text = page.read_text(encoding="utf-8")
        assert text.count("</script") == 2
        assert "onerror" not in text
        packed = re.search(r'id="payload">([^<]*)</script>', text)
        assert packed is not None
        assert SECRET not in gzip.decompress(base64.b64decode(packed[1])).decode()


def planned(run: Path, scratch: Path) -> None:
    command("plan", run, "--json")


def to_chrome(run: Path, scratch: Path) -> None:
    if command("convert", run, "-o", scratch / "trace.json")[0] == 0:
        assert SECRET not in (scratch / "trace.json").read_text(errors="replace")


def to_parquet(run: Path, scratch: Path) -> None:
    if command("convert", run, "--to", "parquet", "-o", scratch / "made")[0] == 0:
        for path in files_of(scratch / "made"):
            assert SECRET.encode() not in path.read_bytes()
        assert not [path for path in (scratch / "made").rglob("*") if path.is_symlink()]


def served(run: Path, scratch: Path) -> None:
    """Follow it, as `view` and `watch` do."""
    with watched():
        try:
            check_place(run)
        except NotARunError:
            return
        follower = Follower(run, quiet=0)
        with contextlib.closing(follower):
            for _ in range(3):
                follower.look()
            payload = draw(follower)
    assert SECRET not in json.dumps(payload, allow_nan=False)


ASKED = (in_terminal, as_page, planned, to_chrome, to_parquet, served)


@fuzz(few=12)
@given(
    base=st.sampled_from(sorted(BASES)),
    done=st.lists(changes(), min_size=1, max_size=3),
    ask=st.sampled_from(ASKED),
)
def test_run_directories(bases: dict[str, tuple[Path, Any]], base: str, done: list[Change], ask: Any) -> None:
    """Whatever became of a run, its report is right, or says which file is not, or refuses; and all others end well."""
    original, truth = bases[base]
    with tempfile.TemporaryDirectory(prefix="pipesight-fuzz-") as scratch:
        run = Path(scratch, "run")
        shutil.copytree(original, run)
        for change in done:
            do(run, change)
        code, out, err = command("report", run, "--json")
        note(f"{code} {err}")
        ask(run, Path(scratch))
        if code:
            assert not out
            account("run directories", "agreed")
            return
        report = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        if key_of(report) == truth or tells(report):
            account("run directories", "agreed")
        else:
            account("run directories", excuse(original, run, done, report, truth))


def tells(report: dict[str, Any]) -> bool:
    """Whether the report names a file that it did not trust."""
    return any(remark["path"] is not None for remark in report["remarks"])


def excuse(original: Path, run: Path, done: list[Change], report: dict[str, Any], truth: Any) -> str:
    """Say why a report may differ from the truth without a word; fail if there is no reason."""
    if any(change[0] in EDITS for change in done):
        return "excused: what the files say was changed, and may be true"
    for file in files_of(original):
        now = run / file.relative_to(original)
        if not now.exists() and (file.parent.name in ("stats", "logs") or not (original / "run.json").exists()):
            return "excused: a file that is gone, and that nothing else tells of"
        if now.is_file() and file.read_bytes() != now.read_bytes() and not file.name.endswith(".gz"):
            return "excused: a file without checksums says something else"
    raise AssertionError(f"the report differs, and says nothing of it:\n{key_of(report)}\n{truth}")
