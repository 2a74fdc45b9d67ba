"""The classes of DFTracer's tree, for pipesight: to ask what a node is, and to build a tree apart from ``ai``."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Makes nodes of our classes, and objects of classes that a program derives from them.

    ``isinstance`` asks ours for what a node stands for: nodes change their class while they are switched off.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (cls.make if cls.__module__ == __name__ else super().__call__)(*args, **kwargs)  # type: ignore[attr-defined]

    def __instancecheck__(cls, thing: object) -> bool:
        ours = cls.__module__ == __name__
        return super().__instancecheck__(thing) or (ours and cls.covers(thing))  # type: ignore[attr-defined]


class DFTracerAI(metaclass=_NodeClass):
    """Any node; called, a new one that is not below ``ai``. A class derived from it is a node with a tree of its own.

    Example::

        io = DFTracerAI(cat="io", name="read")
        with io: ...

        class Agent(DFTracerAI):
            def __init__(self):
                super().__init__(cat="agent")
                self.create_children({"plan": "plan", "act": "act"})

        with Agent().plan: ...
    """

    def __init__(self, **args: Any) -> None:
        ours = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        self._node: Node = ours.make(**args)  # type: ignore[attr-defined]
        self._children: dict[str, Any] = {}

    @staticmethod
    def covers(thing: object) -> bool:
        """Tell whether ``thing`` is a node, or one use of it."""
        return isinstance(thing, Node | Use)

    @classmethod
    def make(cls, *, cat: str, name: str | None = None, enable: bool = True, **args: Any) -> Node:
        """Return a node; ``args`` are ``epoch``, ``step``, ``image_idx`` and ``image_size``."""
        return _prepared(Node(str(name or cat), str(cat)), enable, args)

    # Objects of derived classes: what is not here is that of their node.

    def create_children(self, names: Mapping[str, str]) -> None:
        """Add events, as attributes: the names of these, and those in the trace."""
        for attribute, name in names.items():
            self._children[attribute] = self._node.named(str(name))
            setattr(self, attribute, self._children[attribute])

    def update(self, **args: Any) -> DFTracerAI:
        """Add arguments to the spans of this event and its children that end from now on."""
        for node in (self._node, *self._children.values()):
            node.update(**args)
        return self

    def enable(self) -> None:
        """Record this event and its children."""
        for node in (self._node, *self._children.values()):
            node.enable()

    def disable(self) -> None:
        """Stop recording this event and its children."""
        for node in (self._node, *self._children.values()):
            node.disable()

    def __enter__(self) -> DFTracerAI:
        self._node.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._node.__exit__(*error)

    def __call__(self, function: Any = None, /, **options: Any) -> Any:
        """Decorate ``function``; or, given keywords, return a decorator and context manager with these arguments."""
        return self._node(function, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("_node", "_children"):
            raise AttributeError(f"{type(self).__qualname__}.__init__ must call super().__init__(cat=...)")
        return getattr(self._node, name)


class IO(DFTracerAI):
    """``ai.data.io``, ``ai.checkpoint.io`` or ``ai.other.io``."""

    @staticmethod
    def covers(thing: object) -> bool:
        """Tell whether ``thing`` is such a node."""
        return isinstance(thing, Node) and thing.name == f"{thing.category}.io"

    @classmethod
    def make(cls, *, cat: str, parent_name: str, enable: bool = True, **args: Any) -> Node:  # type: ignore[override]
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

    @classmethod
    def make(cls, *, enable: bool = True, **args: Any) -> Node:
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

    @classmethod
    def make(cls, *, enable: bool = True, **args: Any) -> Node:
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
