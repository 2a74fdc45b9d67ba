"""Many threads, recursion, and switches in the middle of a block."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections import Counter

import pytest

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import (
    COVERED,
    NAP,
    args_of,
    check_nesting,
    named,
    names,
    run_threads,
)


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
def test_node_inside_itself(use):
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
