"""``Registry`` as extensions know it: one object to register with, whatever session comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipesight.stats import registry
from pipesight.stats.current_session import running_or_none

__all__ = ["Registry"]


class _Registry:
    """Registers features and APIs of namespaces, and shows those of the session that is open.

    Example::

        @Registry.register_feature(namespace="mine")
        class CountCalls: ...
    """

    @property
    def data(self) -> dict[str, registry.Namespace]:
        """The namespaces, by name: of the session, or of all that was registered if there is none."""
        session = running_or_none()
        return (registry.default_registry() if session is None else session.registry).data

    def register_feature(self, namespace: str, name: str | None = None) -> Callable[[Any], Any]:
        """Return a decorator that makes a class a feature."""
        return registry.register_feature(namespace, name)

    def register_namespace_api(self, namespace: str) -> Callable[[Any], Any]:
        """Return a decorator that makes a class the API of a namespace."""
        return registry.register_namespace_api(namespace)

    def validate_and_init(self) -> None:
        """Do nothing: `debug_api.initialize` does."""

    def reset(self) -> None:
        """Do nothing: each session has objects of its own."""


Registry = _Registry()
