"""The modules of a model by the time spent in them alone, not in those inside, with their names.

Every call of every module is recorded in some steps only, since that takes time; times of modules are of those steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.program_steps import is_backward, is_call
from pipesight.analysis.program_time import Pieces
from pipesight.runs.reading.event_codes import EVALUATION

__all__ = ["ModuleTime", "ModuleTimes", "shows_modules", "times_of_modules"]


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """A module and what it takes in a step alone, in microseconds: mean over the steps that show it, and over ranks."""

    name: str
    """Its name in the model that the program calls; the class, for the model itself."""
    type: str
    """The class."""
    model: str
    """The class of the model that the program calls."""
    calls: float
    """Forwards in a step."""
    forward: float
    """In its forwards, and likewise the next two."""
    recompute: float
    """In forwards that run again during a backward."""
    backward: float
    """In its backwards, as far as they are told apart by module."""
    whole_forward: float
    """The forward with all modules inside; likewise the next."""
    whole_backward: float
    """With all modules inside."""
    share: float
    """Of the time in all modules."""

    @property
    def total(self) -> float:
        """What it takes alone, in all."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class ModuleTimes:
    """The modules, longest first."""

    modules: tuple[ModuleTime, ...] = ()
    """Each by its name."""
    steps: int = 0
    """How many steps show every module."""


_FORWARD, _RECOMPUTE, _BACKWARD = range(3)


def shows_modules(pieces: Pieces) -> np.ndarray:
    """Return which pieces are modules inside of a model: those of steps that show all; of recomputation, any does."""
    again = np.array([part == "recompute" for part in pieces.part], bool)
    found: np.ndarray = (pieces.spans.layer != "") & ~again
    return found


def times_of_modules(ranks: Sequence[tuple[Pieces, np.ndarray]]) -> ModuleTimes:
    """Add up the times of modules.

    ``ranks`` has the pieces of each, and which of its steps count.
    """
    sums: dict[tuple[str, str, str], np.ndarray] = {}
    shown = 0
    for pieces, counted in ranks:
        spans = pieces.spans
        calls, backwards = is_call(spans), is_backward(spans)
        modules = (calls | backwards) & (spans.module != "") & (spans.kind != EVALUATION) & counted[pieces.step]
        detailed = np.unique(pieces.step[modules & shows_modules(pieces)])
        if not len(detailed):
            detailed = np.unique(pieces.step[modules])
        modules &= np.isin(pieces.step, detailed)
        shown += len(detailed)
        # The outermost module around each, whose class tells models apart that have modules of the same name.
        model: list[str] = []
        for row, outer in enumerate(pieces.outer.tolist()):
            around = model[outer] if outer >= 0 else ""
            model.append(around or (str(spans.module[row]) if modules[row] else ""))
        for row in np.flatnonzero(modules).tolist():
            key = (model[row], str(spans.layer[row]), str(spans.module[row]))
            own = sums.setdefault(key, np.zeros(6))
            way = _BACKWARD if backwards[row] else _RECOMPUTE if pieces.part[row] == "recompute" else _FORWARD
            own[way] += pieces.alone[row]
            if way != _RECOMPUTE:
                own[3 if way == _FORWARD else 4] += spans.end[row] - spans.begin[row]
            own[5] += way == _FORWARD
    everything = max(sum(float(own[:3].sum()) for own in sums.values()), 1e-9)
    steps = max(shown, 1)
    found = [
        ModuleTime(
            name=layer or kind,
            type=kind,
            model=model,
            calls=float(own[5]) / steps,
            forward=float(own[_FORWARD]) / steps,
            recompute=float(own[_RECOMPUTE]) / steps,
            backward=float(own[_BACKWARD]) / steps,
            whole_forward=float(own[3]) / steps,
            whole_backward=float(own[4]) / steps,
            share=float(own[:3].sum()) / everything,
        )
        for (model, layer, kind), own in sums.items()
    ]
    return ModuleTimes(tuple(sorted(found, key=lambda module: -module.total)), shown // max(len(ranks), 1))
