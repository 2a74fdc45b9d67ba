"""What the tests of recording share: small trainings, and ways to read a run directory."""

from __future__ import annotations

import gzip
import json

import torch
from torch import nn

from pipesight import GPipe
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
