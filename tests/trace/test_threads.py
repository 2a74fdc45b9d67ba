"""Spans of threads, tasks and greenlets: each has its own, and what comes from a span is nested in it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import COVERED, NAP, args_of, levels, named, names, parents, tree_put_back


@pytest.fixture(autouse=True)
def tree():
    with tree_put_back():
        yield


def run_threads(n, target):
    """Run ``target(k)`` in n threads that are alive at the same time."""
    together = threading.Barrier(n)

    def run(k):
        together.wait()
        target(k)
        together.wait()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_nesting(events):
    """Check that every span lies in its parent, one level deeper, in its thread, and overlaps no sibling."""
    by_id = {event["id"]: event for event in events}
    assert len(by_id) == len(events)
    children = {}
    for event in events:
        assert event["dur"] >= 0
        parent = by_id.get(event["args"]["p_idx"])
        if parent is None:
            assert (event["args"]["p_idx"], event["args"]["level"]) == (6, 2)
        else:
            assert event["args"]["level"] == parent["args"]["level"] + 1
            assert event["tid"] == parent["tid"]
            assert parent["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"]
        children.setdefault((event["tid"], event["args"]["p_idx"]), []).append(event)
    for siblings in children.values():
        siblings.sort(key=lambda event: event["id"])
        for one, other in itertools.pairwise(siblings):
            assert one["ts"] + one["dur"] <= other["ts"]


@pytest.mark.alone
def test_ten_threads_with_a_hundred_thousand_spans_each():
    """No event is lost, and every one lies in its parent, whatever the other threads do with the same nodes."""
    spans = 100_000

    def work(k):
        for _ in range(spans // 10):
            with ai.pipeline.train, ai.data.item(args={"thread": k}):
                with ai.compute, ai.compute.forward, ai.compute.forward:
                    pass
                with ai.compute.backward:
                    with ai.comm.send:
                        pass
                    with ai.comm.receive, ai.comm, ai.comm:
                        pass

    gc.disable()  # a million events are no garbage
    try:
        with capture_events() as events:
            run_threads(10, work)
        check_nesting(events)
    finally:
        gc.enable()
    assert set(Counter(event["tid"] for event in events).values()) == {spans}
    assert len(events) == 10 * spans
    carried = {(event["tid"], event["args"]["thread"]) for event in events if event["name"] == "item"}
    assert sorted(k for _, k in carried) == list(range(10))


def test_threads_have_durations_of_their_own():
    """Eight threads in one node at once: each event is as long as its own block (DFTracer sums to 2%)."""
    with capture_events() as events:

        def work(k):
            with ai.compute.forward(args={"k": k}):
                time.sleep(NAP * (1 + k % 2))

        run_threads(8, work)
    assert sorted(args_of(event)["k"] for event in events) == list(range(8))
    assert all(event["dur"] > COVERED * (1 + args_of(event)["k"] % 2) for event in events)
    assert len({event["tid"] for event in events}) == 8
    check_nesting(events)


def test_recursion():
    """Each call of a function that calls itself is an event, nested in the one before (DFTracer: 1 of 4)."""

    @ai.compute.forward
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    with capture_events() as events:
        assert factorial(3) == 6
    assert [event["args"]["level"] for event in events] == [5, 4, 3, 2]
    check_nesting(events)


def test_deep_recursion():
    """Depth is limited by Python alone."""

    @ai.compute.forward
    def dive(n):
        if n:
            dive(n - 1)

    with capture_events() as events:
        dive(300)
    assert max(event["args"]["level"] for event in events) == 302
    check_nesting(events)


@pytest.mark.parametrize("use", [ai.compute, ai.compute(args={"a": 1})])
def test_one_node_in_itself(use):
    """A node, or one use of it, that is entered while it is open is open twice (DFTracer: 1 event of 2)."""
    with capture_events() as events, use:
        with use, use:
            pass
        with ai.data:
            pass
    assert names(events) == ["compute", "compute", "data", "compute"]
    check_nesting(events)


def test_exceptions_close_all_blocks():
    """An exception through many blocks closes each, in order."""
    with capture_events() as events:
        with contextlib.suppress(KeyError), ai.pipeline, ai.compute(step=1), ai.compute.forward:
            raise KeyError
        with contextlib.ExitStack() as stack:
            stack.enter_context(ai.data)
            stack.enter_context(ai.data.item(step=2))
    assert names(events) == ["forward", "compute", "pipeline", "item", "data"]
    check_nesting(events)


# Switches in the middle.


def test_switch_in_the_middle_of_a_block():
    """A block that began is recorded; one that began silently is not; what is around stays as it is."""
    with capture_events() as events:
        with ai.pipeline:
            with ai.compute:
                ai.disable()
                with ai.data:
                    pass
            with ai.comm, ai.comm(args={"a": 1}):
                ai.enable()
                with ai.device:
                    pass
            with ai.checkpoint:
                pass
        ai.data.start()
        ai.disable()
        ai.data.stop()
        ai.data.start()
        ai.enable()
        ai.data.stop()
    assert names(events) == ["compute", "device", "checkpoint", "pipeline", "data"]
    check_nesting(events)


def test_switches_while_threads_record():
    """Switching on and off from another thread breaks no block: the ends that come fit the beginnings."""
    done = threading.Event()

    def work(k):
        try:
            for _ in range(2000):
                with ai.pipeline, ai.compute(step=k), ai.compute.forward:
                    ai.data.start()
                    ai.data.stop()
        finally:
            if k == 0:
                done.set()

    def toggle():
        for switch in itertools.cycle([ai.compute.disable, ai.disable, ai.enable]):
            if done.is_set():
                break
            switch()

    with capture_events() as events:
        toggler = threading.Thread(target=toggle)
        toggler.start()
        run_threads(3, work)
        toggler.join()
        ai.enable()
        with ai.device:
            pass
    assert named(events, "device")["args"]["level"] == 2
    check_nesting(events)


def test_trace_begins_and_ends_in_the_middle_of_a_block():
    """A block that began before the trace is not in it; one that ends after it is in no other."""
    with ai.pipeline, capture_events() as first, ai.compute:
        pass
    with contextlib.ExitStack() as stack:
        with capture_events() as second:
            stack.enter_context(ai.pipeline)
        with capture_events() as third, ai.data:
            pass
    assert (names(first), names(second), names(third)) == (["compute"], [], ["data"])


# Ends that are not in order.


def test_ends_that_are_not_in_order():
    """Spans end in any order; one that outlives the span it began in belongs to the one around that."""
    with capture_events() as events:
        with ai.pipeline:
            ai.data.start()
            ai.compute.start()
            ai.data.stop()
            with ai.comm:
                pass
            ai.compute.stop()
        with ai.device:
            pass
    assert parents(events) == {
        "data": "pipeline",
        "comm": "compute",
        "compute": "pipeline",
        "pipeline": None,
        "device": None,
    }
    assert levels(events) == {"data": 3, "comm": 4, "compute": 3, "pipeline": 2, "device": 2}


def test_blocks_that_end_out_of_order():
    """The same for blocks, of nodes and of single uses, recorded or not."""
    blocks = [ai.pipeline, ai.compute(step=1), ai.compute, ai.comm(enable=False), ai.data]
    for order in itertools.permutations(range(len(blocks))):
        with capture_events() as events:
            for block in blocks:
                block.__enter__()
            for k in order:
                blocks[k].__exit__(None, None, None)
            with ai.device:
                pass
        assert sorted(names(events)) == ["compute", "compute", "data", "device", "pipeline"]
        assert named(events, "device")["args"] == {**events[-1]["args"], "p_idx": 6, "level": 2}


def test_overlapping_start_and_stop_do_not_pile_up():
    """Starts and stops that overlap for ever neither get deeper nor leave anything open."""
    with capture_events() as events:
        ai.data.start()
        for _ in range(50):
            ai.compute.start()
            ai.data.stop()
            ai.data.start()
            ai.compute.stop()
        ai.data.stop()
        with ai.device:
            pass
    assert max(event["args"]["level"] for event in events) <= 3
    assert len(events) == 102
    assert named(events, "device")["args"]["p_idx"] == 6


def test_start_in_a_block_of_the_same_node():
    """The end of a block is not taken for the stop of a start, nor the other way round."""
    with capture_events() as events:
        with ai.compute:
            ai.compute.start()
            time.sleep(NAP)
        time.sleep(NAP)
        ai.compute.stop()
        ai.compute.start()
        with ai.compute:
            ai.compute.stop()
            time.sleep(NAP)
        with ai.device:
            pass
    block, started = events[:2]
    assert started["dur"] > 2 * COVERED
    assert block["ts"] <= started["ts"]
    assert events[3]["dur"] > COVERED
    assert len({event["id"] for event in events}) == 5
    assert named(events, "device")["args"]["p_idx"] == 6


def test_stop_without_start():
    """It does nothing, also where a block of that node is open, and in a thread that started nothing."""
    with capture_events() as events, ai.compute:
        ai.compute.stop()
        ai.data.stop()
        ai.compute.start()
        run_threads(1, lambda k: ai.compute.stop())
        ai.compute.stop()
        ai.compute.stop()
    assert names(events) == ["compute", "compute"]
    check_nesting(events)


def test_nested_starts_of_one_node():
    """A stop ends the last start."""
    with capture_events() as events:
        for _ in range(3):
            ai.compute.start()
        for _ in range(3):
            ai.compute.stop()
    assert [event["args"]["level"] for event in events] == [4, 3, 2]
    check_nesting(events)


def test_start_and_stop_in_different_contexts():
    """Hooks run in contexts of their own: a stop finds what its thread started, and nothing stays open."""
    with capture_events() as events:
        for _ in range(10):
            contextvars.copy_context().run(ai.pipeline.epoch.start)
            ai.pipeline.epoch.stop()
            ai.compute.start()
            contextvars.copy_context().run(ai.compute.stop)
        ai.data.start()
        ai.data.stop()
        with ai.device:
            pass
    assert Counter(names(events)) == {"epoch": 10, "compute": 10, "data": 1, "device": 1}
    assert max(event["args"]["level"] for event in events) <= 3
    assert named(events, "device")["args"]["p_idx"] == 6


def test_start_and_stop_of_tasks():
    """Each task's stop ends its own start, though all are in one thread."""

    async def work(k):
        ai.compute.start()
        await asyncio.sleep(NAP * (3 - k))
        with ai.data(args={"k": k}):
            pass
        ai.compute.stop()

    async def main():
        await asyncio.gather(*map(work, range(3)))

    with capture_events() as events:
        asyncio.run(main())
    assert [args_of(event)["k"] for event in events if event["name"] == "data"] == [2, 1, 0]
    check_nested_only(events)
    durations = [event["dur"] for event in events if event["name"] == "compute"]
    assert durations == sorted(durations)


def check_nested_only(events):
    """Check that every span lies in its parent; siblings of one thread may overlap, as tasks do."""
    by_id = {event["id"]: event for event in events}
    for event in events:
        parent = by_id.get(event["args"]["p_idx"])
        if parent is not None:
            assert parent["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= parent["ts"] + parent["dur"]
            assert event["args"]["level"] == parent["args"]["level"] + 1


# What comes from a span is nested in it.


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


def test_threads_one_after_the_other():
    """Python gives the number of an ended thread to the next; the system's numbers tell them apart."""
    numbers = []

    def work(k):
        numbers.append(threading.get_native_id())
        with ai.compute:
            pass

    with capture_events() as events:
        for _ in range(5):
            run_threads(1, work)
    assert [event["tid"] for event in events] == numbers


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
                from pipesight.trace._span import EVENTS

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
