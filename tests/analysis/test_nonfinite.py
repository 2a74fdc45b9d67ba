"""The first tensor with NaN or Inf, from statistics."""

from __future__ import annotations

import pytest

from pipesight.analysis.nonfinite import first_nonfinite
from support.analysed import analysed, even


def line(iteration: int, layer: str, tensor: str, **more) -> dict:
    return {"iteration": iteration, "layer": layer, "tensor": tensor, "statistic": "mean", "value": None, **more}


@pytest.mark.parametrize(
    ("tensors", "first"),
    [
        ([("b", "activation"), ("a", "activation")], ("a", "activation")),
        ([("a", "gradient"), ("b", "gradient")], ("b", "gradient")),  # the backward comes to b first
        ([("b", "gradient"), ("b", "activation")], ("b", "activation")),
        ([("a", "wgrad"), ("a", "gradient")], ("a", "gradient")),
        ([("a", "wgrad"), ("b", "wgrad")], ("b", "wgrad")),
        ([("a", "activation"), ("b", "weight")], ("b", "weight")),  # weights are there before the forward
        ([("b", "activation"), ("b", "input")], ("b", "input")),
        ([("partitions.1.b.sub", "input"), ("partitions.0.a.sub", "activation")], ("partitions.0.a.sub", "activation")),
    ],
)
def test_first_nonfinite_in_the_order_of_the_step(tensors, first):
    """Of an iteration's bad tensors, the one is named that the step came to first."""
    lines = [line(7, "b", "input", nonfinite="nan", nans=1), line(2, "a", "activation")]
    lines += [line(3, layer, tensor, nonfinite="nan", nans=2) for layer, tensor in tensors]
    found = first_nonfinite(lines, layers=["a", "b"])
    assert (found.iteration, found.layer, found.tensor) == (3, *first)
    assert (found.nans, found.iterations) == (2, 2)


def test_all_finite():
    """Lines without a sign of NaN or Inf are fine, whatever else they hold."""
    assert first_nonfinite([line(1, "a", "input"), {}, {"nans": 0}, {"nonfinite": "nan"}]) is None


def test_undefined_statistics_are_finite_tensors():
    """The std of one element and the mean of none are NaN; the tensors are fine, but a scalar of the user's is not."""
    assert first_nonfinite([line(1, "a", "input", nonfinite="nan")]) is None
    assert first_nonfinite([line(1, "loss", "", nonfinite="nan")]).layer == "loss"


def placed(order: int, rank: int, layer: str, tensor: str, partition: int, microbatch: int, phase: str = "forward"):
    more = {"partition": partition, "microbatch": microbatch, "phase": phase, "order": order, "rank": rank}
    return line(3, layer, tensor, nans=1, **more)


def test_the_session_knows_the_order_of_computation():
    """Names say less than the session that measured: layers may run in any order."""
    lines = [placed(1, 0, "a", "activation", 0, 1), placed(0, 0, "b", "activation", 1, 0)]
    found = first_nonfinite(lines, layers=["a", "b"])
    assert (found.layer, found.where) == ("b", "iteration 3, partition 1, micro-batch 0, forward")


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        ([placed(0, 0, "a", "activation", 0, 5), placed(0, 1, "b", "activation", 1, 2)], 1),
        ([placed(0, 0, "a", "activation", 0, 2), placed(0, 1, "b", "activation", 1, 2)], 0),
        ([placed(0, 0, "a", "gradient", 0, 2, "backward"), placed(0, 1, "b", "gradient", 1, 2, "backward")], 1),
        ([placed(0, 0, "a", "gradient", 0, 2, "backward"), placed(0, 1, "b", "activation", 1, 2)], 1),
        ([placed(0, 0, "a", "activation", 0, 0), line(3, "b", "weight", nans=1, rank=1, order=0)], 1),
        ([placed(0, 0, "a", "gradient", 0, 0, "backward"), line(3, "b", "wgrad", nans=1, rank=1, order=0)], 1),
    ],
)
def test_first_nonfinite_of_ranks(lines, first):
    """Ranks are compared by the way of the data: micro-batch and partition forward, layers upwards backward."""
    assert first_nonfinite(lines, layers=["a", "b"]).rank == first
    assert first_nonfinite(lines[::-1], layers=["a", "b"]).rank == first


def test_nonfinite_of_a_run(made):
    """The report names the first tensor that is not finite."""
    made.gpipe(0, even)
    made.stat("l1", "activation", "mean", 4, 1.0)
    made.stats[0].append(line(5, "l1", "activation", nonfinite="inf", infs=3))
    found = analysed(made).nonfinite
    assert (found.iteration, found.layer, found.infs, found.rank) == (5, "l1", 3, 0)
