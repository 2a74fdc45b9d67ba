"""`pipesight plan`: a table, JSON or a page of what other settings would give; what cannot be says why."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from pipesight._formatting import size as format_size
from pipesight.analysis.plan_outcome import make_plans
from pipesight.cli import _quantities as quantities
from pipesight.cli._model_option import make_sample
from pipesight.cli.plan import NO_STATE
from pipesight.distributed import schedule_names
from pipesight.distributed.schedules import choose
from pipesight.plan import SCHEDULES, Setting, load_schedule, measure, zero_bubble
from pipesight.runs.reading.run import open_run
from pipesight.schedule.setting import LOOPS
from pipesight.view.plan_table import plan_text
from support import warm
from support.commands import pipesight
from support.schemas import validated
from support.synthetic import Made

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

def broken():
    raise RuntimeError("no model today")

number = 3
"""

SCRIPT = """
import argparse, sys
from mine import build

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
options = parser.parse_args()

def build_too():
    assert parser.parse_args() == options and sys.argv == [__file__], sys.argv
    return build()
"""


def plan(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Plan, in a process of its own where the plan is for a model, whose modules are imported."""
    if "--model" in args:
        return warm.run("-m", "pipesight", "plan", *map(str, args), cwd=cwd, env={**os.environ, "COLUMNS": "80"})
    return pipesight("plan", *args, cwd=cwd, env={"COLUMNS": "200"})


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of 2 partitions, the second twice as slow, with layers of equal times: [2, 4] layers are [3, 3] better."""
    run = Made(tmp_path / "run", balance=[2, 4], chunks=4)
    at = 0
    for step in range(5):
        at = run.gpipe(
            step,
            lambda phase, i, j: (1 + j) * (200_000 if phase == "backward" else 100_000),
            at=at,
            checkpointed=3,
            layers=lambda j: [f"l{k}" for k in ((0, 1) if j == 0 else (2, 3, 4, 5))],
        )
        at += 100_000
    return run.write()


def test_table_has_the_recorded_schedule_and_plans(recorded):
    """The table begins with what was recorded, then the best plan; the code to paste comes last."""
    ended = plan(recorded)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[1].split()[:8] == ["recorded", "gpipe", "except_last", "4", "2", "4", "3.40", "s"]
    assert lines[2].split()[:4] == ["simulated", "3.40", "s", "31.8%"]
    assert lines[3].startswith("best")
    every = plan(recorded, "--chunks", "4", "--all").stdout
    assert {"gpipe", "1f1b", "interleaved", "zero-bubble"} <= {*every.split()}
    assert lines[3].split()[1] == "looped-bfs"
    assert lines[-2] == "Pipeline.step runs any of these, GPipe only gpipe; its best:"
    assert plan(recorded, "--schedule", "gpipe").stdout.splitlines()[-2:] == ["", lines[-1]]
    assert re.fullmatch(
        r'GPipe\(model, balance=\[3, 3\], devices=\["cpu", "cpu"\], chunks=\d+, checkpoint="never"\)', lines[-1]
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_in_a_terminal(recorded, width):
    """No line is wider than the terminal, as many of the words are in a table as fit, and the code is still a call."""
    with open_run(recorded) as run:
        measured = measure(run)
    outcome = make_plans(measured.costs, measured, partitions=[1, 2], chunks=[4])
    whole = plan_text(outcome)
    lines = plan_text(outcome, width=width).splitlines()
    assert max(map(len, lines)) <= width
    code = whole.splitlines()[-1]
    at = max(k for k, line in enumerate(lines) if line.startswith("GPipe("))
    assert ast.dump(ast.parse("\n".join(lines[at:]))) == ast.dump(ast.parse(code))
    lines = lines[:at]
    faster = [one for one in outcome.worth_listing() if one.step_seconds < outcome.baseline]
    assert 0 < len(faster) < len(outcome.plans)
    table = whole.splitlines()[1 : 3 + len(faster)]
    assert not whole.splitlines()[3 + len(faster)].startswith(" ")
    said = re.sub(r"[,\s]+", " ", " ".join(lines))
    for row in table:  # each cell, in order
        assert re.search(r"\D*? ".join(map(re.escape, row.split()[1:])), said)
    heads = [k for k, line in enumerate(lines) if line.endswith("memory")]
    assert bool(heads) == (width >= 80)
    assert heads[:1] == [0] or max(map(len, table)) > width


def test_what_is_recorded_is_kept_if_nothing_is_faster(recorded):
    """Where no plan saves time, one line says so instead of code; other devices, or less memory, need a plan anyway."""
    common = [recorded, "--schedule", "gpipe", "--checkpoint", "always", "--chunks"]
    ended = plan(*common, "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "no plan saves more than 1%: keep the current settings"
    assert "GPipe(" not in ended.stdout
    assert plan(*common, "1", "--partitions", "1").stdout.splitlines()[-1].startswith("GPipe(")
    assert plan(*common, "4").stdout.splitlines()[-1].startswith("GPipe(model, balance=[3, 3]")
    held = json.loads(plan(*common, "1", "--json").stdout)["recorded"]["memory_bytes"]
    assert plan(*common, "1", "--memory", max(held) - 1).stdout.splitlines()[-1].startswith("GPipe(")


def test_json_has_everything(recorded):
    """With --json, all plans are there, the fastest first, and the recorded schedule is predicted."""
    found = validated("plan", json.loads(plan(recorded, "--json", "--schedule", "gpipe", "--chunks", "4,8").stdout))
    assert (found["format"], found["format_version"]) == ("pipesight-plan", 1)
    assert found["recorded"]["balance"] == [2, 4]
    assert found["recorded"]["predicted_step_seconds"] == pytest.approx(found["recorded"]["step_seconds"])
    plans = found["plans"]
    assert {(p["chunks"], p["checkpoint"]) for p in plans} == {
        (m, mode) for m in (4, 8) for mode in ("always", "except_last", "never")
    }
    assert [p["step_seconds"] for p in plans] == sorted(p["step_seconds"] for p in plans)
    assert all(p["balance"] == [3, 3] and p["proven"] and p["call"].startswith("GPipe(") for p in plans)
    # 3 layers a partition: forwards of 150 ms, backwards of 300; 5 clocks of each, 100 ms outside.
    never = next(p for p in plans if (p["chunks"], p["checkpoint"]) == (4, "never"))
    assert never["step_seconds"] == pytest.approx((5 * (150 + 300) + 100) * 1e-3)
    assert never["bubble"] == pytest.approx(1 / 5)
    # When the gradients are there, the first of four micro-batches is not.
    assert never["memory_bytes"] == [2 * 3000 + 225, 2 * 3000 + 75 + 225]


def test_partitions_and_links(recorded):
    """Plans may have other numbers of partitions, and links that take time."""
    common = ["--json", "--schedule", "gpipe", "--checkpoint", "never", "--chunks", "1"]
    found = json.loads(plan(recorded, *common, "--partitions", "1,3").stdout)
    assert {p["partitions"]: p["step_seconds"] for p in found["plans"]} == {
        n: pytest.approx(4 * (300 + 600) * 1e-3 + 100e-3, rel=0.01) for n in (1, 3)
    }
    slow = json.loads(plan(recorded, *common, "--link-latency", "50ms", "--link-bandwidth", "1kB/s").stdout)
    # 100 bytes at 1 kB/s are 100 ms; two ways.
    assert slow["plans"][0]["step_seconds"] == pytest.approx((3600 + 100 + 2 * (50 + 100)) * 1e-3, rel=0.01)


def test_only_plans_that_are_worth_it_are_listed(recorded):
    """A listed plan is faster than all that need as little memory, and no plan left out is: these are counted."""
    options = [recorded, "--chunks", "4,8"]
    found = json.loads(plan(*options, "--json").stdout)
    faster = [p for p in found["plans"] if p["step_seconds"] < found["recorded"]["predicted_step_seconds"]]
    needs = [max(p["memory_bytes"]) for p in faster]
    worth, least = {next(k for k, p in enumerate(faster) if p["call"] is not None)}, math.inf
    for k, need in enumerate(needs):
        if need < 0.95 * least:
            worth, least = {*worth, k}, need
    table = plan(*options).stdout.splitlines()
    listed = [line.split()[-2:] for line in table[3 : 3 + len(worth)]]
    assert [size.split() for size in map(format_size, (needs[k] for k in sorted(worth)))] == listed
    left = len(found["plans"]) - len(worth)
    assert table[3 + len(worth)].startswith(f"{left} of {len(found['plans'])} plans are not listed: ")
    assert len(plan(*options, "--all").stdout.splitlines()) > len(found["plans"])


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.texts.append(data)


def test_page_draws_both_timelines(recorded):
    """The page of the run has drawings of the recorded and the planned schedule, every task in them, and the table."""
    odd = recorded.rename(recorded.with_name("<img src=x onerror=alert(1)>"))
    page = recorded.with_name("plan.html")
    assert plan(odd, "--schedule", "gpipe", "--checkpoint", "never", "--chunks", "2", "--html", page).returncode == 0
    text = page.read_text(encoding="utf-8")
    read = Page()
    read.feed(text)
    assert "img" not in read.tags
    assert {*read.addresses} == {"data:,", "#timeline"}  # nothing is asked for
    assert "default-src 'none'" in text
    assert "<img src=x onerror=alert(1)>" in read.texts
    assert {"Plans", "Where the time went", "recorded", "best"} <= {*read.texts}
    tips = [tip for tip in read.texts if re.match(r"(forward|recompute|backward) of micro-batch \d", tip)]
    assert len(tips) == (4 + 3 + 4) * 2 + (2 + 2) * 2
    assert len([tip for tip in tips if tip.startswith("recompute")]) == 3 * 2
    assert "light-dark(" in text


def test_memory_limit(recorded):
    """Plans keep to the limit; one that nothing fits into says how much the least is."""
    common = [recorded, "--chunks", "4,8"]
    found = json.loads(plan(*common, "--json", "--memory", "6.3kB").stdout)
    assert found["plans"]
    assert all(max(p["memory_bytes"]) <= 6300 for p in found["plans"])
    ended = plan(*common, "--memory", "5kB")
    assert ended.returncode == 2
    sizes = re.search(r"no plan fits into ([\d.]+ KiB) per device: the smallest needs ([\d.]+ KiB);", ended.stderr)
    assert sizes is not None
    assert sizes[1] == "4.88 KiB"
    assert json.loads(plan(*common, "--json", "--memory", sizes[2]).stdout)["plans"]


def test_split_backwards_are_doubted(recorded):
    """Where the run splits no backward, a note names the listed schedules that do: what that costs is not known."""
    words = "note: what it costs to run backwards in two parts, as in v-min, was not measured; 4% more is assumed"
    assert words in plan(recorded, "--chunks", "4", "--schedule", "v-min").stdout
    assert "two parts" not in plan(recorded, "--chunks", "4", "--schedule", "gpipe,1f1b").stdout
    split = Made(recorded.with_name("split"), balance=[3, 3], chunks=4)
    split.pipeline = {"schedule": "interleaved-zero-bubble", "ranks": [[0], [1]]}
    at, times = 0, {"forward": 1_000, "backward": 1_100, "weight": 1_200}
    for step in range(5):
        at = 50 + split.scheduled(step, zero_bubble(2, 4), times, at=at)
    assert "two parts" not in plan(split.write(), "--chunks", "4", "--all").stdout


def test_small_micro_batches_are_doubted(recorded):
    """Where micro-batches would be half as large as the recorded ones, or smaller, a note names the chunks."""
    common = [recorded, "--schedule", "gpipe", "--checkpoint", "never", "--chunks"]
    assert "note: with" not in plan(*common, "2,4").stdout
    ended = plan(*common, "4,8,16,32", "--all")
    assert "note: with 8, 16 or 32 chunks, micro-batches have at most half the recorded samples" in ended.stdout
    found = json.loads(plan(*common, "4,8", "--json").stdout)
    assert [note for note in found["notes"] if note.startswith("with 8 chunks, ")]


def test_processors_that_partitions_share(recorded):
    """With fewer processors than partitions, plans have as many partitions as processors, too; beyond is doubted."""
    common = [recorded, "--schedule", "gpipe"]
    assert "processor" not in plan(*common).stdout
    facts = json.loads((recorded / "run.json").read_text())
    (recorded / "run.json").write_text(json.dumps({**facts, "processors": 1}))
    found = json.loads(plan(*common, "--json").stdout)
    assert {p["partitions"] for p in found["plans"]} == {1, 2}
    # What one processor does for two partitions takes as long as both.
    least = sum(2 * (100e-3 + 200e-3) * (1 + j) for j in range(2))
    assert min(p["step_seconds"] for p in found["plans"]) >= least
    ended = plan(*common, "--partitions", "3")
    assert "plans with 3 partitions on 1 processor are optimistic: the run had fewer" in ended.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--partitions", "7"], "too few layers for the partitions (layers: 6, partitions: 7)"),
        (["--partitions", "0"], "'0' is not a positive integer"),
        (["--chunks", "33"], "chunks: 33, samples: 32"),
        (["--schedule", "dualpipe"], "'dualpipe' is not one of gpipe, 1f1b, interleaved, looped-bfs"),
        (["--schedule", "interleaved", "--chunks", "5"], "no schedule is possible"),
        (["--memory", "much"], "'much' is not a size, such as 16GiB"),
        (["--link-bandwidth", "25"], "'25' is not a bandwidth, such as 25GB/s"),
        (["--model", "x:y"], "--model and --sample must be given together"),
    ],
)
def test_what_cannot_be(recorded, args, words):
    """Options that make no sense for the run end with code 2 and a line that says why."""
    ended = plan(recorded, *args)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ended.stdout


def test_what_is_refused_writes_nothing(recorded):
    """A cut that another program cannot take is refused before the order or the page is written."""
    order, page = recorded.with_name("order.csv"), recorded.with_name("page.html")
    ended = plan(recorded, "--format", "megatron", "--out", order, "--html", page)
    assert (ended.returncode, "takes no order of tasks" in ended.stderr) == (2, True)
    assert [path for path in (order, page) if path.exists()] == []


def test_runs_that_cannot_be_planned(tmp_path):
    """What is no run, and a run without tasks, end with code 2 and a line that says why."""
    empty = Made(tmp_path / "empty")
    empty.span("dataloader", "fetch", begin=0, dur=10)
    for path, words in ((empty.write(), "no pipeline tasks"), (tmp_path / "nothing", "nothing")):
        ended = plan(path)
        assert ended.returncode == 2
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
    ended = plan()
    assert ended.returncode == 2
    assert "nothing to plan from" in ended.stderr


def test_a_page_that_cannot_be_written(recorded):
    """A folder that is not there is named, with code 1."""
    ended = plan(recorded, "--html", recorded / "no" / "plan.html")
    assert ended.returncode == 1
    assert "plan.html" in ended.stderr


def test_models_without_a_run(tmp_path):
    """A model that was never run is profiled, and planned for."""
    (tmp_path / "mine.py").write_text(MODEL)
    args = ["--model", "mine:build", "--sample", "16x8", "--partitions", "2", "--json"]
    ended = plan(*args, "--memory", "1MiB", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = validated("plan", json.loads(ended.stdout))
    assert "recorded" not in found
    assert {p["chunks"] for p in found["plans"]} == {1, 2, 4, 8, 16}
    assert all(sum(p["balance"]) == 4 and min(p["memory_bytes"]) > 0 for p in found["plans"])
    assert NO_STATE in found["notes"]
    again = functools.partial(warm.run, "-m", "pipesight", "plan", cwd=tmp_path)
    for name, words in (
        ("mine:broken", "no model today"),
        ("mine:number", "must name a function or a module"),
        ("mine:biuld", "no attribute 'biuld'"),
    ):
        ended = again("--model", name, "--sample", "16x8", "--partitions", "2")
        assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    ended = again(*args, "--parameter-scale", "4")
    assert NO_STATE not in json.loads(ended.stdout)["notes"]
    (tmp_path / "script.py").write_text(SCRIPT)  # it reads the command line, which is not for it
    ended = again("--model", "script:build_too", "--sample", "16x8", "--partitions", "2")
    assert ended.returncode == 0, ended.stderr
    ended = again("--model", "mine:build", "--sample", "16x9", "--partitions", "2")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "pipesight plan: error: --sample must be a batch that the model takes (--model mine:build, --sample 16x9: "
    )
    assert "while profiling layer '0' (Linear) with input torch.float32 (16, 9)); give the shape" in ended.stderr
    assert ended.stderr.count("\n") == 1
    ended = again("--model", "mine:build", "--sample", "16y8", "--partitions", "2")
    assert "--sample must be shapes" in ended.stderr
    ended = again("--model", "mine:build", "--sample", "16x8")
    assert "--partitions N" in ended.stderr


PAIRS = """
import torch
from torch import nn

class Add(nn.Module):
    def forward(self, pair):
        words, mask = pair
        assert (words.dtype, mask.dtype) == (torch.int64, torch.bool)
        return (words + mask).float()

def build():
    return nn.Sequential(Add(), nn.Linear(8, 8), nn.Linear(8, 8))

def batch():
    return (torch.zeros(16, 8, dtype=torch.int64), torch.ones(16, 8, dtype=torch.bool)), {}

def named():
    return {"words": torch.zeros(16, 8)}

def text():
    return "batch"
"""


def test_several_tensors(tmp_path):
    """A model may take several tensors: by their shapes and types, or as a function of the module makes them."""
    (tmp_path / "pairs.py").write_text(PAIRS)
    again = functools.partial(
        warm.run, "-m", "pipesight", "plan", "--model", "pairs:build", "--partitions", "2", cwd=tmp_path
    )
    for sample in ("16x8:int64,16x8:bool", "pairs:batch"):
        ended = again("--sample", sample)
        assert ended.returncode == 0, ended.stderr
        assert "balance=[" in ended.stdout
    for sample, words in (
        (
            "16x8:int64,mask=16x8:bool",
            "an nn.Sequential takes no keyword arguments (--sample 16x8:int64,mask=16x8:bool",
        ),
        ("pairs:named", "takes no keyword arguments (--sample pairs:named: words)"),
        ("pairs:text", "--sample must return a tensor, a tuple of tensors, (args, kwargs), or kwargs"),
        ("pairs:bacth", "--sample pairs:bacth: no attribute 'bacth'; did you mean 'batch'?"),
    ):
        ended = again("--sample", sample)
        assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr


TAGGER = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x, mask):
        for _ in range(self.inner.in_features // 64):
            x = x + self.inner(x) * mask.unsqueeze(-1)
        return x

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 256)
        self.blocks = nn.ModuleList(Block(256) for _ in range(4))
        self.head = nn.Linear(256, 20, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids, *, mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return {"scores": self.head(x)}

def batch():
    return {"ids": torch.randint(20, (32, 64)), "mask": torch.ones(32, 64)}
"""


def test_any_model(tmp_path):
    """A model that is no nn.Sequential is planned by its modules; tied weights count once."""
    (tmp_path / "tagger.py").write_text(TAGGER)
    again = functools.partial(
        warm.run, "-m", "pipesight", "plan", "--model", "tagger:Tagger", "--partitions", "2", cwd=tmp_path
    )
    for sample in ("32x64:int64,mask=32x64", "tagger:batch"):
        ended = again("--sample", sample, "--schedule", "gpipe")
        assert ended.returncode == 0, ended.stderr
        assert re.search(r'Pipeline\(model, cuts=\["blocks\.[123]"\], ', ended.stdout), ended.stdout
    ended = again("--sample", "32x64:int64", "--schedule", "gpipe")
    assert ended.returncode == 2
    assert "missing 1 required keyword-only argument: 'mask'" in ended.stderr


def test_arguments_of_a_sample():
    """Positional arguments come first, then named ones, each with its shape and type."""
    args, kwargs = make_sample("4x2:int64, 4, mask=4x2:bool,scale=4x1")
    assert [(tuple(x.shape), x.dtype) for x in args] == [((4, 2), torch.int64), ((4,), torch.float32)]
    assert {name: (tuple(x.shape), x.dtype) for name, x in kwargs.items()} == {
        "mask": ((4, 2), torch.bool),
        "scale": ((4, 1), torch.float32),
    }
    for wrong in ("", "4x", "4x2,", "4x0", "mask=4x2,4x2", "a=4,a=4", "1a=4", "=4", "4x2:linear", "4x2:int64:int64"):
        with pytest.raises(ValueError, match="--sample must be shapes"):
            make_sample(wrong)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (quantities.size, "16GiB", 16 * 2**30),
        (quantities.size, "16G", 16 * 2**30),
        (quantities.size, "1.5 k", 1536),
        (quantities.size, "800 mb", 8e8),
        (quantities.quota, "1G", 2**30),
        (quantities.quota, "16GiB", 16 * 2**30),
        (quantities.quota, "800MB", 800_000_000),
        (quantities.quota, "0", None),
        (quantities.size, "12", 12),
        (quantities.seconds, "10us", 1e-5),
        (quantities.seconds, ".5ms", 5e-4),
        (quantities.bandwidth, "25GB/s", 25e9),
        (quantities.bandwidth, "100Gb/s", 12.5e9),
        (quantities.bandwidth, "1GiB/s", 2**30),
    ],
)
def test_quantities(read, text, value):
    """Sizes, times and speeds are read as people write them."""
    assert read(text) == value


@pytest.fixture
def over_ranks(tmp_path: Path) -> Path:
    """A run of 4 partitions on 2 ranks, in a V, with backwards that begin with the first micro-batch."""
    run = Made(tmp_path / "ranks", balance=[1, 1, 1, 1], chunks=4)
    run.pipeline = {"schedule": "zbv-zero-bubble", "ranks": [[0], [1], [1], [0]]}
    for step in range(4):
        ended: dict[tuple[str, int, int], int] = {}
        free = [5_000_000 * step] * 2
        order = [("forward", i, j, j - 1) for j in range(4) for i in range(4)]
        order += [("backward", i, j, j + 1) for j in reversed(range(4)) for i in range(4)]
        for phase, i, j, source in order:
            rank = (0, 1, 1, 0)[j]
            begin = max(free[rank], ended.get((phase, i, source), 0))
            where = {"partition": j, "microbatch": i, "rank": rank, "layers": {f"l{j}": 100_000}}
            run.task(step, phase=phase, begin=begin, dur=100_000, **where)
            ended[phase, i, j] = free[rank] = begin + 100_000
    return run.write()


def test_run_over_ranks(over_ranks):
    """A run with several partitions a rank is planned for its ranks, and its engine runs what is suggested."""
    ended = plan(over_ranks)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[1].split()[:8] == ["recorded", "zbv-zero-bubble", "never", "4", "1", "1", "1", "1"]
    assert lines[2].split()[-2:] == ["4.05", "KiB"]
    assert "share devices" not in ended.stdout
    call = re.fullmatch(
        r'DistributedPipeline\(\.\.\., balance=(\[.+\]), chunks=\d+, schedule="(.+)", checkpoint="never"\)', lines[-1]
    )
    assert call is not None, lines[-1]
    assert call[2] in schedule_names()
    found = validated("plan", json.loads(plan(over_ranks, "--json").stdout))
    assert (found["recorded"]["partitions"], found["recorded"]["devices"]) == (4, 2)
    # Parameters of two layers, twice; when all gradients are there, inputs and outputs of three micro-batches of a
    # stage, the input of the first excepted.
    assert found["recorded"]["memory_bytes"] == [4000 + 3 * 25, 4000 + 3 * 50]
    assert {p["partitions"] for p in found["plans"]} == {2}
    fastest = next(p for p in found["plans"] if p["call"] is not None)
    assert fastest["call"] == lines[-1]
    rounds = {p["schedule"]: p["rounds"] for p in sorted(found["plans"], key=lambda p: p["rounds"])}
    assert rounds == {name: 1 if name in ("gpipe", "1f1b") else 2 for name in SCHEDULES}


def test_only_what_the_engine_runs_is_listed(over_ranks):
    """DualPipeV with fewer chunks than stages, which engines refuse, is in no plan; alone, it is an error."""
    found = json.loads(plan(over_ranks, "--schedule", "dualpipev,1f1b", "--json").stdout)["plans"]
    assert all(p["call"] is not None for p in found)
    assert {p["chunks"] for p in found if p["schedule"] == "dualpipev"} == {4, 8, 16}
    assert 1 in {p["chunks"] for p in found if p["schedule"] == "1f1b"}
    refused = plan(over_ranks, "--schedule", "dualpipev", "--chunks", "2")
    assert refused.returncode == 2
    assert "dualpipev needs at least as many chunks as stages" in refused.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_settings_that_run_are_those_that_the_engine_takes(schedule):
    """The planner's rule, which needs no torch, is that of the engine."""
    rounds = 2 if schedule in LOOPS else 1
    for partitions, chunks in itertools.product(range(2, 6), range(1, 21)):
        setting = Setting(schedule, partitions, chunks, "never", rounds)
        kind = choose(setting.engine_name)
        assert setting.runs == kind.fits(chunks, partitions, setting.stages), setting


def test_an_order_is_searched_and_written(over_ranks, recorded, tmp_path):
    """What a search finds is no slower than any plan, fits, and is written as a file that ranks run."""
    named = validated("plan", json.loads(plan(over_ranks, "--chunks", "4,6", "--json").stdout))["plans"]
    file = tmp_path / "mine.csv"
    ended = plan(over_ranks, "--chunks", "4,6", "--search", "--out", file, "--json")
    assert ended.returncode == 0, ended.stderr
    first = validated("plan", json.loads(ended.stdout))["plans"][0]
    assert first["step_seconds"] <= min(p["step_seconds"] for p in named) * (1 + 1e-12)
    schedule = load_schedule(file)
    assert (schedule.stages, schedule.chunks, schedule.devices) == (len(first["balance"]), first["chunks"], 2)
    kind = choose(file)
    kind.check(first["chunks"], 2, len(first["balance"]))
    text = plan(over_ranks, "--chunks", "4,6", "--schedule", "1f1b", "--out", file).stdout
    assert text.endswith(f'schedule="{file}", checkpoint="never")\n')
    assert load_schedule(file).name == "mine"
    text = plan(recorded, "--chunks", "4", "--schedule", "1f1b", "--out", file).stdout
    assert re.search(rf'one process:\nPipeline\(model, .*schedule="{file}"\)\nover ranks:\nDistributed', text)
    wrong = plan(over_ranks, "--out", tmp_path / "mine.txt")
    assert (wrong.returncode, "must end in .csv" in wrong.stderr) == (2, True)


def test_one_chunk_is_explained(recorded):
    """A plan of one chunk does not pipeline, and a note says so."""
    words = "with chunks=1 there is no pipelining"
    assert words in plan(recorded, "--chunks", "1").stdout
    assert words not in plan(recorded, "--chunks", "2,4").stdout
    assert words not in plan(recorded, "--chunks", "1", "--partitions", "1").stdout


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_names_of_the_engine(schedule):
    """Every planned schedule has a name that `DistributedPipeline` knows, with as many partitions a rank."""
    setting = Setting(schedule, 2, 4, "never", 2 if schedule in LOOPS else 1)
    kind = choose(setting.engine_name)
    assert kind.name == setting.engine_name
    kind.check(setting.chunks, setting.partitions, setting.stages)
    assert list(setting.build().device_of_stage) == [kind.rank_of(j, 2) for j in range(setting.stages)]
