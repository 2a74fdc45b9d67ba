"""``nvdlfw_inspect.base``, for pipesight."""

from pipesight.stats.extensions import BaseConfigAPIMapper, BaseNamespaceAPI

__all__ = ["BaseConfigAPIMapper", "BaseNamespaceAPI"]
