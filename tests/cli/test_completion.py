"""`pipesight completion`: in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time

import pytest

from pipesight.cli import main
from pipesight.cli.command import COMMANDS

CASES = [
    ("pipesight re", ["report"]),
    ("pipesight report --wi", ["--width"]),
    ("pipesight stats ", ["check"]),
    ("pipesight stats check --feature", ["--feature-dir"]),
    ("pipesight demo --checkpoint ", ["always", "except_last", "never"]),
    ("pipesight completion f", ["fish"]),
    ("pipesight report run", ["run one", "run-2"]),
    ("pipesight report run-2 run", ["run one", "run-2"]),
    ("pipesight run --out run-", ["run-2"]),
    ("pipesight report --width ", []),
]


@pytest.fixture
def folder(tmp_path, capsys):
    """A folder with two runs, and the scripts."""
    for name in ("run one", "run-2"):
        (tmp_path / name).mkdir()
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        (tmp_path / f".{shell}").write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(folder):
    """Commands, options, values and runs are completed where they can stand."""
    lines = ["IFS=$'\\n'", "source ./.bash"]
    for line, _ in CASES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        lines += [f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; IFS=$' \\t\\n'; _pipesight; IFS=$'\\n'"]
        lines += ["echo \"= ${COMPREPLY[*]//$'\\n'/|}\""]
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    found = [sorted(part.strip("\n").split("\n")) for part in done.stdout.split("= ")[1:]]
    assert found == [sorted(expected) or [""] for _, expected in CASES]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(folder):
    """The same in fish, which has a command for it."""
    code = "source ./.fish\n" + "\n".join(f"echo = ; complete -C '{line}'" for line, _ in CASES)
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.stderr == ""
    found = [
        sorted(line.split("\t")[0].rstrip("/").replace("\\", "") for line in part.strip("\n").split("\n"))
        for part in done.stdout.split("=\n")[1:]
    ]
    assert found == [sorted(expected) or [""] for _, expected in CASES]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh(folder):
    """A tab after the beginning of a command, an option and a run completes it."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ.update(TERM="dumb", PS1="> ", HOME=str(folder))
        os.execvp("zsh", ["zsh", "-f", "-i"])
    result, until = folder / "arguments", time.monotonic() + 60
    try:
        os.write(terminal, b"autoload -U compinit; compinit -D -u; source ./.zsh\n")
        os.write(terminal, b"pipesight() { print -l $@ >arguments }\n")
        os.write(terminal, b"pipesight repo\t--wid\t80 run-\t\n")
        while time.monotonic() < until and not (result.exists() and result.read_text().count("\n") == 4):
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 4096)
        assert result.read_text().replace("/", "").split() == ["report", "--width", "80", "run-2"]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def test_every_command_is_there(folder):
    """Each script names each command."""
    for shell in ("bash", "zsh", "fish"):
        text = (folder / f".{shell}").read_text()
        assert [command for command in COMMANDS if command not in text] == []
