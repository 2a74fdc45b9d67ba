"""Simulate devices that slow each other down: time advances from one begin or end of a task to the next.

Many batches are simulated at once, each with a clock of its own::

    batch 0   device 0 | F0 |  F1  |      from here on two run at once, so each is slower;
              device 1      |   F0    |   the next end is the least of what is left / rate
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.schedule.contention import rate_of

__all__ = ["simulate_contended"]

_Times = NDArray[np.float64]
_Numbers = NDArray[np.int64]


def simulate_contended(
    numbers: _Numbers, needs: _Numbers, took: _Times, late: _Times, gaps: _Times, count: int, rates: Sequence[float]
) -> tuple[_Times, _Times, _Times]:
    """Return when each task begins and ends, by its number, and when all have ended, for each batch.

    Args:
        numbers: The tasks of each device, in order; ``count + 1`` after the last.
        needs: The tasks that they wait for; ``count`` for none.
        took: How long each takes alone, by device, position in its order, and batch.
        late: How long after the end of what it waits for its input arrives.
        gaps: How long the device then waits before it begins, by device and position.
        count: The number of task numbers.
        rates: How fast each of 1, 2, ... devices computes while that many do.
    """
    devices, length, batch = took.shape
    rate = np.array([1.0, *(rate_of(rates, k) for k in range(1, devices + 1))])
    begin, end = (np.full((count + 2, batch), np.nan) for _ in range(2))
    end[count] = 0.0
    place, row = np.zeros((devices, batch), np.int64), np.arange(devices)[:, None]
    column, now = np.arange(batch)[None], np.zeros(batch)
    free = np.zeros((devices, batch))
    running, left = np.zeros((devices, batch), bool), np.zeros((devices, batch))
    rounding = 1e-12 * max(float(took.max(initial=0.0)), 1e-9)
    while True:
        at = np.minimum(place, length - 1)
        task = np.where(place < length, numbers[row, at], count + 1)
        waits = (task <= count) & ~running
        there = np.maximum(end[needs[row, at], column] + late[row, at, column], free)  # NaN until it is
        ready = np.where(waits, there + gaps[row, at], np.nan)
        starts = waits & (ready <= now)
        if starts.any():
            begin[task[starts], np.broadcast_to(column, task.shape)[starts]] = np.broadcast_to(now, task.shape)[starts]
            left[starts] = took[row, at, column][starts]
            running |= starts
        if not running.any() and not np.isfinite(ready[~starts]).any():
            return begin, end, now
        speed = rate[running.sum(axis=0)]
        until = np.where(running, left / speed, np.where(starts | np.isnan(ready), np.inf, ready - now)).min(axis=0)
        until = np.where(np.isfinite(until), until, 0.0)
        now = now + until
        left -= np.where(running, until * speed, 0.0)
        done = running & (left <= rounding)
        end[task[done], np.broadcast_to(column, task.shape)[done]] = np.broadcast_to(now, task.shape)[done]
        free = np.where(done, now, free)
        running &= ~done
        place = place + done
