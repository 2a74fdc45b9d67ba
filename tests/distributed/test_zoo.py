"""Real models over 2 ranks, unmodified: losses, gradients and buffers are those of the plain model."""

import importlib.util

import pytest

from support.torchrun import torchrun
from zoo import ZOO

BODY = """
import importlib.util, warnings
from zoo import CHUNKS, ZOO
from zoo.reference import RELATIVE, Result, objective, plain_microbatches, worst, worst_gradient

warnings.simplefilter("error", RuntimeWarning)
for number, entry in enumerate(ZOO):
    if importlib.util.find_spec(entry.needs) is None:
        continue
    args, kwargs = entry.batch()
    truth = plain_microbatches(entry, entry.build(), (args, kwargs))
    options = dict(entry.options)
    if entry.items is None:
        options["loss_weight"] = "sum"
    elif callable(options.get("loss_weight")):
        options["loss_weight"] = lambda items=entry.items, **arguments: items(arguments)
    pipeline = DistributedPipeline(
        entry.build(),
        cuts=entry.cuts_into(2),
        chunks=CHUNKS,
        loss=objective,
        checkpoint=("never", "always")[number % 2],
        sample=(args, kwargs),
        **options,
    )
    for step in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(*args, **kwargs, broadcast_loss=True)
        found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        expected = {name: truth.gradients[name] for name in found}
        error, name = worst_gradient(Result({}, found, {}), Result({}, expected, {}))
        assert error <= RELATIVE, f"{entry.name}, step {step}: {name} differs by {error:.1e}"
        if entry.items is not None:
            torch.testing.assert_close(loss, truth.outputs["output.loss"], msg=entry.name)
        state = {name: value for name, value in pipeline.state_dict().items() if name in truth.buffers}
        if step == 0:  # later ones change them again
            assert worst(state, {name: truth.buffers[name] for name in state})[0] <= RELATIVE, entry.name
    held = [None] * size
    dist.all_gather_object(held, list(found))
    assert {*held[0], *held[1]} == truth.gradients.keys(), entry.name
    assert all(len(names) < len(truth.gradients) for names in held), f"{entry.name}: a rank holds everything"
    if rank == 0:
        print(entry.name, flush=True)
"""


def test_same_as_the_plain_model(tmp_path):
    output, _ = torchrun(2, BODY, tmp_path, timeout=220)
    found = [line for line in output.splitlines() if line in {entry.name for entry in ZOO}]
    present = [entry.name for entry in ZOO if importlib.util.find_spec(entry.needs)]
    assert found == present
    if present != [entry.name for entry in ZOO]:
        pytest.skip(f"not installed: {', '.join(sorted({entry.needs for entry in ZOO if entry.name not in present}))}")
