"""The `pipesight` command: help, version, errors, and how it ends."""

import re
import subprocess
import sys

import pytest

import pipesight
from pipesight.cli import main
from support.processes import STRICT_PYTHON


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [*STRICT_PYTHON, "-m", "pipesight", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_version_is_printed(capsys):
    """``--version`` prints the version of the package."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipesight {pipesight.__version__}\n"


def test_no_command_prints_help():
    """``python -m pipesight`` alone lists the commands, and that is an error."""
    ended = run()
    assert ended.returncode == 2
    assert ended.stdout.startswith("usage: pipesight ")
    assert "demo" in ended.stdout
    assert ended.stderr == ""


def test_help_of_demo_names_its_options(capsys):
    """``pipesight demo --help`` lists every option."""
    assert main(["demo", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for option in ("--partitions", "--chunks", "--checkpoint", "--seconds", "--steps", "--seed", "--out", "--plain"):
        assert option in help_text
    assert "1 to 8 partitions" in help_text
    assert "1 to 32 on the CPU" in help_text


def test_command_imports_no_demo():
    """The command line is read without importing what only the demo needs."""
    script = "import sys, pipesight.cli; print([m for m in ('pipesight.demo', 'rich') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--partitions", "9"], "too few layers for the partitions (layers: 8, partitions: 9)"),
        (["--partitions", "0"], "partitions must be a positive integer (partitions: 0)"),
        (["--chunks", "0"], "chunks must be between 1 and the batch's 32 samples (chunks: 0)"),
        (["--chunks", "33"], "chunks must be between 1 and the batch's 32 samples (chunks: 33)"),
        (["--steps", "0"], "number of steps must be a positive integer (steps: 0)"),
        (["--seconds", "0"], "seconds must be a positive, finite number (seconds: 0.0)"),
        (["--seconds", "nan"], "seconds must be a positive, finite number (seconds: nan)"),
        (["--seed", "-1"], "seed must be between 0 and 2**63 - 1 (seed: -1)"),
        (["--steps", "few"], "argument --steps: invalid int value: 'few'"),
        (["--steps", "5", "--seconds", "5"], "argument --seconds: not allowed with argument --steps"),
    ],
)
def test_bad_option_is_told_in_one_line(args, error, capsys):
    """A bad option ends with code 2 and one line that names the rule and the values."""
    assert main(["demo", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"pipesight demo: error: {error}\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (
            ["reprot", "RUN"],
            r"pipesight: error: argument COMMAND: invalid choice: 'reprot' \(.*\); did you mean report\?",
        ),
        (["report", "RUN", "--htm"], r"pipesight report: error: unrecognized arguments: --htm; did you mean --html\?"),
        (["run", "--ot=RUN", "x.py"], r"pipesight run: error: unrecognized arguments: --ot=RUN; did you mean --out\?"),
        (["stats", "chek", "x"], r"pipesight stats: error: argument COMMAND: .*; did you mean check\?"),
        (["plan", "RUN", "--zzz"], r"pipesight plan: error: unrecognized arguments: --zzz"),
    ],
)
def test_misspelt_word(args, error, capsys):
    """A command or an option that does not exist is refused with the nearest one, even if it abbreviates that."""
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(f"{error}\n", captured.err)


def test_wrong_command(capsys):
    """A command that does not exist, or lacks an argument, is told in one line."""
    assert main(["dance"]) == 2
    assert capsys.readouterr().err.startswith("pipesight: error: argument COMMAND: invalid choice: 'dance'")
    assert main(["report"]) == 2
    assert capsys.readouterr().err == "pipesight report: error: the following arguments are required: RUN\n"
