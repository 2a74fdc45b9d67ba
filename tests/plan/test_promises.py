"""Every kind of advice, taken: the step gets faster by what the report promised."""

from __future__ import annotations

import pytest
import torch

from pipesight.analysis.planned_changes import AT_LEAST, AT_MOST
from support.promising import CASES, Kept

WITHIN = 0.1
"""Of the step, by which a promise may be off."""
TURNS = 5
"""A machine that stops for a moment breaks any promise; over several turns, the shortest steps count."""


def is_kept(found: Kept) -> bool:
    """Tell whether a simulated gain is the measured one, and a limit is one, within 10 points."""
    promised, measured = found.change.gain, found.measured
    if found.change.promise == AT_MOST:
        return 0 < measured <= promised + WITHIN
    if found.change.promise == AT_LEAST:
        return measured >= promised - WITHIN
    return abs(measured - promised) <= WITHIN


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_promise_is_kept(case, tmp_path):
    """Who takes the advice has the gain, by the watch."""
    torch.set_num_threads(1)
    found: Kept | None = None
    for turn in range(TURNS):
        (folder := tmp_path / str(turn)).mkdir()
        try:
            latest = case(folder)
        except LookupError:
            if turn == TURNS - 1:
                raise
            continue
        found = latest if found is None else found.again(latest)
        if is_kept(found):
            return
    raise AssertionError(found)
