"""The threads that run the partitions, started when first needed, ended with their model."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch.autograd.function import BackwardCFunction

from pipesight._torch.autograd import sequence_number
from pipesight.context import Where, enter_thread

__all__ = ["Job", "Pace", "Threads", "Workers", "annotate", "place_of", "worker_name"]

Job: TypeAlias = Callable[[Where], None]
"""What one worker does in one pass. It must not raise."""


class Pace:
    """Decides whether tasks are so brief that the workers should take turns.

    Every operator releases the GIL and takes it again. Workers that do little else spend their time waking each other
    up: below about 120 µs per task, partitions in parallel are slower than one after the other. How long a task takes
    alone shows only in turns, so a pass that might be brief is followed by one in turns, as a trial.
    """

    BRIEF = 120e-6
    _TRY_BELOW = 200e-6
    _PASSES_TO_NEXT_TRIAL = 20

    def __init__(self) -> None:
        self.in_turns = False
        self._until_trial = 0
        self._usual: float | None = None

    def learn(self, seconds: float, *, in_turns: bool) -> None:
        """Note the average duration of a task in a pass, run in turns or not."""
        if in_turns:
            # An average over the last few passes: other programs disturb one now and then.
            self._usual = seconds if self._usual is None else self._usual + (seconds - self._usual) / 4
            self.in_turns = self._usual < self.BRIEF
            self._until_trial = self._PASSES_TO_NEXT_TRIAL
        elif self._until_trial:
            self._until_trial -= 1
        else:
            self.in_turns = seconds < self._TRY_BELOW
            self._usual = None


class Threads:
    """Threads that wait for jobs. Those of several callers run one after the other in each thread."""

    def __init__(self, names: Sequence[str], devices: Sequence[torch.device]) -> None:
        self._pid = os.getpid()
        self._submitting = threading.RLock()  # a signal handler may use the model that it interrupts
        self._inboxes: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in names]
        self.threads = [
            threading.Thread(target=_work, args=(inbox, device), name=name, daemon=True)
            for inbox, name, device in zip(self._inboxes, names, devices, strict=True)
        ]
        weakref.finalize(self, _end, self._inboxes, self.threads, self._pid)
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether the threads exist in this process: a forked one does not have them."""
        return self._pid == os.getpid()

    def run(self, jobs: Sequence[Job], abort: Callable[[], None]) -> None:
        """Run each job in its thread and wait for all of them; threads without a job stay idle.

        An exception in the waiting thread, such as ``KeyboardInterrupt``, calls ``abort``, which must make the jobs
        end soon, and is raised once they have.
        """
        if not self.alive:
            raise RuntimeError(
                "backward must run in the process that ran forward, but this process was forked after it; run forward "
                "here too"
            )
        unfinished = _Countdown(len(jobs))
        sent: list[None] = []
        try:
            # Every worker sees the passes in one order, or two callers could wait for each other forever.
            # A single C call hands out all jobs, so that an interrupt falls before it or after it.
            with self._submitting:
                sent.extend(map(SimpleQueue.put, self._inboxes, [unfinished.counting(job) for job in jobs]))
            unfinished.wait()
        except BaseException:
            abort()
            if sent:
                unfinished.wait()
            raise


class Workers(Threads):
    """One thread per partition on the CPU, and one per GPU.

    Partitions on one GPU share a thread: several would only compete for the GIL to launch kernels on one device.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.shares = _share(devices)
        """The partitions of each worker."""
        self.forward_pace, self.backward_pace = Pace(), Pace()
        super().__init__([worker_name(share) for share in self.shares], [devices[share[0]] for share in self.shares])


class _Countdown:
    """Waits for jobs to end. An interrupted wait can be repeated, unlike one on a `threading.Event`."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._counting = threading.Lock()
        self._pending = threading.Lock()
        self._pending.acquire()

    def counting(self, job: Job) -> Job:
        def run(where: Where) -> None:
            try:
                job(where)
            finally:
                with self._counting:
                    self._left -= 1
                    if not self._left:
                        self._pending.release()

        return run

    def wait(self) -> None:
        while self._left:
            self._pending.acquire()


def _share(devices: Sequence[torch.device]) -> list[tuple[int, ...]]:
    shares: dict[object, list[int]] = {}
    for j, device in enumerate(devices):
        shares.setdefault(device if device.type == "cuda" else j, []).append(j)
    return [tuple(share) for share in shares.values()]


def worker_name(share: Sequence[int]) -> str:
    """Return the name of the worker of some partitions."""
    return "pipesight-partition-" + "-".join(map(str, share))


def _work(inbox: SimpleQueue[Job | None], device: torch.device) -> None:
    where = Where()
    enter_thread(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (job := inbox.get()) is not None:
        job(where)
        del job  # it holds the tensors of its mini-batch


def _end(inboxes: Sequence[SimpleQueue[Job | None]], threads: Sequence[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return
    for inbox in inboxes:
        inbox.put(None)
    # The collector may run this in any thread, a worker included. At exit, threads that outlive Python's own state
    # would crash, so give them a moment.
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(timeout=1)


def annotate(error: BaseException, where: Where) -> None:
    """Add a note such as ``in partition 1, layer '2', micro-batch 0, forward``."""
    if where.phase is None:
        note = f"in partition {where.partition}, between tasks"
    else:
        note = place_of(where, where.layer if where.layer is not None else _layer_of_backward(error, where))
    with contextlib.suppress(Exception):  # an exception may refuse attributes, or have an add_note of its own
        # One object may be raised many times; what is left of earlier mini-batches would mislead. A pipeline inside a
        # layer of this one began after it, and its note stays.
        ours: list[tuple[int, str]] = getattr(error, "_pipesight_notes", [])
        for serial, old in ours:
            if serial < where.serial or old == note:
                error.__notes__.remove(old)
        error._pipesight_notes = [*(o for o in ours if o[0] >= where.serial and o[1] != note), (where.serial, note)]  # type: ignore[attr-defined]
        error.add_note(note)


def place_of(where: Where, layer: str | None) -> str:
    """Return where a task is, such as ``in partition 1, layer '2', micro-batch 0, forward``."""
    name = "" if layer is None else f", layer '{layer}'"
    return f"in partition {where.partition}{name}, micro-batch {where.microbatch}, {where.phase}"


def _layer_of_backward(error: BaseException, where: Where) -> str | None:
    """Return the layer whose backward raised, if that is Python code: the traceback holds its autograd node."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, BackwardCFunction):
            number = sequence_number(node)
            index = bisect.bisect_right(where.marks, number, key=lambda mark: mark[0]) - 1
            return where.marks[index][1] if index >= 0 else None
    return None
