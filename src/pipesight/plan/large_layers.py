"""Find the layer that is too large for any cut to help, and what splitting it would give."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipesight.plan.balance_search import find_balance
from pipesight.plan.plans import WORTH, Plan, predict
from pipesight.schedule.costs import Costs, Layer
from pipesight.schedule.setting import Setting
from pipesight.schedule.stage_costs import StageCosts

__all__ = ["LargeLayer", "large_layer"]

PARTS = (2, 4, 8)
"""Into how many layers one is split."""


@dataclass(frozen=True, slots=True)
class LargeLayer:
    """A layer that takes longer than the share of a device, so that every cut leaves other devices idle."""

    name: str
    """Its name in the model."""
    share: float
    """Of the time that all layers take."""
    fair: float
    """The share of each device if they were equal."""
    parts: int
    """Into how many equal layers it was split for the prediction: the fewest that are about as good as any."""
    step_seconds: float
    """The step with these, in the same setting and with the best balance."""
    gain: float
    """What that saves of the step."""


def large_layer(costs: Costs, plan: Plan) -> LargeLayer | None:
    """Return the largest layer if it takes more than the share of a device, and splitting it saves more than 1%.

    The parts are assumed to take equally long, and as long as the layer together.
    """
    setting = plan.setting
    if setting.partitions == 1 or plan.order is not None:
        return None
    blocks = StageCosts(costs, setting)
    busy = [float(blocks.busy()[k, k + 1]) for k in range(len(costs.layers))]
    total, worst = sum(busy), max(range(len(busy)), key=busy.__getitem__)
    fair = total / setting.partitions
    if total <= 0 or busy[worst] <= fair * (1 + WORTH):
        return None
    steps = {parts: _step(costs, setting, worst, parts) for parts in PARTS}
    parts = next(parts for parts in PARTS if steps[parts] <= min(steps.values()) * (1 + WORTH))
    gain = 1 - steps[parts] / plan.step_seconds
    if gain <= WORTH:
        return None
    return LargeLayer(costs.layers[worst].name, busy[worst] / total, 1 / setting.partitions, parts, steps[parts], gain)


def _step(costs: Costs, setting: Setting, worst: int, parts: int) -> float:
    """Predict the step if a layer were so many equal ones."""
    layers = [*costs.layers[:worst], *[_part(costs.layers[worst], parts)] * parts, *costs.layers[worst + 1 :]]
    split = replace(costs, layers=tuple(layers))
    return predict(split, setting, find_balance(StageCosts(split, setting)).balance).step_seconds


def _part(layer: Layer, parts: int) -> Layer:
    times = {name: getattr(layer, name) / parts for name in ("forward", "backward", "kept_bytes", "parameter_bytes")}
    again = None if layer.recompute is None else layer.recompute / parts
    return replace(layer, recompute=again, **times)
