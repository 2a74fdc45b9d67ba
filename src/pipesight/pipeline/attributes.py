"""What a model writes into attributes of its modules while it is called: each micro-batch reads what it wrote itself.

A model may note a mask, a list of states or an auxiliary loss on a module, and read it further on. In a pipeline, the
next micro-batch has by then written there, too. So what a micro-batch writes is also kept apart, for itself::

    micro-batch 0   self.mask = a ────────────────────────> self.mask is a
    micro-batch 1                     self.mask = b ──────────────────────────> self.mask is b
    everyone else                                                               self.mask is b, the last one

What it did not write itself, it reads as the micro-batch before has left it; that raises if this may not have come so
far. A tensor that another micro-batch wrote, or that is read after the call, has a graph that is not the reader's. It
can be looked at, but not differentiated.

A list, dict, set or plain object that was there before and is filled in place is one for each micro-batch, too; see
`filled_attributes`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container
from typing import Any

from torch import Tensor, nn

from pipesight._nested import PLAIN, map_tensors
from pipesight.pipeline.filled_attributes import CONTAINERS, Contents, Copies, Place, items, put, text_of
from pipesight.pipeline.guard import guard
from pipesight.pipeline.seen_changes import Lesson, ModelAttributes, Rest

__all__ = ["Attributes", "PassAttributes"]


class PassAttributes:
    """What the micro-batches of a mini-batch have written last.

    Args:
        count: How many they are.
        model: What is known of the model; modules that are made in a call are its own.
        partitions: How many there are.
    """

    def __init__(self, count: int = 1, model: ModelAttributes | None = None, partitions: int = 1) -> None:
        self.count, self._model = count, model
        self.modules: Container[int] = () if model is None else model.modules
        self.filled: Container[Place] = () if model is None else model.filled
        self.shared: dict[Place, set[int]] = {} if model is None or partitions == 1 else model.shared
        self.last: dict[tuple[int, str], tuple[nn.Module, int]] = {}
        """The modules, and which micro-batch has written there."""
        self.readers: dict[tuple[int, str], int] = {}
        """The first partitions that read what their micro-batch had not written."""
        self.writers: dict[tuple[int, str], int] = {}
        """The last partitions that write."""
        self.learns = model is not None and model.learns(count)
        self.shares = self.learns or min(count, partitions) == 1
        """Whether micro-batches come one after the other, and fill the originals."""
        self.stale = {} if model is None or self.shares else model.stale
        self.first = Contents() if model is None else model.contents(filled=not self.learns)
        """What is in containers before all micro-batches."""
        self.copies: dict[int, Copies] = {}
        """Those of each micro-batch."""
        self.lesson = Lesson(model, partitions, self.first) if model is not None and self.learns else None
        self._rest = None if model is None or self.shares else model.rest(count)
        if self._rest is not None:
            self._rest.note()

    def end(self, *, failed: bool = False) -> None:
        """Put back what micro-batches have filled, and let nobody differentiate what is left in the modules."""
        if self._rest is not None and not failed:
            self._look_at(self._rest)
        for _, copies in sorted(self.copies.items()):
            copies.write_back(_guarded_item)
        for _, value, _ in [*self.first.changes()] if self.shares else ():
            put(value, {key: map_tensors(_guarded_item, item) for key, item in items(value).items()})
        for (_, name), (module, _) in self.last.items():
            if name in vars(module):
                vars(module)[name] = map_tensors(functools.partial(_guarded, module, name), vars(module)[name])
        if self._model is not None and self.learns and not failed:
            self._model.learned(self.count)
        self.last, self.copies, self.lesson = {}, {}, None

    def _look_at(self, rest: Rest) -> None:
        """Warn if the model has changed what it had not changed before."""
        place = rest.first_change()
        if place is not None and self._model is not None:
            self._model.forget(self.count)
            warnings.warn(
                f"the model changed {text_of(place)} for the first time, in a mini-batch whose micro-batches ran at "
                "the same time: if it reads that in its next call, this mini-batch is not exact; the next ones run "
                "one after the other once, to see where it is used",
                RuntimeWarning,
                stacklevel=2,
            )


class Attributes:
    """What one micro-batch has written.

    Args:
        all: What all of its mini-batch have.
        i: Which micro-batch it is.
    """

    def __init__(self, all: PassAttributes, i: int = 0) -> None:
        self._all, self._i = all, i
        self._copies = Copies(all.first, all.stale if i else None)
        if not all.shares:
            all.copies[i] = self._copies
        self.modules = all.modules
        self.partition = 0
        """Where the micro-batch is now."""
        self.repeats = False
        """Whether it is computed once more, which leaves nothing behind."""
        self._written: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._inside: dict[tuple[int, str], Contents] = {}  # containers that it has written, and what was in them

    def note(self, module: nn.Module, name: str, value: Any, before: Any = None) -> None:
        """Keep what was just written into an attribute in the place of what was there ``before``.

        Raises:
            RuntimeError: It is read in an earlier partition, where the next micro-batch may have been by now.
        """
        key = id(module), name
        self._written[key] = (module, value)
        self._inside.pop(key, None)
        if self.repeats:
            return
        self._all.last[key] = module, self._i
        if type(value) in CONTAINERS:
            self._inside[key] = Contents([(key, value)])
        if type(value) not in PLAIN or type(before) not in PLAIN or value != before:
            self._note_writer(module, name)

    def _note_writer(self, module: nn.Module, name: str) -> None:
        key = id(module), name
        self._all.writers[key] = max(self._all.writers.get(key, self.partition), self.partition)
        if self._all.readers.get(key, self.partition) < self.partition:
            self._refuse(module, name)

    def _refuse(self, module: nn.Module, name: str) -> None:
        if self._all.count > 1:
            key = id(module), name
            raise RuntimeError(
                f"{type(module).__name__}.{name} is read in partition {self._all.readers[key]} and written in "
                f"partition {self._all.writers[key]}, for the next call of the model: in a pipeline, that has begun by "
                "then; keep no state from one call to the next, write it before the first cut, or use chunks=1"
            )

    def forget(self, module: nn.Module, name: str) -> None:
        """Note that an attribute was deleted."""
        self._written.pop((id(module), name), None)

    def read(self, module: nn.Module, name: str, left: Any) -> Any:
        """Return what this micro-batch wrote into an attribute; else what is ``left`` there."""
        key = id(module), name
        if key in self._written:
            return self._written[key][1]
        if self.repeats:
            return self._copies.of(left, (module, name))
        self._all.readers[key] = min(self._all.readers.get(key, self.partition), self.partition)
        if (reached := self._all.shared.get((module, name))) is not None:
            reached.add(self.partition)
            if len(reached) > 1 and (module, name) not in self._all.filled:
                self._all.writers[key] = max(reached)
                self._refuse(module, name)
        if key in self._all.last:
            if self._all.writers.get(key, 0) > self.partition or self._all.last[key][1] > self._i:
                self._refuse(module, name)
            left = map_tensors(functools.partial(_guarded, module, name), left)
        is_own = not self._all.shares and (module, name) in self._all.filled
        return self._copies.of(left, (module, name)) if is_own else left

    def function(self, function: Any) -> Any:
        """Return a function that fills what this micro-batch has, instead of what it was made with."""
        return function if self._all.shares and not self.repeats else self._copies.function_of(function)

    def note_buffer(self, module: nn.Module, name: str) -> None:
        """Note that another buffer was put in the place of one."""
        if self._all.lesson is not None:
            self._all.lesson.change((module, name), self.partition)

    def end_task(self) -> None:
        """Note what was changed in this partition."""
        for key, inside in [*self._inside.items()]:
            module, value = self._written[key]
            if any(True for _ in inside.changes()):
                self._inside[key] = Contents([(key, value)])
                self._note_writer(module, key[1])
        if self._all.lesson is not None:
            self._all.lesson.end_task(self.partition, self._written)

    def end(self) -> None:
        """Note what was filled by this micro-batch."""
        if self._all.lesson is not None:
            self._all.lesson.end_micro_batch(self._i, checks=self._all.count > 1)

    def values(self) -> Attributes | None:
        """Return a copy to compute with once more, with values alone; None if nothing was written or filled."""
        if not self._written and not self._all.first:
            return None
        other = Attributes(PassAttributes())
        other.modules, other.repeats = self.modules, True
        filled = [value for _, value, _ in self._all.first.changes()] if self._all.shares else ()
        other._copies = self._copies.again(_value, filled)
        pairs = self._written.items()
        other._written = {key: (module, other._copies.of(value, (module, key[1]))) for key, (module, value) in pairs}
        return other


def _guarded(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    return guard(
        tensor,
        f"{type(module).__name__}.{name} is a tensor with a graph that one micro-batch has left there, and it was "
        "differentiated in another, or outside the pipeline, where that graph cannot be reached; return it from "
        "forward, or write detach() of it into the attribute",
    )


def _guarded_item(tensor: Tensor) -> Tensor:
    return guard(
        tensor,
        "a tensor that a micro-batch has left in a list, dict or object of a module was differentiated by another, or "
        "outside the pipeline, where its graph cannot be reached; return it from forward, or put detach() of it there",
    )


def _value(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
