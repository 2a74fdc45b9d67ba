"""A process that begins with torch imported is like one that Python starts."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from support import warm
from support.processes import STRICT_PYTHON

SEES = """
import atexit, os, sys, warnings
atexit.register(print, "the end")
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("MINE"), sys.stdin.read())
try:
    warnings.warn("an error")
except UserWarning as error:
    print("raised", error, file=sys.stderr)
"""


@pytest.mark.parametrize("begin", [["-c", SEES], ["-m", "sees"], ["sees.py"]], ids=["code", "module", "script"])
def test_a_program_sees_the_same(begin, tmp_path):
    """Its name, arguments, path, folder, environment, input and warnings are those that Python gives it."""
    (tmp_path / "sees.py").write_text(SEES)
    environment = {"MINE": "7"}
    arguments = [*begin, "--one", "two"]
    expected = subprocess.run(
        [*STRICT_PYTHON, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
    )
    found = warm.run(*arguments, cwd=tmp_path, env=environment)
    assert "the end" in expected.stdout
    assert expected.stderr == "raised an error\n"
    assert (found.returncode, found.stdout, found.stderr) == (0, expected.stdout, expected.stderr)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_it_ends_the_same(code, status):
    """Its exit code says how it ended, and a traceback comes where Python has one."""
    ended = warm.run("-c", code)
    assert ended.returncode == status
    assert ("Traceback" in ended.stderr) == (status == 1)


def test_nothing_of_pipesight_is_there():
    """Of pipesight nothing was imported, of torch all was; and one process does not see what another did."""
    code = "import sys; print('torch' in sys.modules, 'pipesight' in sys.modules, hasattr(sys, 'mine')); sys.mine = 1"
    assert [warm.run("-c", code).stdout for _ in range(2)] == ["True False False\n"] * 2


def test_a_process_that_does_not_end():
    """Waiting has a limit, after which the process can be killed."""
    process = warm.start("-c", "print('begun'); import time; time.sleep(600)", merge=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)
    process.kill()
    assert process.returncode == -9
    process.communicate()


def test_ranks():
    """Ranks find each other, as those that torchrun starts."""
    code = "import torch.distributed as dist; dist.init_process_group('gloo'); print(dist.get_rank(), "
    code += "dist.get_world_size()); dist.barrier(); dist.destroy_process_group()"
    assert [rank.stdout.splitlines()[-1] for rank in warm.torchrun(2, "-c", code)] == ["0 2", "1 2"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("import os; os.abort()", -6)],
)
def test_a_command_ends_the_same(code, status, tmp_path):
    """What stands for such a process has its streams, folder and environment, and its exit code."""
    telling = f"import os, sys; print(os.getcwd(), os.environ['MINE']); print(sys.argv, file=sys.stderr)\n{code}"
    command = warm.command("-c", telling, "--one")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"MINE": "7"}, timeout=60)
    assert (done.returncode, done.stdout) == (status, f"{tmp_path} 7\n")
    assert done.stderr.splitlines()[0] == "['-c', '--one']"


@pytest.mark.parametrize(("sent", "told"), [(signal.SIGTERM, "told"), (signal.SIGKILL, "")])
def test_a_command_and_its_process_end_together(sent, told):
    """The process gets the signals of what stands for it, and does not outlive it."""
    waiting = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told"), sys.exit(4)))
print(os.getpid(), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(warm.command("-c", waiting), stdout=subprocess.PIPE, text=True) as command:
        pid = int(command.stdout.readline())
        ended = os.pidfd_open(pid)
        command.send_signal(sent)
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
        assert command.stdout.read().strip() == told
        assert command.wait(60) == (-9 if sent == signal.SIGKILL else 4)
