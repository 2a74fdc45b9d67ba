"""Which dimension of an argument or of an output is the batch: what the user says, and what was seen so far.

Names are paths: an argument of ``forward``, ``inputs.mask`` of one that is nested, and ``output``, ``output.logits`` of
what the model returns. The longest one that fits counts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torch import nn

from pipesight._user_warnings import warn_user

__all__ = ["BatchDim", "BatchDims", "Rule"]

Rule: TypeAlias = int | Literal["items", "first", "sum"] | None
"""A dimension; None if it does not depend on the batch; ``items`` of a list with one item for each sample; of outputs,
``first`` to take that of the first micro-batch, and ``sum`` to add those of all."""

BatchDim: TypeAlias = int | Mapping[str | int, Rule] | None

_OUTPUT = "output"


class BatchDims:
    """Answers which dimension is the batch.

    Args:
        given: The user's ``batch_dim``: a dimension for all, or one by name or position of an argument, or nothing.
        signature: That of the model's ``forward``, if known: names of positional arguments come from it.
        more: Names of arguments beside those, which are samples unless the user says otherwise: a target.
        model: The model, to find out in doubt whether it takes all of an argument as well as a part.
    """

    def __init__(
        self,
        given: BatchDim = None,
        signature: inspect.Signature | None = None,
        more: Iterable[str] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.model, self._asked = model, set[str]()
        parameters = list(signature.parameters.values()) if signature is not None else []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in parameters if p.kind in kinds]
        self._known = {p.name for p in parameters if p.kind in (*kinds, inspect.Parameter.KEYWORD_ONLY)}
        self._closed = bool(parameters) and len(self._known) == len(parameters)  # no *args, no **kwargs
        self._beside = {*more}
        self._known |= self._beside
        self.default = 0 if given is None or isinstance(given, Mapping) else _checked(given, "batch_dim")
        self._rules: dict[str, Rule] = {}
        if isinstance(given, Mapping):
            for key, rule in given.items():
                name = self.name_of(key) if isinstance(key, int) else str(key)
                self._check_name(name, key)
                self._rules[name] = _checked(rule, f"batch_dim[{key!r}]")
                if rule in ("first", "sum") and name.partition(".")[0] != _OUTPUT:
                    raise ValueError(f"batch_dim[{key!r}] must not be {rule!r}, since it is an argument, not an output")
        self._seen: dict[str, tuple[bool, int, tuple[int, ...]]] = {}
        self._warned: set[str] = set()
        self.has_contrasts = False
        """Whether samples were seen to be scored against each other."""

    def name_of(self, position: int) -> str:
        """Return the name of a positional argument, or its position where the name is not known."""
        return self._positional[position] if position < len(self._positional) else str(position)

    def rule(self, name: str) -> tuple[Rule, bool]:
        """Return the rule for what is called ``name``, and whether it is for this very one."""
        parts = name.split(".")
        names = (".".join(parts[:stop]) for stop in range(len(parts), 0, -1))
        found = next((known for known in names if known in self._rules), None)
        return (self.default, False) if found is None else (self._rules[found], found == name)

    def says(self, name: str) -> bool:
        """Return whether this is no guess: the user has said it, of this or of what it is in, or it is a target."""
        parts = name.split(".")
        return parts[0] in self._beside or any(
            ".".join(parts[:stop]) in self._rules for stop in range(len(parts), 0, -1)
        )

    def of_model(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model among those of a call: all but the target."""
        return {name: value for name, value in arguments.items() if name not in self._beside}

    def with_rules(self, names: Iterable[str], rule: Rule) -> BatchDims:
        """Return the same, with what some are."""
        other = copy.copy(self)
        other._rules = {**self._rules, **dict.fromkeys(names, rule)}
        other._seen, other._warned, other._asked = dict(self._seen), set(self._warned), set(self._asked)
        other.model = None
        return other

    def learn(self, names: Iterable[str], rule: Rule) -> None:
        """Note what some are, as if the user had said it; what the model said of others was said without that."""
        self._rules.update(dict.fromkeys(names, rule))
        self._asked.clear()

    def is_new(self, name: str) -> bool:
        """Tell once whether the model was not asked before about an argument."""
        new = name not in self._asked
        self._asked.add(name)
        return new

    def listed(self, rule: Rule) -> set[str]:
        """Return the names with this rule."""
        return {name for name, value in self._rules.items() if value == rule and type(value) is type(rule)}

    def check_used(self, names: Iterable[str], arguments: Iterable[str]) -> None:
        """Warn of names in ``batch_dim`` that fit nothing in a call, unless the argument was not given."""
        everything, given = set(names), set(arguments)
        for name in self._rules:
            root = name.partition(".")[0]
            if root == _OUTPUT or (root in self._known and root not in given) or name in self._warned:
                continue
            if not any(path == name or path.startswith(f"{name}.") for path in everything):
                self._warn(name, f"batch_dim names {name!r}, but the call has only {', '.join(sorted(given))}")

    def seen(self) -> dict[str, tuple[bool, int, tuple[int, ...]]]:
        """Return what was guessed so far."""
        return dict(self._seen)

    def forget_but(self, seen: Mapping[str, tuple[bool, int, tuple[int, ...]]]) -> None:
        """Forget what was guessed since `seen`, in a call that failed."""
        self._seen = dict(seen)

    def follows(self, name: str) -> None:
        """Note that this is cut with the samples, whatever it was taken for before."""
        self._seen.pop(name, None)
        self._warned.add(name)

    def seen_whole(self, name: str) -> bool:
        """Whether this was not of the size of the batch in an earlier call."""
        return name in self._seen and not self._seen[name][0]

    def remember(self, name: str, cut: bool, size: int, shape: Iterable[int]) -> None:
        """Note what was guessed, and warn if it is not what was guessed before."""
        now = (cut, size, tuple(shape))
        before = self._seen.setdefault(name, now)
        if before[0] == cut or name in self._warned:
            return
        self._seen[name] = min(before, now)  # what was once not of the size of the batch is not cut any more
        whole, part = sorted((before, now))
        self._warn(
            name,
            f"{name!r} looked like samples when the batch had {part[1]} (shape: {list(part[2])}), and not when it had "
            f"{whole[1]} (shape: {list(whole[2])}); say which it is: batch_dim={{{name!r}: {self.default}}} if it is "
            f"cut into micro-batches, batch_dim={{{name!r}: None}} if each gets all of it",
        )

    def warn_of_doubt(self, name: str, why: str, dim: Any) -> None:
        """Warn of a guess that may be wrong."""
        if name not in self._warned:
            self._warn(
                name,
                f"{name!r} {why}; say which it is: batch_dim={{{name!r}: {dim}}} if it is cut into micro-batches, "
                f"batch_dim={{{name!r}: None}} if each gets all of it",
            )

    def warn_of_contrasts(self, *names: str) -> None:
        """Warn that samples are scored against each other."""
        self.has_contrasts = True
        if names[0] not in self._warned:
            self._warn(
                names[0],
                f"{' and '.join(map(repr, names))} score{'s' * (len(names) == 1)} the samples of a micro-batch against "
                "each other, and not against those of other micro-batches, so that it is not what the whole batch "
                "gives, nor is a loss made of it; use chunks=1, or compute it outside the pipeline; "
                "loss_weight='samples' if this is what you want",
            )

    def warn_of_square(self, name: str, shape: list[int]) -> None:
        """Warn that samples may be scored against each other."""
        self._warn(
            name,
            f"{name!r} has as many columns as a micro-batch has samples (shape: {shape}); if it scores samples against "
            f"each other, use chunks=1; if these are classes, say so: batch_dim={{{name!r}: 0}}",
        )

    def warn_of_change(self, name: str) -> None:
        """Warn that the model changes an argument that it does not return."""
        if name not in self._warned:
            self._warn(
                name,
                f"the model changes its argument {name!r} and does not return it: each micro-batch changed a copy, and "
                "yours is as it was; return it from forward, then it is filled with what all micro-batches put into it",
            )

    def _warn(self, name: str, message: str) -> None:
        self._warned.add(name)
        warn_user(message)

    def _check_name(self, name: str, key: str | int) -> None:
        root = name.partition(".")[0]
        if self._closed and root not in self._known and root != _OUTPUT:
            raise ValueError(
                f"batch_dim names {key!r}, but forward has only the arguments {', '.join(sorted(self._known))} "
                f"(what it returns is called 'output', 'output.field')"
            )


def _checked(rule: Any, what: str) -> Any:
    if rule is None or rule in ("items", "first", "sum") or (type(rule) is int and rule >= 0):
        return rule
    raise ValueError(
        f"{what} must be a dimension (0, 1, ...), None if each micro-batch gets all of it, or 'items' for a list with "
        f"one item for each sample; of outputs, also 'first' or 'sum' (got: {rule!r})"
    )
