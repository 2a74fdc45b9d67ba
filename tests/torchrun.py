"""Jobs of several ranks, started by torchrun, and what their scripts begin and end with."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from processes import STRICT_PYTHON

RANK = """
import copy, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from pipesight import context
from pipesight.distributed import *
from torchrun import *
torch.set_num_threads(1)
init_process_group("gloo")
rank, size, folder = dist.get_rank(), dist.get_world_size(), os.environ["FOLDER"]
"""

# Without that, torch may abort at exit: so it does if a thread of gloo's lets go of a tensor when Python is ending.
END = """
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


def start(ranks, body, folder, *, options=(), begin=RANK, end=END, through=(), **environment):
    """Start a job of as many ranks; ``through`` another program that runs the script, if one is given."""
    script = Path(folder) / "script.py"
    script.write_text(begin + textwrap.dedent(body) + end)
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *options,
            *("--no-python", *STRICT_PYTHON, *through, str(script)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
            **{key: str(value) for key, value in environment.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def torchrun(ranks, body, folder, *, timeout=180, fails=False, **settings):
    """Run code on as many ranks; return what they wrote to stdout and stderr."""
    job = start(ranks, body, folder, **settings)
    try:
        output, errors = job.communicate(timeout=timeout)
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its ranks
            job.communicate(timeout=60)
    assert (job.returncode != 0) == fails, f"{job.returncode}\n{output}\n{errors}"
    return output, errors


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
