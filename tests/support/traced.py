"""What the tests of tracing share: the tree as it was before, and ways to look at events."""

from __future__ import annotations

import contextlib

from pipesight.trace import ai


@contextlib.contextmanager
def tree_put_back():
    """Undo the switches and updates of a block."""
    args = {node: node.args for node in ai.subtree()}
    try:
        yield
    finally:
        ai.enable()
        for node in ai.subtree():
            node.args = args.get(node, {})


def names(events):
    return [event["name"] for event in events]


def args_of(event):
    """Return the arguments that are the user's."""
    return {name: value for name, value in event["args"].items() if name not in ("hhash", "p_idx", "level")}


def named(events, name):
    """Return the one event with this name."""
    (event,) = (event for event in events if event["name"] == name)
    return event


def parents(events):
    """Return the name of each event's parent, by the event's name; None where it is the root."""
    by_id = {event["id"]: event["name"] for event in events}
    return {event["name"]: by_id.get(event["args"]["p_idx"]) for event in events}


def levels(events):
    return {event["name"]: event["args"]["level"] for event in events}
