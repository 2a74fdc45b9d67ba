"""What comes from a span is nested in it: tasks, threads, copied contexts, generators, greenlets."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import (
    NAP,
    args_of,
    check_nested_only,
    check_nesting,
    named,
    names,
    parents,
    run_threads,
)


def test_tasks_are_nested_in_what_started_them():
    """Spans of a hundred tasks in one gather are each their own, inside the span that waits for them."""

    @ai.compute.forward
    async def work(k):
        with ai.data.item(args={"k": k}):
            await asyncio.sleep(0.001 * (k % 7))
            with ai.comm:
                await asyncio.sleep(0)

    async def main():
        with ai.pipeline:
            await asyncio.gather(*map(work, range(100)))
        with ai.device:
            pass

    with capture_events() as events:
        asyncio.run(main())
    assert Counter(names(events)) == {"forward": 100, "item": 100, "comm": 100, "pipeline": 1, "device": 1}
    assert parents(events) == {
        "comm": "item",
        "item": "forward",
        "forward": "pipeline",
        "pipeline": None,
        "device": None,
    }
    check_nested_only(events)


def test_to_thread_is_nested_in_what_called_it():
    """``asyncio.to_thread`` takes the context along: its spans are in their own thread, inside the caller's."""

    async def main():
        with ai.pipeline:
            await asyncio.gather(*(asyncio.to_thread(work, k) for k in range(4)))

    def work(k):
        with ai.compute, ai.data(args={"k": k}):
            time.sleep(NAP)

    with capture_events() as events:
        asyncio.run(main())
    assert parents(events) == {"data": "compute", "compute": "pipeline", "pipeline": None}
    assert named(events, "pipeline")["tid"] not in {event["tid"] for event in events if event["name"] == "compute"}
    check_nested_only(events)


def test_copied_context_in_another_thread():
    """Code that runs in a copied context is nested in the span it comes from, and leaves the original alone."""

    def work():
        with ai.compute, ai.pipeline.init:
            pass

    with capture_events() as events:
        with ai.pipeline:
            context = contextvars.copy_context()
            run_threads(1, lambda k: context.run(work))
            with ai.data:
                pass
        run_threads(1, lambda k: context.run(work))
    outer, data = named(events, "pipeline"), named(events, "data")
    assert [event["args"]["p_idx"] for event in events if event["name"] == "compute"] == [outer["id"]] * 2
    assert (data["args"]["p_idx"], data["tid"]) == (outer["id"], outer["tid"])


def test_pool_of_threads():
    """Workers of a pool do not inherit: their spans are in no other, and each has as many as it did work."""
    with capture_events() as events, ai.pipeline, ThreadPoolExecutor(4) as pool:

        @ai.compute.forward
        def work(k):
            with ai.data.item(args={"k": k}):
                return k

        assert list(pool.map(work, range(200))) == list(range(200))
    assert Counter(names(events)) == {"forward": 200, "item": 200, "pipeline": 1}
    assert parents(events) == {"item": "forward", "forward": None, "pipeline": None}
    check_nesting(events)


def test_generator_that_moves_between_threads():
    """A decorated generator may be resumed by any thread: it is one event, and what it does is nested in it."""

    @ai.compute.forward
    def produce():
        for _ in range(4):
            with ai.data:
                yield

    with capture_events() as events:
        generator = produce()
        for _ in range(2):
            next(generator)
            run_threads(1, lambda k: next(generator))
        with pytest.raises(StopIteration):
            next(generator)
        with ai.device:
            pass
    assert Counter(names(events)) == {"data": 4, "forward": 1, "device": 1}
    assert parents(events) == {"data": "forward", "forward": None, "device": None}


def test_greenlets():
    """Greenlets of one thread each have their own spans, however they take turns."""
    greenlet = pytest.importorskip("greenlet").greenlet

    def work(k):
        with ai.compute(args={"k": k}):
            main.switch()
            with ai.data(args={"k": k}):
                main.switch()

    with capture_events() as events:
        main = pytest.importorskip("greenlet").getcurrent()
        workers = [greenlet(work) for _ in range(3)]
        with ai.pipeline:
            for k, worker in enumerate(workers):
                worker.switch(k)
            for _ in range(2):
                for worker in reversed(workers):
                    worker.switch()
        assert all(worker.dead for worker in workers)
    inside = {event["id"]: args_of(event)["k"] for event in events if event["name"] == "compute"}
    assert sorted(inside.values()) == [0, 1, 2]
    assert all(inside[e["args"]["p_idx"]] == args_of(e)["k"] for e in events if e["name"] == "data")
    assert {event["args"]["level"] for event in events if event["name"] == "pipeline"} == {2}


def test_forked_process_does_not_end_its_parents_spans():
    """What began before a fork is the parent's: the child records nothing for it, and starts without open spans."""
    read, write = os.pipe()
    with capture_events() as events:
        ai.data.start()
        loop = ai.dataloader.fetch.iter("a")
        next(loop)
        with ai.compute:
            child = os.fork()
            if child == 0:
                from pipesight.trace._span_events import EVENTS

                try:
                    EVENTS.clear()
                    ai.compute.__exit__(None, None, None)
                    ai.data.stop()
                    loop.close()
                    os.write(write, b"%d" % len(EVENTS))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        loop.close()
        ai.data.stop()
    assert os.read(read, 10) == b"0"
    os.close(read)
    os.close(write)
    assert names(events) == ["fetch.iter", "compute", "fetch.block", "data"]
