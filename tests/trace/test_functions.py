"""Decorated functions, methods and other callables."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
import types

import pytest
import torch
from torch import nn

from pipesight.testing import capture_events
from pipesight.trace import ai
from support.traced import COVERED, NAP, named, names, parents

forward = ai.compute.forward


def nap():
    time.sleep(NAP)


@forward
def documented(a: int, *rest: str, b: float = 2.0, **more: bytes) -> complex:
    """A docstring."""
    return complex(a, b)


def test_decorator_keeps_name_docstring_and_signature():
    """Name, docstring, signature, annotations and module are those of the function."""
    assert (documented.__name__, documented.__doc__) == ("documented", "A docstring.")
    assert (documented.__module__, documented.__qualname__) == (__name__, "documented")
    parameters = "(a: 'int', *rest: 'str', b: 'float' = 2.0, **more: 'bytes') -> 'complex'"
    assert str(inspect.signature(documented)) == parameters
    assert documented(1, "x", b=3.0, c=b"") == 1 + 3j
    assert isinstance(documented, types.FunctionType)


def test_decorator_keeps_the_kind_of_a_function():
    """Generators, coroutines and asynchronous generators are still what they were."""

    @forward
    def generator():
        yield

    @forward()
    async def coroutine():
        pass

    @forward(args={"a": 1})
    async def async_generator():
        yield

    kinds = [inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction]
    found = [[kind(f) for kind in kinds] for f in (documented, generator, coroutine, async_generator)]
    assert found == [[False] * 3, [True, False, False], [False, True, False], [False, False, True]]


def test_function():
    """The event lasts as long as the body."""
    with capture_events() as events:
        assert forward(lambda x: (nap(), x)[1])(5) == 5
    assert COVERED < events[0]["dur"] < 100 * COVERED


def test_function_that_raises():
    """The event is there, the exception is the same, and what comes after is not nested in it."""
    error = KeyError("k")

    @forward
    def fail():
        nap()
        raise error

    with capture_events() as events:
        with pytest.raises(KeyError) as caught:
            fail()
        with ai.data:
            pass
    assert caught.value is error
    assert parents(events) == {"forward": None, "data": None}
    assert named(events, "forward")["dur"] > COVERED


class Model(nn.Module):
    """Has decorated members of every kind."""

    @ai.data.init
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._lr = 0.1

    @ai.compute.forward
    def forward(self, x):
        return self.linear(x)

    @ai.compute.forward
    def method(self, x):
        return (self, x)

    @ai.compute.forward
    @staticmethod
    def outer_static(x):
        return x

    @staticmethod
    @ai.compute.forward
    def inner_static(x):
        return x

    @ai.compute.forward
    @classmethod
    def outer_class(cls, x):
        return (cls, x)

    @classmethod
    @ai.compute.forward
    def inner_class(cls, x):
        return (cls, x)

    @ai.compute.forward
    @property
    def lr(self):
        """The learning rate."""
        return self._lr

    @lr.setter
    def lr(self, value):
        self._lr = value

    @property
    @ai.compute.forward
    def inner_lr(self):
        return self._lr

    @ai.compute.forward
    @functools.cached_property
    def outer_cached(self):
        """Made once."""
        return object()

    @functools.cached_property
    @ai.compute.forward
    def inner_cached(self):
        return object()

    part = ai.compute.forward(functools.partialmethod(lambda self, x, y: (self, x, y), 1))


def test_members_of_a_class():
    """Methods, static and class methods, properties, cached ones, __init__ and forward: one event for each run."""
    with capture_events() as events:
        model = Model()
        assert model(torch.ones(1, 2)).shape == (1, 2)
        assert model.method(1) == (model, 1)
        assert Model.outer_static(1) == model.outer_static(1) == Model.inner_static(1) == 1
        assert Model.outer_class(1) == model.inner_class(1) == (Model, 1)
        assert model.lr == model.inner_lr == 0.1
        model.lr = 0.2
        assert model.lr == 0.2
        assert model.outer_cached is model.outer_cached
        assert model.inner_cached is model.inner_cached
        assert model.part(2) == (model, 1, 2)
    assert names(events) == ["data.init"] + ["forward"] * 13
    assert Model.lr.__doc__ == "The learning rate."
    assert Model.outer_cached.__doc__ == "Made once."
    assert isinstance(Model.__dict__["outer_static"], staticmethod)
    assert isinstance(Model.__dict__["outer_class"], classmethod)
    assert isinstance(Model.__dict__["outer_cached"], functools.cached_property)
    assert list(inspect.signature(Model).parameters) == []


def test_subclass_of_property_stays_one():
    """A descriptor's own class is kept."""

    class Special(property):
        pass

    class Owner:
        @ai.data
        @Special
        def value(self):
            return 3

    assert isinstance(Owner.__dict__["value"], Special)
    with capture_events() as events:
        assert Owner().value == 3
    assert names(events) == ["data"]


def test_callables_that_are_not_functions():
    """Partial objects, bound methods, builtins, and objects with __call__, whatever kind that is of."""

    class Adder:
        def __call__(self, x):
            return x + 1

    class AsyncAdder:
        async def __call__(self, x):
            await asyncio.sleep(NAP)
            return x + 1

    class Counter:
        def __call__(self, n):
            yield from range(n)
            nap()

    async def slow(x, y):
        await asyncio.sleep(NAP)
        return x + y

    with capture_events() as events:
        assert forward(functools.partial(max, 3))(4) == 4
        assert forward([1, 2].index)(2) == 1
        assert forward(len)("abc") == 3
        assert forward(Adder())(1) == 2
        assert forward(nn.Identity())(1) == 1
        assert asyncio.run(forward(functools.partial(slow, 1))(2)) == 3
        assert asyncio.run(forward(AsyncAdder())(1)) == 2
        assert list(forward(Counter())(2)) == [0, 1]
    assert len(events) == 8
    assert all(event["dur"] > COVERED for event in events[-3:])


@pytest.mark.parametrize("target", [Model, 3, "forward", functools.singledispatchmethod(len)])
@pytest.mark.parametrize("node", [ai.compute, ai.compute(), ai.data.init])
def test_what_cannot_be_decorated(node, target):
    """A class, and what cannot be called, is refused, and the message says what to decorate instead."""
    with pytest.raises(
        TypeError, match=r"an event can decorate functions and methods, but got .*; decorate the method"
    ):
        node(target)


# Compiled, and disabled.


@pytest.mark.parametrize("node", [forward, forward(), forward(args={"a": 1}), forward(enable=False)])
@pytest.mark.parametrize("disabled", [False, True])
def test_disabled_decorator_costs_one_call(node, disabled):
    """Switched off, or with no trace, a decorated function makes exactly one more Python call than a bare one."""

    def bare(x):
        return x

    def calls(function):
        count = 0

        def count_calls(frame, event, arg):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_calls)
        try:
            function(1)
        finally:
            sys.setprofile(None)
        return count

    decorated = node(bare)
    if disabled:
        forward.disable()
        with capture_events() as events:
            more = calls(decorated) - calls(bare)
        assert events == []
    else:
        more = calls(decorated) - calls(bare)
    assert more == 1


def test_switch_in_the_middle():
    """A switch during a run changes the next run, not this one, for every kind of function."""

    @forward
    def function(switch):
        switch()

    @forward(args={"use": 1})
    def use(switch):
        switch()

    @forward
    def generator(switch):
        switch()
        yield

    @forward
    async def coroutine(switch):
        switch()

    @forward
    async def async_generator(switch):
        switch()
        yield

    async def exhaust(switch):
        async for _ in async_generator(switch):
            pass

    for run in (
        function,
        use,
        lambda switch: list(generator(switch)),
        lambda switch: asyncio.run(coroutine(switch)),
        lambda switch: asyncio.run(exhaust(switch)),
    ):
        with capture_events() as events:
            run(ai.disable)
            run(ai.enable)
            with ai.device:
                pass
        assert parents(events) == {"forward": None, "device": None}
        assert len(events) == 2
