"""``nvdlfw_inspect.debug_features.log_tensor_stats``: what features that log statistics derive from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper
from pipesight.stats.config.steps import steps_of
from pipesight.stats.current_session import running
from pipesight.stats.measuring_feature import MeasuringFeature

__all__ = ["LogTensorStats"]


class LogTensorStats(MeasuringFeature, GenericConfigAPIMapper):
    """A feature that logs statistics, and whose settings and calls a derived class is free to choose.

    Example::

        @Registry.register_feature(namespace="mine")
        class LogTensorStats(LogTensorStats):
            @api_method
            def look_at(self, config, layer_name, tensor, tensor_name, iteration):
                self.log_tensor_stats(config, layer_name, tensor=tensor, tensor_name=tensor_name, iteration=iteration)
    """

    def _get_supported_stats_list(self) -> set[str]:
        return {"max", "min", "mean", "std", "l1_norm", "l2_norm"}

    def _get_current_iteration(self, **kwargs: Any) -> int:
        iteration: int = kwargs.get("iteration", running().step_count)
        return iteration

    def _check_log_frequency(self, config: Mapping[str, Any], **kwargs: Any) -> bool:
        return steps_of(config, inclusive=self.inclusive).includes(self._get_current_iteration(**kwargs))

    def _check_params(self, config: Mapping[str, Any], layer_name: str, **kwargs: Any) -> bool:
        return self._check_log_frequency(config, **kwargs)  # Transformer Engine 2.4 to 2.6 ask this
