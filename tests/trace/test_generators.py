"""Decorated generators, coroutines and asynchronous generators."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref

import pytest

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import COVERED, NAP, args_of, named, names, parents

forward = ai.compute.forward


def nap():
    time.sleep(NAP)


# Generators.


@forward
def conversation(log):
    """Say back what one is told."""
    said = None
    try:
        while said != "bye":
            try:
                with ai.data:
                    nap()
                    said = yield said
            except ValueError as error:
                said = f"caught {error}"
        return "end"
    finally:
        with ai.checkpoint:
            log.append("closed")


def test_generator_is_covered_from_first_item_to_end():
    """A generator's event is its whole life; what its user does between items is not nested in it."""
    with capture_events() as events:
        for _ in conversation([]):
            with ai.comm:
                nap()
            break
        with ai.device:
            pass
    assert parents(events) == {
        "data": "forward",
        "comm": None,
        "checkpoint": "forward",
        "forward": None,
        "device": None,
    }
    assert named(events, "forward")["dur"] > 2 * COVERED


def test_generator_protocol():
    """Send, throw, return values and close work as without the decorator."""
    log = []
    with capture_events() as events:
        generator = conversation(log)
        assert next(generator) is None
        assert generator.send("a") == "a"
        assert generator.throw(ValueError("b")) == "caught b"
        with pytest.raises(StopIteration) as stop:
            generator.send("bye")
        assert stop.value.value == "end"
        with pytest.raises(StopIteration):
            next(generator)
        thrown_into = conversation(log)
        next(thrown_into)
        with pytest.raises(KeyError):
            thrown_into.throw(KeyError)
        closed = conversation(log)
        next(closed)
        closed.close()
        conversation(log).close()  # not begun: there was no run
        dropped = conversation(log)
        next(dropped)
        del dropped
        gc.collect()
    assert log == ["closed"] * 4
    assert names(events).count("forward") == 4
    assert {event["args"]["p_idx"] for event in events if event["name"] == "forward"} == {6}


def test_generator_that_raises():
    """The event ends with the exception; StopIteration in a body is the RuntimeError that Python makes of it."""

    @forward
    def fails(error):
        yield 1
        raise error

    with capture_events() as events:
        for error, expected in ((KeyError(), KeyError), (StopIteration(), RuntimeError)):
            with pytest.raises(expected):
                list(fails(error))
    assert names(events) == ["forward", "forward"]


def test_generator_leaves_no_exception_behind():
    """An exception thrown into a generator is freed without the garbage collector."""

    class FreedError(Exception):
        pass

    @forward
    def stubborn():
        with contextlib.suppress(FreedError):
            yield 1
        yield 2

    def throw():
        generator = stubborn()
        next(generator)
        error = FreedError()
        generator.throw(error)
        return weakref.ref(error)

    gc.disable()
    try:
        with capture_events():
            assert throw()() is None
    finally:
        gc.enable()


def test_interleaved_generators():
    """Two lives of one generator, and one inside the other's items, do not disturb each other."""

    @forward
    def count(n):
        for i in range(n):
            with ai.data:
                yield i

    with capture_events() as events:
        assert list(zip(count(3), count(3), strict=True)) == [(i, i) for i in range(3)]
        with ai.device:
            pass
    lives = [event["id"] for event in events if event["name"] == "forward"]
    assert sorted(event["args"]["p_idx"] for event in events if event["name"] == "data") == sorted(lives * 3)
    assert named(events, "device")["args"]["p_idx"] == 6


# Coroutines and asynchronous generators.


def test_coroutine_is_covered_while_it_waits():
    """The event lasts until the awaited body returns, raises or is cancelled (DFTracer: until it is created)."""

    @forward
    async def work(error=None):
        await asyncio.sleep(NAP)
        if error:
            raise error
        return 3

    @forward(args={"cancelled": True})
    async def forever():
        await asyncio.sleep(10)

    async def main():
        assert await work() == 3
        with pytest.raises(KeyError):
            await work(KeyError())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), NAP)
        with ai.device:
            pass

    with capture_events() as events:
        asyncio.run(main())
    assert names(events) == ["forward", "forward", "forward", "device"]
    assert args_of(events[2]) == {"cancelled": True}
    assert all(event["dur"] > COVERED for event in events[:3])
    assert named(events, "device")["args"]["p_idx"] == 6


@forward
async def async_conversation(log):
    """Say back what one is told."""
    said = None
    try:
        while said != "bye":
            try:
                with ai.data:
                    await asyncio.sleep(NAP)
                    said = yield said
            except ValueError as error:
                said = f"caught {error}"
    finally:
        with ai.checkpoint:
            log.append("closed")


def test_async_generator_is_covered_from_first_item_to_end():
    """An asynchronous generator's event is its whole life, without what its user does between items."""

    async def main():
        generator = async_conversation([])
        async for _ in generator:
            with ai.comm:
                await asyncio.sleep(NAP)
            break
        await generator.aclose()
        with ai.device:
            pass

    with capture_events() as events:
        asyncio.run(main())
    assert parents(events) == {
        "data": "forward",
        "comm": None,
        "checkpoint": "forward",
        "forward": None,
        "device": None,
    }
    assert named(events, "forward")["dur"] > 2 * COVERED


@pytest.mark.parametrize("enabled", [True, False])
def test_async_generator_protocol(enabled):
    """Asend, athrow, aclose, cancellation and being dropped work as without the decorator, recorded or not."""
    log = []

    async def main():
        generator = async_conversation(log)
        assert await anext(generator) is None
        assert await generator.asend("a") == "a"
        assert await generator.athrow(ValueError("b")) == "caught b"
        with pytest.raises(StopAsyncIteration):
            await generator.asend("bye")
        thrown_into = async_conversation(log)
        await anext(thrown_into)
        with pytest.raises(KeyError):
            await thrown_into.athrow(KeyError())
        closed = async_conversation(log)
        await anext(closed)
        await closed.aclose()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(async_conversation(log)), NAP / 4)
        dropped = async_conversation(log)
        await anext(dropped)
        del dropped
        gc.collect()
        await asyncio.sleep(0.01)

    if not enabled:
        forward.disable()
    with capture_events() as events:
        asyncio.run(main())
    assert log == ["closed"] * 5
    assert names(events).count("forward") == 5 * enabled
