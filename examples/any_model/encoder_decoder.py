"""Train an encoder-decoder of transformers, cut as it is, to write words backwards; then let it write some.

    python encoder_decoder.py

The decoder's layers look at what the encoder returned, whichever partition they are in. The embeddings are shared by
encoder, decoder and head, which are in different partitions: their gradients are added up. `generate()` is the model's
own, with its cache.
"""

import argparse
import random
import string

import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

from pipesight import Pipeline

PAD, BEGIN, END = 0, 1, 2
LETTERS = {letter: number for number, letter in enumerate(string.ascii_lowercase, start=3)}


def make_model() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=3 + len(LETTERS),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=16,
        dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
        decoder_start_token_id=BEGIN,
        forced_eos_token_id=END,
    )
    return BartForConditionalGeneration(config)


def padded(words: list[str], fill: int) -> Tensor:
    rows = [torch.tensor([*(LETTERS[letter] for letter in word), END]) for word in words]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def batch(words: list[str]) -> dict[str, Tensor]:
    ids = padded(words, PAD)
    labels = padded([word[::-1] for word in words], -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def written(ids: Tensor) -> str:
    names = {number: letter for letter, number in LETTERS.items()}
    return "".join(names.get(number, "") for number in ids.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an encoder-decoder that is cut as it is.")
    parser.add_argument("--steps", type=int, default=250, help="training steps (250)")
    parser.add_argument("--batch", type=int, default=32, help="words a step (32)")
    options = parser.parse_args()

    cuts = ["model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"]
    pipe = Pipeline(make_model(), cuts, chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    draw = random.Random(0)
    for step in range(1, options.steps + 1):
        words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 5))) for _ in range(options.batch)]
        loss = pipe(**batch(words)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)

    pipe.eval()
    words = ["tide", "sail", "mast"]
    asked = batch(words)
    answers = pipe.generate(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=8)
    for word, answer in zip(words, answers, strict=True):
        print(f"{word} -> {written(answer)}")


if __name__ == "__main__":
    main()
