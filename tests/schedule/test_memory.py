"""Peaks in the middle of tasks, beside a walk that adds and frees every piece."""

from __future__ import annotations

import numpy as np
import pytest

from pipesight.schedule.costs import Costs, Layer, Peak
from pipesight.schedule.memory import device_bytes
from pipesight.schedule.setting import Setting
from pipesight.schedule.stage_costs import StageCosts
from pipesight.schedule.task_orders import B, F, R, W

SIZE = 8.0
"""Of what goes from layer to layer, of a whole batch, forward and backward."""
KEPT, FORWARD, BACKWARD, WEIGHTS = (
    [40.0, 24.0, 56.0, 16.0],
    [9.0, 30.0, 12.0, 90.0],
    [20.0, 6.0, 50.0, 70.0],
    [3, 5, 2, 9],
)
"""Of layers: what they keep, all but the first their input, too; what they need while they run; and their weights."""
WAITING = [12.0, 6.0, 16.0, 10.0]
LOSS_KEPT, LOSS = 16.0, 44.0


def costs(step: float) -> Costs:
    """Make layers whose peaks are what a recording would see of the walk below."""
    layers = []
    for k, (kept, forward, backward) in enumerate(zip(KEPT, FORWARD, BACKWARD, strict=True)):
        given = SIZE if k else 0.0
        new = kept - given + SIZE
        peak = Peak(new + forward, new, given + backward, given - kept - SIZE)
        sizes = {"kept_bytes": kept, "shared_bytes": given, "output_bytes": SIZE, "parameter_bytes": WEIGHTS[k]}
        layers.append(Layer(f"{k}", 1.0, 2.0, peak=peak, **sizes))
    loss = Peak(LOSS_KEPT + LOSS, LOSS_KEPT - SIZE, SIZE + LOSS, SIZE - LOSS_KEPT)
    return Costs(tuple(layers), loss_peak=loss, loss_bytes=LOSS_KEPT, other_bytes=7.0, optimizer_scale=step)


def walked(setting: Setting, balance: tuple[int, ...], step: float) -> list[float]:
    """Return the peak of each device: walk along its tasks, layer by layer."""
    schedule, m = setting.build(), setting.chunks
    return [_most(row.tolist(), d, balance, m, step) for d, row in enumerate(schedule.order)]


def _most(tasks: list[list[int]], stage: int, balance: tuple[int, ...], m: int, step: float) -> float:
    begin = sum(balance[:stage])
    layers, last = range(begin, begin + balance[stage]), stage == len(balance) - 1
    given = SIZE if stage else 0.0
    weights = sum(WEIGHTS[k] for k in layers)
    again = {i for kind, _, i in tasks if kind == R}
    now = most = 7.0 + 3 * weights  # weights, and two numbers of the optimizer for each
    learned = False

    def use(size: float, for_a_moment: float = 0.0) -> None:
        nonlocal now, most
        now += size
        most = max(most, now + for_a_moment)

    for kind, _, i in tasks:
        if kind == F:
            use(given / m)
        if kind == R or (kind == F and i not in again):
            for k in layers:
                use((KEPT[k] - (SIZE if k else 0.0) + SIZE) / m, FORWARD[k] / m)
            use(-SIZE / m if kind == R or not last else 0.0)  # the output has gone
        if kind == F and last:
            use(LOSS_KEPT / m, LOSS / m)
            use(-SIZE / m if i not in again else 0.0)
        if kind == B:
            use(SIZE / m, LOSS / m if last else 0.0)
            use(-LOSS_KEPT / m if last else 0.0)
            for k in reversed(layers):
                use(WEIGHTS[k] + (SIZE if k else 0.0) / m, BACKWARD[k] / m)
                use((-KEPT[k] - SIZE) / m)
            use(-given / m - weights)  # to the stage before; and the gradients are added to those that there are
            use(0.0 if learned else weights)
            learned = True
    use(0.0, step * weights)
    return most


@pytest.mark.parametrize("balance", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 4), ("1f1b", 4), ("1f1b", 2)])
@pytest.mark.parametrize("step", [0.5, 30.0])
def test_peaks_in_the_middle_of_tasks(schedule, chunks, checkpoint, balance, step):
    """A layer that needs much while it runs, the loss, gradients of weights in the making, and the optimizer count."""
    setting = Setting(schedule, 2, chunks, checkpoint)
    found = device_bytes(setting.build(), costs(step), balance, parameter_scale=4.0)
    expected = walked(setting, balance, step)
    assert found == pytest.approx(expected, rel=0.02)
    cuts = np.concatenate([[0], np.cumsum(balance)])[:, None]
    blocks = StageCosts(costs(step), setting, parameter_scale=4.0)
    assert blocks.memory(cuts)[:, 0].tolist() == pytest.approx(list(found))


def test_split_backwards_keep_what_weights_wait_for():
    """Between the two parts of a backward, a stage holds its activations and the gradients that its weights need."""
    setting = Setting("zero-bubble", 2, 4, "never")
    order = setting.build()
    layers = [Layer(str(k), 1.0, 2.0, kept_bytes=8.0, waiting_bytes=WAITING[k]) for k in range(4)]
    plain = Costs(tuple(layers))
    found = device_bytes(order, plain, (2, 2), parameter_scale=1.0)
    for device, waiting in enumerate([0.0, sum(WAITING[2:])]):  # a first stage has no first part
        alive, split, most = 0, 0, 0.0
        for kind, _, _ in order.order[device].tolist():
            alive, split = alive + (kind == F), split + (kind == B)
            most = max(most, (alive * 16.0 + split * waiting) / 4)
            alive, split = alive - (kind == W), split - (kind == W)
        assert found[device] == pytest.approx(most)
