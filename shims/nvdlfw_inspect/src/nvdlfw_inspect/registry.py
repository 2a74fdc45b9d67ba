"""``nvdlfw_inspect.registry``: one place to register features and the APIs of namespaces with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import pipesight.stats.builtin_features  # noqa: F401 (registers them)
from pipesight.stats import registry as features
from pipesight.stats.current_session import running_or_none
from pipesight.stats.registry import BASE, api_method, api_names, default_registry

if TYPE_CHECKING:
    from nvdlfw_inspect.base import BaseNamespaceAPI

__all__ = ["NamespaceData", "Registry", "api_method"]

C = TypeVar("C", bound=type)


@dataclass(slots=True)
class NamespaceData:
    """One namespace.

    Attributes:
        api: The object that routes its calls.
        features: A feature object by name.
        feat_api_to_features: The names of the features that serve a call, by the name of the call.
        deferred_features: The classes that nothing routes calls to, as the namespace has no API.
    """

    name: str
    api: BaseNamespaceAPI | None
    features: dict[str, Any] = field(default_factory=dict)
    feat_api_to_features: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    deferred_features: list[type] = field(default_factory=list)


# The APIs of namespaces, beside the features that belong to them.
_apis: WeakKeyDictionary[features.Registry, dict[str, BaseNamespaceAPI]] = WeakKeyDictionary()


class _Registry:
    """Registers features and APIs of namespaces, and shows them, those of the session first.

    Example::

        @Registry.register_feature(namespace="mine")
        class CountCalls: ...
    """

    @property
    def data(self) -> dict[str, NamespaceData]:
        """The namespaces, by name."""
        from nvdlfw_inspect.debug_manager import manager_of

        registered = namespaces(default_registry(), _apis.get(default_registry(), {}))
        session = running_or_none()
        return registered if session is None else registered | manager_of(session).namespaces

    def register_feature(self, namespace: str, name: str | None = None) -> Callable[[C], C]:
        """Return a decorator that makes a class a feature."""
        return features.register_feature(namespace, name)

    def register_namespace_api(self, namespace: str) -> Callable[[C], C]:
        """Return a decorator that makes a class the API of a namespace; the last one counts."""

        def register(cls: C) -> C:
            for registry in default_registry().targets(cls):
                _apis.setdefault(registry, {})[namespace] = cls()
            return cls

        return register

    def validate_and_init(self) -> None:
        """Tell the API of each namespace its name and features; `debug_api.initialize` does that for the session.

        Raises:
            TypeError: One of them cannot route calls.
        """
        for namespace in self.data.values():
            introduce(namespace)

    def reset(self) -> None:
        """Forget what was registered; an open session keeps what it has."""
        default_registry().reset()
        _apis.pop(default_registry(), None)


Registry = _Registry()


def registered_apis(registry: features.Registry) -> dict[str, BaseNamespaceAPI]:
    """Return new APIs of namespaces, for a session with these features."""
    known = {**_apis.get(default_registry(), {}), **_apis.get(registry, {})}
    return {name: type(api)() for name, api in known.items()}


def namespaces(registry: features.Registry, apis: dict[str, BaseNamespaceAPI]) -> dict[str, NamespaceData]:
    """Return features and APIs by namespace."""
    data = {}
    for name in dict.fromkeys((*registry.namespaces, *apis)):
        objects = {feature: registry.feature(name, feature) for feature in registry.feature_names(name)}
        found = NamespaceData(name, apis.get(name), objects)
        for feature, thing in objects.items():
            for call in api_names(type(thing)):
                found.feat_api_to_features[call].append(feature)
        if found.api is None and name != BASE:
            found.deferred_features = [type(thing) for thing in objects.values()]
        data[name] = found
    return data


def introduce(namespace: NamespaceData) -> None:
    """Tell the API of a namespace its name and features.

    Raises:
        TypeError: It cannot route calls.
    """
    api = namespace.api
    if api is None:
        return
    if not callable(getattr(type(api), "route_api", None)):
        raise TypeError(
            f"the API of a namespace must have a method route_api (namespace: {namespace.name}, API: "
            f"{type(api).__qualname__}); derive it from BaseNamespaceAPI"
        )
    api.name = namespace.name
    api.set_default_api_impl()
    api.set_api_map(namespace.feat_api_to_features)
    api.set_features(namespace.features)
