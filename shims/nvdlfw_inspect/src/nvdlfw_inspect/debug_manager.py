"""``nvdlfw_inspect.debug_manager``: the namespaces of a session, and what extensions read of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nvdlfw_inspect.debug_features.generic_feature_api import GenericFrameworkAPI
from nvdlfw_inspect.registry import NamespaceData, introduce, namespaces, registered_apis
from pipesight.stats.config_errors import nearest
from pipesight.stats.current_session import serving
from pipesight.stats.registry import BASE
from pipesight.stats.stats_session import StatsSession

__all__ = ["DebugManager", "check_name", "manager_of"]


class DebugManager:
    """Routes calls to the APIs of namespaces; one that brought none has one that knows its features.

    Attributes:
        namespaces: Features and API of each namespace.
    """

    def __init__(self, session: StatsSession) -> None:
        self._session = session
        apis = registered_apis(session.registry)
        session.registry.routed |= apis.keys()
        self.namespaces = namespaces(session.registry, apis)
        for namespace in self.namespaces.values():
            namespace.api = namespace.api or GenericFrameworkAPI()
            namespace.deferred_features = []
            introduce(namespace)
        session.after_step.append(partial(self._tell_namespaces, "step"))
        session.before_close.append(self._close)

    def get_extension_api(self, name: str) -> Any:
        """Return a call that features of the base namespace serve, or the API of a namespace.

        Raises:
            AttributeError: There is neither.
        """
        base = self.namespaces[BASE]
        if base.feat_api_to_features.get(name):
            return getattr(base.api, name)
        if name not in self.namespaces:
            check_name(name, self.namespaces)
        return self.namespaces[name].api

    def _tell_namespaces(self, event: str) -> None:
        with serving(self._session):
            for namespace in self.namespaces.values():
                getattr(namespace.api, event)()

    def _close(self) -> None:
        try:
            self._tell_namespaces("end_debug")
        finally:
            _managers.pop(self._session, None)

    @property
    def _trainer_iteration_count(self) -> int:
        return self._session.step_count

    @_trainer_iteration_count.setter
    def _trainer_iteration_count(self, step: int) -> None:
        self._session.count_from(step)

    @property
    def _tensor_reduction_group(self) -> Any:
        return self._session.merging.group


def check_name(name: str, namespaces: Mapping[str, NamespaceData]) -> None:
    """Raise ``AttributeError`` unless it is the name of a namespace, or of a call that the base namespace serves."""
    known = {*namespaces, *(call for call, features in namespaces[BASE].feat_api_to_features.items() if features)}
    if name not in known:
        rest = "" if name.startswith("_") else nearest(name, known)
        raise AttributeError(f"there is no function or namespace {name!r}{rest}")


_managers: dict[StatsSession, DebugManager] = {}


def manager_of(session: StatsSession) -> DebugManager:
    """Return the manager of a session; a session that was not opened through this package gets one."""
    manager = _managers.get(session)
    if manager is None:
        manager = _managers[session] = DebugManager(session)
    return manager
