"""Jobs of several ranks, as torchrun starts them or by torchrun itself, and what their scripts begin and end with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import textwrap
from pathlib import Path

from support import warm

RANK = """
import copy, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from pipesight import context
from pipesight.distributed import *
from support.torchrun import *
torch.set_num_threads(1)
init_process_group("gloo")
rank, size, folder = dist.get_rank(), dist.get_world_size(), os.environ["FOLDER"]
"""

END = """
dist.barrier()
dist.destroy_process_group()
"""


def skip_old_torch():
    """Skip a test of pipelines over ranks where torch is too old for them."""
    import pytest  # ranks import this module, and need none

    from pipesight._torch.pipelining import SUPPORTED

    if not SUPPORTED:
        pytest.skip("pipesight.distributed needs torch 2.10")


def start(ranks, body, folder, *, options=(), **settings):
    """Start a job of as many ranks by torchrun itself."""
    program, environment = _written(body, folder, **settings)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return warm.start(*launcher, *options, "--no-python", *warm.command(*program), cwd=folder, env=environment)


def ended(job, timeout=180):
    """Wait for a job of torchrun's; return what was written to stdout and stderr. End it if it takes too long."""
    try:
        return job.communicate(timeout=timeout)
    finally:
        if job.returncode is None:
            os.kill(job.pid, signal.SIGTERM)  # torchrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(60)
        job.end()


def torchrun(ranks, body, folder, *, timeout=180, fails=False, stuck=(), **settings):
    """Run code on as many ranks, which have the variables that torchrun gives them; return what they wrote.

    Args:
        ranks: How many.
        body: What comes between ``begin`` and ``end``.
        folder: Where they run.
        timeout: Seconds for all of it.
        fails: Whether one of them does.
        stuck: Those that stay until they are killed, when all others have ended.
        **settings: ``begin``; ``end``; ``through`` another program that runs the script; more variables.
    """
    program, environment = _written(body, folder, **settings)
    done = warm.torchrun(ranks, *program, env=environment, timeout=timeout, stuck=stuck, cwd=folder)
    texts = [f"rank {k}: {rank.returncode}\n{rank.stdout}\n{rank.stderr}" for k, rank in enumerate(done)]
    assert any(rank.returncode for rank in done) == fails, "\n".join(texts)
    return "".join(rank.stdout for rank in done), "".join(rank.stderr for rank in done)


def _written(body, folder, *, begin=RANK, end=END, through=(), **environment):
    """Write the script; return how to run it, and the variables that it needs."""
    script = Path(folder) / "script.py"
    script.write_text(begin + textwrap.dedent(body) + end)
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    return (*through, str(script)), {**shared, **{key: str(value) for key, value in environment.items()}}


def tanhs(layers, width=6):
    """Return a float64 model of equal layers, always with the same weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(layers)]
    return nn.Sequential(*blocks).double()


def batches(sizes, width=6):
    """Yield an input and a target of each size, the same on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for batch in sizes:
        draw = [torch.randn(batch, width, generator=generator, dtype=torch.float64) for _ in range(2)]
        yield draw[0], draw[1]


def train_plainly(model, pairs, optimizer):
    """Train a plain model on batches, without any interruption; return its losses."""
    from torch import nn

    losses = []
    for x, y in pairs:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_gradients(pipeline, plain):
    """Compare the gradients of this rank's layers with those of the plain model."""
    import torch

    expected = dict(plain.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def error_of(function, *args, **kwargs):
    """Return the exception that a call raises, or ``None``."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def sleeping(forwards, backwards):
    """Return a model of layers that take so many milliseconds, and no processor: ranks may share one."""
    import time

    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward, backward):
            ctx.backward = backward
            if type(x) is torch.Tensor:  # else only shapes are found out
                time.sleep(forward / 1000)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(ctx.backward / 1000)
            return gradient, None, None

    class Layer(nn.Module):
        def __init__(self, forward, backward):
            super().__init__()
            self.times = forward, backward
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return Sleep.apply(self.inner(x), *self.times)

    torch.manual_seed(0)
    return nn.Sequential(*[Layer(*times) for times in zip(forwards, backwards, strict=True)])
