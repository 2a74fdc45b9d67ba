"""Real models as pipelines, unmodified: outputs, gradients and buffers are those of the plain model."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from pipesight import Pipeline
from zoo import CHUNKS, ZOO
from zoo.reference import Result, assert_same, piped, plain_microbatches

BY_NAME = {entry.name: entry for entry in ZOO}
PARAMETERS = [
    pytest.param(
        entry,
        id=entry.name,
        marks=pytest.mark.skipif(importlib.util.find_spec(entry.needs) is None, reason=f"{entry.needs} is missing"),
    )
    for entry in ZOO
]


@functools.cache
def truth(name):
    entry = BY_NAME[name]
    return plain_microbatches(entry, entry.build(), entry.batch())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("entry", PARAMETERS)
def test_same_as_the_plain_model(entry, partitions, checkpoint):
    model, expected = entry.build(), truth(entry.name)
    names = list(model.state_dict())
    pipe = Pipeline(model, entry.cuts_into(partitions), chunks=CHUNKS, checkpoint=checkpoint, **entry.options)
    assert_same(piped(pipe, entry.batch()), expected)
    pipe.zero_grad()
    again = piped(pipe, entry.batch())  # the engine now knows what each block uses, and looks less
    assert_same(Result(again.outputs, again.gradients, expected.buffers), expected)
    assert list(pipe.state_dict()) == names
