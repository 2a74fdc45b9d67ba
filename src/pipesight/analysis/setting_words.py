"""What settings are called in advice: as arguments of our pipelines, or as bare torch has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight.analysis.measured_costs import Measured
from pipesight.plan.plans import division, sizes_of
from pipesight.schedule.setting import Setting
from pipesight.schedule.supported_schedules import by_name

__all__ = ["SettingWords"]


@dataclass(frozen=True, slots=True)
class SettingWords:
    """Names settings for whoever runs the pipeline.

    >>> SettingWords(is_bare_torch=False).chunks(8), SettingWords(is_bare_torch=True).chunks(8)
    ('chunks=8', 'n_microbatches=8')
    """

    is_bare_torch: bool
    units: Sequence[str] | None = None
    """The layers, by name, of a model that is cut at modules."""

    @classmethod
    def of(cls, measured: Measured) -> SettingWords:
        """Return the words for the pipeline of a run."""
        return cls(measured.facts.is_bare_torch, measured.costs.units)

    def runs(self, setting: Setting) -> bool:
        """Whether who runs the pipeline can run a setting."""
        return setting.runs and bool(setting.torch_name or not self.is_bare_torch)

    def balance(self, balance: Sequence[int], *, instead_of: Sequence[int] | None = None) -> str:
        """Name a balance; torch has no argument for it."""
        if self.is_bare_torch:
            before = "" if instead_of is None else f" instead of {sizes_of(instead_of)}"
            return f"stages of {sizes_of(balance)} layers{before}"
        before = "" if instead_of is None else f" instead of {division(instead_of, self.units).partition('=')[2]}"
        return division(balance, self.units) + before

    def chunks(self, chunks: int) -> str:
        """Name a number of micro-batches."""
        return f"n_microbatches={chunks}" if self.is_bare_torch else f"chunks={chunks}"

    def checkpoint(self, mode: str) -> str:
        """Name a checkpoint mode; torch has none, and without recomputation there is nothing to say."""
        if self.is_bare_torch:
            return "" if mode == "never" else "each stage through torch.utils.checkpoint"
        return f'checkpoint="{mode}"'

    def schedule(self, setting: Setting, *, instead_of: str | None = None) -> str:
        """Name a schedule, by its class in torch."""
        if self.is_bare_torch:
            known = None if instead_of is None else by_name(instead_of)
            before = "" if instead_of is None else f" instead of {known.torch_name if known else instead_of}"
            return setting.torch_name + before
        return f'schedule="{setting.engine_name}"' + ("" if instead_of is None else f' instead of "{instead_of}"')
