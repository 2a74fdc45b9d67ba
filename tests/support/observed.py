"""What the tests of recording share: small trainings, and ways to read a run directory."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading

import torch
from torch import nn

from pipesight import GPipe, context, trace
from support.schemas import validated

STATS = {
    "all": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "LogTensorStats": {"enabled": True, "tensors": ["activation", "wgrad"], "stats": ["mean"]},
    }
}


def pipeline(**options):
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return GPipe(layers, [2, 1], devices=["cpu"] * 2, **{"chunks": 2, **options})


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def learn(model, samples=8):
    model(torch.randn(samples, 4)).square().mean().backward()


def train(model, steps, optimizer=None):
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        learn(model)
        optimizer.step()


def events(run):
    """Return all events in a run directory, but for the frame."""
    found = []
    for file in sorted((run / "trace").glob("*.pfw.gz")):
        with gzip.open(file, "rt") as lines:
            found += [json.loads(line) for line in lines if line.strip() not in ("[", "]")]
    return [event for event in found if event["cat"] != "dftracer"]


def tasks(run, name="forward"):
    return [e for e in events(run) if e["ph"] == "X" and e["name"] == name and "partition" in e["args"]]


def description(run):
    return validated("run", json.loads((run / "run.json").read_text()))


def statistics(run):
    lines = (run / "stats/rank-00000.jsonl").read_text().splitlines()
    return [validated("statistics", json.loads(line)) for line in lines]


def log_lines(run):
    return (run / "logs/rank-00000.log").read_text().splitlines()


def attached():
    """Return all that an observation puts somewhere."""
    import torch.distributed as dist
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return (
        logging.Logger.isEnabledFor,
        logging.Logger.callHandlers,
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        context.observer._attached,
        context.steps._counter,
        dict(module._global_forward_pre_hooks),
        dict(module._global_forward_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch.autograd.backward,
        torch.autograd.grad,
        torch.save,
        torch.load,
        torch.Tensor.to,
        torch.cuda.CUDAGraph.capture_begin,
        torch.amp.GradScaler.step,
        dist.all_reduce,
        dataloader._BaseDataLoaderIter.__next__,
        os._exit,
        {name: value for name, value in os.environ.items() if name.startswith("PIPESIGHT")},
        sorted(t.name for t in threading.enumerate() if t.name.startswith("pipesight-trace")),
        list(trace._span_events.on_pass),
    )
