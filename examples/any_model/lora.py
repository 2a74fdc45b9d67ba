"""Fine-tune a model with LoRA: peft puts adapters into it, and it is cut as it is after that.

    python lora.py
    python lora.py --out ADAPTER

All weights but those of the adapters are frozen. Only the adapters have gradients, and only they are saved; a plain
model of the same weights loads them with `PeftModel.from_pretrained`.
"""

import argparse
from pathlib import Path

import torch
from finetune import batches, make_model, make_tokenizer
from peft import LoraConfig, get_peft_model

from pipesight import Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model with LoRA, in two partitions.")
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    parser.add_argument("--batch", type=int, default=16, help="lines a step (16)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to save the adapters")
    options = parser.parse_args()

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    torch.manual_seed(0)
    model = get_peft_model(make_model(None), config)
    pipe = Pipeline(model, cuts=["base_model.model.transformer.h.2"], chunks=4)
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    print(f"training {sum(p.numel() for p in trained):,} of {sum(p.numel() for p in pipe.parameters()):,} numbers")
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    for step, batch in enumerate(batches(make_tokenizer(None), options.steps, options.batch), start=1):
        loss = pipe(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if options.out is not None:
        model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
