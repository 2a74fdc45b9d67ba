"""Trainers of other packages around a pipeline: the losses are those of the plain model with the same trainer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from pipesight import Pipeline

pytest.importorskip("transformers", reason="needs transformers")

from zoo.text import GPT2, text

CUTS = ["transformer.h.1", "transformer.h.3"]
LINES, BATCH, STEPS = 18, 6, 3
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def model():
    torch.manual_seed(0)
    return GPT2()


def lines():
    """Return padded samples, as a tokenizer and a collator make them."""
    torch.manual_seed(1)
    calls = [text()[1] for _ in range(LINES // BATCH)]
    return [{key: call[key][k] for key in call} for call in calls for k in range(BATCH)]


def losses_of_transformers(wrapped, folder, **settings):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        save_strategy="no",
        label_names=["labels"],  # or it asks the class, which does not know the model's arguments
        **settings,
    )
    trainer = Trainer(model=wrapped, args=arguments, train_dataset=lines())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.parametrize("accumulated", [1, 2])
def test_transformers(tmp_path, accumulated):
    settings = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.5}
    plain = model()
    expected, plainly = losses_of_transformers(plain, tmp_path / "plain", **settings)
    ours = model()
    found, trainer = losses_of_transformers(Pipeline(ours, CUTS, chunks=3), tmp_path / "ours", **settings)
    assert len(expected) == STEPS
    assert expected[0] != expected[-1]
    assert found == pytest.approx(expected, rel=1e-4)  # Trainer rounds what it logs
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    evaluated = plainly.evaluate(lines())["eval_loss"]
    assert trainer.evaluate(lines())["eval_loss"] == pytest.approx(evaluated, rel=1e-4)


def train_with_accelerate(wrapped):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped, optimizer, loader = accelerator.prepare(wrapped, optimizer, DataLoader(lines(), BATCH))
    found = []
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found, accelerator.get_state_dict(wrapped)


def test_accelerate():
    pytest.importorskip("accelerate", reason="needs accelerate")
    expected, theirs = train_with_accelerate(model())
    found, ours = train_with_accelerate(Pipeline(model(), CUTS, chunks=3))
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def train_with_lightning(wrapped, folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = wrapped, []

        def training_step(self, batch, _):
            loss = self.net(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(lines(), BATCH))
    return module.losses


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason="needs lightning")
    expected = train_with_lightning(model(), tmp_path)
    found = train_with_lightning(Pipeline(model(), CUTS, chunks=3), tmp_path)
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
