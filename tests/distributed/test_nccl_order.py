"""NCCL's rules for messages, applied to what ranks issue: none of our schedules blocks under any of them.

Gloo matches messages by tag, in threads of its own. NCCL has no tags: between two ranks, the k-th send meets the k-th
receive. It puts messages on a stream, one for each peer or one for all of them, where each takes until its other end
is there, and begins no sooner than everything that the program has waited for. No GPU is needed to check an order.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest

from support.torchrun import torchrun

ISSUED = """
import json
from pipesight.distributed import schedules
from pipesight.skip import pop, skippable, stash

issued = []

class Noted:
    def __init__(self, work, number):
        self.work, self.number = work, number
    def wait(self, *timeout):
        issued.append(("wait", self.number, 0))
        return self.work.wait(*timeout)

def noting(name, original):
    def call(tensor, group=None, **peer):
        number = len(issued)
        issued.append((name, peer["group_dst" if name == "send" else "group_src"], tensor.numel()))
        return Noted(original(tensor, group=group, **peer), number)
    return call

@skippable(stash=["far"])
class Down(nn.Module):
    def forward(self, input):
        yield stash("far", input)
        return input * 2

@skippable(pop=["far"])
class Up(nn.Module):
    def forward(self, input):
        return input + (yield pop("far"))

def layers(stages, skips):
    blocks = [nn.Linear(6, 6) for _ in range(stages)]
    if skips:
        blocks[0], blocks[-1] = nn.Sequential(blocks[0], Down()), nn.Sequential(blocks[-1], Up())
    return nn.Sequential(*blocks)

found = {}
isend, irecv = dist.isend, dist.irecv
for k, name in enumerate(schedules.names()):
    kind, skips = schedules.choose(name), (k + size // 2) % 2 == 1
    stages = size * (1 if kind.placement == "one each" else 2)
    pipeline = DistributedPipeline(
        layers(stages, skips), [1] * stages, chunks=stages if skips else 2 * stages, schedule=name,
        loss_fn=nn.functional.mse_loss, checkpoint="except_last" if skips else "never",
    )
    given = torch.randn(2, 4 * stages, 6)
    dist.isend, dist.irecv = noting("send", isend), noting("recv", irecv)
    pipeline.step(*given, scaler=GradScaler(pipeline) if skips else None)
    found[f"{name}, training"], issued = issued, []
    pipeline.eval_step(*given)
    found[f"{name}, evaluation"], issued = issued, []
    dist.isend, dist.irecv = isend, irecv
with open(f"issued-{rank}.json", "w") as file:
    json.dump(found, file)
"""


def blocked(ranks, *, streams):
    """Return what is wrong with what ranks issue: sizes that do not meet, or messages that wait for each other.

    Args:
        ranks: For each rank, its sends and receives, as kind, peer and size, and its waits, for the place of one.
        streams: `one` for all messages of a rank, `pairs` for one for each peer, or `program`, if each blocks it.
    """
    ends, after, problems = defaultdict(list), defaultdict(set), []
    for me, row in enumerate(ranks):
        last, waited = {}, set()
        for place, (kind, peer, size) in enumerate(row):
            if kind == "wait":
                waited.add((me, peer))
                continue
            ends[(me, peer, "send") if kind == "send" else (peer, me, "recv")].append((me, place, size))
            stream = peer if streams == "pairs" else None
            after[me, place] = {*waited, *last.get(stream, ())}
            last[stream] = {(me, place)}
    other = {}
    for source, target, _ in list(ends):
        sent, received = ends[source, target, "send"], ends[source, target, "recv"]
        if [size for *_, size in sent] != [size for *_, size in received]:
            problems.append(f"rank {source} sends {len(sent)} messages to rank {target}, which expects others")
            continue
        for (one, here, _), (two, there, _) in zip(sent, received, strict=True):
            other[one, here], other[two, there] = (two, there), (one, here)
    over = set()
    while True:
        free = {message for message in after if message not in over and after[message] <= over}
        if streams == "program":
            free = {m for m in free if m == min(x for x in after if x[0] == m[0] and x not in over)}
        done = {message for message in free if other.get(message) in free}
        if not done:
            break
        over |= done
    return problems + [f"rank {me} never ends {ranks[me][place]}" for me, place in sorted(after.keys() - over)[:4]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_schedule_blocks(ranks, tmp_path):
    """With any schedule, with skips, recomputation and loss scaling or without, all messages get through."""
    torchrun(ranks, ISSUED, tmp_path)
    rows = [json.loads((tmp_path / f"issued-{rank}.json").read_text()) for rank in range(ranks)]
    for name, streams in itertools.product(rows[0], ("one", "pairs", "program")):
        issued = [row[name] for row in rows]
        assert sum(len(row) for row in issued) > 8, name
        assert blocked(issued, streams=streams) == [], (name, streams)


def test_blocked_orders_are_seen():
    """Two ranks that both send first block each other, except where each direction has a stream; so do odd sizes."""
    first = [[("send", 1, 8), ("recv", 1, 8)], [("send", 0, 8), ("recv", 0, 8)]]
    assert all(len(blocked(first, streams=streams)) == 4 for streams in ("one", "pairs", "program"))
    assert blocked([first[0], first[1][::-1]], streams="one") == []
    ring = [[("recv", (k - 1) % 3, 8), ("send", (k + 1) % 3, 8)] for k in range(3)]
    assert blocked(ring, streams="pairs") == []
    assert len(blocked(ring, streams="one")) == 4
    waits = [[row[0], ("wait", 0, 0), row[1]] for row in ring]
    assert len(blocked(waits, streams="pairs")) == 4
    assert "expects others" in blocked([[("send", 1, 8)], [("recv", 0, 4)]], streams="one")[0]
