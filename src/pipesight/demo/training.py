"""Train the demo's model in a pipeline, one step at a time, and generate text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pipesight._os_facts import processors
from pipesight._plurals import count_of
from pipesight.balance import balance_by_size
from pipesight.demo.model import char_gpt
from pipesight.demo.sonnets import SonnetText
from pipesight.pipeline.gpipe import GPipe
from pipesight.schedule.argument_checks import CheckpointMode

__all__ = ["CONTEXT", "ON_CPU", "ON_GPU", "Size", "Training", "one_thread", "pick_partitions"]

CONTEXT = 32
"""Characters per sample."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of model and batch: large enough that computing takes longer than launching it."""

    batch: int
    """Samples."""
    width: int
    heads: int
    rate: float
    """The learning rate: smaller for wider models."""


ON_CPU = Size(batch=32, width=64, heads=4, rate=5e-3)
ON_GPU = Size(batch=512, width=768, heads=12, rate=5e-4)


class Training:
    """A pipeline, its optimizer, and the text it learns. The seed determines every loss.

    Example::

        training = Training(partitions=4, chunks=4, checkpoint="except_last", seed=0)
        losses = [training.step() for _ in range(100)]
        print(training.write(200))

    Raises:
        ValueError: There are more partitions than layers, more chunks than samples, or less than one of either; or the
            seed is out of range.
    """

    def __init__(self, *, partitions: int, chunks: int, checkpoint: CheckpointMode, seed: int) -> None:
        devices = pick_devices(partitions)
        size = ON_GPU if any(device.type == "cuda" for device in devices) else ON_CPU
        self.batch = size.batch
        if not 1 <= chunks <= self.batch:
            raise ValueError(f"chunks must be between 1 and the batch's {self.batch} samples (chunks: {chunks})")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1 (seed: {seed})")
        torch.manual_seed(seed)
        self._picks = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._verse = SonnetText.sonnets()
        model = char_gpt(len(self._verse.alphabet), width=size.width, heads=size.heads, context=CONTEXT)
        sample = torch.zeros(self.batch, CONTEXT, dtype=torch.long)
        balance = balance_by_size(model, sample, partitions, chunks=chunks, param_scale=4)  # as Adam needs it
        self.pipe = GPipe(model, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        self._optimizer = torch.optim.AdamW(
            self.pipe.parameters(), lr=size.rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )

    @property
    def description(self) -> str:
        """What is trained where, in lines of less than 80 columns."""
        parameters = sum(p.numel() for p in self.pipe.parameters())
        gpus = len({device for device in self.pipe.devices if device.type == "cuda"})
        where = count_of(gpus, "GPU") if gpus else "the CPU"
        microbatches = count_of(self.pipe.chunks, "micro-batch", "micro-batches")
        return (
            f"a GPT of {len(self.pipe)} layers and {parameters:,} parameters learns Shakespeare's sonnets\n"
            f"partitions of {self.pipe.balance} layers on {where}\n"
            f"batches of {self.batch} samples in {microbatches}, checkpoint {self.pipe.checkpoint}"
        )

    def step(self) -> float:
        """Train on one batch, and return its loss."""
        inputs, targets = self._verse.batch(self.batch, length=CONTEXT, generator=self._picks)
        scores = self.pipe(inputs.to(self.pipe.devices[0]))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten().to(scores.device))
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.pipe.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    @torch.no_grad()
    def write(self, length: int, *, temperature: float = 0.8) -> str:
        """Generate ``length`` characters, each from those before it."""
        dice = torch.Generator().manual_seed(self._seed)
        tokens = self._verse.encode("\n")
        self.pipe.eval()
        try:
            for _ in range(length):
                scores = self.pipe(tokens[None, -CONTEXT:].to(self.pipe.devices[0]))[0, -1].cpu()
                odds = torch.softmax(scores / temperature, dim=0)
                tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=dice)])
        finally:
            self.pipe.train()
        return self._verse.decode(tokens[1:])


def pick_partitions() -> int:
    """Return the number of partitions that can compute at once on this machine, from 2 to 4."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max(2, min(gpus or processors(), 4))


def pick_devices(partitions: int) -> list[torch.device]:
    """Return a device for each partition: the GPUs in turn, or else the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", j % gpus) if gpus else torch.device("cpu") for j in range(partitions)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run each CPU operator in one thread.

    The demo's operators are too small to gain from more, and the partitions run in parallel anyway.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
