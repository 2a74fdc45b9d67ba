"""The tree of events that DFTracer's ``ai`` conventions name."""

from __future__ import annotations

from pipesight.trace.node import Node

__all__ = ["CONVENTIONS", "ai"]

CONVENTIONS = {
    "compute": ("forward", "backward", "step"),
    "data": ("preprocess", "item"),
    "dataloader": ("fetch",),
    "comm": (
        "send",
        "receive",
        "barrier",
        "bcast",
        "reduce",
        "all_reduce",
        "gather",
        "all_gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
    ),
    "device": ("transfer",),
    "checkpoint": ("capture", "restart"),
    "pipeline": ("epoch", "train", "evaluate", "test"),
}
"""The categories, and the events in each."""


def _tree() -> Node:
    root = Node("ai_root", "ai")  # the name by which DFAnalyzer knows the application
    for category, names in CONVENTIONS.items():
        node = root.add(category, category=category)
        for name in names:
            node.add(name)
    return root


ai = _tree()
"""The root of the tree. ``ai.compute.forward`` and the other events, the categories and the root are all `Node`s."""
