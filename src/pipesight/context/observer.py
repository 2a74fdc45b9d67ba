"""Observers: what sees the tasks, layers and transfers of pipelines."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from pipesight._logger import own_logger

if TYPE_CHECKING:
    from torch import Tensor

    from pipesight.context.where import Where

__all__ = ["DEFAULT_OBSERVERS", "Observer", "Observers", "attach", "detach", "observers"]

logger = own_logger(__name__)


class Observer:
    """Receives the events of pipelines. Subclass it, override the events you need, and :func:`attach` it.

    Worker threads call it, several at once, and wait for it: be quick, and lock what you share. ``where`` belongs to
    the engine and changes after the call: copy what you keep. An observer that raises is reported once and detached;
    training continues.
    """

    def wanted(self) -> bool:
        """Return whether to observe the next forward or backward pass. Called once a pass, before it starts."""
        return True

    def pass_started(self) -> None:
        """A pass starts. Called in the thread that called the pipeline, which waits until the pass ends.

        In a pipeline over several ranks, that thread runs the tasks of its rank, and a pass is forward and backward.
        """

    def pass_ended(self) -> None:
        """The pass has ended, or failed."""

    def step_ended(self, loss: Tensor) -> None:
        """A ``step`` of a pipeline has run all backwards; ``loss`` is that of the mini-batch, where the rank has it."""

    def task_started(self, where: Where) -> None:
        """A partition starts a task."""

    def task_ended(self, where: Where) -> None:
        """A partition has finished a task, or failed."""

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """A partition starts to copy ``size`` bytes from another device, or to wait for them from another rank.

        Copies to a GPU are only queued here.
        """

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """The transfer is done; to a GPU, it is queued."""

    def layer_started(self, where: Where) -> None:
        """A layer starts; in a backward phase, its backward does."""

    def layer_ended(self, where: Where) -> None:
        """A layer has finished. Not called for a layer that raises.

        The layers of a backward are seen only if any observer saw the forward.
        """


class Observers:
    """The observers of one pass. Each event is a method that calls it on one observer after the other.

    One that raises is detached. On hot paths, engines test ``members`` first: usually nobody observes.
    """

    def __init__(self, members: tuple[Observer, ...]) -> None:
        self.members = members
        self._of_layers = tuple(observer for observer in members if _sees_layers(observer))

    def __bool__(self) -> bool:
        return bool(self.members)

    def pass_started(self) -> None:
        """Call :meth:`Observer.pass_started` of each."""
        for observer in self.members:
            try:
                observer.pass_started()
            except Exception:
                self._drop(observer, "pass_started")

    def pass_ended(self) -> None:
        """Call :meth:`Observer.pass_ended` of each."""
        for observer in self.members:
            try:
                observer.pass_ended()
            except Exception:
                self._drop(observer, "pass_ended")

    def step_ended(self, loss: Tensor) -> None:
        """Call :meth:`Observer.step_ended` of each."""
        for observer in self.members:
            try:
                observer.step_ended(loss)
            except Exception:
                self._drop(observer, "step_ended")

    def task_started(self, where: Where) -> None:
        """Call :meth:`Observer.task_started` of each."""
        for observer in self.members:
            try:
                observer.task_started(where)
            except Exception:
                self._drop(observer, "task_started")

    def task_ended(self, where: Where) -> None:
        """Call :meth:`Observer.task_ended` of each."""
        for observer in self.members:
            try:
                observer.task_ended(where)
            except Exception:
                self._drop(observer, "task_ended")

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """Call :meth:`Observer.transfer_started` of each."""
        for observer in self.members:
            try:
                observer.transfer_started(where, source, target, size)
            except Exception:
                self._drop(observer, "transfer_started")

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """Call :meth:`Observer.transfer_ended` of each."""
        for observer in self.members:
            try:
                observer.transfer_ended(where, source, target, size)
            except Exception:
                self._drop(observer, "transfer_ended")

    def layer_started(self, where: Where) -> None:
        """Call :meth:`Observer.layer_started` of each that has one: there are more layers than anything else."""
        for observer in self._of_layers:
            try:
                observer.layer_started(where)
            except Exception:
                self._drop(observer, "layer_started")

    def layer_ended(self, where: Where) -> None:
        """Call :meth:`Observer.layer_ended` of each that has one."""
        for observer in self._of_layers:
            try:
                observer.layer_ended(where)
            except Exception:
                self._drop(observer, "layer_ended")

    def _drop(self, observer: Observer, event: str) -> None:
        self.members = tuple(other for other in self.members if other is not observer)
        self._of_layers = tuple(other for other in self._of_layers if other is not observer)
        _give_up(observer, event)


def _sees_layers(observer: Observer) -> bool:
    seen = (observer.layer_started, observer.layer_ended)
    return [getattr(method, "__func__", None) for method in seen] != [Observer.layer_started, Observer.layer_ended]


DEFAULT_OBSERVERS = (("pipesight.logs", "TaskLog"),)
"""The observers of every process: :func:`observers` attaches them before the first pass.

By name, because this package stands below those that observe. All others are attached by whoever wants them.
"""

_attached: tuple[Observer, ...] = ()
_attaching = threading.Lock()
_defaults_attached = False


def attach(observer: Observer) -> None:
    """Observe every pass that starts from now on, in every pipeline of this process."""
    global _attached
    with _attaching:
        if observer not in _attached:
            _attached = (*_attached, observer)


def detach(observer: Observer) -> bool:
    """Stop observing; return whether ``observer`` was attached."""
    global _attached
    with _attaching:
        before, _attached = _attached, tuple(o for o in _attached if o is not observer)
        return len(before) > len(_attached)


def _give_up(observer: Observer, event: str) -> None:
    """Detach an observer that raised, and report it once, however many threads it raised in."""
    if detach(observer):
        logger.exception("observer %r failed in %s and was detached; training continues", observer, event)


def _attach_defaults() -> None:
    global _attached, _defaults_attached
    defaults: list[Observer] = [getattr(importlib.import_module(module), name)() for module, name in DEFAULT_OBSERVERS]
    with _attaching:
        if not _defaults_attached:
            _attached, _defaults_attached = (*defaults, *_attached), True


def observers() -> Observers:
    """Return the attached observers that want to see the next pass. For engines."""
    if not _defaults_attached:
        _attach_defaults()
    wanted = []
    for observer in _attached:
        try:
            if observer.wanted():
                wanted.append(observer)
        except Exception:
            _give_up(observer, "wanted")
    return Observers(tuple(wanted))
