"""Trainers of other packages around a model, on the CPU or on a GPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch.utils.data import DataLoader

from zoo.text import GPT2, text

__all__ = ["CUTS", "STEPS", "lightning_name", "lines", "losses_of_transformers", "model", "train_with_accelerate"]
__all__ += ["train_with_lightning"]

CUTS = ["transformer.h.1", "transformer.h.3"]
LINES, BATCH, STEPS = 18, 6, 3


def model():
    torch.manual_seed(0)
    return GPT2()


def lines():
    """Return padded samples, as a tokenizer and a collator make them."""
    torch.manual_seed(1)
    calls = [text()[1] for _ in range(LINES // BATCH)]
    return [{key: call[key][k] for key in call} for call in calls for k in range(BATCH)]


def losses_of_transformers(wrapped, folder, device="cpu", **settings):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        seed=0,
        save_strategy="no",
        label_names=["labels"],  # or it asks the class, which does not know the model's arguments
        **settings,
    )
    trainer = Trainer(model=wrapped, args=arguments, train_dataset=lines())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def train_with_accelerate(wrapped, device="cpu"):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
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


def lightning_name():
    """Return the name under which Lightning is installed, if it is."""
    names = ("lightning", "pytorch_lightning")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def train_with_lightning(wrapped, folder, device="cpu"):
    lightning = importlib.import_module(lightning_name())

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
        accelerator="cpu" if device == "cpu" else "gpu",
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
