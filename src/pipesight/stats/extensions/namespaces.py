"""``debug_api.namespace.call(...)`` and ``debug_api.call(...)``: what the API has beyond its own functions."""

from __future__ import annotations

from typing import Any

from pipesight.stats.config_errors import nearest
from pipesight.stats.current_session import running, running_or_none
from pipesight.stats.extensions.config_mapper import GenericFrameworkAPI
from pipesight.stats.registry import BASE, Namespace, Registry, default_registry

__all__ = ["DebugManager", "attribute", "end_namespaces", "namespace_api", "step_namespaces"]


class DebugManager:
    """What some extensions read of the session under these names."""

    @property
    def _trainer_iteration_count(self) -> int:
        return running().step_count

    @property
    def _tensor_reduction_group(self) -> Any:
        return running().merging.group


def attribute(name: str) -> Any:
    """Return what the API has under a name: the API of a namespace, or a call that features of the base one serve.

    Example::

        debug_api.transformer_engine.fp8_gemm("decoder.1.qkv", gemm="fprop")
        debug_api.count_calls("fc1", tensor_name="activation")  # a feature of the user's, in the base namespace

    Raises:
        AttributeError: There is nothing of that name.
        RuntimeError: There would be, but there is no session.
    """
    if name == "DEBUG_MANAGER":
        return None if running_or_none() is None else DebugManager()
    session = running_or_none()
    data = (default_registry() if session is None else session.registry).data
    calls = {call for call, features in data[BASE].feat_api_to_features.items() if features} if BASE in data else set()
    if name not in data and name not in calls:
        rest = "" if name.startswith("_") else nearest(name, {*data, *calls})
        raise AttributeError(f"there is no function or namespace {name!r}{rest}")
    running()
    return namespace_api(data[name]) if name in data else getattr(namespace_api(data[BASE]), name)


def namespace_api(namespace: Namespace) -> Any:
    """Return the object that takes the calls of a namespace; one that brought none has one that knows its features."""
    if namespace.api is not None:
        return namespace.api
    generic = GenericFrameworkAPI()
    generic.name = namespace.name
    generic.set_features(namespace.features)
    generic.set_api_map(namespace.feat_api_to_features)
    return generic


def step_namespaces(registry: Registry) -> None:
    """Tell the API of each namespace that a step has ended."""
    for namespace in registry.data.values():
        if namespace.api is not None:
            namespace.api.step()


def end_namespaces(registry: Registry) -> None:
    """Tell the API of each namespace that the session ends."""
    for namespace in registry.data.values():
        if namespace.api is not None:
            namespace.api.end_debug()
