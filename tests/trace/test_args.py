"""Arguments: whatever they are, the line is JSON, and says what they were when they were given."""

from __future__ import annotations

import enum
import fractions
import json
import math
import pathlib
import time
from collections import OrderedDict, namedtuple
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.testing import capture_events
from pipesight.trace import ai, counter, instant
from support.traced import args_of


def written(**args):
    """Return arguments as they come back from the file."""
    return written_dict(args)


def written_dict(args):
    with capture_events() as events, ai.compute.forward(args=args):
        pass
    return args_of(events[0])


def kind(value):
    return type(value).__name__


class Color(enum.Enum):
    RED = "red"
    MANY = ("a", "b")


class Number(enum.IntEnum):
    ONE = 1


Point = namedtuple("Point", "x y")


class Shout(str):
    def __str__(self):
        return self.upper()


class BadRepr:
    def __repr__(self):
        raise ValueError("no")


class WrongRepr:
    def __repr__(self):
        return 3


class BadEverything:
    """Raises whatever one asks."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    __repr__ = __str__ = __iter__ = __len__ = __hash__ = __eq__ = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, str(2**63)),
        (-(2**64), str(-(2**64))),
        (0.1, 0.1),
        (-0.0, -0.0),
        (1e308, 1e308),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        ("", ""),
        ('say "hi"\n\t\\ \0 \x7f </script> µ 😀', 'say "hi"\n\t\\ \0 \x7f </script> µ 😀'),
        ("\u2028\u2029\x85\x1c", "\u2028\u2029\x85\x1c"),  # line ends, for some
        ("\ud800", "\ud800"),
        (Shout("loud"), "loud"),
        (Color.RED, "red"),
        (Color.MANY, "MANY"),
        (Number.ONE, 1),
        (pathlib.Path("/data/x"), "/data/x"),
        (np.int64(3), 3),
        (np.uint64(2**64 - 1), str(2**64 - 1)),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (np.bool_(True), True),
        (np.str_("s"), "s"),
        (np.array(7), 7),
        (np.zeros((2, 3), np.float32), {"shape": [2, 3], "dtype": "float32"}),
        (torch.tensor(3), 3),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(math.nan), "NaN"),
        (torch.tensor(True), True),
        (torch.nn.Parameter(torch.tensor(2.0)), 2.0),
        (torch.zeros(2, 3, dtype=torch.bfloat16), {"shape": [2, 3], "dtype": "bfloat16"}),
        (torch.zeros((), device="meta"), {"shape": [], "dtype": "float32"}),
        (torch.Size([4, 5]), [4, 5]),
        (torch.float16, "torch.float16"),
        (torch.nn.Parameter, "<class 'torch.nn.parameter.Parameter'>"),
        (np.float32, "<class 'numpy.float32'>"),
        ((1, (2, [3])), [1, [2, [3]]]),
        (Point(1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        (frozenset({1}), [1]),
        ({"a": {"b": math.nan}}, {"a": {"b": "NaN"}}),
        (OrderedDict(a=Number.ONE), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ({1: "a", None: "b", 2.5: "c", Color.RED: "d"}, {"1": "a", "None": "b", "2.5": "c", "red": "d"}),
        (b"\xff\0", r"b'\xff\x00'"),
        (bytearray(b"ab"), "bytearray(b'ab')"),
        (1 + 2j, "(1+2j)"),
        (fractions.Fraction(1, 3), "Fraction(1, 3)"),
        (len, "<built-in function len>"),
        (BadRepr(), "<BadRepr: ValueError>"),
        (WrongRepr(), "<WrongRepr: TypeError>"),
        ([1, BadRepr()], [1, "<BadRepr: ValueError>"]),
    ],
    ids=kind,
)
def test_value(value, expected):
    """Simple values come back as they are, scalars as numbers, tensors as shape and dtype, others as their repr."""
    found = written(x=value)["x"]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "key", [3, None, 2.5, math.nan, ("a", 1), b"b", BadRepr(), 10**5000, Number.ONE, "\ud800", ""], ids=kind
)
def test_key(key):
    """Keys that are no strings become some; none of them breaks a line or the program."""
    assert list(written_dict({key: 1}).values()) == [1]
    assert list(written(x={key: 1})["x"].values()) == [1]


@pytest.mark.parametrize("name", ["hhash", "p_idx", "level"])
def test_names_that_are_taken(name):
    """An argument named as one of the event's own does not take its place."""
    assert written_dict({name: "mine"}) == {f"{name}_": "mine"}
    ai.compute.forward.update(args={name: "mine"})
    with capture_events() as events, ai.compute.forward:
        pass
    assert events[0]["args"][name] not in (None, "mine")


def test_objects_that_raise_at_everything():
    """No object can break the program that names it."""
    for value in (BadEverything(), mock.Mock(), mock.MagicMock(), mock.Mock(shape=(), dtype="x")):
        assert isinstance(json.dumps(written(x=value)), str)


def test_shapes_that_are_no_numbers():
    """Sizes that are known only later, of TensorFlow or of a compiler, are told as what they say of themselves."""
    unknown = mock.Mock(spec_set=["shape", "dtype"], shape=(None, fractions.Fraction(2)), dtype="float32")
    assert written(x=unknown)["x"] == {"shape": [None, "Fraction(2, 1)"], "dtype": "float32"}


def test_tensor_on_a_device_is_not_waited_for():
    """Only a plain tensor on the CPU is read."""

    class Sharded(torch.Tensor):
        def item(self):
            raise AssertionError("read")

    assert written(x=torch.tensor(1.0).as_subclass(Sharded))["x"] == {"shape": [], "dtype": "float32"}


def test_long_values_are_cut():
    """Ten million characters, digits or entries: the line is short, says how many there were, and comes soon."""
    begun = time.perf_counter()
    many = {"items": [1] * 10**7, "keys": dict.fromkeys(range(10**5))}
    found = written(text="é" * 10**7, data=bytes(10**6), number=10**100_000, **many)
    assert time.perf_counter() - begun < 5
    assert found["text"].endswith("é... (10000000 characters)")
    assert found["data"].startswith(r"b'\x00")
    assert found["number"].startswith("0x")
    assert found["items"][-1] == "... (10000000 entries)"
    assert found["keys"]["..."] == "100000 entries"
    assert len(json.dumps(found)) < 600_000


def test_recursive_values():
    """Lists and mappings that contain themselves, once or many times over, are cut too."""
    once = [1]
    once.append(once)
    many = []
    many += [many] * 50
    tangled = {}
    tangled.update({str(n): [tangled, many] for n in range(50)})
    deep = []
    for _ in range(100_000):
        deep = [deep]
    found = written(once=once, many=many, tangled=tangled, deep=deep)
    assert found["once"][:1] == [1]
    assert len(json.dumps(found)) < 200_000


def test_mutation_after_update_changes_nothing():
    """Arguments are what they were when they were given."""
    shapes, nested, weight = [1], {"a": [1]}, np.array(1)
    ai.compute.forward.update(args={"shapes": shapes, "nested": nested, "weight": weight})
    given = {"own": shapes}
    use = ai.compute.forward(args=given)
    shapes.append(2)
    nested["a"].append(2)
    weight += 1
    given["more"] = 1
    with capture_events() as events, use:
        pass
    assert args_of(events[0]) == {"shapes": [1], "nested": {"a": [1]}, "weight": 1, "own": [1]}


def test_update_changes_no_event_that_is_over():
    """Events that wait to be written keep the arguments that they ended with."""
    with capture_events() as events:
        for step in range(100):
            ai.compute.forward.update(step=step)
            with ai.compute.forward:
                pass
    assert [args_of(event)["step"] for event in events] == list(range(100))


def test_marks():
    """Counters and instants take the same values, and names as odd."""
    with capture_events() as events:
        counter('mem "x"\n', allocated=3, level=math.inf)
        instant("dropped", lr=np.float32(0.5), tensor=torch.zeros(2))
    first, second = events
    assert (first["ph"], first["name"], first["args"]) == ("C", 'mem "x"\n', {"allocated": 3, "level": "Infinity"})
    assert (second["ph"], args_of(second)) == ("i", {"lr": 0.5, "tensor": {"shape": [2], "dtype": "float32"}})
    counter("nothing", x=1)
    instant("nothing")


def test_names_that_are_odd():
    """Names of events are escaped as arguments are."""
    for name in ('"', "\n", "\ud800", "</script>", "\u2028"):
        with capture_events() as events, ai.data.derive(name):
            pass
        assert events[0]["name"] == f"data.{name}"


simple = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=40)
)
representable = st.recursive(
    simple,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)
anything = st.recursive(
    simple
    | st.floats()
    | st.integers()
    | st.binary(max_size=20)
    | st.complex_numbers()
    | st.datetimes()
    | st.sampled_from([*Color, *Number, torch.zeros(3), np.arange(3), object()])
    | st.builds(BadRepr)
    | st.builds(WrongRepr),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(simple | st.binary(max_size=5) | st.tuples(simple), inner, max_size=5)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=10), representable, max_size=5))
def test_what_json_can_say_comes_back(args):
    """Any JSON value that is no deeper than eight comes back equal."""
    taken = {f"{name}_" if name in ("hhash", "p_idx", "level") else name: value for name, value in args.items()}
    assert written_dict(args) == cut_depth(taken)


def cut_depth(value, depth=-1):
    """Return what is kept of a value that may be deep: hypothesis makes some."""
    if isinstance(value, (list, dict)) and depth >= 8:
        return mock.ANY
    if isinstance(value, list):
        return [cut_depth(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: cut_depth(item, depth + 1) for key, item in value.items()}
    return value


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(simple | st.binary(max_size=5) | st.tuples(simple), anything, max_size=5))
def test_no_value_breaks_a_line(args):
    """Whatever is given, each event is one line, and the line is JSON that any reader takes."""
    with capture_events() as events:
        ai.data.update(args=args)
        with ai.data, ai.data.item(args=args):
            list(ai.data.iter([1]))
        instant("here", **{str(key): value for key, value in args.items()})
    assert len(events) == 5
    json.dumps(events, allow_nan=False)
