"""Random pipelines over ranks against the plain model, and ranks that fail at random moments.

Truth is the plain model, fed the same micro-batches; the loss is that of all outputs together. Where a rank fails, all
others must end and name that one, and no other.
"""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import account, fuzz
from fuzz.rank_pool import Pool
from fuzz.rank_steps import expected
from pipesight.distributed import schedule_names, schedules
from support import faults
from support.torchrun import skip_old_torch

TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 0.12}
"""Of the largest value of a tensor: gradients of micro-batches are summed in another order."""


@pytest.fixture(scope="module")
def pool():
    """Ranks for all cases."""
    skip_old_torch()
    ranks = Pool()
    yield ranks
    ranks.close()


@st.composite
def shapes(draw):
    """Draw ranks, a schedule that suits them, and how many partitions and chunks it takes."""
    pp, dp = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (1, 4), (1, 1), (1, 3)]))
    kind = schedules.choose(draw(st.sampled_from(schedule_names())))
    rounds = {"one each": [1], "loop": [1, 2, 3], "v": [2]}[kind.placement]
    partitions = pp * draw(st.sampled_from(rounds))
    chunks = draw(st.sampled_from([c for c in range(1, 13) if kind.fits(c, pp, partitions)]))
    shape = {"pp": pp, "dp": dp, "schedule": kind.name, "chunks": chunks}
    shape["checkpoint"] = draw(st.sampled_from(["never", "except_last", "always"]))
    shape["data_parallel"] = draw(st.sampled_from(["ddp", "fsdp"])) if dp > 1 else "ddp"
    return shape, partitions


LAYERS = ("linear", "linear", "frozen", "tanh", "relu", "norm", "noise", "unused", "inplace", "views", "tuple", "skip")


@st.composite
def layer_names(draw, partitions, batchnorm):
    """Draw layers, at least as many as partitions; those that belong together may end up in different ones."""
    choices = (*LAYERS, "batchnorm") if batchnorm else LAYERS
    names = []
    for name in draw(st.lists(st.sampled_from(choices), min_size=partitions, max_size=partitions + 6)):
        names += ["apart", "together"] if name == "tuple" else [name]
    pairs = [k for k, name in enumerate(names) if name == "skip"]
    for number, k in enumerate(pairs):
        names[k] = f"stash:{number}"
    for number in range(len(pairs)):
        start = names.index(f"stash:{number}") + 1
        at = draw(st.integers(start, len(names)))
        if at < len(names) and names[at] == "together":  # what comes in between is no tensor
            at += 1
        names.insert(at, f"pop:{number}")
    names.insert(draw(st.sampled_from([0, len(names)])), "linear")
    return names


@st.composite
def trainings(draw):
    """Draw a case of training that must agree with the plain model."""
    shape, partitions = draw(shapes())
    loss = draw(
        st.sampled_from(["mse", "module", "sum", "partial", "lambda", "classes", "padded", "weighted", "masked"])
    )
    batchnorm = draw(st.booleans())
    steps = draw(st.integers(1, 3))
    flat = batchnorm or loss in ("classes", "padded", "weighted")
    names = draw(layer_names(partitions, batchnorm))
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: partitions - 1])
    least = 2 * shape["chunks"] if batchnorm else 0
    # A multiple of the chunks, if micro-batches of one sample must not be: of those, there is no variance.
    size = st.integers(1, 3).map(lambda k: k * least) if batchnorm else st.integers(0, 2 * shape["chunks"] + 3)
    sizes = [[draw(size) for _ in range(shape["dp"])] for _ in range(steps)]
    for own in sizes:
        own[draw(st.integers(0, shape["dp"] - 1))] += 0 if batchnorm else 1  # one sample in all, at least
    return {
        **shape,
        "layers": names,
        "balance": np.diff([0, *cuts, len(names)]).tolist(),
        "loss": loss,
        # A few samples a micro-batch, normalised, in bfloat16: whatever comes out is rounding.
        "dtype": draw(st.sampled_from(["float64", "float64", "float32", *(["bfloat16"] if not batchnorm else [])])),
        "sizes": sizes,
        "lengths": [0 if flat else draw(st.integers(0, 3)) for _ in range(steps)],
        "modes": ["train", *(draw(st.sampled_from(["train", "train", "eval", "predict"])) for _ in range(steps - 1))],
        "deferred_batch_norm": batchnorm and draw(st.booleans()),
        "broadcast_loss": draw(st.booleans()),
        "accumulates": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


@st.composite
def failures(draw):
    """Draw a rank, a moment, and how it fails then."""
    shape, _ = draw(shapes().filter(lambda drawn: drawn[0]["pp"] * drawn[0]["dp"] > 1))
    kind, pp, dp = schedules.choose(shape["schedule"]), shape["pp"], shape["dp"]
    partitions = pp * (1 if kind.placement == "one each" else 2)
    shape["chunks"] = next(c for c in range(2 * partitions, 40) if kind.fits(c, pp, partitions))
    case = {**shape, "collective": draw(st.sampled_from([None, "sync", "async", "objects", "functional"]))}
    # FSDP calls no hooks of parameters.
    points = [point for point in faults.POINTS if point != "hook" or shape["data_parallel"] == "ddp"]
    case["point"] = draw(st.sampled_from(points))
    case["what"] = draw(st.sampled_from(["raise", "raise", "exit", "exit", "_exit", "kill", "kill", "sleep", "stop"]))
    ranks = range(pp * dp)
    if case["point"] == "loss":
        ranks = [rank for rank in ranks if rank // dp == kind.rank_of(partitions - 1, pp)]
    case["rank"] = draw(st.sampled_from(ranks))
    case["step"], case["microbatch"] = draw(st.integers(0, 2)), draw(st.integers(0, min(shape["chunks"], 8) - 1))
    return {**case, "agent": draw(st.booleans())}


@fuzz(8)
@given(case=st.integers(0, 9).flatmap(lambda k: failures() if k == 9 else trainings()))
def test_agrees_with_the_plain_model_or_names_who_failed(pool, case):
    """Losses, gradients, outputs and buffers are those of the plain model; where a rank fails, all others name it."""
    if "what" in case:
        with tempfile.TemporaryDirectory() as folder:
            faults.verify(case, faults.strike(case, folder))
        account("distributed failures", "agreed")
        return
    found = pool.run(case)
    dp, steps = case["dp"], len(case["modes"])
    masks = [[_merged(answer[k]["masks"] for answer in found[r::dp]) for r in range(dp)] for k in range(steps)]
    for k, truth in enumerate(expected(case, masks)):
        if case["modes"][k] == "train" and np.isnan(truth["loss"]).any():  # and so are its gradients, from here on
            assert all(np.isnan(rank[k]["loss"]).all() for rank in found if rank[k]["loss"] is not None)
            assert all(np.isfinite(g).all() for rank in found for g in rank[k]["gradients"].values())
            account("distributed", "excused: gradients of a batch that weighs nothing are 0, not NaN")
            return
        _check_step(case, [answer[k] for answer in found], truth, case["modes"][k], masks[k])
    account("distributed", "agreed")


def _merged(parts):
    return {key: value for part in parts for key, value in part.items()}


def _check_step(case, ranks, truth, mode, masks):
    tolerance, dp = TOLERANCE[case["dtype"]], case["dp"]
    # A gradient that is nothing but rounding, as before a BatchNorm, is as exact as those that it comes of.
    steepest = max((np.abs(gradient).max(initial=0.0) for gradient in truth["gradients"].values()), default=0.0)
    assert len({found["generator"] for found in ranks}) == 1, "random generators that differ after a step"
    for rank, found in enumerate(ranks):
        if found["loss"] is not None:
            _check(found["loss"], truth["loss"], tolerance, f"loss on rank {rank}")
        if found["output"] is not None:
            _check(found["output"], truth["outputs"][rank % dp], tolerance, f"output on rank {rank}")
        for name, buffer in found["buffers"].items():
            _check(buffer, truth["buffers"][rank % dp][name], tolerance, f"buffer {name} on rank {rank}")
        for name, gradient in found["gradients"].items() if mode == "train" else ():
            expects = truth["gradients"].get(name, 0.0)
            _check(gradient, expects, tolerance, f"gradient of {name} on rank {rank}", least=steepest)
    if mode == "train":
        there = {name for found in ranks for name in found["gradients"]}
        assert {n for n, g in truth["gradients"].items() if np.any(g)} <= there, "parameters without a gradient"
        drawn = [mask for of in masks for layer in of.values() for mask in layer.values() if mask.size >= 64]
        assert len({mask.tobytes() for mask in drawn}) == len(drawn), "random numbers that are drawn twice"
    if mode == "predict":
        assert sum(found["output"] is not None for found in ranks) == dp


def _check(found, truth, tolerance, what, *, least=0.0):
    found, truth = np.asarray(found), np.broadcast_to(truth, np.shape(found))
    size = max(np.abs(truth[np.isfinite(truth)]).max(initial=0.0), least, 1.0)
    np.testing.assert_allclose(found, truth, rtol=0, atol=tolerance * size, err_msg=what)
