"""``nvdlfw_inspect.registry``, for pipesight."""

from pipesight.stats.extensions import Registry
from pipesight.stats.registry import Namespace as NamespaceData
from pipesight.stats.registry import api_method

__all__ = ["NamespaceData", "Registry", "api_method"]
