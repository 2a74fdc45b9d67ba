"""What a statistics session has logged, and runs of several ranks that log."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import numpy as np
import torch

from support import warm

SIX = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]


def config(tensors=("activation",), stats=SIX, layers=".*", **settings):
    """Return a configuration with one section."""
    feature = {"enabled": True, "tensors": list(tensors), "stats": list(stats), **settings}
    return {"s": {"enabled": True, "layers": {"layer_name_regex_pattern": layers}, "LogTensorStats": feature}}


def lines(folder, rank=0):
    """Return the JSON lines of a run; none if there is no file."""
    path = Path(folder) / "stats" / f"rank-{rank:05d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def values(folder, rank=0):
    """Return the values of a run by iteration, layer, tensor and statistic; each is logged once."""
    found = {}
    for line in lines(folder, rank):
        key = (line["iteration"], line["layer"], line["tensor"], line["statistic"])
        assert key not in found, f"logged twice: {key}"
        found[key] = line["value"] if line["value"] is not None else float(line["nonfinite"])
    return found


def six(*tensors):
    """Return the six statistics of tensors taken together, by numpy in float64."""
    x = np.concatenate([t.detach().cpu().double().numpy().reshape(-1) for t in tensors])
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(ddof=1),
        "l1_norm": np.abs(x).sum(),
        "l2_norm": np.sqrt((x * x).sum()),
    }


def assert_six(found, iteration, layer, tensor, *tensors, rtol=1e-6):
    """Compare the six statistics in :func:`values` with those of tensors."""
    for name, expected in six(*tensors).items():
        actual = found[iteration, layer, tensor, name]
        scale = max(abs(expected), float(torch.cat([t.detach().reshape(-1).double() for t in tensors]).abs().mean()))
        assert abs(actual - expected) <= rtol * scale, (layer, tensor, name, actual, expected)


RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
import pipesight.stats as debug_api
from support.logged import *
torch.set_num_threads(1)
rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["FOLDER"]
if os.environ.get("INIT", "1") == "1":
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
"""

# Without that, torch may abort at exit: so it does if a thread of gloo's lets go of a tensor when Python is ending.
END = """
import time
if dist.is_initialized():
    time.sleep(0.2)
    dist.destroy_process_group()
"""


def run_ranks(count, body, folder, *, timeout=120, codes=None, **environment):
    """Run code in as many processes, which form a gloo group; return what each wrote to stdout and stderr."""
    script = Path(folder) / "script.py"
    script.write_text(RANK + textwrap.dedent(body) + END)
    shared = {**os.environ, "FOLDER": str(folder), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    shared |= {key: str(value) for key, value in environment.items()}
    processes = [warm.start(str(script), env={**shared, "RANK": str(rank)}, cwd=folder) for rank in range(count)]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.end()
    for rank, process in enumerate(processes):
        expected = 0 if codes is None else codes[rank]
        assert process.returncode == expected, f"rank {rank}: {process.returncode}\n{outputs[rank][1]}"
    return outputs
