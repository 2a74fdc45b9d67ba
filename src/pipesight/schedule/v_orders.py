"""Orders whose stages lie in a V: each device has two, and the first device has the first and the last one.

With 2 devices and 4 stages, a micro-batch goes down the devices and comes up again::

    device 0   stage 0        stage 3        its loss is known where it began, so device 0 starts backwards early,
    device 1       stage 1 stage 2           and both devices hold equally much
"""

from __future__ import annotations

from collections.abc import Sequence

from pipesight.schedule.task_orders import WHOLE, B, F, Schedule, W, numbered, schedule_of

__all__ = ["dualpipev", "v_homes", "zbv"]


def v_homes(stages: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage.

    >>> v_homes(4, 8)
    (0, 1, 1, 0)

    Raises:
        ValueError: There is an odd number of stages, or no micro-batch.
    """
    if stages < 2 or stages % 2 or chunks < 1:
        raise ValueError(
            "a schedule in a V needs two stages per device, and a micro-batch "
            f"(stages: {stages}, chunks: {chunks}); use an even number of stages"
        )
    return tuple(min(s, stages - 1 - s) for s in range(stages))


def zbv(stages: int, chunks: int, *, recompute: Sequence[bool] = ()) -> Schedule:
    """Run split backwards in a V, so that no device waits if F, B and W take equally long (ZBV).

    Each device starts as many forwards as 1F1B would, each of half the size, and delays weight gradients only at the
    end. With fewer than 2n - 1 micro-batches on n devices, it is the order for so many without those that are missing.

    >>> [tuple(task) for task in zbv(2, 1).order[0].tolist()]
    [(0, 0, 0), (0, 1, 0), (2, 1, 0), (3, 1, 0), (2, 0, 0), (3, 0, 0)]
    """
    homes, n = v_homes(stages, chunks), stages // 2
    m = max(2 * n - 1, chunks)
    orders = []
    for d in range(n):
        low, high = d, stages - 1 - d
        steps = [(F, low)] * (2 * (n - d) - 1) + [(F, high), (F, low)] * d
        steps += [(F, high), (B, high), (W, high)] * (n - d)
        both = [(B, low), (W, low), (F, high), (B, high), (W, high)]
        more = m - (2 * n - 1 - d)  # forwards that are left
        steps += [(F, low), *both] * more + both * (m - n - more)
        steps += [(B, low), (B, high)] * d + [(B, low), (W, low)] * (n - d)
        orders.append(numbered([*steps, *[(W, high)] * d, *[(W, low)] * d], chunks))
    return schedule_of("zbv-zero-bubble", homes, chunks, orders, recompute)


def dualpipev(stages: int, chunks: int, *, recompute: Sequence[bool] = ()) -> Schedule:
    """Run forwards and backwards of the two stages in pairs, which kernels of one and messages of the other can share.

    Only at the begin and the end are backwards split.

    >>> dualpipev(2, 2).order[0].tolist()[-2:]
    [[2, 0, 1], [3, 0, 1]]

    Raises:
        ValueError: There are fewer micro-batches than stages.
    """
    homes, n = v_homes(stages, chunks), stages // 2
    if chunks < stages:
        raise ValueError(
            f"dualpipev needs at least as many chunks as stages (chunks: {chunks}, stages: {stages}); "
            "use schedule='zbv-zero-bubble'"
        )
    return schedule_of("dualpipev", homes, chunks, [_paired(d, n, chunks) for d in range(n)], recompute)


def _paired(d: int, n: int, chunks: int) -> list[tuple[int, int, int]]:
    """Return the tasks of a device in DualPipeV."""
    low, high, after = d, 2 * n - 1 - d, n - 1 - d
    steps = [(F, low)] * (2 * after) + [(F, low), (F, high)] * (d + 1)
    steps += [(B, high), (W, high), (F, high)] * after
    # Whole backwards, each beside a forward of the other stage.
    steps += [(F, low), (WHOLE, high), (F, high), (WHOLE, low)] * (chunks - 2 * n + d + 1)
    steps += [(WHOLE, high), (F, high), (WHOLE, low)] * after
    # Only backwards are left. Half of the pairs are whole; the weight gradients of the others come while later devices
    # run theirs.
    pairs = [high, low] * (d + 1)
    waiting = pairs[d + 1 :] + [low] * after
    steps += [(WHOLE, stage) for stage in pairs[: d + 1]] + [(B, stage) for stage in pairs[d + 1 :]]
    for stage in waiting[:after]:
        steps += [(W, stage), (B, low)]
    return numbered(steps + [(W, stage) for stage in waiting[after:]], chunks)
