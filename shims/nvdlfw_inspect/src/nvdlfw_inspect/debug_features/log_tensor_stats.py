"""``nvdlfw_inspect.debug_features.log_tensor_stats``, for pipesight."""

from pipesight.stats.extensions import LogTensorStats

__all__ = ["LogTensorStats"]
