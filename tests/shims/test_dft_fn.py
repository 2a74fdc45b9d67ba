"""`dft_fn` of the shim for DFTracer: blocks, functions and loops; what DFTracer gets wrong is right here."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import time

import pytest
from dftracer.logger import dft_fn
from dftracer.logger import dftracer as tracer

from support.dftraced import clean_environment, events_of, own, read, run_script, user


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    with clean_environment(monkeypatch):
        yield


@pytest.fixture
def traced(tmp_path):
    """Return a function that traces a call, and gives the events in the order they end."""
    return functools.partial(events_of, folder=tmp_path)


# dft_fn as a block.


def test_block(traced):
    """A block is an event with the arguments of the constructor and of every update, as what they are."""

    def work():
        with dft_fn(cat="io", name="read", epoch=1, image_size=2.5) as event:
            event.update(step=2, args={"file": "x", "big": 2**40, "epoch": 3})

    (event,) = traced(work)
    assert (event["cat"], event["name"]) == ("io", "read")
    assert own(event) == {"epoch": 3, "image_size": 2.5, "step": 2, "file": "x", "big": 2**40}


def test_default_name(traced):
    """Without a name, a block is called after the function it is in."""

    def load_images():
        with dft_fn("io"):
            pass

    assert [event["name"] for event in traced(load_images)] == ["load_images"]


def test_flush_and_reset(traced):
    """Flush records at once, and only once; reset begins anew; what is between belongs to no event of it."""

    def work():
        with dft_fn("a", name="step") as event:
            for step in range(3):
                with dft_fn("b", name=f"in {step}"):
                    pass
                event.update(step=step).flush()
                event.flush()
                with dft_fn("b", name="between"):
                    pass
                event.reset()
            with dft_fn("b", name="in last"):
                pass

    found = traced(work)
    steps = [event for event in found if event["name"] == "step"]
    assert [own(event)["step"] for event in steps] == [0, 1, 2, 2]
    parents = {event["name"]: event["args"]["p_idx"] for event in found if event["cat"] == "b"}
    names = ["in 0", "in 1", "in 2", "in last"]
    assert [parents[name] for name in names] == [event["id"] for event in steps]
    assert parents["between"] == 6


def test_flush_without_a_block(traced):
    """Outside of a block, an event lasts from when it was made, or reset, to its flush."""

    def work():
        event = dft_fn("a", name="x")
        time.sleep(0.02)
        event.flush()
        event.flush()
        time.sleep(0.02)
        event.reset().flush()

    long, short = traced(work)
    assert long["dur"] > 15_000 > short["dur"]


def test_flush_of_an_outer_block(traced):
    """Flushing within nested uses of one object records the innermost; each is recorded once."""

    def work():
        event = dft_fn("a", name="x")
        with event, event:
            event.flush()
            time.sleep(0.01)

    inner, outer = traced(work)
    assert inner["args"]["p_idx"] == outer["id"]
    assert inner["dur"] < 10_000 <= outer["dur"]


def test_nested_in_itself(traced):
    """One object can be open many times at once; DFTracer records the last only."""

    def work():
        event = dft_fn("a", name="x")
        with event, event, event:
            pass

    found = traced(work)
    assert [event["args"]["level"] for event in found] == [4, 3, 2]


def test_disabled(traced):
    """With enable=False nothing is recorded, and code in it runs as ever."""

    def work():
        silent = dft_fn("a", enable=False)
        with silent as event, dft_fn("b", name="in"):
            event.update(step=1).flush().reset()
        assert silent.log(lambda x: x + 1)(1) == 2
        assert list(silent.iter([1, 2])) == [1, 2]
        silent.log_metadata("a", "b")

    (event,) = traced(work)
    assert (event["name"], event["args"]["level"]) == ("in", 2)


def test_tracing_that_ends_within_a_block(tmp_path):
    """A block that is open when the trace ends, or begins, disturbs no later one."""
    log = tracer.initialize_log(tmp_path / "one.pfw")
    with dft_fn("a"):
        log.finalize()
    with dft_fn("b"):
        log = tracer.initialize_log(tmp_path / "two.pfw")
        with dft_fn("c"):
            pass
    log.finalize()
    (event,) = user(read(tmp_path / "two.pfw.gz"))
    assert (event["cat"], event["args"]["level"], event["args"]["p_idx"]) == ("c", 2, 6)


# dft_fn on functions.


class Reader:
    events = dft_fn("reader")

    @events.log_init
    def __init__(self, epoch, image_size=7):
        self.epoch, self.image_idx = epoch, None

    def step(self):
        """As an optimizer's: not a number."""

    @events.log
    def read(self, step, extra=None):
        """Read."""
        return step + 1

    @events.log_static
    @staticmethod
    def above(x):
        return x

    @staticmethod
    @events.log_static
    def below(x):
        return x

    @classmethod
    @events.log(name="made")
    def make(cls):
        return cls.__name__

    @property
    def image_size(self):
        raise RuntimeError("not yet")


def test_methods(traced):
    """Methods go by their qualified name; arguments come from the call, or else from the object."""

    def work():
        reader = Reader(4)
        assert reader.read(step=1) == 2
        assert reader.read(1, "x") == 2
        assert (Reader.above(1), reader.below(2), Reader.make()) == (1, 2, "Reader")

    found = traced(work)
    expected = [
        ("Reader.__init__", {"epoch": 4, "image_size": 7}),
        ("Reader.read", {"epoch": 4, "step": 1}),
        ("Reader.read", {"epoch": 4, "step": 1}),
        ("Reader.above", {}),
        ("Reader.below", {}),
        ("made", {}),
    ]
    assert [(event["name"], own(event)) for event in found] == expected
    assert {event["cat"] for event in found} == {"reader"}
    assert (Reader.read.__name__, Reader.read.__doc__) == ("read", "Read.")


def test_arguments_of_calls(traced):
    """A passed argument wins over its default, None is left out, and what was updated stays."""
    event = dft_fn("a", epoch=9)

    @event.log()
    def f(x, step=5, *, image_idx=None):
        pass

    found = traced(lambda: [f(1), f(1, 6), f(1, step=7, image_idx=8)])
    assert [own(e) for e in found] == [
        {"epoch": 9, "step": 5},
        {"epoch": 9, "step": 6},
        {"epoch": 9, "step": 7, "image_idx": 8},
    ]


def test_exception_in_a_function(traced):
    """A function that raises is an event too, and so is what is around it; DFTracer has none."""

    @dft_fn("a").log
    def fail():
        raise KeyError("x")

    def work():
        with pytest.raises(KeyError), dft_fn("a", name="around"):
            fail()
        with dft_fn("a", name="after"):
            pass

    found = traced(work)
    assert [(e["name"].rpartition(".")[2], e["args"]["level"]) for e in found] == [
        ("fail", 3),
        ("around", 2),
        ("after", 2),
    ]


def test_recursion(traced):
    """Each call of a recursive function is an event inside of the one before; DFTracer records 1 of 4."""

    @dft_fn("a").log(name="down")
    def down(step):
        return step and down(step - 1)

    found = traced(lambda: down(3))
    assert [(own(e)["step"], e["args"]["level"]) for e in found] == [(0, 5), (1, 4), (2, 3), (3, 2)]
    assert [e["args"]["p_idx"] for e in found] == [*(e["id"] for e in found[1:]), 6]


def test_generators_and_coroutines(traced):
    """The event of a generator or a coroutine lasts for its whole run; DFTracer measures the call alone."""
    event = dft_fn("a")

    @event.log(name="generator")
    def generate():
        yield 1
        time.sleep(0.02)

    @event.log(name="coroutine")
    async def wait():
        await asyncio.sleep(0.02)

    @event.log(name="asynchronous generator")
    async def stream():
        yield 1
        await asyncio.sleep(0.02)

    async def main():
        await wait()
        assert [x async for x in stream()] == [1]

    assert inspect.iscoroutinefunction(wait)
    found = traced(lambda: [list(generate()), asyncio.run(main())])
    assert [e["name"] for e in found] == ["generator", "coroutine", "asynchronous generator"]
    assert all(e["dur"] > 15_000 for e in found)


def test_other_callables(traced):
    """Partial functions, properties and callable objects can be decorated; a class cannot, and the error says what."""

    class Callable:
        def __call__(self):
            return 1

    class Owner:
        size = dft_fn("a").log(property(lambda self: 2))

    event = dft_fn("a")
    calls = [event.log(functools.partial(max, 1)), event.log(Callable(), name="callable")]
    found = traced(lambda: [calls[0](2), calls[1](), Owner().size])
    assert [e["name"].rpartition(".")[2] for e in found] == ["max", "callable", "<lambda>"]
    with pytest.raises(TypeError, match="decorate the method"):
        event.log(Owner)


def test_decorated_before_the_trace_begins(tmp_path):
    """What was decorated, and updated, while nothing was traced counts once there is a trace."""
    source = """
        from dftracer.logger import dft_fn, dftracer
        event = dft_fn("a").update(epoch=1)
        @event.log
        def f(): pass
        f()
        log = dftracer.initialize_log("run.pfw", None, -1)
        f()
        log.finalize()
    """
    run_script(source, tmp_path)
    (event,) = user(read(tmp_path / "run.pfw.gz"))
    assert (event["id"], event["name"], own(event)) == (7, "f", {"epoch": 1})


# dft_fn on loops.


def test_loop(traced):
    """A loop gives name.iter and name.yield for each item, with its number; the object's arguments go with them."""
    event = dft_fn("a", epoch=1)
    found = traced(lambda: list(event.iter("xy")))
    expected = [(name, {"epoch": 1, "step": n}) for n in (1, 2) for name in ("loop.iter", "loop.yield")]
    assert [(e["name"], own(e)) for e in found] == expected


def test_loop_by_other_names(traced):
    """The names of a loop and of its counter can be given, and either event left out."""
    event = dft_fn("a")
    found = traced(lambda: [list(event.iter([1], name="x", iter_name="n", include_iter=False))])
    assert [(e["name"], own(e)) for e in found] == [("x.yield", {"n": 1})]
    found = traced(lambda: [list(event.iter([1], "x", "n", include_yield=False))])
    assert [(e["name"], own(e)) for e in found] == [("x.iter", {"n": 1})]


# Elsewhere.


def test_pickle():
    """A dft_fn can be part of what is sent to another process."""
    copy = pickle.loads(pickle.dumps(dft_fn("a", name="x", epoch=1)))
    assert (copy.category, copy.name, copy.args) == ("a", "x", {"epoch": 1})


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph, traced):
    """Inside of torch.compile, a decorated function breaks no graph, and a block no code."""
    import torch

    event = dft_fn("a")

    @event.log(name="double")
    def double(x):
        return 2 * x

    @functools.partial(torch.compile, backend="eager", fullgraph=fullgraph)
    def compiled(x):
        if fullgraph:
            return double(x) + 1
        with dft_fn("a", name="block"):
            return double(x) + 1

    def work():
        with dft_fn("a", name="around"):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))

    found = traced(work)
    assert [e["args"]["level"] for e in found if e["name"] == "around"] == [2]
