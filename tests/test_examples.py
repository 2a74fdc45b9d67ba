"""The examples of models that are cut as they are: they learn, and do over ranks what they do in one process."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from pipesight._torch.pipelining import SUPPORTED
from support import warm

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "any_model"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # inside peft


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what runs an example in this process, and returns what it printed."""

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        monkeypatch.syspath_prepend(str(FOLDER))
        with torch.random.fork_rng():
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(text):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.M)]


def test_finetune(run, tmp_path):
    """A model that was trained in one process is loaded without pipesight; over ranks, the losses are the same."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    found = losses(run("finetune.py", "--steps", 8, "--out", tmp_path / "model"))
    assert len(found) == 8
    assert found[-1] < found[0] - 0.5
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    if not SUPPORTED:
        pytest.skip("pipesight.distributed needs torch 2.10")
    options = ["--steps", "8", "--out", str(tmp_path / "checkpoint")]
    ranks = warm.torchrun(2, FOLDER / "finetune.py", *options, env=dict(os.environ), timeout=180, cwd=tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert losses("".join(rank.stdout for rank in ranks)) == pytest.approx(found, abs=2e-4)
    assert list((tmp_path / "checkpoint").iterdir())


def test_unet(run, tmp_path):
    found = losses(run("unet.py", "--steps", 12, "--out", tmp_path / "RUN"))
    assert len(found) == 12
    assert found[-1] < 0.6 * found[0]
    assert (tmp_path / "RUN/run.json").exists()


def test_encoder_decoder(run):
    pytest.importorskip("transformers", reason="needs transformers")
    text = run("encoder_decoder.py", "--steps", 10)
    found = losses(text)
    assert found[-1] < found[0] - 0.2
    assert re.findall(r"^(\w+) -> \w*$", text, re.M) == ["tide", "sail", "mast"]


def test_lora(run, tmp_path):
    """The adapters that were trained change what a plain model returns; nothing else of it was trained."""
    pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft")
    text = run("lora.py", "--steps", 10, "--out", tmp_path / "adapters")
    found = losses(text)
    assert found[-1] < found[0]
    base = runpy.run_path(str(FOLDER / "finetune.py"))["make_model"](None)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    ids = torch.arange(40, 60)[None]
    with torch.no_grad(), model.disable_adapter():
        before = model(ids).logits
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, before)
