"""The steps of a program without a pipeline, from what its main threads did.

A step begins with whatever comes first after an optimizer's step: a batch is fetched, a module called, a backward
begun. It ends where the next one begins, so steps leave no time out::

    |<-------------- step 3 --------------->|<-- step 4
    | fetch | forward | backward | optimizer | fetch ...

A program that only calls modules, without a backward, has a step for each batch. torchtitan logs its steps themselves:
there, the last one has an end, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesight.runs.reading.event_codes import COMMUNICATION, DATA, EVALUATION, OPTIMIZER
from pipesight.runs.reading.event_tables import Column, ProgramSpans, Table

__all__ = ["ProgramSteps", "find_program_steps", "is_backward", "is_call", "is_whole_pass"]
__all__ += ["WHOLE_PASSES", "is_whole_step"]

WHOLE_PASSES = ("fwd_bwd", "forward_backward")
"""Spans of torchtitan that are a forward with its backward."""
_WHOLE_STEPS = ("step", "train_step")


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSteps(Table):
    """One step of a rank per row, by rank and begin."""

    rank: Column
    """The rank."""
    step: Column
    """The number of the step."""
    begin: Column
    """When it began, in microseconds, by the clock of rank 0."""
    end: Column
    """When the next began, or its last span ended."""
    trains: Column
    """Whether it has a backward or an optimizer's step; in a program without any, every step counts."""
    follows: Column
    """Whether its end is known: where the next begins, or where a log says that the last one ended."""


def is_call(spans: ProgramSpans) -> Column:
    """Return which spans are calls of modules."""
    named = (spans.category == "compute") & (spans.name == "forward")
    calls: Column = named | (spans.kind == EVALUATION)
    return calls


def is_backward(spans: ProgramSpans) -> Column:
    """Return which spans are backwards."""
    found: Column = (spans.category == "compute") & (spans.name == "backward")
    return found


def is_whole_pass(spans: ProgramSpans) -> Column:
    """Return which spans are a forward with its backward, as torchtitan logs them."""
    found: Column = (spans.category == "torchtitan") & np.isin(spans.name.astype(str), WHOLE_PASSES)
    return found


def is_whole_step(spans: ProgramSpans) -> Column:
    """Return which spans are a step, as torchtitan logs them."""
    found: Column = (spans.category == "torchtitan") & np.isin(spans.name.astype(str), _WHOLE_STEPS)
    return found


def find_program_steps(spans: ProgramSpans) -> ProgramSteps:
    """Find the steps of every rank."""
    tables = [_of_rank(spans.where(spans.rank == rank)) for rank in np.unique(spans.rank)]
    return ProgramSteps.joined(*tables) if tables else ProgramSteps.empty()


def _of_rank(spans: ProgramSpans) -> ProgramSteps:
    calls, backwards = is_call(spans), is_backward(spans)
    stepping = spans.kind == OPTIMIZER
    training = backwards | stepping | is_whole_pass(spans)
    # Spans of the user's own may be open for many steps; these begin and end within one.
    own = training | calls | np.isin(spans.kind, (DATA, COMMUNICATION))
    if not own.any():
        return ProgramSteps.empty()
    there = spans.where(own)
    if not training.any():
        number = _by_batch(there, calls[own])
    elif (there.step >= 0).any():
        kept = there.step >= 0
        there, own = there.where(kept), np.flatnonzero(own)[kept]
        number = there.step
    else:
        number = _by_optimizer(there, stepping[own])
    numbers, which = np.unique(number, return_inverse=True)
    begin = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(begin, which, there.begin)
    # Numbers of the program's own need not rise with time.
    order = np.argsort(begin, kind="stable")
    numbers, begin = numbers[order], begin[order]
    follows = np.arange(len(numbers)) < len(numbers) - 1
    last = spans.end[is_whole_step(spans) & (spans.step == numbers[-1])]
    follows[-1] = len(last) > 0
    end = np.append(begin[1:], max(int(last[-1] if len(last) else there.end.max()), int(begin[-1])))
    trains = np.ones(len(numbers), bool)
    if training.any():
        trained = np.searchsorted(begin, spans.begin[training], side="right") - 1
        trains = np.isin(np.arange(len(numbers)), trained)
    return ProgramSteps(
        rank=np.full(len(numbers), spans.rank[0]),
        step=numbers,
        begin=begin,
        end=end,
        trains=trains,
        follows=follows,
    )


def _by_optimizer(spans: ProgramSpans, stepping: Column) -> Column:
    """Number spans by how many optimizer steps are over; steps with nothing between them are one."""
    over = np.searchsorted(np.sort(spans.end[stepping]), spans.begin, side="right")
    others = np.unique(over[~stepping])
    number: Column = np.searchsorted(others, over, side="right") - 1
    return np.maximum(number, 0)


def _by_batch(spans: ProgramSpans, calls: Column) -> Column:
    """Number spans by the batches that were fetched before or, if there are none, by calls from outside of modules."""
    fetches = spans.kind == DATA
    if not fetches.any():
        reached = np.maximum.accumulate(np.where(calls, spans.end, 0))
        fetches = calls & (spans.begin >= np.append(0, reached[:-1]))
    number: Column = np.searchsorted(np.sort(spans.begin[fetches]), spans.begin, side="right") - 1
    return np.maximum(number, 0)
