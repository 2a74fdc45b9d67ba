"""Traces of many processes: forked, spawned, launched, restarted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.trace_files import events_by_process, events_of, lines_of
from support.traced import PREAMBLE

FORK = """
start('run', interval=60)
record(10)
with ai.compute.forward:
    ai.compute.backward.start()
    loop = iter(ai.pipeline.epoch.iter(range(3)))
    next(loop)
    if os.fork() == 0:
        record(20)
        {inside}
    os.wait()
    next(loop)
    ai.compute.backward.stop()
{after}
del loop
"""


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)", "pass", "stop()"])
def test_fork(script, tmp_path, ending):
    """A forked process has a file of its own, without what its parent recorded or had begun."""
    body = FORK.format(inside="pass" if ending == "pass" else ending, after="")
    if ending in ("pass", "stop()"):  # the child goes on where the parent's spans end
        body = body.replace("    os.wait()\n", "    else: os.wait()\n", 1)
    process = script(body)
    assert process.returncode == 0, process.errors
    found = events_by_process(tmp_path)
    parent = found.pop(process.pid)
    ((child, events),) = found.items()
    assert (tmp_path / f"run-{child}.pfw.gz").exists()
    names = [event["name"] for event in parent]
    assert names.count("step") == 10
    assert {"forward", "backward", "epoch.iter", "epoch.block"} <= set(names)
    assert [event["name"] for event in events][:20] == ["step"] * 20
    assert not {"forward", "backward"} & {event["name"] for event in events}
    assert all(event["args"]["p_idx"] == 6 for event in events[:20])
    start = next(event for event in lines_of(tmp_path / f"run-{child}.pfw.gz") if event["name"] == "start")
    assert start["args"]["ppid"] == process.pid
    assert all(event["ts"] >= start["ts"] for event in events)
    assert start["ts"] >= min(event["ts"] for event in parent)  # one clock


def test_session_of_forked_process(script, tmp_path):
    """In a forked process the session is that process's: its path, its losses, its end."""
    body = """
session = start('run')
record(1)
flush()
if os.fork() == 0:
    record(2)
    session.stop()
    print(session.path, session.lost, flush=True)
    os._exit(0)
os.wait()
record(3)
"""
    process = script(body)
    path, lost = process.output.split()
    assert lost == "0"
    assert len(events_of(Path(path))) == 2
    assert len(events_of(tmp_path / "run.pfw.gz")) == 4


def test_grandchildren(script, tmp_path):
    """A process that was forked may fork again, in any thread."""
    body = """
start('run')
def fork(depth):
    record(1)
    if depth and os.fork() == 0:
        thread = threading.Thread(target=fork, args=(depth - 1,))
        thread.start(); thread.join()
        os._exit(0)
    elif depth:
        os.wait()
fork(3)
"""
    process = script(body)
    assert process.returncode == 0, process.errors
    assert [len(events) for events in events_by_process(tmp_path).values()] == [1] * 4


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(script, tmp_path, method):
    """Processes of multiprocessing are traced, on the clock of their parent, with nothing to configure."""
    body = f"""
import multiprocessing
def work(count):
    record(count)
if __name__ == "__main__":
    real = time.time_ns
    time.time_ns = lambda: real() - 1000 * 10**9  # somebody sets the clock after the start
    start('run', compress=True)
    time.time_ns = real
    record(5)
    context = multiprocessing.get_context({method!r})
    with ai.pipeline.train:
        processes = [context.Process(target=work, args=(10 * n,)) for n in (1, 2)]
        for process in processes: process.start()
        for process in processes: process.join()
        print([process.exitcode for process in processes])
"""
    process = script(body)
    assert (process.returncode, process.output) == (0, "[0, 0]\n"), process.errors
    found = events_by_process(tmp_path)
    train = found.pop(process.pid)[-1]
    assert sorted(len(events) for events in found.values()) == [10, 20]
    for event in (event for events in found.values() for event in events):
        assert train["ts"] <= event["ts"] <= train["ts"] + train["dur"]
    names = [line["args"]["name"] for path in tmp_path.glob("run-*") for line in lines_of(path)
             if line["name"] == "process_name"]  # fmt: skip
    assert all("Process-" in name for name in names)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("late", [False, True])
def test_traces_one_after_the_other(script, tmp_path, method, late):
    """Processes belong to the trace that there is when they start, also if a server that is older forks them."""
    body = f"""
{"" if late else "import pipesight.trace"}
def work(count):
    from pipesight.trace import ai
    for _ in range(count):
        with ai.compute.step: pass
if __name__ == "__main__":
    import multiprocessing
    from pipesight.trace import start
    context = multiprocessing.get_context({method!r})
    def run(count):
        process = context.Process(target=work, args=(count,))
        process.start(); process.join()
        assert process.exitcode == 0
    run(1)
    with start('one'):
        run(2)
    run(3)
    with start('two', compress=False):
        run(4)
    run(5)
"""
    (tmp_path / "late.py").write_text(body)
    command = [sys.executable, "-W", "error", "late.py"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIPESIGHT_")}
    ended = subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    (one,) = tmp_path.glob("one-*.pfw.gz")
    (two,) = tmp_path.glob("two-*.pfw")
    assert len(events_of(one)) == 2
    assert two.read_text().count('"name":"step"') == 4
    assert len(list(tmp_path.iterdir())) == 3


def test_start_without_guard(script, tmp_path):
    """A start at the top of a script that spawned processes import again gives each its own file."""
    body = """
import multiprocessing
start('run', compress=False)
def work():
    record(4)
if __name__ == "__main__":
    record(2)
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start(); process.join()
"""
    process = script(body)
    assert process.returncode == 0, process.errors
    counts = sorted(path.read_text().count('"step"') for path in tmp_path.glob("*.pfw"))
    assert counts == [2, 4]


def test_subprocess_with_trace_of_its_own(script, tmp_path):
    """A program that starts a trace does so too if a traced one runs it; its file is the one it asked for."""
    (tmp_path / "other.py").write_text(PREAMBLE + "start('other')\nrecord(3)")
    process = script(
        "import subprocess\nstart('run')\nrecord(2)\nsubprocess.run([sys.executable, 'other.py'], check=True)"
    )
    assert process.returncode == 0, process.errors
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == ["other.pfw.gz", "run.pfw.gz"]


def test_exec(script, tmp_path):
    """A process that becomes another program does not overwrite what it wrote."""
    body = """
if len(sys.argv) == 1:
    start('run')
    record(2)
    flush()
    os.execv(sys.executable, [sys.executable, *sys.argv, 'again'])
record(3)
"""
    process = script(body)
    assert process.returncode == 0, process.errors
    assert len(events_of(tmp_path / "run.pfw.gz")) == 2
    assert len(events_of(tmp_path / f"run-{process.pid}.pfw.gz")) == 3


def test_same_file_at_once(script, tmp_path):
    """Two programs that were told to write the same file at once write two."""
    env = {"PIPESIGHT_ENABLE": 1, "PIPESIGHT_LOG_FILE": tmp_path / "run"}
    body = "record(3)\nflush()\nprint('ready', flush=True)\nsys.stdin.readline()\ntime.sleep(1)\nrecord(2)"
    processes = [script(body, wait=False, **env) for _ in range(2)]
    for process in processes:
        assert process.wait(30) == 0
        process.communicate()
    assert [len(events) for events in events_by_process(tmp_path).values()] == [5, 5]


def test_torchrun(script, tmp_path):
    """Under torchrun each rank has a file with its rank in the name, and its place in a viewer."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    body = "start('run')\nrecord(10 + int(os.environ['RANK']))\nif os.fork() == 0: record(1); os._exit(0)\nos.wait()"
    process = script(body, launcher=(torchrun, "--nproc-per-node", "2"), OMP_NUM_THREADS=1)
    assert process.returncode == 0, process.errors
    for rank in (0, 1):
        path = tmp_path / f"run-rank-0000{rank}.pfw.gz"
        assert len(events_of(path)) == 10 + rank
        order = next(line for line in lines_of(path) if line["name"] == "process_sort_index")
        assert order["args"]["sort_index"] == rank
    assert len(events_by_process(tmp_path)) == 4


def test_restart_keeps_what_was_written(script, tmp_path):
    """A rank that torchrun restarts does not overwrite the trace of the attempt that failed."""
    env = {"WORLD_SIZE": 2, "RANK": 1}
    script("start('run')\nrecord(1)", **env)
    script("start('run')\nrecord(2)", **env, TORCHELASTIC_RESTART_COUNT=1)
    assert len(events_of(tmp_path / "run-rank-00001.pfw.gz")) == 1
    assert len(events_of(tmp_path / "run-rank-00001-restart-1.pfw.gz")) == 2


def test_fork_while_threads_record(script, tmp_path):
    """Forks while threads record, update and flush do not hang the children or write an event twice."""
    body = """
start('run', interval=0.001)
over = threading.Event()
def work():
    while not over.is_set():
        record(5, ai.compute.forward)
        ai.update(step=1)
        flush()
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
statuses = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        record(3)
        ai.update(step=2)
        flush()
        os._exit(7)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads: thread.join()
print(set(statuses))
"""
    process = script(body)
    assert (process.returncode, process.output) == (0, "{7}\n"), process.errors
    found = events_by_process(tmp_path)
    parent = found.pop(process.pid)
    assert {event["name"] for event in parent} == {"forward"}
    assert len(found) == 20
    assert all([event["name"] for event in events] == ["step"] * 3 for events in found.values())


def test_fork_while_the_tree_changes(script, tmp_path):
    """A fork while another thread changes the tree does not leave the child without the tree's lock."""
    body = """
from pipesight.trace import _recording_switch
start('run')
held, over = threading.Event(), threading.Event()
def hold():
    with _recording_switch.changing():
        held.set()
        over.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)
    ai.update(step=2)
    record(1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
"""
    process = script(body)
    assert (process.returncode, process.output) == (0, "7\n"), process.errors
    assert [len(events) for events in events_by_process(tmp_path).values()] == [1]
