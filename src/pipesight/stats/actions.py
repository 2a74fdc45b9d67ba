"""What to do with one tensor of one layer in each step, compiled from the configuration once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from pipesight.stats.config import Config, TensorRule
from pipesight.stats.config.steps import Steps
from pipesight.stats.measuring_feature import MeasuringFeature
from pipesight.stats.moments.quantity import Quantity, Source, combine, quantity
from pipesight.stats.registry import Registry

__all__ = ["Action", "Serve", "TensorActions", "action_for", "actions_for"]

Serve = Callable[..., Any]
OPTIONAL = ("iteration", "skip_reduction", "reduction_group")  # what not every feature cares for


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """What to do with a tensor at one step. Each is equal to itself only.

    Attributes:
        sources: What to measure.
        quantities: What to log.
        on_nonfinite: What to do about NaN and Inf, as far as anything.
        custom: Features of users to call, with their rules.
    """

    sources: tuple[Source, ...]
    quantities: tuple[Quantity, ...]
    on_nonfinite: frozenset[str]
    custom: tuple[tuple[Serve, TensorRule], ...]
    labels: tuple[str, ...] = field(init=False)
    """What the quantities are logged as."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(quantity.label for quantity in self.quantities))


class TensorActions:
    """The rules of a section's features for one tensor, compiled into one action per step.

    Example::

        action = actions.at(step)  # None: nothing to do
    """

    __slots__ = ("_built", "_now", "_rules", "_tensor")

    def __init__(self, rules: Iterable[tuple[TensorRule, Serve | None]], tensor: str) -> None:
        self._rules, self._tensor = tuple(rules), tensor
        self._built: dict[tuple[int, ...], Action] = {}
        self._now: tuple[int, Action | None] = (-1, None)

    @property
    def steps(self) -> frozenset[Steps]:
        """The steps at which there may be something to do."""
        return frozenset(rule.steps for rule, _ in self._rules)

    @property
    def stops(self) -> bool:
        """Whether a tensor with NaN or Inf does more than make a warning, at once."""
        return any(rule.on_nonfinite not in (None, "warn") for rule, _ in self._rules)

    def at(self, step: int) -> Action | None:
        """Return what to do at a step."""
        known, action = self._now
        if known == step:
            return action
        on: tuple[int, ...]
        if len(self._rules) == 1:
            on = (0,) if self._rules[0][0].steps.includes(step) else ()
        else:
            on = tuple(i for i, (rule, _) in enumerate(self._rules) if rule.steps.includes(step))
        action = None
        if on:
            if on not in self._built:
                self._built[on] = action_for([self._rules[i] for i in on], self._tensor)
            action = self._built[on]
        self._now = (step, action)
        return action


def action_for(rules: Iterable[tuple[TensorRule, Serve | None]], tensor: str) -> Action:
    """Return what rules ask for a tensor together; a rule with a function is served by that."""
    rules = list(rules)
    measured = [rule for rule, serve in rules if serve is None]
    quantities: dict[str, Quantity] = {}
    for rule in measured:
        for request in rule.stats:
            quantities.setdefault(request.label, quantity(request, tensor))
    return Action(
        combine(quantities.values()) if measured else (),
        tuple(quantities.values()),
        frozenset(rule.on_nonfinite for rule in measured if rule.on_nonfinite is not None),
        tuple((serve, rule) for rule, serve in rules if serve is not None),
    )


def actions_for(config: Config, registry: Registry, layer: str, tensor: str, gemm: str | None) -> TensorActions | None:
    """Return what the configuration says of a tensor, ``None`` for nothing; `ConfigError` if two sections do."""
    section = config.section_for(layer)
    if section is None:
        return None
    rules: list[tuple[TensorRule, Serve | None]] = []
    for chosen in section.features:
        feature = registry.logs(chosen.namespace, chosen.name)
        if not chosen.enabled or feature is None:
            continue
        rule = chosen.rule(tensor, gemm)
        if rule is None:
            continue
        if _measures(feature):
            rules.append((replace(rule, stats=feature.requests(rule.stats, tensor)), None))
        else:
            rules.append((rule, _tolerant(feature.log_tensor_stats)))
    return TensorActions(rules, tensor) if rules else None


def _measures(feature: object) -> TypeGuard[MeasuringFeature]:
    """Whether the session may measure in the feature's place: it is built in, or derived without a change."""
    return isinstance(feature, MeasuringFeature) and not feature.overrides


def _tolerant(serve: Serve) -> Serve:
    """Leave out the arguments that a feature of the user's does not take."""
    try:
        takes = inspect.signature(serve).parameters
    except (TypeError, ValueError):
        return serve
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return serve
    unknown = [name for name in OPTIONAL if name not in takes]

    def serve_known(*args: Any, **kwargs: Any) -> Any:
        return serve(*args, **{name: value for name, value in kwargs.items() if name not in unknown})

    return serve_known if unknown else serve
