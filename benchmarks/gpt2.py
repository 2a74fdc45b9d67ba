"""GPT-2 of transformers, 124 million parameters, which computes its loss itself: plain, and as a `Pipeline` on one GPU.

Its mini-batch is 64 sequences of 512 tokens. Micro-batches are fed to the plain model one by one, or by the pipeline:
its call and `backward()`, or its `step`.
"""

from typing import Any

import torch

from benchmarks.job import Job

__all__ = ["BATCH", "LENGTH", "Training"]

BATCH, LENGTH = 64, 512


class Training:
    """Runs steps of one contender, in bfloat16 by autocast."""

    def __init__(self, job: Job) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self.job = job
        with torch.device(job.device):
            self.model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False)).train()
            self.tokens = torch.randint(self.model.config.vocab_size, (BATCH, LENGTH))
        self.parts = self.tokens.chunk(job.chunks)
        self.pipe: Any = None
        if job.engine != "accumulated":
            from pipesight import Pipeline

            layers = self.model.config.n_layer
            self.model = self.pipe = Pipeline(
                self.model,
                [f"transformer.h.{j * layers // job.partitions}" for j in range(1, job.partitions)],
                devices=[job.device] * job.partitions,
                chunks=job.chunks,
                checkpoint=job.checkpoint,  # type: ignore[arg-type]
                schedule=job.engine.removeprefix("step ") if job.engine.startswith("step ") else "gpipe",
            )
            self.parts = (self.tokens,)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for tokens in self.parts:
            with torch.autocast(torch.device(self.job.device).type, torch.bfloat16):
                if self.job.engine.startswith("step "):
                    self.pipe.step(input_ids=tokens, labels=tokens)
                    continue
                loss = self.model(input_ids=tokens, labels=tokens).loss / len(self.parts)
            loss.backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()

    def gradient_norms(self) -> list[float]:
        """None: dropout makes them differ."""
        return []

    def close(self) -> None:
        """Nothing to end."""
