"""Blocks that change the lists, mappings and objects that they are given change the caller's, in every partition."""

from __future__ import annotations

import collections
import copy
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline
from pipesight.pipeline.entering import EnteredArguments
from support.against_plain import rand


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class State:
    last: Any = None
    history: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Any


def entered(value):
    """Enter a value with doubled tensors."""
    call = EnteredArguments(lambda tensor: tensor * 2)
    return call, call.enter(value)


def test_tensors_are_replaced_wherever_they_are():
    x = rand(2)
    value = {
        "a": [x, 1],
        "b": (x, Pair(x, None)),
        "c": State(x, [x]),
        "d": Frozen(x),
        "e": types.MappingProxyType({1: x}),
    }
    _, new = entered(value)
    for found in (
        new["a"][0],
        new["b"][0],
        new["b"][1].left,
        new["c"].last,
        new["c"].history[0],
        new["d"].x,
        new["e"][1],
    ):
        assert torch.equal(found, x * 2)
    assert torch.equal(value["a"][0], x)
    assert type(new["b"][1]) is Pair


def test_what_is_not_replaced_is_the_same():
    plain = {"a": [1, (None, "x")], "b": State()}
    call = EnteredArguments(lambda tensor: tensor)
    assert call.enter(plain) is plain
    held = [rand(2)]
    assert call.enter(held) is held


def test_changes_reach_the_caller():
    """What was added, removed and replaced is so in the caller's; what was not keeps the caller's own tensors."""
    x, y, new = rand(2), rand(3), rand(4)
    value = {"list": [x, y], "dict": collections.OrderedDict(x=x, y=y), "state": State(x, [y]), "only": x}
    value["same"] = value["list"]
    call, mine = entered(value)
    assert mine["same"] is mine["list"]
    mine["list"].insert(0, new)
    mine["list"].pop()
    del mine["dict"]["x"]
    mine["dict"]["new"] = mine["list"]
    mine["state"].last = new
    mine["state"].history.append(new)
    call.leave()
    assert value["list"][0] is new
    assert value["list"][1] is x
    assert len(value["list"]) == 2
    assert list(value["dict"]) == ["y", "new"]
    assert value["dict"]["y"] is y
    assert value["dict"]["new"] is value["list"]
    assert value["state"].last is new
    assert value["state"].history[0] is y
    assert value["state"].history[1] is new
    assert value["only"] is x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor, seen: list[Tensor], sums: dict[str, Tensor], state: State) -> Tensor:
        y = self.layer(x + torch.stack(seen).sum(0) + state.last)
        seen.append(y)
        sums["all"] = sums.get("all", 0) + y
        state.last = 2 * y
        state.history.append(y)
        return y


class Model(nn.Module):
    """Blocks leave what later ones use in what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        seen, sums, state = [x], dict[str, Tensor](), State(x)
        for block in self.blocks:
            x = block(x, seen, sums=sums, state=state)
        return x + torch.stack(seen).sum(0) + sums["all"] + state.last + torch.stack(state.history).mean(0)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("cuts", [["blocks.1"], ["blocks.1", "blocks.3"]])
def test_blocks_that_append(cuts, checkpoint):
    torch.manual_seed(0)
    plain = Model().double()
    pipe = Pipeline(copy.deepcopy(plain), cuts, devices=["cpu"] * (1 + len(cuts)), chunks=3, checkpoint=checkpoint)
    x = rand(6, 4)
    expected = torch.cat([plain(part) for part in x.split(2)])
    for _ in range(2):
        output = pipe(x)
        torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for (name, truth), parameter in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, truth.grad, msg=name)
