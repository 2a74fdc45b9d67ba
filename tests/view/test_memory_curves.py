"""Memory on the page: each partition over a step, with its peak, in the last steps where it was counted."""

from __future__ import annotations

from pipesight.analysis.memory import PARTS, MemoryCurve, MemoryReport
from pipesight.view.payload.memory_curves import POINTS, STEPS, last_counted, memory_of


def test_the_peak_survives_thinning():
    """Of a long step, evenly spread moments are kept, and the one with the most memory; times are those of the step."""
    count, peak = 5 * POINTS, 3 * POINTS + 1
    steps = tuple(step for step in range(STEPS + 2) for _ in range(count))
    values = [[1] * len(steps) for _ in PARTS]
    values[4][5 * count + peak] = 1000
    curve = MemoryCurve(0, 1, None, tuple(range(100, 100 + len(steps))), steps, tuple(map(tuple, values)))
    memory = MemoryReport(tuple(range(STEPS + 2)), (), (), (), (curve,))
    begins = {step: 100 + step * count - 7 for step in range(STEPS + 2)}
    found = memory_of(memory, begins)
    assert found is not None
    assert [step["number"] for step in found["steps"]] == list(range(2, STEPS + 2))
    (drawn,) = found["steps"][-1]["curves"]
    assert (drawn["name"], drawn["peak"], drawn["times"][0], drawn["times"][-1]) == ("partition 1", 1004, 7, count + 6)
    assert len(drawn["times"]) <= POINTS + 2
    assert drawn["values"][4][drawn["times"].index(peak + 7)] == 1000


def test_steps_that_all_partitions_counted():
    """A step that only one of two ranks counted is not drawn: the other would look as if it held nothing."""
    curves = [
        MemoryCurve(rank, rank, None, tuple(range(len(steps))), steps, tuple((1,) * len(steps) for _ in PARTS))
        for rank, steps in ((0, (0, 1, 8)), (1, (0, 1)))
    ]
    memory = MemoryReport((0, 1, 8), (), (), (), tuple(curves))
    found = memory_of(memory, dict.fromkeys((0, 1, 5, 8), 0))
    assert found is not None
    assert [(step["number"], len(step["curves"])) for step in found["steps"]] == [(0, 2), (1, 2)]
    assert last_counted(memory) == 1
    assert memory_of(memory, {5: 0, 8: 0}) is None


def test_without_memory_there_is_nothing():
    """A run that counted nothing has no section."""
    assert memory_of(None, {}) is None
    assert last_counted(None) is None
