"""Fine-tune a causal language model of transformers, cut as it is: in one process, or over the ranks of a job.

    python finetune.py
    torchrun --standalone --nproc-per-node 2 finetune.py
    python finetune.py --model gpt2 --cuts transformer.h.6 --steps 3

The model is not changed: not its embeddings, which are tied to its head, not its mask, not the loss that it computes
itself. Both ways train on the same batches and print the same losses. Without --model, it is a small GPT-2 with random
weights, and characters are its tokens.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from pipesight import Pipeline
from pipesight.distributed import DistributedPipeline, init_process_group

TEXT = Path(__file__).with_name("harbour.txt")
CUTS = ["transformer.h.2"]

Tokenize = Callable[[str], list[int]]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model, in one process or over ranks.")
    add = parser.add_argument
    add("--model", metavar="NAME", help="a model of the hub, or a folder (a small GPT-2 with random weights)")
    add("--cuts", default=",".join(CUTS), metavar="NAME,..", help="modules that begin the partitions 1, 2, ...")
    add("--steps", type=int, default=30, help="training steps (30)")
    add("--batch", type=int, default=16, help="lines a step (16)")
    add("--chunks", type=int, default=4, help="micro-batches a step (4)")
    add("--out", type=Path, metavar="DIR", help="where to save the model that was trained")
    return parser.parse_args()


def make_model(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # so that both ways have the same losses
    return GPT2LMHeadModel(config)


def make_tokenizer(name: str | None) -> Tokenize:
    if name is None:
        return lambda line: [*line.encode("ascii"), 0]
    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda line: [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]


def batches(tokenize: Tokenize, steps: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield lines of the text, padded to the longest; the loss skips the padding."""
    lines = [torch.tensor(tokenize(line)) for line in TEXT.read_text(encoding="ascii").splitlines()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = [lines[k] for k in torch.randperm(len(lines), generator=generator)[:size].tolist()]
        ids = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(line) for line in chosen], batch_first=True)
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train_here(options: argparse.Namespace) -> None:
    """Train in this process, a partition on each GPU, or all on the CPU."""
    pipe = Pipeline(make_model(options.model), options.cuts.split(","), chunks=options.chunks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step, batch in enumerate(batches(make_tokenizer(options.model), options.steps, options.batch), start=1):
        loss = pipe(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if options.out is not None:
        pipe.save_pretrained(options.out)  # loads without pipesight


def train_over_ranks(options: argparse.Namespace) -> None:
    """Train over the ranks of the job; each of them holds one partition."""
    init_process_group()
    # Every rank builds the model and keeps its partition. If none can hold it all, pass a function that builds it.
    pipeline = DistributedPipeline(make_model(options.model), cuts=options.cuts.split(","), chunks=options.chunks)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    for step, batch in enumerate(batches(make_tokenizer(options.model), options.steps, options.batch), start=1):
        loss = pipeline.step(**batch)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:  # on the last rank
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if options.out is not None:
        pipeline.save(options.out, optimizer)  # goes on with any number of ranks
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    chosen = read_options()
    if "RANK" in os.environ:  # of torchrun
        train_over_ranks(chosen)
    else:
        train_here(chosen)
