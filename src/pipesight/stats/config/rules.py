"""What to log of a tensor: the rules that a feature's settings come down to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipesight.stats.config.steps import Steps

__all__ = ["NOTHING", "RuleTable", "StatisticRequest", "TensorRule"]


@dataclass(frozen=True, slots=True)
class StatisticRequest:
    """A statistic by name, with the options it was given.

    Example::

        >>> StatisticRequest("max_blockwise_dynamic_range", (("block_size", 32), ("dims", 1))).label
        'max_blockwise_dynamic_range_block_size_32_dims_1'
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The name to log it under."""
        return "_".join([self.name, *(key if value is True else f"{key}_{value}" for key, value in self.options)])


@dataclass(frozen=True, slots=True)
class TensorRule:
    """What to log of one tensor, and when.

    Attributes:
        stats: The statistics, in the order of the configuration.
        steps: The steps.
        on_nonfinite: ``"warn"``, ``"raise"`` or ``"dump"`` when it has NaN or Inf; ``None`` to do nothing.
        options: All settings that hold for this tensor in one dict, as nvdlfw_inspect passes it to a feature: those of
            the feature, then those of its entry in ``gemms_struct`` and ``tensors_struct``, with the names ``tensor``
            and ``gemm`` where the configuration names them.
    """

    stats: tuple[StatisticRequest, ...] = ()
    steps: Steps = field(default_factory=Steps)
    on_nonfinite: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuleTable:
    """Rules by tensor name, and the rule for all other tensors."""

    tensors: Mapping[str, TensorRule] = field(default_factory=dict)
    otherwise: TensorRule | None = None


NOTHING = RuleTable()
