"""The code of the AI logging specification runs as it stands, and writes the events that the text shows.

Each block runs in a process of its own, with DFTracer's import names: the conventions are one tree in a process, and
the first event of a process is the one with id 7.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pipesight.trace.ai import CONVENTIONS
from support.spec import document

SPEC = document("ai-logging.rst")

# Two blocks are no Python as they stand. What stands in the way, and what the reader is to think of instead.
MENDED = {
    8: ("def __init__(self, ...):", "def __init__(self):"),
    15: ("        # Do some work\n    ai.pipeline.epoch.stop", "        ...\n    ai.pipeline.epoch.stop"),
}

# The names that the reader of a block is to think of.
PRESUPPOSED = """
from types import SimpleNamespace
from dftracer.logger import ai, dftracer

class Loss:
    def backward(self):
        pass

class Batch:
    def to(self, device):
        return self

def model(x):
    return Loss()

class SessionRunHook:
    pass

tf = SimpleNamespace(train=SimpleNamespace(SessionRunHook=SessionRunHook))
training_util = SimpleNamespace(_get_or_create_global_step_read=lambda: "the step")
run_context = SimpleNamespace(session=SimpleNamespace(run=lambda tensor: 17))
x, loss, dataloader = 1.0, Loss(), [Batch(), Batch()]
num_epoch = num_epochs = 2
num_steps = epoch = 3
"""


def code_blocks(language: str) -> list[str]:
    """Return what is indented below each ``.. code-block::`` of the language."""
    blocks = re.findall(rf"^\.\. code-block:: {language}\n\n((?:    .*\n|\s*\n)+)", SPEC, re.M)
    return [textwrap.dedent(block).strip("\n") for block in blocks]


def block(ordinal: int) -> str:
    """Return a Python block, counted from 1, mended if it is not Python."""
    source = code_blocks("python")[ordinal - 1]
    if ordinal in MENDED:
        old, new = MENDED[ordinal]
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


def shown(ordinal: int) -> list[dict[str, Any]]:
    """Return the events of a JSON block, counted from 1."""
    return [json.loads(line) for line in code_blocks("json")[ordinal - 1].splitlines() if line != "..."]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a trace, without the brackets."""
    first, *lines, last = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert (first, last) == ("[", "]")
    return [json.loads(line) for line in lines]


@pytest.fixture
def lines(tmp_path):
    """Return a function that runs some code in a new process and gives the lines of its trace."""

    def run(*sources: str) -> list[dict[str, Any]]:
        path = tmp_path / "run.pfw.gz"
        path.unlink(missing_ok=True)
        log = 'log = dftracer.initialize_log("run.pfw")'
        script = "\n".join([PRESUPPOSED, log, *sources, "log.finalize()"])
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            cwd=tmp_path,
            env=os.environ | {"DFTRACER_ENABLE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        return lines_of(path) if path.exists() else []

    return run


@pytest.fixture
def events(lines):
    """Return a function that runs some code in a new process and gives its events, in the order they end."""

    def run(*sources: str) -> list[dict[str, Any]]:
        return [line for line in lines(*sources) if line["ph"] == "X" and line["cat"] != "dftracer"]

    return run


def names(events: list[dict[str, Any]]) -> list[str]:
    return [f"{event['cat']}/{event['name']}" for event in events]


def own(event: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the program gave."""
    return {key: value for key, value in event["args"].items() if key not in ("hhash", "p_idx", "level")}


def assert_alike(event: dict[str, Any], example: dict[str, Any], same: tuple[str, ...] = ()) -> None:
    """Compare field by field: the same keys in the same order, of the same types; the ``same`` ones are equal."""
    flat, expected = ({**line, **line["args"]} for line in (event, example))
    assert list(event) == list(example)
    assert list(event["args"]) == list(example["args"])
    assert {key: type(value) for key, value in flat.items()} == {key: type(value) for key, value in expected.items()}
    assert re.fullmatch("[0-9a-f]{16}", event["args"]["hhash"])
    for key in ("cat", "ph", *same):
        assert flat[key] == expected[key]


def test_every_block_is_found():
    """The specification has as many blocks as one counts by eye."""
    assert (len(code_blocks("python")), len(code_blocks("json"))) == (18, 3)


def test_blocks_that_are_mended_are_no_python():
    """Only what Python refuses to read is changed."""
    for ordinal in range(1, 19):
        source = code_blocks("python")[ordinal - 1]
        if ordinal in MENDED:
            with pytest.raises(SyntaxError):
                compile(source, "ai-logging.rst", "exec")
            compile(block(ordinal), "ai-logging.rst", "exec")
        else:
            assert block(ordinal) == source


@pytest.mark.parametrize("ordinal", range(1, 19))
def test_block_runs(ordinal, lines):
    """Every Python block runs."""
    lines(block(ordinal))


def test_table_of_conventions(lines):
    """Every access path of the table is an event with that name, in the category it is listed under."""
    paths = re.findall(r"``(ai\.\w+\.\w+)``", SPEC)
    assert {tuple(path.split(".")[1:]) for path in paths} == {(c, n) for c in CONVENTIONS for n in CONVENTIONS[c]}
    found = lines(*(f"with {path}: pass" for path in paths))
    spans = [line for line in found if line["ph"] == "X" and line["cat"] != "dftracer"]
    assert names(spans) == [path.removeprefix("ai.").replace(".", "/") for path in paths]


def test_usage(events):
    """Usage: each decorated function, block and loop of a training run is an event, nested as the calls are."""
    # As it stands, transfer_to_gpu returns nothing, and train() cannot unpack that.
    give = "transfer_to_gpu = ai.dataloader.fetch(lambda batch, device: (batch.to(device), None))"
    found = events(block(2), give, "train(model, dataloader, None, 'cpu', 1)")
    step = ["dataloader/fetch.iter", "dataloader/fetch", "compute/forward", "comm/all_reduce", "compute/backward"]
    step += ["compute/compute", "dataloader/fetch.block"]
    assert names(found) == ["pipeline/epoch.iter", *step, *step, "pipeline/epoch.block", "pipeline/train"]
    by_id = {event["id"]: event["name"] for event in found}
    parents = {event["name"]: by_id.get(event["args"]["p_idx"]) for event in found}
    assert parents == {
        "train": None,
        "epoch.iter": "train",
        "epoch.block": "train",
        "fetch.iter": "epoch.block",
        "fetch.block": "epoch.block",
        "fetch": "fetch.block",
        "compute": "fetch.block",
        "forward": "compute",
        "backward": "compute",
        "all_reduce": "backward",
    }


def test_main_of_usage(lines, tmp_path):
    """Usage: main() runs with ``initialize_log(...)`` to the letter; the dots mean the default file."""
    stand_in = "def train(*args):\n    assert args == (..., ..., ..., ..., 10)\n    with ai.pipeline.train: pass"
    lines("log.finalize()", block(2), stand_in, "main()")
    assert [line["name"] for line in lines_of(tmp_path / "trace.pfw.gz") if line["cat"] == "pipeline"] == ["train"]


def test_decorator(events):
    """Decorator style: each call is an event; arguments of the decorator go with it, and with no other."""
    call = "assert type(forward(model, x)) is Loss"
    found = events(block(3), call, block(4), call, block(3), call)
    assert names(found) == ["compute/forward"] * 3
    assert [own(event) for event in found] == [{}, {"arg1": "value1", "arg2": "value2"}, {}]


def test_context_manager(events):
    """Context manager style: each block is an event, with the arguments that were passed."""
    found = events(block(5), block(6), block(5))
    assert names(found) == ["compute/forward"] * 3
    assert [own(event) for event in found] == [{}, {"arg1": "value1", "arg2": "value2"}, {}]


def test_iterable(events):
    """Iterable style: each wait and each run of the body is an event, numbered from 1."""
    found = events(block(7))
    assert names(found) == ["dataloader/fetch.iter", "dataloader/fetch.block"] * 2
    assert [own(event) for event in found] == [{"count": "1"}] * 2 + [{"count": "2"}] * 2


def test_constructor(events):
    """Constructor hooking: making an object is an event ``init``."""
    found = events(block(8), "MyDataset()")
    assert names(found) == ["data/item.init"]


@pytest.mark.parametrize("ordinal", [9, 12])
def test_update(ordinal, events):
    """Updating arguments: events of the node have the arguments of the last update."""
    found = [event for event in events(block(ordinal)) if event["name"] == "forward"]
    assert [own(event) for event in found] == [{"epoch": e, "step": s} for e in range(2) for s in range(2)]


def test_update_reaches_the_subtree(events):
    """Updating arguments: they apply to all below, and to nothing else."""
    found = events("ai.compute.update(epoch=1)", "with ai.compute.forward, ai.compute.step.init, ai.data.item: pass")
    assert {event["name"]: own(event) for event in found} == {
        "forward": {"epoch": 1},
        "step.init": {"epoch": 1},
        "item": {},
    }


def test_disable_and_enable(events):
    """Disabling: a category is silent until it is enabled again, the whole tree too."""
    source = block(10)
    beat = "with ai.compute.forward, ai.checkpoint.capture: pass\n"
    assert names(events(source.replace("\n\n", f"\n{beat}\n") + f"\n{beat}")) == [
        *["compute/forward"],  # after the categories were enabled; checkpoint is not among them
        *["checkpoint/capture", "compute/forward"],  # after everything was
    ]


def test_force(events):
    """Force enable or disable: ``enable`` of one event wins over the switch of its category."""
    first, again, second = block(11).partition("ai.compute.enable()")
    call = "forward(model, x)"
    assert names(events(first, call, "with ai.compute.step: pass", again)) == ["compute/backward", "compute/forward"]
    assert names(events(again, second, call)) == []
    assert names(events(block(11), call)) == ["compute/backward"]


def test_hooks(events):
    """Hook style: start and stop make an event, with what was updated in between; calls nest."""
    steps = "hook.before_run(run_context); hook.after_run(run_context, None)"
    found = events(block(13), f"hook = DFTracerProfilingHook(); hook.begin(); {steps}; {steps}; hook.end(None)")
    assert names(found) == ["compute/compute", "compute/compute", "pipeline/epoch"]
    assert [own(event) for event in found] == [{"step": 17}] * 3
    assert [event["args"]["level"] for event in found] == [3, 3, 2]


def test_derive(events):
    """Derivation: ``preprocess.collate`` in the category of its parent, with the arguments that the parent gets."""
    found = events(block(14), "Dataset()[0]; collate_fn([1]); ai.data.preprocess.update(step=4); collate([1])")
    assert names(found) == ["data/preprocess", *["data/preprocess.collate"] * 3]
    assert [own(event) for event in found] == [{"epoch": 3}] * 3 + [{"epoch": 3, "step": 4}]


def test_derived_inherits(events):
    """Derivation: a derived profiler has the arguments and the switch of the original."""
    found = events(
        "ai.data.update(epoch=1); one = ai.data.item.derive(name='one')\nwith one: pass",
        "ai.data.disable(); two = ai.data.item.derive(name='two')\nwith one, two: pass",
    )
    assert [(event["name"], own(event)) for event in found] == [("item.one", {"epoch": 1})]


def test_regular_mode_is_the_example(lines):
    """Metadata section, regular mode: the lines are those of the example, field by field."""
    found = [line for line in lines(block(15)) if line["name"] == "epoch.block"]
    examples = shown(1)
    assert len(found) == len(examples) == 2
    for event, example in zip(found, examples, strict=True):
        assert_alike(event, example, same=("name", "p_idx", "level"))
        assert event["pid"] == event["tid"]
    assert [event["args"]["count"] for event in found] == ["1", "2"]
    assert found[0]["ts"] + found[0]["dur"] <= found[1]["ts"]


def test_metadata_mode_is_the_example(lines):
    """Metadata section, metadata mode: the lines are those of the example, field by field."""
    found = [line for line in lines(block(15)) if line["ph"] == "M" and line["name"] == "CM"]
    examples = shown(2)
    assert len(found) == len(examples) == 4
    for event, example in zip(found, examples, strict=True):
        assert_alike(event, example, same=("id",))
    assert [event["args"]["name"] for event in found] == ["epoch.start", "epoch.end"] * 2
    assert {event["args"]["name"] for event in found} == {example["args"]["name"] for example in examples}
    moments = [int(event["args"]["value"]) for event in found]
    assert moments == sorted(moments)
    assert len(str(moments[0])) == len(examples[0]["args"]["value"])  # microseconds since 1970


def test_init_is_the_example(lines):
    """Init event: both ways give the line of the example, field by field, the ids too."""
    for use in ("Checkpoint()", ""):
        source = block(16) if use else block(16).partition("# or")[2]
        (event,) = (line for line in lines(source, use) if line["id"] == 7)
        assert_alike(event, shown(3)[0], same=("id", "name", "p_idx", "level"))


def test_disabled_after_decorating(events):
    """Caveats: disable() after the decorator silences it, and enable() lets it speak again."""
    calls = ["Checkpoint()", "ai.checkpoint.enable()", "Checkpoint()"]
    assert names(events(block(17), *calls)) == ["checkpoint/checkpoint.init"]


def test_parentheses_do_not_matter(events):
    """Caveats: unlike DFTracer, disable() reaches a decorator with parentheses too; enable=True withstands it."""
    assert names(events(block(18), "Checkpoint()")) == []
    forced = block(18).replace("init()", "init(enable=True)")
    assert names(events(forced, "Checkpoint()")) == ["checkpoint/checkpoint.init"]
