"""What stands in a Markdown document, and how a reader would follow it.

A fenced block is one of these, and nothing else is let through:

    ```python    runs; the blocks of a page share their names, in order, as one script
    ```console   runs, command by command; `# exit code 3` behind a command says how it ends, if not with 0
    ```shell     cannot run in a test: `NOT_RUN` in test_docs.py says why
    ```output    is what the block above it prints
    ```yaml      is a configuration of tensor statistics without a mistake
    ```toml      names entry points of features
    ```text      is a drawing, or an example of what is printed

A block whose first line is a comment with the name of a file, such as ``# train.py``, is that file. It is written into
the folder where everything else runs, and is no part of the script.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from support import warm
from support.commands import pipesight
from support.processes import STRICT_PYTHON

__all__ = ["LANGUAGES", "ROOT", "Block", "Console", "blocks", "follow", "prose", "write_files"]

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"python", "console", "shell", "output", "yaml", "toml", "text"}
READING = {"report", "plan", "watch", "convert"}
"""Commands that only look at a run."""
LIMIT = 120.0

# These begin with Python itself: the README as a reader would, and a page on DuckDB, which counts at its end what is
# left of it. The others begin with torch imported.
COLD = {"README.md", "docs/how-to/large-runs.md"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its lines, and the line of its opening fence, from 1."""

    language: str
    line: int
    code: list[str]

    @property
    def file(self) -> str | None:
        """The name of the file that this block is."""
        named = re.fullmatch(r"# ([\w/-]+\.(?:py|yaml|toml))", self.code[0]) if self.code else None
        return named[1] if named else None

    @property
    def is_script(self) -> bool:
        """Whether it is a part of the page's script."""
        return self.language == "python" and not self.file


@dataclass(frozen=True, slots=True)
class Console:
    """A command of a console block."""

    settings: dict[str, str]
    program: str
    arguments: list[str]
    exit_code: int

    @classmethod
    def parsed(cls, line: str) -> Console:
        """Read a line such as ``OMP_NUM_THREADS=1 pipesight report run --fail-over 0.3   # exit code 3``."""
        command, _, comment = line.partition(" # ")
        expected = re.fullmatch(r"\s*exit code (\d+)", comment)
        words = shlex.split(command)
        settings = []
        while "=" in words[0]:
            settings.append(words.pop(0).split("=", 1))
        return cls(dict(settings), words[0], words[1:], int(expected[1]) if expected else 0)

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run it in a folder, on the CPU; what trains runs in processes that begin with torch imported."""
        surroundings = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        surroundings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | self.settings
        if self.program == "pipesight" and self.arguments[0] in READING and "--model" not in self.arguments:
            return pipesight(*self.arguments, cwd=folder, env=self.settings)
        if self.program != "torchrun":
            beginning = {"python": [], "pipesight": ["-m", "pipesight"]}[self.program]
            return warm.run(*beginning, *self.arguments, cwd=folder, env=surroundings, timeout=LIMIT)
        standalone, option, count, *arguments = self.arguments
        assert (standalone, option) == ("--standalone", "--nproc-per-node"), self.arguments
        ranks = warm.torchrun(int(count), *arguments, cwd=folder, env=surroundings, timeout=LIMIT)
        codes = [rank.returncode for rank in ranks]
        output, errors = ("".join(getattr(rank, name) for rank in ranks) for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.arguments, max(codes, key=abs), output, errors)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if inside and line != "```":
            found[-1].code.append(line)
        elif line.lstrip().startswith(("```", "~~~")):
            inside = not inside
            if inside:
                found.append(Block(line.removeprefix("```"), number, []))
    assert not inside, f"the block in line {found[-1].line} has no end"
    return found


def prose(text: str) -> list[str]:
    """Return the lines of a document, with those of fenced blocks left blank."""
    lines = text.splitlines()
    for block in blocks(text):
        begin, end = block.line - 1, block.line + len(block.code) + 1
        lines[begin:end] = [""] * (end - begin)
    return lines


def write_files(text: str, folder: Path) -> None:
    """Put the files that a document shows into a folder."""
    for block in blocks(text):
        _write(block, folder)


def follow(path: Path, folder: Path, *, done: set[str] | None = None) -> dict[int, str]:
    """Do in a folder what a document shows, from top to bottom; return what each block printed, by its line.

    A block that fails is an `AssertionError`. Warnings in the script are errors.

    Args:
        path: The document.
        folder: Where to do it.
        done: Commands to pass over. Those that leave no file are added: a second time they find nothing of their own.
    """
    done = set() if done is None else done
    text = path.read_text(encoding="utf-8")
    examples = folder / "examples"
    if not examples.exists():
        examples.symlink_to(ROOT / "examples")
    found = blocks(text)
    with tempfile.TemporaryDirectory() as turns:
        script = _Script(path, text, folder, Path(turns)) if any(block.is_script for block in found) else None
        printed = {}
        try:
            for block in found:
                if block.is_script or not (block.file or block.language == "console"):
                    continue
                if script:
                    script.wait_for_turn(block)
                _write(block, folder)
                if block.language == "console":
                    printed[block.line] = _commands(block, folder, done)
                if script:
                    script.give_turn(block)
            return printed | (script.end() if script else {})
        finally:
            if script:
                script.kill()


def _write(block: Block, folder: Path) -> None:
    if block.file:
        file = folder / block.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*block.code, ""]), encoding="utf-8")


def _commands(block: Block, folder: Path, done: set[str]) -> str:
    printed = ""
    for line in block.code:
        if line in done:
            continue
        console, before = Console.parsed(line), _files(folder)
        ended = console.run(folder)
        assert ended.returncode == console.exit_code, f"{line}\n{ended.stdout}{ended.stderr}"
        printed += ended.stdout
        if _files(folder) == before:
            done.add(line)
    return printed


def _files(folder: Path) -> dict[Path, int]:
    """Return the files in a folder, with when each was written last."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.stat().st_mtime_ns for path in found if path.is_file()}


class _Script:
    """The Python blocks of a document as one script in a process, which waits where other blocks have their turn.

    Each line has the place that it has in the document, so that tracebacks lead there.
    """

    def __init__(self, path: Path, text: str, folder: Path, turns: Path) -> None:
        self.turns = turns
        self.blocks = [block for block in blocks(text) if block.is_script]
        lines = [""] * len(text.splitlines())
        for block in blocks(text):
            last = block.line + len(block.code)
            if block.is_script:
                lines[block.line : last] = block.code
                lines[last] = f"print({self._mark(block)!r})"
            elif block.file or block.language == "console":
                lines[last] = f"exec({self._waiting(block)!r}, {{}})"
        script = folder / path.with_suffix(".script.py").name
        script.write_text("\n".join(lines), encoding="utf-8")
        surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        self.process: warm.Process | _Cold
        if path.relative_to(ROOT).as_posix() in COLD:
            self.process = _Cold([*STRICT_PYTHON, "-u", "-X", "utf8", script.name], folder, surroundings)
        else:
            self.process = warm.start(script.name, cwd=folder, env=surroundings, merge=True)

    def _mark(self, block: Block) -> str:
        return f"<end of the block in line {block.line}>"

    def _waiting(self, block: Block) -> str:
        here, there = str(self.turns / f"{block.line}"), str(self.turns / f"{block.line} done")
        return (
            f"import os, time\nopen({here!r}, 'w').close()\nwhile not os.path.exists({there!r}):\n    time.sleep(0.005)"
        )

    def wait_for_turn(self, block: Block) -> None:
        """Wait until the script has come to a block that is no part of it."""
        until = time.monotonic() + LIMIT
        while not (self.turns / f"{block.line}").exists() and not self._has_ended():
            assert time.monotonic() < until, f"the script did not come to line {block.line}"
            time.sleep(0.005)
        if self._has_ended():
            raise AssertionError(self.process.communicate()[0])

    def give_turn(self, block: Block) -> None:
        """Let the script go on behind a block."""
        (self.turns / f"{block.line} done").touch()

    def end(self) -> dict[int, str]:
        """Wait for the end; return what each block printed."""
        rest, _ = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0, rest
        printed = {}
        for block in self.blocks:
            printed[block.line], mark, rest = rest.partition(self._mark(block) + "\n")
            assert mark, f"the block in line {block.line} did not run"
        assert rest == ""
        return printed

    def kill(self) -> None:
        """End the process, if it goes on."""
        self.process.end()

    def _has_ended(self) -> bool:
        try:
            self.process.wait(0)
        except subprocess.TimeoutExpired:
            return False
        return True


class _Cold:
    """A process that begins with Python itself, used as one of `warm`."""

    def __init__(self, command: list[str], folder: Path, env: Mapping[str, str]) -> None:
        self._output: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(command, cwd=folder, env=env, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def communicate(self, *, timeout: float = 60) -> tuple[str, str]:
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), ""

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
