"""The order in which each device runs its tasks: GPipe, 1F1B, looped and interleaved ones, zero-bubble, recorded ones.

A task is a kind, a stage and a micro-batch. Kinds are `F`, a forward, `R`, the forward again for a backward that has no
activations, `B`, a backward, and `W`, the gradients of the weights where they are a task of their own. Then `B` is only
the gradient of the input. For 3 stages and 4 micro-batches, if all tasks take equally long::

    gpipe        0  F0 F1 F2 F3             B3 B2 B1 B0
                 1     F0 F1 F2 F3       B3 B2 B1 B0
                 2        F0 F1 F2 F3 B3 B2 B1 B0
    one_f_one_b  0  F0 F1 F2       B0 F3 B1    B2    B3
                 1     F0 F1    B0 F2 B1 F3 B2    B3
                 2        F0 B0 F1 B1 F2 B2 F3 B3
    zero_bubble  0  F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
                 1     F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                 2        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Devices follow no clock: each takes the next task of its list as soon as the input of that task has arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.argument_checks import check_checkpoint, checkpoint_stop

__all__ = [
    "KINDS",
    "WHOLE",
    "B",
    "F",
    "Order",
    "R",
    "Schedule",
    "W",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "numbered",
    "one_f_one_b",
    "recomputed",
    "recomputing",
    "recorded",
    "schedule_of",
    "zero_bubble",
]

F, R, B, W = range(4)
KINDS = "FRBW"
WHOLE = 4
"""A backward with the gradients of the weights, among those without; for `numbered` only."""

Order: TypeAlias = NDArray[np.int32]
"""The tasks of each device: kind, stage, micro-batch; -1 after the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Which device runs which tasks, in which order.

    Raises:
        ValueError: A task occurs twice, on a device that does not have its stage, or before a task of the same stage
            and micro-batch that it needs.
    """

    name: str
    """Such as `gpipe` or `1f1b`."""
    stages: int
    """How many parts the model is cut into."""
    chunks: int
    """Micro-batches per mini-batch."""
    device_of_stage: tuple[int, ...]
    """The device that runs each stage."""
    order: Order
    """The tasks of each device: kind, stage, micro-batch; -1 after the last."""
    joined: bool = False
    """Whether everything but forwards waits until the last stage has run all of them, as for the loss of a batch."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.order)

    @property
    def split(self) -> NDArray[np.bool_]:
        """For each stage and micro-batch, whether the gradients of the weights are a task of their own."""
        weights = self.order[self.order[..., 0] == W]
        found = np.zeros((self.stages, self.chunks), bool)
        found[weights[:, 1], weights[:, 2]] = True
        return found

    @property
    def tasks(self) -> int:
        """The number of tasks on all devices."""
        return int((self.order[..., 0] >= 0).sum())


def gpipe(
    stages: int,
    chunks: int,
    *,
    recompute: Sequence[bool] = (),
    device_of_stage: Sequence[int] | None = None,
    joined: bool = False,
) -> Schedule:
    """Run all forwards, then all backwards, the last micro-batch first.

    A recomputation comes right before its backward, and does not wait for the gradient. With ``joined``, neither starts
    before all forwards have ended, as in `pipesight.GPipe`, which knows the loss only then.

    >>> gpipe(2, 2).order[0].tolist()
    [[0, 0, 0], [0, 0, 1], [2, 0, 1], [2, 0, 0]]

    Args:
        stages: How many there are.
        chunks: How many micro-batches there are.
        recompute: For each micro-batch, whether its forward is run again; see `recomputed`.
        device_of_stage: Where each stage runs; by default, each on a device of its own. Stages on one device take
            turns: micro-batch i in stage s goes before micro-batch i - 1 in stage s + 1.
        joined: Whether to wait for all forwards.
    """
    homes = _homes(stages, chunks, device_of_stage)
    orders = []
    for device in range(max(homes) + 1):
        s = np.repeat([stage for stage in range(stages) if homes[stage] == device], chunks)
        i = np.tile(np.arange(chunks), len(s) // chunks)
        turn = np.lexsort((s, i + s)) if len(s) > chunks else np.arange(chunks)
        forward = _tasks(F, s[turn], i[turn])
        backward = forward[::-1].copy()
        backward[:, 0] = B
        orders.append(np.concatenate([forward, backward]))
    return Schedule("gpipe", stages, chunks, homes, _order(orders, chunks, recompute), joined)


def one_f_one_b(
    stages: int,
    chunks: int,
    *,
    recompute: Sequence[bool] = (),
    device_of_stage: Sequence[int] | None = None,
) -> Schedule:
    """Run a backward as soon as there is one, so that at most ``stages`` micro-batches are under way.

    >>> one_f_one_b(2, 2).order[1].tolist()
    [[0, 1, 0], [2, 1, 0], [0, 1, 1], [2, 1, 1]]
    """
    homes = _homes(stages, chunks, device_of_stage)
    i = np.arange(chunks)
    orders = []
    for s in range(stages):
        orders.append(_alternate(_tasks(F, s, i), _tasks(B, s, i), ahead=stages - 1 - s))
    alone = Schedule("1f1b", stages, chunks, tuple(range(stages)), _order(orders, chunks, recompute))
    return alone if homes == alone.device_of_stage else _on_devices(alone, homes)


def interleaved(stages: int, chunks: int, *, devices: int, recompute: Sequence[bool] = ()) -> Schedule:
    """Run 1F1B with several stages per device, so that a micro-batch visits each device several times.

    Stage s is on device s % devices. The shorter stages make the bubble shorter: with v of them per device it is
    (n - 1) / (v * m + n - 1).

    >>> interleaved(4, 2, devices=2).order[1, :, :2].tolist()
    [[0, 1], [0, 1], [0, 3], [2, 3], [0, 3], [2, 3], [2, 1], [2, 1]]

    Raises:
        ValueError: The devices cannot have equally many stages, or the micro-batches cannot come in equally large
            groups, each as large as there are devices or larger.
    """
    loop = _Loop(stages, chunks, devices)
    orders = [
        _alternate(*loop.tasks(device), ahead=(loop.turns - 1) * loop.group + 2 * (devices - 1 - device))
        for device in range(devices)
    ]
    return Schedule("interleaved", stages, chunks, loop.homes, _order(orders, chunks, recompute))


def looped_bfs(stages: int, chunks: int, *, devices: int, recompute: Sequence[bool] = ()) -> Schedule:
    """Run all micro-batches in the first stage of each device, then all in its next; backwards in reverse.

    Stage s is on device s % devices.

    >>> looped_bfs(4, 2, devices=2).order[0, :, 1].tolist()
    [0, 0, 2, 2, 2, 2, 0, 0]
    """
    homes = _looped(stages, chunks, devices)
    orders = []
    for device in range(devices):
        forward = _tasks(
            F, np.repeat(np.arange(device, stages, devices), chunks), np.tile(np.arange(chunks), stages // devices)
        )
        backward = forward[::-1].copy()
        backward[:, 0] = B
        orders.append(np.concatenate([forward, backward]))
    return Schedule("looped-bfs", stages, chunks, homes, _order(orders, chunks, recompute))


def zero_bubble(stages: int, chunks: int, *, devices: int | None = None, recompute: Sequence[bool] = ()) -> Schedule:
    """Run 1F1B with input gradients first, and weight gradients where there would be a gap (ZB-H1).

    Device d delays the weight gradients of d micro-batches, so that none holds more than the first one in 1F1B. With
    fewer ``devices`` than stages, stages are interleaved: stage s is on device s % devices.

    >>> zero_bubble(2, 2).order[1].tolist()
    [[0, 1, 0], [2, 1, 0], [0, 1, 1], [2, 1, 1], [3, 1, 0], [3, 1, 1]]
    """
    loop = _Loop(stages, chunks, stages if devices is None else devices)
    orders = []
    for device in range(max(loop.homes) + 1):
        forwards, backwards = loop.tasks(device)
        ahead = (loop.turns - 1) * loop.group + max(loop.homes) - device
        tasks = _alternate(forwards, backwards, ahead=ahead)
        places = np.flatnonzero(tasks[:, 0] == B)
        after = np.concatenate([places[device:], np.full(min(device, len(places)), len(tasks) - 1)])
        orders.append(np.insert(tasks, after + 1, _tasks(W, backwards[:, 1], backwards[:, 2]), axis=0))
    return Schedule("zero-bubble", stages, chunks, loop.homes, _order(orders, chunks, recompute))


def recorded(order: ArrayLike, *, name: str = "recorded", joined: bool = False) -> Schedule:
    """Make a schedule from a recorded order: the tasks of each device (kind, stage, micro-batch), padded with -1.

    >>> recorded([[[F, 0, 0], [B, 0, 0]], [[F, 1, 0], [B, 1, 0]]]).device_of_stage
    (0, 1)

    Raises:
        ValueError: It is no such array, or one stage is on two devices.
    """
    tasks = np.asarray(order)
    if tasks.ndim != 3 or tasks.shape[-1] != 3 or not np.issubdtype(tasks.dtype, np.integer):
        raise ValueError(
            f"an order must be integers of shape (devices, tasks, 3) (shape: {tasks.shape}, dtype: {tasks.dtype})"
        )
    real = tasks[..., 0] >= 0
    if not real.any():
        raise ValueError("an order must have at least one task (tasks: 0)")
    stages, chunks = (int(tasks[real][:, column].max()) + 1 for column in (1, 2))
    homes = np.zeros(stages, int)
    homes[tasks[..., 1][real]] = np.broadcast_to(np.arange(len(tasks))[:, None], real.shape)[real]
    return Schedule(name, stages, chunks, tuple(homes.tolist()), tasks.astype(np.int32), joined)


def recomputed(checkpoint: str, chunks: int) -> tuple[bool, ...]:
    """Return which micro-batches are recomputed in a checkpoint mode of `pipesight.GPipe`.

    >>> recomputed("except_last", 3)
    (True, True, False)
    """
    stop = checkpoint_stop(check_checkpoint(checkpoint), chunks)
    return tuple(i < stop for i in range(chunks))


def recomputing(schedule: Schedule, recompute: Sequence[bool]) -> Schedule:
    """Return the same schedule with recomputations before their backwards; one that has some keeps its own.

    ``recompute`` says for each micro-batch whether its forward is run again; see `recomputed`.
    """
    if not any(recompute) or (schedule.order[..., 0] == R).any():
        return schedule
    lists = [row[row[:, 0] >= 0] for row in schedule.order]
    return replace(schedule, order=_order(lists, schedule.chunks, recompute))


# Parts of orders.


def schedule_of(
    name: str, homes: Sequence[int], chunks: int, orders: Iterable[ArrayLike], recompute: Sequence[bool] = ()
) -> Schedule:
    """Make a schedule of the tasks of each device, with recomputations added before their backwards.

    Args:
        name: That of the schedule.
        homes: The device of each stage.
        chunks: How many micro-batches there are.
        orders: The tasks of each device: kind, stage, micro-batch.
        recompute: For each micro-batch, whether its forward is run again; see `recomputed`.
    """
    lists = [np.asarray(tasks, np.int32).reshape(-1, 3) for tasks in orders]
    return Schedule(name, len(homes), chunks, tuple(homes), _order(lists, chunks, recompute))


def numbered(steps: Iterable[tuple[int, int]], chunks: int) -> list[tuple[int, int, int]]:
    """Give the tasks of a device, of which kind and stage are known, the next micro-batch each; drop those beyond.

    Weight gradients take the first micro-batch that waits for its own. Those of a backward of kind `WHOLE` are part of
    it.

    >>> numbered([(F, 0), (F, 0), (WHOLE, 0), (B, 0), (W, 0), (F, 0)], chunks=2)
    [(0, 0, 0), (0, 0, 1), (2, 0, 0), (2, 0, 1), (3, 0, 1)]
    """
    forwards, backwards = Counter[int](), Counter[int]()
    waiting: dict[int, deque[int]] = {}
    found = []
    for kind, stage in steps:
        if kind == W:
            i = waiting[stage].popleft()
        else:
            count = forwards if kind == F else backwards
            i, count[stage] = count[stage], count[stage] + 1
            if kind == B:
                waiting.setdefault(stage, deque()).append(i)
        if i < chunks:
            found.append((B if kind == WHOLE else kind, stage, i))
    return found


class _Loop:
    """Stages that go round the devices, and micro-batches that come in groups, through all stages of a device each.

    Raises:
        ValueError: Numbers do not fit.
    """

    def __init__(self, stages: int, chunks: int, devices: int) -> None:
        self.homes = _looped(stages, chunks, devices)
        groups, self.turns, self._devices = max(1, chunks // devices), stages // devices, devices
        if chunks % groups and self.turns > 1:
            raise ValueError(
                "chunks must come in equally large groups where stages are interleaved, of as many chunks as there are "
                f"devices or more (chunks: {chunks}, devices: {devices}); use chunks={chunks // devices * devices}"
            )
        self.group = chunks // groups if self.turns > 1 else devices
        """How many micro-batches go through all stages of a device before the next ones do."""
        turn = np.arange(self.turns * chunks)
        several = self.turns > 1
        self._i = turn // (self.group * self.turns) * self.group + turn % self.group if several else turn
        self._down = turn // self.group % self.turns if several else turn * 0

    def tasks(self, device: int) -> tuple[Order, Order]:
        """Return the forwards and the backwards of a device, each in the order in which it runs them."""
        up = self.turns - 1 - self._down
        down = _tasks(F, self._down * self._devices + device, self._i)
        return down, _tasks(B, up * self._devices + device, self._i)


def _looped(stages: int, chunks: int, devices: int) -> tuple[int, ...]:
    """Return the devices of stages that go round."""
    homes = _homes(stages, chunks, [s % devices for s in range(stages)] if devices > 0 else [])
    if stages % devices:
        raise ValueError(f"stages must be a multiple of devices (stages: {stages}, devices: {devices})")
    return homes


def _homes(stages: int, chunks: int, device_of_stage: Sequence[int] | None) -> tuple[int, ...]:
    """Return the device of each stage, and check the numbers that all schedules need."""
    if stages < 1 or chunks < 1:
        raise ValueError(f"stages and chunks must be positive integers (stages: {stages}, chunks: {chunks})")
    if device_of_stage is None:
        return tuple(range(stages))
    homes = tuple(int(device) for device in device_of_stage)
    if len(homes) != stages or {*homes} != {*range(max(homes, default=0) + 1)}:
        raise ValueError(
            "each stage must have a device, and each device from 0 on a stage "
            f"(stages: {stages}, device_of_stage: {list(homes)})"
        )
    return homes


def _tasks(kind: int, s: ArrayLike, i: ArrayLike) -> Order:
    return np.stack(np.broadcast_arrays(np.int32(kind), s, i), axis=-1).astype(np.int32)


def _alternate(forwards: Order, backwards: Order, *, ahead: int) -> Order:
    """Run some forwards ahead, then a forward and a backward in turns, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    both = np.empty((2 * len(forwards), 3), np.int32)
    middle = both[ahead : len(both) - ahead]
    both[:ahead] = forwards[:ahead]
    middle[::2], middle[1::2] = forwards[ahead:], backwards[: len(backwards) - ahead]
    both[len(both) - ahead :] = backwards[len(backwards) - ahead :]
    return both


def _order(orders: Iterable[Order], chunks: int, recompute: Sequence[bool]) -> Order:
    """Put recomputations before their backwards, and the lists of all devices into one array."""
    again = np.asarray(recompute if len(recompute) else [False] * chunks, bool)
    if len(again) != chunks:
        raise ValueError(f"recompute must have a flag for each micro-batch (flags: {len(again)}, chunks: {chunks})")
    lists = [_recomputing(tasks, again) for tasks in orders] if again.any() else list(orders)
    order = np.full((len(lists), max(map(len, lists)), 3), -1, np.int32)
    for device, tasks in enumerate(lists):
        order[device, : len(tasks)] = tasks
    return order


def _recomputing(tasks: Order, again: NDArray[np.bool_]) -> Order:
    wanted = (tasks[:, 0] == B) & again[tasks[:, 2]]
    doubled = np.repeat(tasks, 1 + wanted, axis=0)
    doubled[np.cumsum(1 + wanted)[wanted] - 2, 0] = R
    return doubled


def _on_devices(schedule: Schedule, homes: tuple[int, ...]) -> Schedule:
    """Let stages share devices: in the order in which their tasks would start if they did not."""
    from pipesight.schedule.simulation import simulate  # which needs the schedules of this module

    begins = simulate(schedule, np.array([1.0, 1.0, 2.0, 1.0])[:, None, None]).begin
    orders = []
    for device in range(max(homes) + 1):
        rows = schedule.order[[s for s in range(schedule.stages) if homes[s] == device]]
        tasks = rows[rows[..., 0] >= 0]
        orders.append(tasks[np.lexsort((-tasks[:, 1], begins[tasks[:, 0], tasks[:, 1], tasks[:, 2]]))])
    return Schedule(schedule.name, schedule.stages, schedule.chunks, homes, _order(orders, schedule.chunks, ()))


def _check(schedule: Schedule) -> None:
    stages, chunks, homes = schedule.stages, schedule.chunks, np.asarray(schedule.device_of_stage)
    if len(homes) != stages:
        raise ValueError(f"each stage must have a device (stages: {stages}, device_of_stage: {homes.tolist()})")
    places = np.full((len(KINDS), stages, chunks), -1, np.int32)
    found = 0
    for device, row in enumerate(schedule.order):  # one by one: all together may exceed the caches
        count = int((row[:, 0] >= 0).sum())
        tasks, found = row[:count], found + count
        if count and tasks[:, 0].min() < 0:
            raise ValueError(f"the tasks of a device must come before the -1 that follow the last (device: {device})")
        for column, (limit, what) in enumerate(((len(KINDS), "kinds"), (stages, "stages"), (chunks, "chunks"))):
            if count and not 0 <= tasks[:, column].min() <= (most := tasks[:, column].max()) < limit:
                raise ValueError(f"a task is beyond the {what} (its number: {most}, {what}: {limit})")
        if (homes[tasks[:, 1]] != device).any():
            raise ValueError(
                "each task must be on the device of its stage, and each stage on one device "
                f"(device: {device}, device_of_stage: {homes.tolist()})"
            )
        places[tasks[:, 0], tasks[:, 1], tasks[:, 2]] = np.arange(count)
    if (different := int((places >= 0).sum())) != found:
        raise ValueError(f"each task must be there once (tasks: {found}, different: {different})")
    for after, before in ((R, F), (B, F), (B, R), (W, B)):
        wrong = (places[after] >= 0) & (places[after] < places[before])
        if wrong.any():
            s, i = (int(index[0]) for index in np.nonzero(wrong))
            raise ValueError(f"{KINDS[after]}{i} of stage {s} needs {KINDS[before]}{i}, which must come before it")
