"""Ranks that raise, hang, are killed or preempted; by torchrun itself where it has a part in that."""

import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipesight import context
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.rank_notes import RankNotes
from pipesight.distributed.symptoms import collective_of, is_symptom
from support import faults
from support.torchrun import RANK, batches, ended, start, tanhs, torchrun, train_plainly

BEGIN = (
    RANK
    + """
from torch._subclasses import FakeTensor
mse = nn.functional.mse_loss


class Trouble(nn.Module):
    def forward(self, input):
        where = context.current()
        if not isinstance(input, FakeTensor) and where.step == 1 and where.microbatch == 2:
            trouble()
        return input


def run(steps=3, **settings):
    model = tanhs(4)
    model[2].append(Trouble())
    pipeline = DistributedPipeline(model, [1] * 4, chunks=4, loss_fn=mse, **settings)
    for k, (x, y) in enumerate(batches([8] * steps)):
        if k == 1:
            between(rank)
        try:
            pipeline.step(x, y)
        except Exception as error:
            with open(f"{folder}/{rank}.txt", "w") as file:
                file.write("\\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])]))
            raise


def trouble():
    pass


def between(rank):
    pass
"""
)


def told(folder, ranks=4):
    """Return what each rank raised."""
    paths = [Path(folder) / f"{rank}.txt" for rank in range(ranks)]
    return [path.read_text().splitlines() if path.exists() else None for path in paths]


def test_a_rank_that_raises(tmp_path):
    """All ranks end at once, with the cause and its place; the rank that raised prints it first."""
    body = """
    def trouble():
        raise ValueError("no, thanks")
    os.dup2(os.open(f"{folder}/errors.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # one for all ranks
    run()
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True)
    errors = (tmp_path / "errors.txt").read_text()
    place = "in partition 2, layer '2', micro-batch 2, forward"
    assert told(tmp_path)[2] == ["ValueError", "no, thanks", place]
    for rank in (0, 1, 3):
        assert told(tmp_path)[rank] == ["RankFailedError", "rank 2 failed: ValueError: no, thanks", place]
    assert errors.index("[rank2]: ValueError: no, thanks") < errors.find("RankFailedError") % len(errors)
    assert "pipelining/schedules.py" in errors
    assert "Full Schedule" not in errors


def test_a_rank_that_raises_between_steps(tmp_path):
    """An exception outside the pipeline reaches the others, too, though nobody ends them."""
    body = """
    def between(rank):
        if rank == 1:
            raise KeyError("lost")
    run()
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True)
    failed = ["RankFailedError", "rank 1 failed: KeyError: 'lost'"]
    assert told(tmp_path) == [failed, None, failed, failed]


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_hangs(inside, tmp_path):
    """After the timeout the others name it, and say where it is."""
    body = f"""
    def {"trouble()" if inside else "between(rank)"}:
        if rank == 2:
            time.sleep(1000)
    run(timeout=10)
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True, stuck=[2])
    found = told(tmp_path)
    assert found[2] is None
    for rank in (0, 1, 3):
        kind, text = found[rank]
        assert kind == "RankFailedError"
        if inside:
            assert text.startswith("rank 2 hangs in partition 2, layer '2', micro-batch 2, forward, at script.py:")
            assert " in trouble (" in text
        else:
            assert text.startswith("rank 2 hangs outside the pipeline, at script.py:")
            assert ", but rank 2 made 1: every rank must call step, eval_step and predict equally" in text
        assert "waited 10 s for" in text


def rule(made):
    """Return what follows from a rank that made fewer calls than the others."""
    counts = f"made call {made + 1} of the pipeline, step, but rank 1 made {made}"
    often = "every rank must call step, eval_step and predict equally often"
    return f"; rank 0 {counts}: {often}; give each the same number of batches"


def test_a_rank_that_leaves_the_loop(tmp_path):
    """Under torchrun, which lets the others go on, they say who left, after how many calls, and what to do."""
    _, errors = ended(start(4, "run(steps=2 if rank == 1 else 4)", tmp_path, begin=BEGIN, end=""), timeout=60)
    found = told(tmp_path)
    assert found[1] is None
    texts = {tuple(lines) for lines in found if lines is not None}  # torchrun may end others when the first raises
    ((kind, text),) = texts
    assert kind == "RankFailedError"
    assert text.startswith("rank 1 has exited: rank ")
    assert re.sub(r"; rank \d made", "; rank 0 made", text).endswith(rule(made=2))
    assert f"]: pipesight.distributed.failures.RankFailedError: {text}" in errors


@pytest.mark.parametrize(
    ("end", "begins", "ends"),
    [
        ("sys.exit(3)", "rank 1 has exited: rank ", rule(made=1)),
        (
            "os.kill(os.getpid(), 11)",
            "rank 1 died without an exception: rank ",
            "torchrun reports its exit code or signal",
        ),
    ],
    ids=["sys.exit", "SIGSEGV"],
)
def test_a_rank_that_ends_without_an_exception(end, begins, ends, tmp_path):
    """The others name it in seconds, if nobody ends them before, as torchrun does with those on the same node."""
    body = f"""
    def between(rank):
        if rank == 1:
            {end}
    run()
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True, timeout=30)
    found = told(tmp_path)
    assert found[1] is None
    for rank in (0, 2, 3):
        kind, text = found[rank]
        assert kind == "RankFailedError"
        assert text.startswith(begins)
        assert re.sub(r"; rank \d made", "; rank 0 made", text).endswith(ends)


FSDP = {"pp": 2, "dp": 2, "data_parallel": "fsdp"}


@pytest.mark.parametrize(
    "case",
    [
        {**FSDP, "what": "kill", "rank": 3},
        {**FSDP, "what": "raise", "rank": 3, "point": "backward"},
        {**FSDP, "what": "sleep", "rank": 3},
        {**FSDP, "what": "sleep", "rank": 2, "point": "loss", "collective": "async", "data_parallel": "ddp"},
        {"pp": 1, "dp": 3, "what": "kill", "rank": 0, "point": "between", "collective": "sync", "agent": False},
    ],
    ids=["killed, FSDP", "raises, FSDP", "hangs, FSDP", "hangs, all_reduce of a layer", "killed, all_reduce of a loop"],
)
def test_a_collective_that_fails_is_a_symptom(case, tmp_path):
    """Where others wait for a rank in a collective, of a layer or their own, they name it, and not each other."""
    faults.verify(case, faults.strike(case, tmp_path))


@pytest.mark.parametrize(
    ("error", "symptom"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("the connection to the database timed out"), False),
    ],
)
def test_symptoms(error, symptom):
    """Broken connections between ranks are symptoms, also of errors that were made of them; other errors are not."""
    assert is_symptom(error) is symptom
    wrapped = KeyError("lost")
    wrapped.__cause__ = error
    assert is_symptom(wrapped) is symptom


def test_waits_of_threads():
    """A wait for a work, which is a call of C++ without a frame, is told from other calls."""
    found = {}

    class Asked:
        """Looks at the stack from inside of a call that has no frame."""

        def __init__(self, name):
            self.name = name

        def __index__(self):
            found[self.name] = collective_of(sys._getframe(1))
            return 0

    class Work(list):
        wait = list.pop

    work = Work("abc")
    work.wait(Asked("wait"))
    [work.pop(Asked("pop")), work.wait()]
    assert found == {"wait": "wait", "pop": None}


STEPS = 40
TRAIN = (
    f"STEPS = {STEPS}"
    + """
mse = nn.functional.mse_loss
pipeline = DistributedPipeline(tanhs(4), [2, 2], chunks=4, loss_fn=mse)
optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
start = pipeline.load(f"{folder}/checkpoints", optimizer) or 0
with open(f"{folder}/pid{rank}", "w") as file:
    file.write(str(os.getpid()))
if rank == 0:
    print("from", start, flush=True)
done = start
pipeline.save_on_sigterm(f"{folder}/checkpoints", optimizer, extra=lambda: done)
for k, (x, y) in enumerate(batches([8] * STEPS)):
    if k < start:
        continue
    optimizer.zero_grad()
    loss = pipeline.step(x, y, broadcast_loss=True)
    optimizer.step()
    done = k + 1
    if rank == 0:
        print(k, loss.item(), flush=True)
        open(f"{folder}/step-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
    if "LINGERS" in os.environ:  # it is to be interrupted before it is done
        time.sleep(0.05 if k < STEPS // 2 else 0.5)
    if done % 3 == 0:
        pipeline.save(f"{folder}/checkpoints", optimizer, extra=done)
"""
)


def losses():
    """Return those of a plain model that nothing happens to."""
    model = tanhs(4)
    return train_plainly(model, batches([8] * STEPS), torch.optim.AdamW(model.parameters(), 1e-2))


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def read(output):
    """Return where runs began, and the losses by step."""
    lines = [line.split() for line in output.splitlines()]
    starts = [int(line[1]) for line in lines if line[0] == "from"]
    return starts, {int(line[0]): float(line[1]) for line in lines if line[0] != "from"}


def test_killed_restarted_preempted_resumed(tmp_path):
    """A job of torchrun's goes on from the last checkpoint, and ends with the losses of one that nothing happens to.

    At a random moment a rank is killed with kill -9, and torchrun --max-restarts starts both again. Then torchrun gets
    a SIGTERM: the ranks save at the next step, and leave.
    """
    job = start(2, TRAIN, tmp_path, options=("--max-restarts", "2"), LINGERS=1)
    try:
        checkpoints = tmp_path / "checkpoints"
        wait_for(lambda: checkpoints.exists() and list(checkpoints.glob("step-*")))
        time.sleep(random.uniform(0, 0.5))
        killed = {rank: int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)}
        os.kill(killed[random.randrange(2)], signal.SIGKILL)
        wait_for(lambda: (tmp_path / "step-1").exists())
        os.kill(job.pid, signal.SIGTERM)
    finally:
        first, errors = ended(job)
    assert "received SIGTERM: saved" in errors, errors
    second, _ = torchrun(2, TRAIN, tmp_path)
    starts, found = read(first + second)
    assert len(starts) == 3
    assert starts[0] == 0
    assert starts[1] >= 3
    assert starts[1] % 3 == 0
    assert starts[2] == starts[1] + len(read("from" + first.rpartition("from")[2])[1])
    torch.testing.assert_close(torch.tensor([found[k] for k in range(STEPS)]), torch.tensor(losses()))


def test_threads_have_let_go_at_exit(tmp_path):
    """No thread of gloo's holds a tensor when Python ends, however late it gets to run: the process would abort."""
    torchrun(
        2,
        """
        import atexit
        pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().startswith("pt_gloo"):
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        tensors = [torch.ones(2) for _ in range(5)]
        for tensor in tensors:
            dist.all_reduce(tensor, group=pipeline._mesh.control_group)
        atexit._run_exitfuncs()
        assert [tensor._use_count() for tensor in tensors] == [1] * 5
        """,
        tmp_path,
        end="",
    )


def test_slow_store_at_exit(tmp_path):
    """A rank waits for the store before Python ends: a thread that comes back from it later aborts the process."""
    torchrun(
        2,
        """
        import threading
        from pipesight.distributed.rank_notes import RankNotes

        def slow(self):
            asking.set()
            until = time.monotonic() + 2
            while time.monotonic() < until:
                self._store.check(["nothing"])
            return 0

        asking = threading.Event()
        pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
        RankNotes.asked = slow
        asking.wait()
        """,
        tmp_path,
    )


def test_the_thread_that_answers_holds_no_process_group(tmp_path, monkeypatch):
    """A monitor goes when its owner lets it go; freed by its thread while Python ends, it would abort the process."""
    asking, before = threading.Event(), RankNotes.asked

    def asked(notes):
        asking.set()
        time.sleep(0.2)
        return before(notes)

    monkeypatch.setattr(RankNotes, "asked", asked)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monitor = RankMonitor([dist.group.WORLD], context.current(), timeout=None)
        asking.clear()
        assert asking.wait(10)
        reference = weakref.ref(monitor)
        del monitor
        assert reference() is None
    finally:
        dist.destroy_process_group()
