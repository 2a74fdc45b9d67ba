"""Loops: each wait for an item is X.iter, each run of the body is X.block, however the loop is left."""

from __future__ import annotations

import asyncio
import operator
import time

import pytest
import torch

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import COVERED, NAP, args_of, named, names, parents

fetch = ai.dataloader.fetch


def slow(n):
    for i in range(n):
        time.sleep(NAP)
        yield i


async def async_slow(n):
    for i in range(n):
        await asyncio.sleep(NAP)
        yield i


def counts(events, name):
    return [event["args"]["count"] for event in events if event["name"] == name]


def no_span_is_open(events):
    """Tell whether the last event, which came after the loop, is nested in nothing."""
    return (events[-1]["name"], events[-1]["args"]["p_idx"]) == ("device", 6)


def test_waits_and_bodies_are_told_apart():
    """Waiting is .iter, the body is .block, each with its count as a string; what the body does is nested in it."""
    with capture_events() as events:
        for _ in fetch.iter(slow(2)):
            with ai.compute:
                time.sleep(2 * NAP)
    assert names(events) == ["fetch.iter", "compute", "fetch.block"] * 2
    assert counts(events, "fetch.iter") == counts(events, "fetch.block") == ["1", "2"]
    assert parents(events) == {"fetch.iter": None, "compute": "fetch.block", "fetch.block": None}
    assert all(event["dur"] > COVERED * (1 if event["name"] == "fetch.iter" else 2) for event in events)
    waits, bodies = events[::3], events[2::3]
    assert all(wait["ts"] + wait["dur"] <= body["ts"] for wait, body in zip(waits, bodies, strict=True))
    assert bodies[0]["ts"] + bodies[0]["dur"] <= waits[1]["ts"]


def test_first_wait_has_the_start_of_the_iterator():
    """What ``iter`` does is waited for too: a DataLoader starts its workers in it."""

    class Loader:
        def __iter__(self):
            time.sleep(NAP)
            return iter("ab")

    with capture_events() as events:
        list(fetch.iter(Loader()))
    assert named(events[:1], "fetch.iter")["dur"] > COVERED


def test_empty_loop():
    """Nothing to wait for is no event."""
    with capture_events() as events:
        assert list(fetch.iter([])) == []
        with ai.device:
            pass
    assert names(events) == ["device"]
    assert no_span_is_open(events)


@pytest.mark.parametrize("way", ["break", "continue", "return", "raise"])
def test_ways_to_leave_a_body(way):
    """The body's event is there, and is closed, whichever way it is left (DFTracer loses the last one)."""

    def run():
        for i in fetch.iter(range(3)):
            with ai.compute:
                if i == 1 and way == "break":
                    break
                if way == "continue":
                    continue
                if i == 1 and way == "return":
                    return
                if i == 1 and way == "raise":
                    raise KeyError

    with capture_events() as events:
        if way == "raise":
            with pytest.raises(KeyError):
                run()
        else:
            run()
        with ai.device:
            pass
    expected = ["1", "2", "3"] if way == "continue" else ["1", "2"]
    assert counts(events, "fetch.iter") == counts(events, "fetch.block") == expected
    assert no_span_is_open(events)


def test_exception_while_waiting():
    """A wait that ends with an exception is an event, and the exception goes on (DFTracer: no event)."""

    def fails():
        yield 1
        time.sleep(NAP)
        raise OSError("disk")

    with capture_events() as events:
        with pytest.raises(OSError, match="disk"):
            list(fetch.iter(fails()))
        with ai.device:
            pass
    assert names(events) == ["fetch.iter", "fetch.block", "fetch.iter", "device"]
    assert events[2]["dur"] > COVERED
    assert no_span_is_open(events)


def test_nested_loops_of_one_node():
    """One name can be open many times: the inner loop's events are in the outer loop's bodies."""
    with capture_events() as events:
        for _ in fetch.iter("ab"):
            for _ in fetch.iter("cd"):
                pass
    outer = [event for event in events if event["args"]["level"] == 2]
    inner = [event for event in events if event["args"]["level"] == 3]
    assert counts(outer, "fetch.block") == ["1", "2"]
    assert counts(inner, "fetch.block") == ["1", "2"] * 2
    bodies = [event["id"] for event in outer if event["name"] == "fetch.block"]
    assert [event["args"]["p_idx"] for event in inner] == [bodies[0]] * 4 + [bodies[1]] * 4


def test_loops_side_by_side():
    """Two loops in one zip end each other's bodies out of order; nothing stays open, and no level grows."""
    with capture_events() as events:
        for _ in zip(fetch.iter(range(100)), ai.data.item.iter(range(100)), strict=True):
            with ai.compute:
                pass
        with ai.device:
            pass
    for name in ("fetch.iter", "fetch.block", "item.iter", "item.block"):
        assert counts(events, name) == [str(n) for n in range(1, 101)]
    assert max(event["args"]["level"] for event in events) <= 4
    assert no_span_is_open(events)


def test_loop_in_a_generator_that_is_dropped():
    """A loop in a plain generator that nobody finishes ends when the generator does."""

    def batches():
        yield from fetch.iter(range(3))

    with capture_events() as events:
        for _ in batches():
            break
        with ai.device:
            pass
    assert counts(events, "fetch.block") == ["1"]
    assert no_span_is_open(events)


def test_switch_in_a_loop():
    """A switch changes the next wait or body; one that has begun is finished."""
    with capture_events() as events:
        for i in fetch.iter(range(4)):
            if i == 0:
                ai.disable()
            if i == 2:
                ai.enable()
    assert counts(events, "fetch.iter") == ["1", "4"]
    assert counts(events, "fetch.block") == ["1", "4"]


def test_updates_in_a_loop():
    """Bodies carry what is known when they end; the spec's example gives each forward its epoch and step."""
    with capture_events() as events:
        for epoch in ai.pipeline.epoch.iter(range(2)):
            ai.pipeline.epoch.update(epoch=epoch)
            for step, _ in fetch.iter(enumerate("ab")):
                ai.compute.forward.update(epoch=epoch, step=step)
                with ai.compute.forward:
                    pass
    known = [args_of(event) for event in events if event["name"] == "forward"]
    assert known == [{"epoch": epoch, "step": step} for epoch in range(2) for step in range(2)]
    blocks = [args_of(event) for event in events if event["name"] == "epoch.block"]
    assert blocks == [{"epoch": 0, "count": "1"}, {"epoch": 1, "count": "2"}]


def test_one_side_of_a_loop():
    """Waits or bodies can be left out."""
    with capture_events() as events:
        list(fetch.iter("a", include_iter=False))
        list(fetch.iter("a", include_block=False))
    assert names(events) == ["fetch.block", "fetch.iter"]


def test_use_of_a_loop():
    """One use's arguments are in its waits and bodies, and nowhere else."""
    with capture_events() as events:
        list(fetch(args={"split": "train"}).iter("a"))
        list(fetch.iter("a"))
    assert [args_of(event) for event in events] == [{"split": "train", "count": "1"}] * 2 + [{"count": "1"}] * 2


def test_loop_is_as_long_as_what_it_iterates_over():
    """Progress bars ask for the length; what has none says so as it would by itself, and is not false."""
    assert len(fetch.iter([1, 2, 3])) == 3
    assert operator.length_hint(fetch.iter(iter([1, 2]))) == 2
    assert not fetch.iter([])
    endless = fetch.iter(slow(1))
    assert endless
    assert operator.length_hint(endless, 7) == 7
    with pytest.raises(TypeError, match="has no len"):
        len(endless)
    for wrong in (3, None):
        with pytest.raises(TypeError, match="not iterable"):
            fetch.iter(wrong)


def test_loop_under_a_progress_bar():
    """A bar around the loop, written as tqdm is, changes nothing, and leaving it leaves the loop."""

    class Bar:
        def __init__(self, iterable):
            self.iterable, self.total = iterable, len(iterable)

        def __iter__(self):
            yield from self.iterable

    with capture_events() as events:
        for i in Bar(fetch.iter([0, 1, 2])):
            with ai.compute:
                if i == 1:
                    break
        with ai.device:
            pass
    assert counts(events, "fetch.block") == ["1", "2"]
    assert no_span_is_open(events)


def test_loop_that_is_kept_can_be_closed():
    """A body whose loop is held by a name ends with close, or with the name."""
    with capture_events() as events:
        loop = fetch.iter("ab")
        next(loop)
        loop.close()
        next(loop)
        del loop
        with ai.device:
            pass
    assert counts(events, "fetch.block") == ["1", "2"]
    assert no_span_is_open(events)


@pytest.mark.parametrize("node", [fetch, fetch(args={"split": "train"})])
def test_compiled_loop(node):
    """A loop in code that is compiled neither breaks the graph nor is recorded."""

    def add(x):
        for i in node.iter([1, 2]):
            x = x + i
        return x

    torch.compiler.reset()
    compiled = torch.compile(add, backend="eager", fullgraph=True)
    with capture_events() as events:
        assert compiled(torch.ones(1)) == 4
    assert events == []


# Asynchronous.


def run(loop):
    async def main():
        await loop()
        with ai.device:
            pass

    with capture_events() as events:
        asyncio.run(main())
    assert no_span_is_open(events)
    return events[:-1]


def test_async_loop():
    """The same for ``async for``: a wait that lets other tasks run is still a wait."""

    async def loop():
        async for _ in fetch.iter(async_slow(2)):
            with ai.compute:
                await asyncio.sleep(NAP)

    events = run(loop)
    assert names(events) == ["fetch.iter", "compute", "fetch.block"] * 2
    assert parents(events) == {"fetch.iter": None, "compute": "fetch.block", "fetch.block": None}
    assert counts(events, "fetch.iter") == counts(events, "fetch.block") == ["1", "2"]
    assert all(event["dur"] > COVERED for event in events)


@pytest.mark.parametrize("way", ["break", "continue", "return", "raise"])
def test_ways_to_leave_an_async_body(way):
    """The body's event is there, and is closed, whichever way it is left."""

    async def leave():
        async for i in fetch.iter(async_slow(2)):
            if way == "continue":
                continue
            if i == 1:
                if way == "break":
                    break
                if way == "return":
                    return
                raise KeyError

    async def loop():
        if way == "raise":
            with pytest.raises(KeyError):
                await leave()
        else:
            await leave()

    assert counts(run(loop), "fetch.block") == ["1", "2"]


def test_cancelled_async_loop():
    """A wait that is cancelled is an event as long as it was."""

    async def forever():
        async for _ in fetch.iter(async_slow(1000)):
            await asyncio.sleep(10)

    async def wait():
        async for _ in fetch.iter(never()):
            pass

    async def never():
        await asyncio.sleep(10)
        yield

    async def loop():
        for cancelled in (forever, wait):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cancelled(), 3 * NAP)

    events = run(loop)
    assert names(events) == ["fetch.iter", "fetch.block", "fetch.iter"]
    assert all(event["dur"] > COVERED for event in events)


def test_loops_of_many_tasks():
    """Tasks that share a node each have their own counts and bodies."""

    async def one():
        async for _ in fetch.iter(async_slow(3)):
            with ai.compute:
                await asyncio.sleep(0)

    async def loop():
        await asyncio.gather(*(one() for _ in range(20)))

    events = run(loop)
    assert sorted(counts(events, "fetch.block")) == sorted(["1", "2", "3"] * 20)
    bodies = {event["id"] for event in events if event["name"] == "fetch.block"}
    assert {event["args"]["p_idx"] for event in events if event["name"] == "compute"} == bodies


def test_wrong_kind_of_loop():
    """``for`` over an asynchronous iterable, and the reverse, says which one it takes."""
    with pytest.raises(TypeError, match="'async_generator' is asynchronous: use 'async for'"):
        iter(fetch.iter(async_slow(1)))
    with pytest.raises(TypeError, match="'list' is not asynchronous: use 'for'"):
        aiter(fetch.iter([1]))


def test_asynchronous_and_not():
    """What can be iterated over in both ways is taken in both."""

    class Both:
        def __iter__(self):
            return iter("a")

        def __aiter__(self):
            return async_slow(1)

    async def loop():
        assert [x async for x in fetch.iter(Both())] == [0]
        assert list(fetch.iter(Both())) == ["a"]

    assert named(run(loop)[:2], "fetch.block")
