"""The code of the specification of tensor statistics runs as it stands, through the names of nvdlfw_inspect."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import yaml
from nvdlfw_inspect.logging import BaseLogger

from support import warm
from support.spec import document

SPEC = document("tensor-statistics-logging.md")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", SPEC, re.M | re.S)
CONFIG = {
    "section": {
        "enabled": True,
        "layers": {"layer_types": ["fc"]},
        "LogTensorStats": {"enabled": True, "tensors": ["name"], "stats": ["max", "min", "mean", "std", "l2_norm"]},
    }
}


class Filled:
    """``debug_api``, with the arguments that the text leaves out as ``...``."""

    def __init__(self, **missing):
        self.missing = missing

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if args == (...,):
                args, given = self.missing[name]
                kwargs = {**given, **kwargs}
            return getattr(debug_api, name)(*args, **kwargs)

        return call


@pytest.fixture(autouse=True)
def ended():
    """End whatever a test began."""
    yield
    debug_api.end_debug()


def block(text: str) -> str:
    """Return the one block that holds a text."""
    (found,) = [code for code in BLOCKS if text in code]
    return found


def run(code: str, **names) -> None:
    exec(code, {"debug_api": Filled(initialize=((CONFIG,), {})), "logging": logging, **names})


def test_number_of_blocks():
    """There is a test below for each Python block of the text; one of them stands there twice."""
    assert len(BLOCKS) == 10


@pytest.mark.parametrize("which", [0, 1])
def test_log_dir(tmp_path, which):
    """Logs are in folders of ``log_dir``."""
    blocks = [code for code in BLOCKS if code == "debug_api.initialize(..., log_dir=path_to_dir)\n"]
    run(blocks[which], path_to_dir=tmp_path)
    debug_api.log_tensor_stats("fc1", tensor=torch.ones(3), tensor_name="name", iteration=0)
    debug_api.end_debug()
    assert (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").is_file()
    lines = (tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert "fc1_name_max \t\t\t\t iteration=000000 \t\t\t\t value=1.0000" in lines


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR"])
def test_log_message(tmp_path, monkeypatch, level):
    """A message is in the log; ``{LEVEL}`` stands for a level."""
    monkeypatch.setenv("NVDLFW_INSPECT_LOG_LEVEL", "DEBUG")
    debug_api.initialize(CONFIG, log_dir=tmp_path)
    run(block("log_message").replace("{LEVEL}", level))
    log = (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert f"{level} - MESSAGE" in log


def test_statistics_logger(tmp_path):
    """A logger of the user's gets each statistic."""

    class Logger(BaseLogger):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def log_scalar(self, name, value, iteration, **kwargs):
            self.seen[name, iteration] = value

    logger = Logger()
    filled = Filled(initialize=((CONFIG,), {"log_dir": tmp_path}))
    run(block("statistics_logger"), debug_api=filled, your_logger_here=logger)
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([3.0, 4.0]), tensor_name="name", iteration=7)
    debug_api.step()
    assert logger.seen["fc1_name_l2_norm", 7] == 5.0
    assert all(type(value) is float for value in logger.seen.values())
    assert not (tmp_path / "nvdlfw_inspect_statistics_logs").exists()


def test_tensorboard_writer(tmp_path):
    """A TensorBoard writer gets each statistic."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "board")
    filled = Filled(initialize=((CONFIG,), {"log_dir": tmp_path}))
    run(block("tb_writer=your_writer_here"), debug_api=filled, your_writer_here=writer)
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([3.0, 4.0]), tensor_name="name", iteration=7)
    debug_api.end_debug()
    writer.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (event,) = events.Scalars("fc1_name_l2_norm")
    assert (event.step, event.value) == (7, 5.0)


def test_skip_reduction(tmp_path):
    """The call of the text, on one rank."""
    debug_api.initialize(CONFIG, log_dir=tmp_path)
    run(block('tensor_name="name", skip_reduction=True'), layer_name="fc1", tensor=torch.ones(2))
    debug_api.end_debug()
    assert '"statistic": "mean", "value": 1.0' in (tmp_path / "stats" / "rank-00000.jsonl").read_text()


def test_step_counter(tmp_path):
    """Calls without an iteration are counted by ``step``."""
    debug_api.initialize(CONFIG, log_dir=tmp_path)

    def num_epochs():
        return 3

    counter = []

    class Steps(Filled):
        def __getattr__(self, name):
            debug_api.log_tensor_stats("fc1", tensor=torch.full((2,), 1.0 + len(counter)), tensor_name="name")
            counter.append(name)
            return super().__getattr__(name)

    run(block("for i in range(num_epochs)"), num_epochs=num_epochs(), debug_api=Steps())
    assert counter == ["step"] * 3
    records = map(json.loads, (tmp_path / "stats" / "rank-00000.jsonl").read_text().splitlines())
    assert {r["iteration"]: r["value"] for r in records if r["statistic"] == "mean"} == {0: 1.0, 1: 2.0, 2: 3.0}


def test_configuration(tmp_path):
    """The features that the text lists are there, with the statistics that it lists."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", SPEC, re.M | re.S)
    listed = []
    for line in text.splitlines():
        if match := re.search(r"(\w+): # .*?\[(.*?)\]", line):
            feature, stats = match[1], match[2].split(", ")
            settings = {"enabled": True, "tensors": "all", "stats": stats}
            placed = {feature: settings} if not line.startswith(" ") else {"transformer_engine": {feature: settings}}
            section = {"enabled": True, "layers": {"layer_types": ["fc"]}, **placed}
            debug_api.initialize(yaml.safe_load(yaml.safe_dump({"section": section})), log_dir=tmp_path)
            debug_api.end_debug()
            listed.append(feature)
    assert listed == ["LogTensorStats", "LogTensorStats", "LogFp8TensorStats"]


# What the text takes for granted: Megatron-LM's names, on two ranks that are the stages of a pipeline.
PRELUDE = f"""
import json, os, sys, types
import torch
import nvdlfw_inspect.api as debug_api

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
log_dir = sys.argv[1]
config = {CONFIG!r}
group = tensor_and_data_parallel_group = torch.distributed.group.WORLD
extensions = None
parallel_state = types.SimpleNamespace(is_in_last_pipeline_model_parallel_group=lambda: rank == 1)

def create_tensorboard_writer(folder):
    from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(folder)

def log(**kwargs):
    debug_api.log_tensor_stats("fc1", tensor=torch.full((1 + rank,), 1.0 + rank), tensor_name="name", **kwargs)

class Filled:
    def __getattr__(self, name):
        def call(*args, **kwargs):
            if args == (...,):
                return log(**kwargs)
            if name == "initialize":
                kwargs = dict(config_file=config, log_dir=log_dir) | kwargs
            return getattr(real, name)(*args, **kwargs)
        return call

real = debug_api
"""


def ranks(tmp_path: Path, body: str) -> list[dict[str, float]]:
    """Run code on two ranks as torchrun would; return the statistics that each rank logged at iteration 0."""
    program = tmp_path / "program.py"
    # torch may abort at exit if someone still holds a group
    ending = """
    real.step()
    real.end_debug()
    del group, tensor_and_data_parallel_group
    __import__("time").sleep(0.2)
    torch.distributed.destroy_process_group()
    """
    program.write_text(PRELUDE + textwrap.dedent(body) + textwrap.dedent(ending))
    for done in warm.torchrun(2, str(program), str(tmp_path), timeout=200):
        assert done.returncode == 0, done.stderr
    found = []
    for rank in range(2):
        lines = (tmp_path / "stats" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        found.append({r["statistic"]: r["value"] for r in map(json.loads, lines)})
    return found


def test_reduction_group_on_two_ranks(tmp_path):
    """Statistics are merged over the group: rank 0 has [1], rank 1 has [2, 2]."""
    code = block("set_tensor_reduction_group(group)")
    both = ranks(tmp_path, f"debug_api.initialize(config, log_dir=log_dir)\n{code}\nlog()\n")
    assert both[0] == both[1]
    assert both[0]["mean"] == pytest.approx(5 / 3)
    assert both[0]["l2_norm"] == pytest.approx(3.0)


def test_default_logging_on_two_ranks(tmp_path):
    """Each rank logs what it has, to its own file."""
    both = ranks(tmp_path, f"debug_api = Filled()\n{block('default_logging_enabled=True')}")
    assert [stats["mean"] for stats in both] == [1.0, 2.0]
    for rank in range(2):
        name = f"nvdlfw_inspect_globalrank-{rank}.log"
        assert "fc1_name_mean" in (tmp_path / "nvdlfw_inspect_statistics_logs" / name).read_text()


def test_megatron_example_on_two_ranks(tmp_path):
    """The last stage has a writer, which gets what the group has together."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = block("create_tensorboard_writer")
    ranks(tmp_path, f"{code}\nlog()\nreal.step()\nif tb_writer: tb_writer.flush()\n")
    assert not (tmp_path / "pp_rank_0").exists()
    events = EventAccumulator(str(tmp_path / "pp_rank_1")).Reload()
    (event,) = events.Scalars("fc1_name_mean")
    assert event.value == pytest.approx(5 / 3)
