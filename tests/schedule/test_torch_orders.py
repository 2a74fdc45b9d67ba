"""Our orders are those of torch.distributed.pipelining, task by task, sends and receives included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from pipesight.plan import (
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)
from pipesight.schedule.csv_format import actions_from_csv, schedule_from_csv, schedule_to_csv
from pipesight.schedule.messages import with_messages

ORDERS = {
    "ScheduleLoopedBFS": lambda stages, m, n: looped_bfs(stages, m, devices=n),
    "ScheduleInterleaved1F1B": lambda stages, m, n: interleaved(stages, m, devices=n),
    "ScheduleInterleavedZeroBubble": lambda stages, m, n: zero_bubble(stages, m, devices=n),
    "ScheduleZBVZeroBubble": lambda stages, m, n: zbv(stages, m),
    "ScheduleDualPipeV": lambda stages, m, n: dualpipev(stages, m),
}


torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
pytestmark = pytest.mark.skipif(
    not hasattr(torch_schedules, "ScheduleDualPipeV"), reason="this torch has schedules of an earlier time"
)


def of_torch(name, n, v, m):
    """Return torch's schedule; it needs of its stages only how many there are."""
    module, facts = nn.Linear(1, 1), {"num_stages": n * v, "group_size": n, "group_rank": 0}
    stages = [SimpleNamespace(submod=module, stage_index=k, is_last=False, **facts) for k in range(v)]
    return getattr(torch_schedules, name)(stages, m, loss_fn=lambda *_: None)


def flat(rows):
    """Return what each rank does, as words, without what is about sharded parameters."""
    found = []
    for _, row in sorted(rows.items()):
        actions = [part for action in row if action is not None for part in (action.sub_actions or (action,))]
        found.append([str(action) for action in actions if "SHARD" not in str(action) and "GRAD" not in str(action)])
    return found


def by_peer(rows, schedule):
    """Return tasks in order, and sends to each other rank and receives from it; overlapped pairs send after both."""
    found = []
    for row in rows:
        received = {}
        for action in actions_from_csv(",".join(row))[0]:
            way = action.kind.partition("_")[0] if "_" in action.kind else None
            peer = schedule.device_of_stage[action.peer] if way else None
            received.setdefault((way, peer), []).append(str(action))
        found.append(received)
    return found


SIZES = [
    (1, 2, 3),
    (2, 2, 1),
    (2, 2, 5),
    (2, 2, 8),
    (2, 3, 4),
    (3, 2, 6),
    (3, 2, 11),
    (4, 2, 8),
    (4, 3, 10),
    (5, 2, 13),
]


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_torch(name):
    """For any numbers of ranks, stages and micro-batches, either both have the same order, or neither has one."""
    compared = 0
    for n, v, m in SIZES:
        if "V" in name.removeprefix("Schedule") and v != 2:
            continue
        try:
            ours = ORDERS[name](n * v, m, n)
        except ValueError:
            with pytest.raises(ValueError, match=r"number of microbatches|many microbatches"):
                of_torch(name, n, v, m)
            continue
        theirs = of_torch(name, n, v, m)
        assert [line.split(",") for line in schedule_to_csv(ours).splitlines()] == flat(theirs.pipeline_order)
        messages = [[str(action) for action in row] for row in with_messages(ours)]
        assert by_peer(messages, ours) == by_peer(flat(theirs.pipeline_order_with_comms), ours)
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(
    "ours",
    [gpipe(4, 6), one_f_one_b(4, 6), one_f_one_b(4, 2), zero_bubble(4, 6), v_half(8, 6), v_min(8, 6)],
    ids=lambda schedule: f"{schedule.name} {schedule.chunks}",
)
def test_torch_reads_files(ours, tmp_path):
    """Torch reads the orders that it has no class for, too, and adds the sends and receives that we expect."""
    facts = {"num_stages": ours.stages, "group_size": ours.devices, "group_rank": 0, "is_last": False}
    mine = [s for s, home in enumerate(ours.device_of_stage) if home == 0]
    stages = [SimpleNamespace(submod=nn.Linear(1, 1), stage_index=s, **facts) for s in mine]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, ours.chunks, loss_fn=lambda *_: None)
    (tmp_path / "ours.csv").write_text(schedule_to_csv(ours))
    runtime._load_csv(tmp_path / "ours.csv")
    assert [line.split(",") for line in schedule_to_csv(ours).splitlines()] == flat(runtime.pipeline_order)
    messages = [[str(action) for action in row] for row in with_messages(ours)]
    assert by_peer(messages, ours) == by_peer(flat(runtime.pipeline_order_with_comms), ours)


@pytest.mark.parametrize("name", ORDERS)
def test_files_of_torch(name, tmp_path):
    """What torch writes, waits and overlapped pairs included, is read as the same order; and torch reads ours."""
    theirs, ours = of_torch(name, 2, 2, 6), ORDERS[name](4, 6, 2)
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    read = schedule_from_csv((tmp_path / "theirs.csv").read_text())
    assert (read.order == ours.order).all()
    (tmp_path / "ours.csv").write_text(schedule_to_csv(ours))
    theirs._load_csv(tmp_path / "ours.csv")  # it checks the order, and adds sends and receives
    assert [line.split(",") for line in schedule_to_csv(ours).splitlines()] == flat(theirs.pipeline_order)
    theirs._dump_csv(tmp_path / "messages.csv")
    with pytest.raises(ValueError, match="format='compute_only'"):
        schedule_from_csv((tmp_path / "messages.csv").read_text())
