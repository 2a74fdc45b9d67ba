"""The description of a run, put together from those of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["complete"]

_ATTEMPT = ("launch", "restart")
"""What the ranks of a node have in common, unless the file of one is of an earlier attempt."""
_END = ("host", "pid", "ended", "outcome")


def complete(description: dict[str, Any], other: dict[str, Any]) -> None:
    """Add what another rank knows: its host, how it ended, and of a pipeline over several ranks, its own layers."""
    hosts, by_rank = description.get("hosts"), description.get("host_of_rank")
    if not isinstance(hosts, list):
        hosts = description["hosts"] = [description.get("host")]
    if other.get("host") not in hosts:
        hosts.append(other.get("host"))
    if not isinstance(by_rank, dict):
        rank = description.get("rank")
        by_rank = description["host_of_rank"] = {rank if type(rank) is int else 0: description.get("host")}
    if type(rank := other.get("rank")) is int:
        by_rank[rank] = other.get("host")
        if other.get("host") != description.get("host") or all(other.get(k) == description.get(k) for k in _ATTEMPT):
            description.setdefault("ends", {})[rank] = {key: other.get(key) for key in _END}
    for ours, theirs in zip(_dicts(description, "pipelines"), _dicts(other, "pipelines"), strict=False):
        if "ranks" not in ours:
            continue  # a pipeline of one rank: the other has one of its own
        for layer, same in zip(_dicts(ours, "layers"), _dicts(theirs, "layers"), strict=False):
            if layer.get("name") == same.get("name") and layer.get("output_bytes") is None:
                layer["output_bytes"] = same.get("output_bytes")


def _dicts(facts: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    entries = facts.get(key)
    return (entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else iter(())
