"""Processes that end in every way there is, and signals."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from support.trace_files import events_by_process, events_of, is_complete


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("stop()", 0),
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyError('mine')", 1),
        ("os._exit(4)", 4),
        ("threading.Thread(target=os._exit, args=(5,)).start(); time.sleep(30)", 5),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", -signal.SIGHUP),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("atexit.register(record, 0); threading.Thread(target=lambda: (time.sleep(0.2), record(0))).start()", 0),
    ],
)
def test_every_end(script, tmp_path, ending, status):
    """However a process ends, all its events are in a whole file, and its status is the same as without a trace."""
    process = script(f"start('run', interval=60)\nrecord(1000)\n{ending}")
    assert process.returncode == status, process.errors
    assert len(events_of(tmp_path / "run.pfw.gz")) == 1000
    assert is_complete(tmp_path / "run.pfw.gz")


def test_kill(script, tmp_path):
    """After kill -9, all events that ended more than a second before are there, and plain zcat reads the file."""
    process = script(
        "start('run')\nrecord(2000)\nprint('recorded', flush=True)\nwhile True: record(100); time.sleep(0.01)",
        wait=False,
    )
    assert process.stdout.readline() == "recorded\n"
    time.sleep(1)
    process.kill()
    process.communicate()
    result = subprocess.run(["zcat", str(tmp_path / "run.pfw.gz")], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert sum('"step"' in line for line in result.stdout.splitlines()) >= 2000
    assert not is_complete(tmp_path / "run.pfw.gz")


@pytest.mark.parametrize("when", ["before", "after"])
def test_handler_of_the_program(script, tmp_path, when):
    """A user's handler of SIGTERM, installed before or after the start, is called, and may go on recording."""
    install = "signal.signal(signal.SIGTERM, lambda *_: (record(5), print('handled')))\n"
    begin = "start('run', interval=60)\nrecord(10)\n"
    both = install + begin if when == "before" else begin + install
    process = script(both + "os.kill(os.getpid(), signal.SIGTERM)\nrecord(20)")
    assert (process.returncode, process.output) == (0, "handled\n"), process.errors
    assert len(events_of(tmp_path / "run.pfw.gz")) == 35


def test_handler_of_the_program_calls_ours(script, tmp_path):
    """A user's handler that calls the one before it is not ended by ours, which writes what there is."""
    body = """
start('run', interval=60)
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: (print('handled', flush=True), before(*args)))
record(10)
os.kill(os.getpid(), signal.SIGTERM)
print(os.path.exists('run.pfw.gz'))
record(5)
"""
    process = script(body)
    assert (process.returncode, process.output) == (0, "handled\nTrue\n"), process.errors
    assert len(events_of(tmp_path / "run.pfw.gz")) == 15
    assert is_complete(tmp_path / "run.pfw.gz")


def test_handlers_are_restored(script):
    """After stop, SIGTERM, SIGHUP and os._exit are what they were."""
    body = "exit = os._exit\nstart('run')\nrecord(1)\nstop()\n"
    handlers = "[signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]"
    process = script(body + f"print(os._exit is exit, *{handlers})")
    assert process.output == "True True True\n"


def test_exit_wrapped_by_others(script, tmp_path):
    """Whoever replaces os._exit after us keeps doing so, through stop and another start."""
    body = """
start('run', interval=60)
ours = os._exit
def theirs(status):
    print('theirs', flush=True)
    ours(status)
os._exit = theirs
stop()
start('run', interval=60)
record(3)
os._exit(6)
"""
    process = script(body)
    assert (process.returncode, process.output) == (6, "theirs\n"), process.errors
    assert len(events_of(tmp_path / "run.pfw.gz")) == 3


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", -15), ("SIGINT", 0)])
def test_signal_while_recording_and_writing(script, tmp_path, number, status):
    """A signal that comes while the recording thread helps the writer loses no event and does not hang."""
    body = f"""
start('run', interval=0.05)
threading.Timer(0.25, os.kill, (os.getpid(), signal.{number})).start()
count = 0
try:
    while True:
        with ai.compute.step: pass
        count += 1
        if count % 500 == 0: flush()
        if count % 20_000 == 0: print(count, flush=True)
except KeyboardInterrupt:
    pass
"""
    process = script(body)
    assert process.returncode == status, process.errors
    ids = sorted(event["id"] for event in events_of(tmp_path / "run.pfw.gz"))
    assert is_complete(tmp_path / "run.pfw.gz")
    assert ids == list(range(ids[0], ids[-1] + 1))
    assert len(ids) >= int((process.output.split() or [0])[-1])


def test_daemon_thread(script, tmp_path):
    """A daemon thread that records while the interpreter shuts down does no harm."""
    body = """
start('run')
threading.Thread(target=lambda: [record(10) for _ in iter(int, 1)], daemon=True).start()
time.sleep(0.1)
record(7, ai.compute.forward)
"""
    process = script(body)
    assert (process.returncode, process.errors) == (0, "")
    assert sum(event["name"] == "forward" for event in events_of(tmp_path / "run.pfw.gz")) == 7
    assert is_complete(tmp_path / "run.pfw.gz")


def test_recording_at_exit(script, tmp_path):
    """What runs at the exit of the interpreter, before the trace ends, is recorded, from a first span on."""
    process = script("start('run', interval=60)\natexit.register(record, 5)")
    assert (process.returncode, process.errors) == (0, "")
    assert len(events_of(tmp_path / "run.pfw.gz")) == 5


UNHEARD = """
import collections, ctypes, functools, multiprocessing, operator
def work(count):
    record(count)
    lock = threading.Lock()
    lock.acquire()
    # In one call: Python notes the signal, and waits before it can call a handler.
    raising = functools.partial(getattr(ctypes.CDLL(None), 'raise'), signal.{number})
    collections.deque(map(operator.call, [raising, lock.acquire]), maxlen=0)
if __name__ == '__main__':
    start('run', interval=60)
    process = multiprocessing.get_context('{method}').Process(target=work, args=({count},))
    process.start()
    process.join(20)
    print(process.exitcode)
    process.kill()
"""


@pytest.mark.parametrize(
    ("method", "number", "count"),
    [("fork", "SIGTERM", 0), ("fork", "SIGTERM", 2), ("fork", "SIGHUP", 2), ("spawn", "SIGTERM", 2)],
)
def test_signal_just_before_a_wait(script, tmp_path, method, number, count):
    """A signal ends a process that begins to wait before Python can call a handler, and nothing is lost."""
    process = script(UNHEARD.format(method=method, number=number, count=count))
    assert process.output == f"{-getattr(signal, number)}\n", process.errors
    assert [len(events) for events in events_by_process(tmp_path).values()] == ([count] if count else [])


EVENT_LOOP = """
import asyncio
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR1, print)
"""


def test_signal_just_before_a_wait_in_a_child_of_an_event_loop(script, tmp_path):
    """So it is where the parent runs an event loop, whose wakeup descriptor the child inherits."""
    body = UNHEARD.format(method="fork", number="SIGTERM", count=2)
    process = script(body.replace("    start('run'", EVENT_LOOP.replace("\n", "\n    ") + "\n    start('run'"))
    assert process.output == f"{-signal.SIGTERM}\n", process.errors
    assert [len(events) for events in events_by_process(tmp_path).values()] == [2]


def test_signal_right_after_a_fork(script):
    """A forked process ends of a signal that comes before it has done anything."""
    body = """
start('run')
def fork():
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    return child
print({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in [fork() for _ in range(20)]})
"""
    process = script(body)
    assert process.output == f"{{{-signal.SIGTERM}}}\n", process.errors


def test_signals_after_a_fork_are_as_before(script):
    """A fork leaves the signals that a thread blocks, and the descriptor that they wake, as they were."""
    body = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
start('run')
def show():
    record(1)
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGHUP}, signal.set_wakeup_fd(writer) == writer)
child = os.fork()
if child == 0:
    show()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
show()
"""
    process = script(body)
    assert process.output == "True True\n" * 2, process.errors
