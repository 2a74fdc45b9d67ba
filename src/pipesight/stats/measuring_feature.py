"""Features whose statistics the session measures, so that several of them read a tensor once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipesight.stats.config.rules import StatisticRequest
from pipesight.stats.current_session import running
from pipesight.stats.registry import api_method

__all__ = ["MeasuringFeature"]


class MeasuringFeature:
    """A feature that logs the ``stats`` of its settings.

    Attributes:
        inclusive: Whether the end of a range in ``start_end_list`` is in its range.
    """

    inclusive = False

    @property
    def overrides(self) -> bool:
        """Whether a derived class has its own way to log, so that it must be called."""
        return type(self).log_tensor_stats is not MeasuringFeature.log_tensor_stats

    def requests(self, stats: tuple[StatisticRequest, ...], tensor_name: str) -> tuple[StatisticRequest, ...]:
        """Return what the names of statistics mean here: a name may mean another one, or depend on the tensor."""
        return stats

    @api_method
    def log_tensor_stats(self, config: Mapping[str, Any], layer_name: str, **kwargs: Any) -> Mapping[str, Any]:
        """Log the statistics of a tensor, if the settings select the step."""
        return running().collect_by(self, config, layer_name, **kwargs)
