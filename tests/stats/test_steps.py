"""Which steps are logged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.config.steps import Steps, step_mistakes
from support.counted import lines_run


def naive(step, freq, ranges):
    """Say it as the documentation does; an end of ``None`` is no end, and all ends are exclusive."""
    return step % freq == 0 and any(start <= step and (end is None or step < end) for start, end in ranges)


@given(
    step=st.integers(0, 200), freq=st.integers(1, 20), start=st.integers(0, 100), length=st.none() | st.integers(0, 100)
)
def test_one_range_includes_its_end(step, freq, start, length):
    """The multiples of freq from start_step to end_step are logged, both included; -1 is no end."""
    steps = Steps(freq=freq, start_step=start, end_step=-1 if length is None else start + length)
    assert steps.includes(step) is naive(step, freq, [(start, None if length is None else start + length + 1)])


@given(
    step=st.integers(0, 120),
    freq=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True).filter(lambda cuts: len(cuts) % 2 == 0),
    endless=st.booleans(),
    inclusive=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_several_ranges(step, freq, cuts, endless, inclusive, order):
    """Of several ranges the ends are exclusive, in Transformer Engine's features inclusive; their order is free."""
    cuts.sort()
    ranges = [(cuts[i], cuts[i + 1]) for i in range(0, len(cuts), 2)]
    if endless:
        ranges[-1] = (ranges[-1][0], -1)
    expected = [(start, None if end == -1 else end + inclusive) for start, end in ranges]
    order.shuffle(ranges)
    steps = Steps(freq=freq, start_end_list=tuple(ranges), inclusive=inclusive)
    assert steps.includes(step) is naive(step, freq, expected)


def test_multiples_count_from_zero():
    """A range that starts between two multiples of freq does not shift them."""
    steps = Steps(freq=10, start_step=5, end_step=30)
    assert [step for step in range(100) if steps.includes(step)] == [10, 20, 30]


def test_by_default_every_step_is_logged():
    """Without settings, each step is logged."""
    steps = Steps.from_settings({})
    assert all(steps.includes(step) for step in (0, 1, 7, 10**12))
    assert steps == Steps()


@pytest.mark.parametrize(
    ("settings", "key", "rule"),
    [
        ({"freq": 0}, "freq", "must be an integer of 1 or more (freq: 0)"),
        ({"freq": -1}, "freq", "must be an integer of 1 or more (freq: -1)"),
        ({"freq": 2.0}, "freq", "must be an integer of 1 or more (freq: 2.0)"),
        ({"freq": True}, "freq", "must be an integer of 1 or more (freq: True)"),
        ({"freq": "2"}, "freq", "must be an integer of 1 or more (freq: '2')"),
        ({"freq": None}, "freq", "must be an integer of 1 or more (freq: None)"),
        ({"start_step": -1}, "start_step", "must be an integer of 0 or more (start_step: -1)"),
        ({"end_step": -2}, "end_step", "must be an integer of 0 or more, or -1 for no end (end_step: -2)"),
        (
            {"start_step": 9, "end_step": 8},
            "end_step",
            "must not be before start_step (start_step: 9, end_step: 8)",
        ),
        (
            {"start_end_list": [[0, 5]], "end_step": 8},
            "start_end_list",
            "cannot be combined with end_step (end_step: 8); remove one of them",
        ),
        (
            {"start_end_list": []},
            "start_end_list",
            "must be a list of [start, end] pairs (start_end_list: []), such as [[0, 100], [500, -1]]",
        ),
        (
            {"start_end_list": [[0, 5, 9]]},
            "start_end_list",
            "must hold pairs of integers [start, end] (found: [0, 5, 9])",
        ),
        (
            {"start_end_list": [[0, True]]},
            "start_end_list",
            "must hold pairs of integers [start, end] (found: [0, True])",
        ),
        (
            {"start_end_list": [[-1, 5]]},
            "start_end_list",
            "must hold steps of 0 or more, or -1 for no end (found: [-1, 5])",
        ),
        (
            {"start_end_list": [[5, 5]]},
            "start_end_list",
            "the end of a range must be after its start, as it is exclusive (found: [5, 5])",
        ),
        (
            {"start_end_list": [[8, 9], [0, -1]]},
            "start_end_list",
            "ranges must not overlap (found: [0, -1] and [8, 9])",
        ),
    ],
)
def test_a_mistake_is_told_with_its_rule(settings, key, rule):
    """Steps that make no sense are an error which says the rule and the values."""
    assert list(step_mistakes(settings)) == [(key, rule)]
    with pytest.raises(ValueError, match=key):
        Steps.from_settings(settings)


def test_all_mistakes_are_told():
    """One mistake does not hide another."""
    found = [key for key, _ in step_mistakes({"freq": 0, "start_step": "a", "end_step": -5, "start_end_list": 3})]
    assert {*found} == {"freq", "start_step", "end_step", "start_end_list"}


def test_ranges_may_touch():
    """A range may start where another ends, unless ends are inclusive."""
    ranges = {"start_end_list": [[0, 5], [5, 9]]}
    assert list(step_mistakes(ranges)) == []
    assert list(step_mistakes(ranges, inclusive=True)) == [
        ("start_end_list", "ranges must not overlap (found: [0, 5] and [5, 9])")
    ]
    assert Steps(start_end_list=((5, 5),), inclusive=True).includes(5)


def test_constructor_checks_too():
    """Steps made in code obey the same rules."""
    with pytest.raises(ValueError, match=r"freq: must be an integer of 1 or more \(freq: 0\)"):
        Steps(freq=0)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (Steps(), "every step"),
        (Steps(freq=10, start_step=5), "every 10 steps, 5 on"),
        (Steps(start_step=5, end_step=5), "every step, 5"),
        (Steps(freq=2, start_end_list=((0, 10), (20, -1))), "every 2 steps, 0 to 9, 20 on"),
    ],
)
def test_steps_are_written_for_people(steps, text):
    """As text, ranges say the last step that is logged."""
    assert str(steps) == text


@pytest.mark.parametrize("ranges", [1, 3, 1000])
def test_asking_is_cheap(ranges):
    """A look runs a few lines, however many ranges there are."""
    steps = Steps(freq=2, start_end_list=tuple((20 * i, 20 * i + 10) for i in range(ranges)))
    assert all(1 < lines_run(lambda step=step: steps.includes(step)) <= 4 for step in (0, 4, 7, 10, 24, 60_000))
