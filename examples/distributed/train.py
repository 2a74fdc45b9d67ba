"""Train a small GPT over the processes of a job, on one machine or on many.

    torchrun --standalone --nproc-per-node 2 train.py
    torchrun --standalone --nproc-per-node 2 train.py --schedule zbv-zero-bubble --checkpoints other --out RUN

After a crash or a preemption, start it again with the same options: it continues from its last checkpoint, and records
into RUN-2 if all ranks are on one machine. The data and the dropout masks depend on the seed and the step alone, so the
losses are those of an uninterrupted run. It may also continue with another schedule, balance or number of processes.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import pipesight
from pipesight.demo.model import char_gpt
from pipesight.demo.sonnets import SonnetText
from pipesight.distributed import DistributedPipeline, init_process_group, schedule_names

CONTEXT = 32  # characters a sample
HELD_OUT = 0.1  # the share of the text that is for evaluation

Batch = tuple[Tensor | None, Tensor | None]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT over the processes of a job; see torchrun.")
    add = parser.add_argument
    add("--steps", type=int, default=200, help="training steps, those before a restart included (200)")
    add("--batch", type=int, default=32, help="samples a step (32)")
    add("--chunks", type=int, default=8, help="micro-batches a step (8)")
    add("--schedule", default="1f1b", help=f"one of {', '.join(schedule_names())} (1f1b)")
    add("--balance", metavar="N,..", help="layers of each partition, such as 3,2,2,1 (as even as can be)")
    add("--blocks", type=int, default=6, help="transformer blocks; embedding and head are two more layers (6)")
    add("--width", type=int, default=64, help="of the model (64)")
    add("--seed", type=int, default=0, help="of weights, data and dropout (0)")
    add("--workers", type=int, default=0, help="processes that load data, for each rank that needs any (0)")
    add("--checkpoints", type=Path, default=Path("checkpoints"), help="a folder that all ranks see (checkpoints)")
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next (50)")
    add("--eval-every", type=int, default=50, help="steps from one evaluation to the next (50)")
    add("--out", type=Path, metavar="RUN", help="record the run; then: pipesight report RUN")
    add("--overwrite", action="store_true", help="replace the recording that is in RUN")
    return parser.parse_args()


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """The pieces of a text: each with itself one character later, which is to be predicted."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        return self.tokens[start : start + CONTEXT], self.tokens[start + 1 : start + CONTEXT + 1]


class Draws(Sampler[list[int]]):
    """Draws the samples of some steps. They depend on the seed and the step, not on where a run began."""

    def __init__(self, steps: range, size: int, batch: int, seed: int) -> None:
        self.steps, self.size, self.batch, self.seed = steps, size, batch, seed

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            generator = torch.Generator().manual_seed(self.seed + step)
            yield torch.randint(self.size, (self.batch,), generator=generator).tolist()


def load(pipeline: DistributedPipeline, tokens: Tensor, steps: range, options: argparse.Namespace) -> Iterable[Batch]:
    """Load the batches of some steps on the first rank and on the last; others need none."""
    if not (pipeline.is_first or pipeline.is_last):
        return itertools.repeat((None, None), len(steps))
    pieces = Pieces(tokens)
    draws = Draws(steps, len(pieces), options.batch, options.seed)
    return DataLoader(pieces, batch_sampler=draws, num_workers=options.workers)


def choose_balance(options: argparse.Namespace, ranks: int) -> list[int]:
    """Return what was asked for, or an even cut: into one partition a rank, or two where the schedule takes several."""
    if options.balance is not None:
        return [int(number) for number in options.balance.split(",")]
    partitions = ranks if options.schedule in ("gpipe", "1f1b") else 2 * ranks
    if options.blocks + 2 < partitions:
        raise SystemExit(f"{options.blocks + 2} layers cannot fill {partitions} partitions: --blocks {partitions - 2}")
    share, more = divmod(options.blocks + 2, partitions)
    return [share + (j < more) for j in range(partitions)]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def evaluate(pipeline: DistributedPipeline, tokens: Tensor, options: argparse.Namespace) -> float | None:
    """Return the mean loss on text that is not trained on; on the last rank."""
    pipeline.eval()
    losses = [pipeline.eval_step(*batch) for batch in load(pipeline, tokens, range(4), options)]
    pipeline.train()
    return sum(float(loss) for loss in losses if loss is not None) / len(losses) if pipeline.is_last else None


@contextlib.contextmanager
def recording(options: argparse.Namespace, done: int) -> Iterator[None]:
    """Record the block, where it is asked for, into a folder that is free."""
    with contextlib.ExitStack() as stack:
        if options.out is not None:
            try:
                stack.enter_context(pipesight.observe(options.out, first_step=done, overwrite=options.overwrite))
            except FileExistsError as error:
                raise SystemExit(str(error).replace("overwrite=True", "--overwrite")) from None
        yield


def main() -> None:
    options = read_options()
    init_process_group()
    verse = SonnetText.sonnets()
    cut = int(len(verse.tokens) * (1 - HELD_OUT))
    training, held_out = verse.tokens[:cut], verse.tokens[cut:]

    def make_model() -> nn.Sequential:
        return char_gpt(len(verse.alphabet), width=options.width, blocks=options.blocks, context=CONTEXT)

    torch.manual_seed(options.seed)
    pipeline = DistributedPipeline(
        make_model,
        choose_balance(options, torch.distributed.get_world_size()),
        chunks=options.chunks,
        schedule=options.schedule,
        loss_fn=cross_entropy,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.1)
    done = pipeline.load(options.checkpoints, optimizer) or 0
    pipeline.save_on_sigterm(options.checkpoints, optimizer, extra=lambda: done)
    if pipeline.is_last:
        print(f"from step {done} of {options.steps}, {pipeline.schedule}, balance {pipeline.balance}", flush=True)

    if done >= options.steps:
        if pipeline.is_last:
            print(
                f"nothing to do: {options.checkpoints} has step {done}; use more --steps to continue, or another "
                "--checkpoints to start over",
                flush=True,
            )
        torch.distributed.destroy_process_group()
        return

    with recording(options, done):
        for input, target in load(pipeline, training, range(done, options.steps), options):
            torch.manual_seed(options.seed + done)  # for dropout
            optimizer.zero_grad()
            loss = pipeline.step(input, target)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            done += 1
            if loss is not None:
                print(f"step {done} loss {loss.item():.6f}", flush=True)
            if done % options.eval_every == 0 or done == options.steps:
                found = evaluate(pipeline, held_out, options)
                if found is not None:
                    print(f"step {done} held-out loss {found:.6f}", flush=True)
            if done % options.save_every == 0 or done == options.steps:
                pipeline.save(options.checkpoints, optimizer, extra=done)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
