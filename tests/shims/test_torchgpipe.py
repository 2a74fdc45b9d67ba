"""The shim gives pipesight the import names of torchgpipe, and its loggers."""

from __future__ import annotations

import importlib
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchgpipe
from packaging.specifiers import SpecifierSet
from torch import nn

import pipesight
import pipesight.balance
import pipesight.pipeline.microbatch
import pipesight.pipeline.partition
import pipesight.skip
from support import warm

# What torchgpipe 0.0.7 lists in `__all__`, what else programs import, and names of the guides; None: the shim's own.
NAMES = {
    "torchgpipe": {
        "GPipe": pipesight.GPipe,
        "is_checkpointing": pipesight.is_checkpointing,
        "is_recomputing": pipesight.is_recomputing,
        "current_microbatch": pipesight.current_microbatch,
        "register_layer_logging_hooks": pipesight.register_layer_logging_hooks,
        "__version__": "0.0.7+pipesight",
    },
    "torchgpipe.gpipe": {
        "GPipe": pipesight.GPipe,
        "TensorOrTensors": pipesight.pipeline.microbatch.TensorOrTensors,
        "verify_module": pipesight.pipeline.partition.verify_sequential,
        **dict.fromkeys(["BalanceError", "NamedModules", "recommend_auto_balance", "split_module"]),
    },
    "torchgpipe.pipeline": {"register_layer_logging_hooks": pipesight.register_layer_logging_hooks},
    "torchgpipe.balance": {
        "balance_by_time": pipesight.balance.balance_by_time,
        "balance_by_size": pipesight.balance.balance_by_size,
        **dict.fromkeys(["profile_sizes", "profile_times"]),
    },
    "torchgpipe.balance.blockpartition": {"solve": None},
    "torchgpipe.balance.profile": dict.fromkeys(["detach", "layerwise_sandbox", "profile_sizes", "profile_times"]),
    "torchgpipe_balancing": {
        "balance_by_time": pipesight.balance.balance_by_time,
        "balance_by_size": pipesight.balance.balance_by_size,
    },
    "torchgpipe.batchnorm": {"DeferredBatchNorm": None},
    "torchgpipe.checkpoint": {
        "is_checkpointing": pipesight.is_checkpointing,
        "is_recomputing": pipesight.is_recomputing,
    },
    "torchgpipe.microbatch": {
        "current_microbatch": pipesight.current_microbatch,
        "TensorOrTensors": pipesight.pipeline.microbatch.TensorOrTensors,
        **dict.fromkeys(["Batch", "check", "gather", "scatter"]),
    },
    "torchgpipe.skip": {name: getattr(pipesight.skip, name) for name in pipesight.skip.__all__},
    "torchgpipe.skip.namespace": {"Namespace": pipesight.skip.Namespace},
    "torchgpipe.skip.skippable": {
        **{name: getattr(pipesight.skip, name) for name in ("skippable", "stash", "pop", "verify_skippables")},
        "Skippable": None,
    },
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_those_of_pipesight(module):
    """Every name of torchgpipe's public modules is there, and is pipesight's own object."""
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module])
    for name, thing in NAMES[module].items():
        assert thing is None or getattr(found, name) is thing or getattr(found, name) == thing


def test_no_module_is_forgotten():
    """The table of names above covers every module of the shim."""
    root = Path(torchgpipe.__file__).parents[1]
    files = [*root.glob("torchgpipe/**/*.py"), *root.glob("torchgpipe_balancing/**/*.py")]
    modules = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert modules == set(NAMES)


def test_version_passes_for_0_0_7():
    """A requirement torchgpipe==0.0.7 or >=0.0.5 is met by the version."""
    assert torchgpipe.__version__ in SpecifierSet("==0.0.7")
    assert torchgpipe.__version__ in SpecifierSet(">=0.0.5,<0.1")


def test_packages_are_typed():
    """Both packages are typed."""
    root = Path(torchgpipe.__file__).parents[1]
    for package in ("torchgpipe", "torchgpipe_balancing"):
        assert (root / package / "py.typed").is_file()


def test_both_orders_of_balance_arguments():
    """The guide's order of arguments and that of 0.0.7 give the same balance."""
    from torchgpipe.balance import balance_by_size

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sample = torch.rand(2, 4)
    assert balance_by_size(model, sample, partitions=2) == balance_by_size(2, model, sample) == [2, 2]


def test_skip_through_the_shim():
    """A model with torchgpipe.skip layers gives what it gives without a pipeline."""
    from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables

    @skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, input):
            yield stash("skip", input)
            return 2 * input

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, input):
            skip = yield pop("skip")
            return input + skip

    name = Namespace()
    model = nn.Sequential(Down().isolate(name), nn.Tanh(), Up().isolate(name))
    verify_skippables(model)
    input = torch.rand(4, 2)
    expected = model(input)
    assert torch.equal(torchgpipe.GPipe(model, [1, 1, 1], chunks=2)(input), expected)


def lines(name, level, *, propagate=True):
    """Return what a handler and a level on the logger ``name`` let through of one pass: two tasks, a layer each."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate
    try:
        model = torchgpipe.GPipe(nn.Sequential(nn.ReLU(), nn.Tanh()), [1, 1])
        torchgpipe.register_layer_logging_hooks(model.partitions)
        model(torch.rand(2, 2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = True
    return stream.getvalue().splitlines()


TASKS = [f"Micro-batch 0 (partition {j}): checkpoint_stop=0, using_checkpointing=False" for j in range(2)]
LAYERS = [f"Executing layer '{j}' in partition {j}: {kind}" for j, kind in enumerate(("ReLU", "Tanh"))]


@pytest.mark.parametrize("name", ["torchgpipe", "torchgpipe.pipeline", "pipesight", "pipesight.pipeline", None])
def test_each_handler_gets_each_line_once(name):
    """A handler and a level on any of the loggers see every line, once."""
    assert lines(name, logging.INFO) == TASKS
    assert lines(name, logging.DEBUG) == [TASKS[0], LAYERS[0], TASKS[1], LAYERS[1]]
    assert lines(name, logging.WARNING) == []


def test_lines_in_a_file(tmp_path, capsys):
    """Handlers on torchgpipe's logger: a file has every line, once; a console that shows errors has none."""
    logger, path = logging.getLogger("torchgpipe"), tmp_path / "lines.log"
    handlers = [logging.FileHandler(path), logging.StreamHandler()]
    handlers[1].setLevel(logging.ERROR)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        lines("torchgpipe", logging.DEBUG)
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
    assert path.read_text().splitlines() == [TASKS[0], LAYERS[0], TASKS[1], LAYERS[1]]
    assert capsys.readouterr().err == ""


def test_propagate_of_torchgpipe_counts(caplog):
    """With propagate off on torchgpipe, the root logger's handlers get no lines."""
    assert lines("torchgpipe", logging.INFO, propagate=False) == TASKS
    assert caplog.messages == []
    assert lines("torchgpipe", logging.INFO) == TASKS
    assert caplog.messages == TASKS


PASS = """
def one_pass():
    import torch
    model = GPipe(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), [1, 1])
    model(torch.rand(2, 2))
"""

SCRIPTS = {
    "level set before the import": """
logging.basicConfig(format="%(message)s")
logging.getLogger("torchgpipe").setLevel(logging.INFO)
from torchgpipe import GPipe
one_pass()
""",
    "pipesight used before the import": """
logging.basicConfig(format="%(message)s")
logging.getLogger("torchgpipe").setLevel(logging.INFO)
from pipesight import GPipe
one_pass()  # silent: torchgpipe's level is none of pipesight's business yet
import torchgpipe
one_pass()
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_order_of_import_and_configuration_does_not_matter(script):
    """The level of the torchgpipe logger applies, and each line comes once, whatever was imported first."""
    done = warm.run("-c", "import logging\n" + PASS + script)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (0, "", TASKS)


def test_import_configures_no_logging():
    """Importing the shim adds no handler and sets no level."""
    script = """
import logging, torchgpipe, torchgpipe_balancing
for name in (None, "torchgpipe", "torchgpipe.pipeline", "pipesight"):
    assert not logging.getLogger(name).handlers, name
    assert logging.getLogger(name).getEffectiveLevel() == logging.WARNING
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
