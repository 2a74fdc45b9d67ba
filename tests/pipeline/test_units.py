"""Which modules of a model are its units, and where it can be cut."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from pipesight import Pipeline
from pipesight.pipeline.units import check_cuts, find_units


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = _Decoder()
        self.head = nn.Linear(4, 8)
        self.twin = self.head


def test_units_are_blocks_and_what_is_beside_them() -> None:
    blocks = [f"decoder.layers.{k}" for k in range(3)]
    assert list(find_units(_Model())) == ["decoder.embed", *blocks, "decoder.norm", "head"]


def test_a_cut_opens_the_modules_around_it() -> None:
    units = list(find_units(_Model(), ["decoder.layers.1.mlp"]))
    assert units[1:5] == ["decoder.layers.0", "decoder.layers.1.norm", "decoder.layers.1.mlp", "decoder.layers.2"]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["decoder.layers.7"], "has no module 'decoder.layers.7' to be cut at; did you mean 'decoder.layers.2'"),
        (
            ["decoder.layers"],
            "has no forward of its own, so that it is never called; cut at 'decoder.layers.0' instead",
        ),
        (["head", "head"], "'head' is given twice"),
        ([""], "cannot be the whole model"),
    ],
)
def test_bad_cuts_are_refused(cuts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cuts(_Model(), cuts)


def test_cuts_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"cuts=\['head'\]"):
        check_cuts(_Model(), "head")
    model = _Model()
    with pytest.raises(TypeError, match=r"names of modules, such as 'decoder\.layers\.1', but got _Block"):
        check_cuts(model, [model.decoder.layers[1]])  # type: ignore[list-item]


def test_a_pipeline_needs_cuts() -> None:
    """Without a word, it would be one partition."""
    with pytest.raises(TypeError, match=r"say where the model is cut: cuts=\['.*'\].* or partitions=2, sample="):
        Pipeline(_Model(), chunks=2)


def test_the_model_is_a_module() -> None:
    with pytest.raises(TypeError, match=r"the model must be an nn\.Module, but got function"):
        check_cuts(lambda x: x, ["head"])  # type: ignore[arg-type]
