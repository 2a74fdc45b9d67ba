"""The classes of DFTracer's tree, for pipesight: to ask what a node is, and to build a tree apart from ``ai``."""

from __future__ import annotations

from typing import Any, ClassVar

from pipesight.trace import Node, Use
from pipesight.trace.ai import CONVENTIONS

from .ai_names import ROOT_NAME, IOEvent

__all__ = [
    "AI",
    "IO",
    "Checkpoint",
    "Communication",
    "Compute",
    "DFTracerAI",
    "Data",
    "DataLoader",
    "Device",
    "Other",
    "Pipeline",
    "add_category",
    "add_io",
]


def add_category(root: Node, category: str) -> Node:
    """Add a category with its events."""
    node = root.add(category, category=category)
    _fill(node)
    return node


def add_io(node: Node) -> None:
    """Add ``io`` with ``open``, ``read``, ``write`` and ``close``, named after the node: ``data.io.open``."""
    io = _attach(node, "io")
    for event in IOEvent:
        _attach(io, event)


def _fill(node: Node) -> None:
    for name in CONVENTIONS.get(node.category, ()):
        node.add(name)
    if node.category in ("data", "checkpoint", "other"):
        add_io(node)
    if node.category == "other":
        _attach(node, "log")


def _attach(node: Node, name: str) -> Node:
    child = node.derive(name)
    setattr(node, name, child)
    return child


class _NodeClass(type):
    """Lets ``isinstance`` ask for what a node stands for: nodes change their class while they are switched off."""

    def __instancecheck__(cls, thing: object) -> bool:
        return cls.covers(thing)  # type: ignore[attr-defined, no-any-return]


class DFTracerAI(metaclass=_NodeClass):
    """Any node; called, a new one that is not below ``ai``.

    Example::

        io = DFTracerAI(cat="io", name="read")
        with io: ...
    """

    @staticmethod
    def covers(thing: object) -> bool:
        """Tell whether ``thing`` is a node, or one use of it."""
        return isinstance(thing, Node | Use)

    def __new__(cls, *, cat: str, name: str | None = None, enable: bool = True, **args: Any) -> Node:  # type: ignore[misc]
        """Return a node; ``args`` are ``epoch``, ``step``, ``image_idx`` and ``image_size``."""
        return _prepared(Node(str(name or cat), str(cat)), enable, args)


class IO(DFTracerAI):
    """``ai.data.io``, ``ai.checkpoint.io`` or ``ai.other.io``."""

    @staticmethod
    def covers(thing: object) -> bool:
        """Tell whether ``thing`` is such a node."""
        return isinstance(thing, Node) and thing.name == f"{thing.category}.io"

    def __new__(cls, *, cat: str, parent_name: str, enable: bool = True, **args: Any) -> Node:  # type: ignore[misc]
        """Return such a node that is not below ``ai``."""
        parent = Node(str(parent_name), str(cat))
        add_io(parent)
        return _prepared(parent.io, enable, args)


class _Category(DFTracerAI):
    category: ClassVar[str]

    @classmethod
    def covers(cls, thing: object) -> bool:
        """Tell whether ``thing`` is the node of this category."""
        return isinstance(thing, Node) and thing.category == thing.name == cls.category

    def __new__(cls, *, enable: bool = True, **args: Any) -> Node:  # type: ignore[misc]
        """Return a category with its events that is not below ``ai``."""
        node = Node(cls.category, cls.category)
        _fill(node)
        return _prepared(node, enable, args)


class Compute(_Category):
    """``ai.compute``."""

    category = "compute"


class Data(_Category):
    """``ai.data``."""

    category = "data"


class DataLoader(_Category):
    """``ai.dataloader``."""

    category = "dataloader"


class Communication(_Category):
    """``ai.comm``."""

    category = "comm"


class Device(_Category):
    """``ai.device``."""

    category = "device"


class Checkpoint(_Category):
    """``ai.checkpoint``."""

    category = "checkpoint"


class Pipeline(_Category):
    """``ai.pipeline``."""

    category = "pipeline"


class Other(_Category):
    """``ai.other``."""

    category = "other"


class AI(DFTracerAI):
    """The root, ``ai``; called, another tree."""

    @staticmethod
    def covers(thing: object) -> bool:
        """Tell whether ``thing`` is the root of a tree."""
        return isinstance(thing, Node) and thing.name == ROOT_NAME

    def __new__(cls, *, enable: bool = True, **args: Any) -> Node:  # type: ignore[misc]
        """Return the root of a new tree."""
        root = Node(ROOT_NAME, "ai")
        for category in (*CONVENTIONS, "other"):
            add_category(root, category)
        return _prepared(root, enable, args)


def _prepared(node: Node, enable: bool, args: dict[str, Any]) -> Node:
    node.update(**args)
    if not enable:
        node.disable()
    return node
