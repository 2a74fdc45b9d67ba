"""Spans that end out of order, and `start` and `stop` of a node."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections import Counter

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import (
    COVERED,
    NAP,
    args_of,
    check_nested_only,
    check_nesting,
    levels,
    named,
    names,
    parents,
    run_threads,
)


def test_spans_that_end_out_of_order():
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
