"""Features that log statistics: those there are from the start, and those that extensions derive from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipesight.stats.config.rules import StatisticRequest
from pipesight.stats.current_session import running
from pipesight.stats.extensions.config_mapper import GenericConfigAPIMapper
from pipesight.stats.registry import api_method

__all__ = ["LogTensorStats", "MeasuringFeature"]


class MeasuringFeature(GenericConfigAPIMapper):
    """A feature whose statistics the session measures, so that several of them read a tensor once."""

    @property
    def overrides(self) -> bool:
        """Whether a derived class has its own way to log, so that it must be called."""
        return type(self).log_tensor_stats is not MeasuringFeature.log_tensor_stats

    def requests(self, stats: tuple[StatisticRequest, ...], tensor_name: str) -> tuple[StatisticRequest, ...]:
        """Return what the names of statistics mean here: a name may mean another one, or depend on the tensor."""
        return stats

    @api_method
    def log_tensor_stats(self, config: Mapping[str, Any], layer_name: str, **kwargs: Any) -> Mapping[str, Any]:
        """Log the ``stats`` of the settings of a tensor, whatever the step.

        Args:
            config: The settings.
            layer_name: Of the layer.
            kwargs: The others that ``debug_api.log_tensor_stats`` takes.
        """
        return running().collect_by(config, layer_name, requests=self.requests, **kwargs)


class LogTensorStats(MeasuringFeature):
    """A feature that logs statistics, and whose settings and calls a derived class is free to choose.

    Example::

        @Registry.register_feature(namespace="mine")
        class LogTensorStats(LogTensorStats):
            @api_method
            def look_at(self, config, layer_name, tensor, tensor_name, iteration):
                if iteration % config["freq"] == 0:
                    self.log_tensor_stats(
                        config, layer_name, tensor=tensor, tensor_name=tensor_name, iteration=iteration
                    )
    """

    def _get_supported_stats_list(self) -> set[str]:
        return {"max", "min", "mean", "std", "l1_norm", "l2_norm"}
