"""Models of vision: of timm, of transformers, and a U-Net as people write it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.entry import BATCH, Call, Entry, hugging_face, layers, samples

VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def images(size: int, *, keyword: str | None = None) -> Callable[[], Call]:
    def call() -> Call:
        pictures = torch.randn(BATCH, 3, size, size)
        return ((), {keyword: pictures}) if keyword else ((pictures,), {})

    return call


MODES = ("BILINEAR", "BICUBIC", "NEAREST", "LANCZOS", "HAMMING", "BOX")  # of interpolation; timm tells them apart


class _Absent(types.ModuleType):
    """A module of torchvision whose every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {mode: mode for mode in MODES})
        setattr(self, name, made)
        return made


def import_timm() -> Any:
    """Import timm without torchvision, if that is missing: timm imports names of it that its models do not use."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        import timm

        return timm
    names = ["torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.datasets"]
    names += ["torchvision.transforms", "torchvision.transforms.functional"]
    absent = {name: _Absent(name) for name in names}
    for name, module in absent.items():
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(absent[parent], last, module)
    sys.modules.update(absent)
    try:
        import timm
    finally:
        for name in absent:  # transformers asks whether torchvision is there
            del sys.modules[name]
    return timm


def of_timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        built: nn.Module = import_timm().create_model(name, num_classes=5, **settings)
        return built

    return make


class Twice(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from each level down to the same level up, kept in a list; the output is as large as the picture."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = Twice(widths[-1], widths[-1] * 2)
        self.up = nn.ModuleList(
            Twice(3 * b if k == 0 else a + b, b)
            for k, (a, b) in enumerate(zip((0, *widths[::-1]), widths[::-1], strict=False))
        )
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, picture: Tensor, *, labels: Tensor | None = None) -> dict[str, Tensor]:
        x, skips = picture, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = block(torch.cat([skip, x], 1))
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


VISION = [
    Entry(
        "ViT",
        hugging_face("ViTForImageClassification", "ViTConfig", **VIT, num_labels=5),
        lambda: ((), {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(5, (BATCH,))}),
        layers("vit.layers"),
        samples,
    ),
    Entry(
        "SegFormer",
        hugging_face(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[2, 2],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            num_labels=3,
        ),
        lambda: ((), {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(3, (BATCH, 32, 32))}),
        ("segformer.stages.0.blocks.1", "segformer.stages.1", "decode_head"),
        samples,
    ),
    Entry(
        "U-Net",
        UNet,
        lambda: ((torch.randn(BATCH, 3, 20, 20),), {"labels": torch.randint(2, (BATCH, 20, 20))}),
        ("down.1", "middle", "up.1"),
        samples,
        needs="torch",
    ),
    Entry(
        "ResNet",
        of_timm("resnet18", channels=(8, 12, 16, 24), stem_width=8),
        images(32),
        ("layer1.1", "layer2.1", "layer4"),
        needs="timm",
    ),
    Entry(
        "DenseNet",
        of_timm(
            "densenet121",
            growth_rate=4,
            block_config=(2, 2, 2),
        ),
        images(32),
        ("features.denseblock1.denselayer2", "features.denseblock2", "features.denseblock3.denselayer2"),
        needs="timm",
    ),
    Entry(
        "Swin",
        of_timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
        images(32),
        ("layers.0.blocks.1", "layers.1", "layers.1.blocks.1"),
        needs="timm",
    ),
    Entry(
        "ConvNeXt",
        of_timm("convnext_atto", depths=(2, 2, 1, 1), dims=(8, 12, 16, 20)),
        images(32),
        ("stages.0.blocks.1", "stages.1", "stages.3"),
        needs="timm",
    ),
    Entry(
        "EfficientNet",
        of_timm("test_efficientnet", drop_path_rate=0.0, drop_rate=0.0),
        images(32),
        ("blocks.1", "blocks.2", "blocks.4"),
        needs="timm",
    ),
]
