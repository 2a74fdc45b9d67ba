"""A program of several ranks, one of which fails in a chosen way at a chosen place; and what the others say of it.

The model has collectives of its own in its layers, as SyncBatchNorm has, and others are in hooks, in the loss, and
between steps. ::

    found = strike({"pp": 2, "dp": 2, "rank": 3, "what": "kill", "point": "forward", ...}, folder)
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from support import warm

__all__ = ["POINTS", "WHATS", "strike", "verify"]

WHATS = ("raise", "exit", "_exit", "kill", "stop", "sleep")
"""How a rank fails; the last two get stuck."""
POINTS = ("forward", "backward", "hook", "loss", "between", "optimizer", "clip", "save", "collective")
"""Where it does."""
TIMEOUT = 5.0
"""Seconds after which a rank counts as hanging."""

DEFAULTS = {
    **{"pp": 2, "dp": 1, "schedule": "1f1b", "chunks": 4, "checkpoint": "never", "data_parallel": "ddp"},
    **{"collective": None, "rank": 0, "what": "raise", "point": "forward", "step": 1, "microbatch": 1, "agent": True},
}


def strike(case, folder):
    """Run a case; return exit code and stderr of each rank."""
    case = {**DEFAULTS, **case}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CASE": json.dumps(case)}
    environment["FOLDER"] = str(folder)
    stuck = [case["rank"]] if case["what"] in ("stop", "sleep") else []
    ranks = case["pp"] * case["dp"]
    settings = {"agent": case["agent"], "timeout": 90, "stuck": stuck, "cwd": folder}
    done = warm.torchrun(ranks, __file__, env=environment, **settings)
    return [(rank.returncode, rank.stderr) for rank in done]


def verify(case, found):
    """Check that every rank but the one that failed names it, and no other."""
    case = {**DEFAULTS, **case}
    guilty = case["rank"]
    verb = {"raise": "failed: ValueError: struck", "exit": "(failed: SystemExit: 3|has exited)"}.get(case["what"])
    if verb is None:
        verb = "died" if case["what"] in ("kill", "_exit") else "(hangs|does not answer)"
    if case["what"] == "exit" and not case["agent"]:
        verb = f"({verb}|died)"
    for rank, (code, text) in enumerate(found):
        told = f"rank {rank} of {case}: {code}\n{text}"
        if rank == guilty:
            continue
        assert code == 1, told
        causes = re.findall(r"RankFailedError: (rank .*)", text)
        assert causes, told
        for cause in causes:
            assert re.match(f"rank {guilty} {verb}", cause), told
            named = re.findall(r"rank (\d+) (?:failed|hangs|died|has exited|does not answer)", cause)
            assert named == [str(guilty)], told


# On the ranks.


def main():
    """Train a few steps, fail where the case says, or meet those who do."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._subclasses import FakeTensor
    from torch.distributed.device_mesh import init_device_mesh

    from pipesight import context
    from pipesight.distributed import DistributedPipeline, init_process_group

    case = json.loads(os.environ["CASE"])
    torch.set_num_threads(1)
    init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (case["pp"], case["dp"]), mesh_dim_names=("pp", "dp"))
    place = {"step": 0}

    def here(point, microbatch=None):
        """Fail, if it is here."""
        if (point, place["step"], rank) != (case["point"], case["step"], case["rank"]):
            return
        if microbatch in (None, case["microbatch"]):
            {
                "raise": lambda: (_ for _ in ()).throw(ValueError("struck")),
                "exit": lambda: sys.exit(3),
                "_exit": lambda: os._exit(0),
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "sleep": lambda: time.sleep(1000),
            }[case["what"]]()

    def share(tensor, how=None):
        """Use a collective among replicas, in one of the ways there are."""
        group = pipeline.data_parallel_group if pipeline else mesh.get_group("dp")
        sent = tensor.detach().clone()
        if (how or case["collective"]) == "async":
            dist.all_reduce(sent, group=group, async_op=True).wait()
        elif (how or case["collective"]) == "objects":
            gathered = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, sent, group=group)
        elif (how or case["collective"]) == "functional":
            from torch.distributed import _functional_collectives as functional

            functional.wait_tensor(functional.all_reduce(sent, "sum", group))
        else:
            dist.all_reduce(sent, group=group)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            here("backward", context.current().microbatch)
            if case["collective"]:
                share(gradient)
            return gradient

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            if isinstance(x, FakeTensor):
                return self.norm(self.linear(x))
            here("forward", context.current().microbatch)
            if case["collective"]:
                share(x)
            here("collective", context.current().microbatch)
            return Function.apply(self.norm(self.linear(x)))

    def loss_fn(output, target):
        here("loss", context.current().microbatch)
        if case["collective"]:
            share(output)
        return nn.functional.mse_loss(output, target)

    pipeline = None
    partitions = case["pp"] * (1 if case["schedule"] in ("gpipe", "1f1b", "zero-bubble") else 2)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(Layer(), nn.Tanh()) for _ in range(partitions)])
    pipeline = DistributedPipeline(
        model,
        [1] * partitions,
        **{key: case[key] for key in ("chunks", "schedule", "checkpoint", "data_parallel")},
        loss_fn=loss_fn,
        mesh=mesh,
        timeout=TIMEOUT,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)

    def hook(gradient):
        here("hook")
        return gradient

    for parameter in pipeline.parameters():
        parameter.register_hook(hook)
    optimizer.register_step_pre_hook(lambda *_: here("optimizer"))
    for k in range(3):
        place["step"] = k
        here("between")
        if case["collective"]:
            share(torch.ones(3), how="between")
        optimizer.zero_grad()
        pipeline.step(torch.randn(8, 6), torch.randn(8, 6), broadcast_loss=k == 2)
        here("clip")
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        here("save")
        if k != 2:
            pipeline.save(os.environ["FOLDER"] + "/checkpoints", optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
