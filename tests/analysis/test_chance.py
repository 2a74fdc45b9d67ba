"""Whether a place loses more than chance explains, with noise that is made: how often some place is blamed for it."""

from __future__ import annotations

import numpy as np
import pytest

from pipesight.analysis.chance import alike, beyond_chance, loses_most


def noise(seed: int, places: int, steps: int, like: float) -> np.ndarray:
    """Return normal noise, in which a step is like the one before it."""
    new = np.random.default_rng(seed).standard_normal((places, steps + 100))
    for step in range(1, steps + 100):
        new[:, step] = like * new[:, step - 1] + np.sqrt(1 - like**2) * new[:, step]
    return new[:, 100:]


def blamed(lost: np.ndarray) -> bool:
    return beyond_chance(lost, int(lost.mean(axis=1).argmax()))


@pytest.mark.parametrize("like", [0.0, 0.5])
@pytest.mark.parametrize(("places", "steps"), [(2, 12), (4, 12), (16, 40)])
def test_equal_places_are_not_blamed(places, steps, like):
    """In one of a hundred jobs, the slowest of equal places is blamed, and not in many more if noise comes in runs."""
    found = sum(blamed(noise(seed, places, steps, like)) for seed in range(400))
    assert found <= (12 if like == 0 else 40)


@pytest.mark.parametrize("cause", ["always", "half of the time", "once"])
def test_causes_are_seen(cause):
    """A place that is slow all the time, half of it, or once for long, is told from noise that is there, too."""
    for seed in range(50):
        lost = noise(seed, 4, 12, 0.3)
        lost[2] += {
            "always": 5.0,
            "half of the time": 10.0 * (np.arange(12) >= 6),
            "once": 60.0 * (np.arange(12) == 6),
        }[cause]
        assert beyond_chance(lost, 2)


def test_what_is_alike():
    """Steps that know nothing of each other are not alike; those of a slow wave are, however few there are."""
    found = [np.mean([alike([*noise(seed, 4, 20, like)]) for seed in range(100)]) for like in (0.0, 0.4, 0.8)]
    assert found == pytest.approx([0.0, 0.4, 0.8], abs=0.15)


def test_too_little_to_compare():
    """With one place, or two steps, nothing is known of chance."""
    assert beyond_chance(np.ones((1, 20)), 0)
    assert beyond_chance(np.ones((4, 2)), 0)


def bursts(seed: int, places: int, steps: int) -> np.ndarray:
    """Return what places lose that lose nothing in most steps, and much in some."""
    drawn = np.random.default_rng(seed)
    return drawn.exponential(10.0, (places, steps)) * (drawn.random((places, steps)) < 0.1)


@pytest.mark.parametrize(("places", "steps"), [(2, 40), (8, 40)])
def test_bursts_of_equal_places_are_not_blamed(places, steps):
    """Where all lose much in few steps, some place is blamed in at most five of a hundred jobs."""
    jobs = [bursts(seed, places, steps) for seed in range(300)]
    assert sum(any(loses_most(lost, place) for place in range(places)) for lost in jobs) <= 15


@pytest.mark.parametrize("places", [2, 8])
def test_a_place_with_the_largest_bursts(places):
    """A place that loses more than all others in many steps is seen, whatever it loses in the rest."""
    for seed in range(50):
        lost = bursts(seed, places, 60)
        lost[1, ::6] += 200.0
        assert loses_most(lost, 1)
        assert not loses_most(lost, 0)
