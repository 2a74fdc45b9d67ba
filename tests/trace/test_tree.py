"""The tree of conventions: every name, in every style, with updates and switches that reach all below."""

from __future__ import annotations

import copy
import pickle

import pytest

from pipesight.testing import capture_events
from pipesight.trace import Node, ai
from support.traced import args_of, levels, named, names, parents

CONVENTIONS = {
    "compute": "forward backward step",
    "data": "preprocess item",
    "dataloader": "fetch",
    "comm": "send receive barrier bcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all",
    "device": "transfer",
    "checkpoint": "capture restart",
    "pipeline": "epoch train evaluate test",
}
CATEGORIES = list(CONVENTIONS)
PATHS = [f"{category}.{name}" for category, names in CONVENTIONS.items() for name in names.split()]


def find(path):
    node = ai
    for name in filter(None, path.split(".")):
        node = getattr(node, name)
    return node


everywhere = pytest.mark.parametrize("path", ["", *CATEGORIES, *PATHS])


def test_names_of_the_tree():
    """The tree has DFTracer's categories and names, and no others; importing the shim adds the category ``other``."""
    tree = {(node.category, node.name) for node in ai.subtree() if "." not in node.name and node.category != "other"}
    assert tree == {("ai", "ai_root"), *((c, c) for c in CATEGORIES), *(tuple(path.split(".")) for path in PATHS)}


@everywhere
def test_every_style_of_every_name(path):
    """Decorator, block, loop, by hand, init and derive: the root, the categories and all names have them all."""
    node = find(path)

    @node
    def plain():
        pass

    @node(args={"a": 1})
    def with_args():
        pass

    @node.init
    def set_up():
        pass

    @node.derive(name="special")
    def special():
        pass

    with capture_events() as events:
        plain()
        with_args()
        with node:
            pass
        with node(args={"b": 2}):
            pass
        assert list(node.iter("x")) == ["x"]
        node.start()
        node.stop()
        node.start(metadata=True)
        node.stop(metadata=True)
        set_up()
        with node.init:
            pass
        special()
    name, category = (path.split(".") or ["ai_root"])[-1] or "ai_root", path.split(".")[0] or "ai"
    assert (node.name, node.category) == (name, category)
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {category}
    loop = [f"{name}.iter", f"{name}.block"]
    assert names(spans) == [name] * 4 + loop + [name] + [f"{name}.init"] * 2 + [f"{name}.special"]
    assert [args_of(event) for event in spans[:4]] == [{}, {"a": 1}, {}, {"b": 2}]
    marks = [event for event in events if event["ph"] == "M"]
    assert [(mark["name"], mark["cat"], mark["args"]["name"]) for mark in marks] == [
        ("CM", "dftracer", f"{name}.start"),
        ("CM", "dftracer", f"{name}.end"),
    ]


@everywhere
def test_switch_of_every_name(path):
    """Disabled, nothing of a name is recorded in any style; one use can say otherwise, and enable brings all back."""
    node = find(path)

    @node
    def function():
        pass

    def use_all(**enable):
        if not enable:
            function()
            with node, node.init, node.derive("special"):
                list(node.iter("x"))
            node.start()
            node.stop()
            node.start(metadata=True)
            node.stop(metadata=True)
        node(**enable)(lambda: None)()
        with node(args={"a": 1}, **enable):
            pass
        with node.init(**enable):
            pass

    node.disable()
    with capture_events() as disabled:
        use_all()
    with capture_events() as forced:
        use_all(enable=True)
    node.enable()
    with capture_events() as refused:
        use_all(enable=False)
    with capture_events() as enabled:
        use_all()
    assert (disabled, refused) == ([], [])
    assert names(forced) == [node.name, node.name, f"{node.name}.init"]
    assert len(enabled) == 12


def test_fields_of_an_event():
    """A line has these fields, in this order; times are microseconds, and the root's id is 6."""
    with capture_events() as events, ai.pipeline.epoch:
        pass
    (event,) = events
    assert list(event) == ["id", "name", "cat", "pid", "tid", "ts", "dur", "ph", "args"]
    assert list(event["args"]) == ["hhash", "p_idx", "level"]
    assert (event["ph"], event["args"]["p_idx"], event["args"]["level"]) == ("X", 6, 2)
    assert event["ts"] > 1.7e15
    assert event["dur"] >= 0


def test_fields_of_metadata():
    """A CM line has the moment in microseconds, as a string, and is there for start and for end."""
    with capture_events() as events:
        ai.pipeline.epoch.start(metadata=True)
        ai.pipeline.epoch.stop(metadata=True)
    start, end = events
    assert list(start) == ["id", "name", "cat", "pid", "tid", "ph", "args"]
    assert list(start["args"]) == ["hhash", "name", "value"]
    assert (start["id"], start["ph"]) == (6, "M")
    assert 1.7e15 < int(start["args"]["value"]) <= int(end["args"]["value"])


def test_everything_nests():
    """A span's parent is the one around it, whichever style either of them has."""

    @ai.pipeline.train
    def train():
        for _ in ai.pipeline.epoch.iter([0]):
            ai.compute.start()
            forward()
            ai.compute.stop()

    @ai.compute.forward(args={"layer": 3})
    def forward():
        with ai.comm.all_reduce, ai.device(step=1), ai.checkpoint.init:
            pass

    with capture_events() as events:
        train()
    assert parents(events) == {
        "train": None,
        "epoch.iter": "train",
        "epoch.block": "train",
        "compute": "epoch.block",
        "forward": "compute",
        "all_reduce": "forward",
        "device": "all_reduce",
        "checkpoint.init": "device",
    }
    assert levels(events)["checkpoint.init"] == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"epoch": 1}, {"epoch": 1}),
        ({"epoch": 0, "step": 2}, {"epoch": 0, "step": 2}),
        ({"image_idx": 3, "image_size": 4}, {"image_idx": 3, "image_size": 4}),
        ({"args": {"lr": 0.1}}, {"lr": 0.1}),
        ({"step": 5, "args": {"lr": 0.1}}, {"step": 5, "lr": 0.1}),
        ({"epoch": None}, {}),
        ({}, {}),
    ],
)
def test_arguments_of_update(given, expected):
    """Epoch, step, image_idx, image_size and args are what update and one use take."""
    with capture_events() as events:
        with ai.data.item(**given):
            pass
        ai.data.item.update(**given)
        with ai.data.item:
            pass
    assert [args_of(event) for event in events] == [expected, expected]


def test_update_reaches_all_below_and_nothing_else():
    """An update of a category changes its names, what is derived from them, and what will be; not its neighbours."""
    early = ai.data.preprocess.derive("early")
    ai.data.update(epoch=3)
    late = early.derive("late")
    with capture_events() as events, ai, ai.compute, ai.data, ai.data.item, early, late, ai.data.item.init:
        list(ai.data.preprocess.iter("x"))
    updated = {event["name"] for event in events if event["args"].get("epoch") == 3}
    below = {"preprocess.early", "preprocess.early.late", "item.init", "preprocess.iter", "preprocess.block"}
    assert updated == {"data", "item", *below}
    assert {event["name"] for event in events} - updated == {"ai_root", "compute"}


def test_updates_add_up():
    """Later values replace earlier ones of the same name; one use's own come last, and stay with it."""
    ai.update(epoch=1, step=1)
    ai.compute.update(step=2)
    ai.compute.forward.update(args={"lr": 0.1})
    use = ai.compute.forward(args={"step": 9})
    with capture_events() as events:
        with use:
            pass
        ai.update(epoch=2)
        with use, ai.compute.forward:
            pass
    assert [args_of(event) for event in events] == [
        {"epoch": 1, "step": 9, "lr": 0.1},
        {"epoch": 2, "step": 2, "lr": 0.1},
        {"epoch": 2, "step": 9, "lr": 0.1},
    ]


def test_update_while_disabled_is_kept():
    """Disabled nodes and a trace that has not begun yet lose no update (DFTracer drops them)."""
    ai.compute.disable()
    ai.compute.forward.update(epoch=4)
    ai.compute.enable()
    with capture_events() as events, ai.compute.forward:
        pass
    assert args_of(events[0]) == {"epoch": 4}


def test_update_in_a_span_is_in_it():
    """What is known at the end of a span is what it carries."""
    with capture_events() as events, ai.compute.forward:
        ai.compute.forward.update(step=7)
    assert args_of(events[0]) == {"step": 7}


def test_use_keeps_its_args_and_leaks_none():
    """Arguments of one use are in all its events and in no others (DFTracer has it the other way round)."""

    @ai.compute.forward(args={"layer": 1})
    def first():
        pass

    @ai.compute.forward
    def second():
        pass

    with capture_events() as events:
        first()
        second()
        with ai.compute.forward(args={"layer": 2}), ai.compute.forward:
            pass
        first()
    assert [args_of(event).get("layer") for event in events] == [1, None, None, 2, 1]


def test_derive_inherits_args():
    """A derived node has the arguments of its parent, those of before and those of after (DFTracer: none)."""
    ai.data.preprocess.update(epoch=1)
    collate = ai.data.preprocess.derive(name="collate")
    ai.data.preprocess.update(step=2)
    with capture_events() as events, collate:
        collate.update(args={"own": 3})
        with ai.data.preprocess:
            pass
    assert [args_of(event) for event in events] == [{"epoch": 1, "step": 2}, {"epoch": 1, "step": 2, "own": 3}]
    assert (events[1]["name"], events[1]["cat"]) == ("preprocess.collate", "data")


def test_derive_of_one_name_is_one_node():
    """The same name gives the same node, so that a switch of one is a switch of all."""
    assert ai.data.preprocess.derive("collate") is ai.data.preprocess.derive(name="collate")
    assert ai.checkpoint.init is ai.checkpoint.init


def test_switch_reaches_all_below_and_nothing_else():
    """Disabling a category silences what is derived from its names, and what will be; not its neighbours."""
    early = ai.data.preprocess.derive("early")
    ai.data.disable()
    late = early.derive("late")
    with capture_events() as events, ai, ai.compute.forward, ai.data, ai.data.item, early, late, ai.data.item.init:
        pass
    assert names(events) == ["forward", "ai_root"]
    ai.data.item.enable()
    with capture_events() as events, ai.data, ai.data.item, early, ai.data.item.init:
        pass
    assert names(events) == ["item.init", "item"]
    ai.enable()
    with capture_events() as events, ai.data, early, late:
        pass
    assert names(events) == ["preprocess.early.late", "preprocess.early", "data"]


def test_decorated_while_disabled_is_logged_after_enable():
    """A decorator asks the switch at each call, not when it is applied (DFTracer never logs it)."""
    ai.compute.disable()

    @ai.compute.forward
    def forward():
        pass

    with capture_events() as events:
        forward()
        ai.compute.enable()
        forward()
        ai.compute.disable()
        forward()
    assert names(events) == ["forward"]


@pytest.mark.parametrize("parentheses", [False, True])
def test_init_follows_disable(parentheses):
    """``@ai.checkpoint.init`` and ``@ai.checkpoint.init()`` are switched alike, though DFTracer's second is not."""
    node = ai.checkpoint.init

    class Checkpoint:
        @(node() if parentheses else node)
        def __init__(self):
            pass

    with capture_events() as events:
        ai.checkpoint.disable()
        Checkpoint()
        ai.checkpoint.enable()
        Checkpoint()
    assert [(event["name"], event["cat"]) for event in events] == [("checkpoint.init", "checkpoint")]


@pytest.mark.parametrize("enable", [True, False])
def test_enable_of_one_use_wins(enable):
    """Where ``enable`` is given, the switches of the tree do not matter, whenever they are turned."""

    @ai.checkpoint.init(enable=enable)
    def set_up():
        pass

    loop = ai.dataloader.fetch(enable=enable)
    with capture_events() as events:
        for switch in (ai.disable, ai.enable):
            switch()
            set_up()
            with ai.compute.forward(enable=enable):
                pass
            list(loop.iter("x"))
    assert names(events) == ["checkpoint.init", "forward", "fetch.iter", "fetch.block"] * (2 * enable)


def test_span_in_one_that_is_switched_off_belongs_to_the_one_around():
    """Levels and parents skip what is not recorded."""
    ai.comm.disable()
    with capture_events() as events, ai.pipeline, ai.comm, ai.data(enable=False), ai.compute:
        pass
    assert parents(events) == {"compute": "pipeline", "pipeline": None}
    assert levels(events) == {"compute": 3, "pipeline": 2}


def test_nothing_is_recorded_without_a_trace():
    """Outside of a trace all nodes are silent, one use that is forced too."""
    with ai.compute, ai.data(enable=True):
        assert not ai.compute.recording
        assert not ai.data(enable=True).recording
    with capture_events() as events:
        pass
    assert events == []


def test_own_roots_and_names():
    """Programs can have trees of their own, and add names to this one."""
    root = Node("mine", "mine")
    child = root.add("part", category="parts")
    with capture_events() as events, root, child, root.part.derive("detail"):
        pass
    assert [(event["name"], event["cat"]) for event in events] == [
        ("part.detail", "parts"),
        ("part", "parts"),
        ("mine", "mine"),
    ]
    for taken in ("forward", "update"):
        with pytest.raises(ValueError, match=f"already has a '{taken}'"):
            ai.compute.add(taken)
    with pytest.raises(AttributeError, match="forwrad"):
        _ = ai.compute.forwrad


def test_arguments_and_function_at_once():
    """A decorator gets either a function or keywords; both is a mistake that is named."""
    with pytest.raises(TypeError, match="arguments or a function, not both"):
        ai.compute.forward(len, enable=True)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda node: pickle.loads(pickle.dumps(node))])
def test_copies_are_the_node_itself(again):
    """A model or data set that has a node can be copied and sent to another process."""
    for node in (ai, ai.compute.forward, ai.data.item.derive("a.b").derive("c"), ai.data.init):
        assert again(node) is node
    use = again(ai.compute.forward(args={"a": 1}, enable=True))
    ai.disable()
    with capture_events() as events, use:
        pass
    assert args_of(named(events, "forward")) == {"a": 1}


def test_unknown_event():
    """A name that is not in the tree says which are."""
    with pytest.raises(AttributeError, match=r"no event 'froward' \(its events: forward, backward, step\)"):
        ai.compute.froward  # noqa: B018
    assert not hasattr(ai.compute, "froward")


@pytest.mark.parametrize("name", ["", None, 3])
def test_name_of_a_derived_event(name):
    """It must be one."""
    with pytest.raises(ValueError, match="must be a string that is not empty"):
        ai.compute.derive(name)
