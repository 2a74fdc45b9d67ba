"""``nvdlfw_inspect.debug_features.generic_feature_api``, for pipesight."""

from pipesight.stats.extensions import GenericConfigAPIMapper, GenericFrameworkAPI

__all__ = ["GenericConfigAPIMapper", "GenericFrameworkAPI"]
