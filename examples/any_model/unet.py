"""Train a U-Net, cut as it is: what its forward keeps in a list on the way down comes back on the way up.

    python unet.py
    python unet.py --out RUN && pipesight report RUN

The skips jump over partitions, from where they are made to where they are used. Nothing in the model says so.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipesight


class Convolutions(nn.Sequential):
    """Two convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(1, 8), Convolutions(8, 16), Convolutions(16, 32)])
        self.middle = Convolutions(32, 64)
        self.up = nn.ModuleList([Convolutions(64 + 32, 32), Convolutions(32 + 16, 16), Convolutions(16 + 8, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, picture: Tensor) -> Tensor:
        skips, x = [], picture
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2.0)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def discs(batch: int, generator: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw noisy pictures of a disc each; return them, and which pixels are of the disc."""
    places = torch.arange(size, dtype=torch.float32)
    x, y, radius = (
        torch.rand(3, batch, 1, 1, generator=generator) * torch.tensor([1, 1, 0.5]).view(3, 1, 1, 1)
    ) * 20 + 4
    inside = ((places.view(1, 1, size) - x) ** 2 + (places.view(1, size, 1) - y) ** 2 < radius**2).float()[:, None]
    return inside + torch.randn(inside.shape, generator=generator), inside


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net that is cut as it is.")
    parser.add_argument("--steps", type=int, default=40, help="training steps (40)")
    parser.add_argument("--batch", type=int, default=16, help="pictures a step (16)")
    parser.add_argument("--out", type=Path, metavar="RUN", help="record the run; then: pipesight report RUN")
    options = parser.parse_args()

    torch.manual_seed(0)
    pipe = pipesight.Pipeline(UNet(), cuts=["down.2", "up.1"], chunks=4)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    with contextlib.nullcontext() if options.out is None else pipesight.observe(options.out):
        for step in range(1, options.steps + 1):
            pictures, inside = discs(options.batch, generator)
            loss = F.binary_cross_entropy_with_logits(pipe(pictures), inside)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
