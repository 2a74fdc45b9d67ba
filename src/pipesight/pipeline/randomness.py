"""A separate random stream for every task.

PyTorch has one default generator per device, shared by all threads. Workers that drew from it side by side would get
numbers in an order that changes from run to run, and a recomputation could not get those of the first forward again.
So in a task (i, j) other generators stand in for the default ones, seeded by (pass, i, j). The pass's seed comes from
the default generator when the first layer draws: ``torch.manual_seed`` decides all of it, and a model that draws
nothing leaves the default generator alone.

Two things make them stand in:

- The dispatcher sends an operator to us if it is random (PyTorch tags those) and runs inside :func:`isolated`. All
  other operators cost nothing: our dispatch key falls through.
- ``torch.get_rng_state``, ``set_rng_state`` and ``manual_seed``, also those of ``torch.cuda``, act on them when they
  are called in a task, so that ``torch.utils.checkpoint`` and ``fork_rng`` work in a layer.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesight._patches import Patches
from pipesight._torch import compiling
from pipesight._torch.operators import (
    SPARE_KEY,
    aten_operators,
    dispatch_key,
    key_set,
    pass_over_in_higher_order_operators,
    schema_of,
    with_key,
    without_key,
)

__all__ = [
    "PassRandomness",
    "SavedGenerators",
    "Task",
    "begin_task",
    "draw_seed",
    "end_task",
    "isolated",
    "next_seed",
    "seed_of",
]

_CPU = torch.device("cpu")

Task: TypeAlias = tuple[int, int, str]
"""Micro-batch, partition and phase; a recomputation is a forward."""

SavedGenerators: TypeAlias = dict[torch.Generator, Tensor]
"""The states of the user's own generators before a task first drew from them."""


class PassRandomness:
    """The seeds of one pass, one per device, drawn from the caller's generators when first needed.

    Those are the default ones, or in a pipeline that is a layer of another, those of the outer task. Partitions in
    other processes share a seed, and draw none themselves (:func:`next_seed`).
    """

    def __init__(self, shared: dict[torch.device, int] | None = None) -> None:
        self._outer = _here.task
        self._seeds: dict[torch.device, int] = {} if shared is None else dict(shared)
        self._seeding = threading.RLock()

    def seed(self, device: torch.device, task: Task) -> int:
        """Return the seed of a task on ``device``."""
        with self._seeding:
            if device not in self._seeds:
                outer = self._outer
                self._seeds[device] = _draw_seed(
                    _default_generator(device) if outer is None else outer.generator(device)
                )
        return seed_of(self._seeds[device], *task)


class _TaskRandomness:
    __slots__ = ("_fixed", "_generators", "_now", "_replay", "_source", "_task", "saved")

    def __init__(self, source: PassRandomness, task: Task, replay: SavedGenerators | None) -> None:
        self._source, self._task, self._replay = source, task, replay
        self._fixed: int | None = None
        self._generators: dict[torch.device, torch.Generator] = {}
        self._now: SavedGenerators = {}
        self.saved: SavedGenerators = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that replaces the default one of ``device``."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(
                self._source.seed(device, self._task) if self._fixed is None else self._fixed
            )
        return self._generators[device]

    def reseed(self, seed: int) -> None:
        """Do what ``torch.manual_seed`` does, for this task alone."""
        self._fixed = seed
        self._generators.clear()

    def meet(self, generator: torch.Generator) -> None:
        """Save the state of a generator that the layer passes, or restore it in a recomputation."""
        if self._replay is None:
            if generator not in self.saved:
                self.saved[generator] = generator.get_state()
        elif generator in self._replay and generator not in self._now:
            self._now[generator] = generator.get_state()
            generator.set_state(self._replay[generator])

    def end(self) -> None:
        for generator, state in self._now.items():
            generator.set_state(state)


class _PerThread(threading.local):
    pending: tuple[PassRandomness, Task, SavedGenerators | None] | None = None  # a task that has drawn nothing yet
    begun: _TaskRandomness | None = None

    @property
    def task(self) -> _TaskRandomness | None:
        if self.pending is not None:
            self.begun, self.pending = _TaskRandomness(*self.pending), None
        return self.begun


_here = _PerThread()
_swapping = threading.Lock()


def isolated() -> AbstractContextManager[None]:
    """Make random operators in this thread draw from the stream that :func:`begin_task` chose."""
    with _swapping:
        key = _install()
        if compiling.is_imported():
            _hide_from_compiler()
    return with_key(key)


def draw_seed() -> int:
    """Return the seed of a pass on the CPU, drawn from the default generator."""
    return _draw_seed(torch.default_generator)


def next_seed() -> int:
    """Return what :func:`draw_seed` would, without advancing the generator."""
    copy = torch.Generator()
    copy.set_state(torch.default_generator.get_state())
    return _draw_seed(copy)


def seed_of(*what: object) -> int:
    """Return a seed that depends only on ``what``, numbers and strings."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little", signed=True)


def begin_task(source: PassRandomness, task: Task, replay: SavedGenerators | None = None) -> None:
    """Make this thread draw from the stream of a task, from its start; ``replay`` is what :func:`end_task` returned."""
    _here.pending = (source, task, replay)


def end_task() -> SavedGenerators:
    """Make this thread draw from the default generators again; return the states of the user's own that it used."""
    if _here.pending is not None:
        _here.pending = None
        return {}
    task, _here.begun = _here.begun, None
    if task is None:
        return {}
    task.end()
    return task.saved


@functools.cache
def _install() -> Any:
    """Register our kernel for every random operator, and replace the functions for states; once per process, 0.2 s."""
    key = dispatch_key(SPARE_KEY)
    everything = torch.library.Library("_", "IMPL", SPARE_KEY)
    everything.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", SPARE_KEY)
    _libraries.extend((everything, aten))
    pass_over_in_higher_order_operators(key)
    for name, op in aten_operators():
        # Some are tagged that only choose, or repeat what a forward has drawn.
        if torch.Tag.nondeterministic_seeded in op.tags and not name.partition(".")[0].endswith(
            ("_backward", "_choice")
        ):
            aten.impl(name, _Random(op, key_set(key)))
    _stand_in(torch.random, "get_rng_state", lambda task: task.generator(_CPU).get_state())
    _stand_in(torch.random, "set_rng_state", lambda task, state: task.generator(_CPU).set_state(state) and None)
    _stand_in(torch.random, "manual_seed", lambda task, seed: task.reseed(int(seed)) or task.generator(_CPU))
    _stand_in(
        torch.cuda.random, "get_rng_state", lambda task, device="cuda": task.generator(_indexed(device)).get_state()
    )
    _stand_in(torch.cuda.random, "set_rng_state", _set_cuda_state)
    return key


@functools.cache
def _hide_from_compiler() -> None:
    """Keep ``torch.compile`` from compiling this module where compiled code calls it."""
    things = [*globals().values(), *vars(PassRandomness).values(), *vars(_TaskRandomness).values()]
    ours = (__name__, aten_operators.__module__)
    codes = [thing.__code__ for thing in things if isinstance(thing, FunctionType) and thing.__module__ in ours]
    while codes:
        code = codes.pop()
        compiling.skip_code(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


_libraries: list[torch.library.Library] = []  # a library that is collected unregisters its kernels


def _stand_in(module: ModuleType, name: str, inside: Callable[..., Any]) -> None:
    def act(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = _here.task
        return original(*args, **kwargs) if task is None else inside(task, *args, **kwargs)

    Patches().wrap(module, name, act, may_raise=True)  # for good


def _set_cuda_state(task: _TaskRandomness, new_state: Tensor, device: Any = "cuda") -> None:
    task.generator(_indexed(device)).set_state(new_state)


class _Random:
    """The kernel of a random operator: it draws from the generator of the task under way.

    Args:
        operator: The operator.
        ours: The dispatch keys that the operator's own kernels are found without.
    """

    __slots__ = ("_dropout", "_generator", "_operator", "_ours")

    def __init__(self, operator: Any, ours: Any) -> None:
        self._operator, self._ours = operator, ours
        arguments = list(enumerate(schema_of(operator).arguments))
        self._generator: int | None = next((p for p, a in arguments if a.name == "generator"), None)
        self._dropout = next(((p, a.name, a.default_value) for p, a in arguments if a.name.startswith("dropout")), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        operator = self._operator
        with without_key(self._ours):
            if self._is_certain(args, kwargs) or (task := _here.task) is None or torch.compiler.is_compiling():
                return operator(*args, **kwargs)
            device = _device_of(args, kwargs)
            if device is None:
                return operator(*args, **kwargs)
            position = self._generator
            if position is None:
                return _run_swapped(operator, args, kwargs, _default_generator(device), task.generator(device))
            given = args[position] if position < len(args) else kwargs.get("generator")
            if given is not None:
                task.meet(given)
            elif position < len(args):
                args = (*args[:position], task.generator(device), *args[position + 1 :])
            else:
                kwargs["generator"] = task.generator(device)
            return operator(*args, **kwargs)

    def _is_certain(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operator that could drop elements, such as fused attention, has nothing to draw."""
        if self._dropout is None:
            return False
        position, name, default = self._dropout
        return not (args[position] if position < len(args) else kwargs.get(name, default))


def _run_swapped(op: Any, args: Any, kwargs: Any, default: torch.Generator, own: torch.Generator) -> Any:
    """Run an operator that takes no generator with the state of ours in the default one."""
    if default.device.type == "cuda":  # two generators can share a state
        with _swapping:
            theirs = default.graphsafe_get_state()
            default.graphsafe_set_state(own)
            try:
                return op(*args, **kwargs)
            finally:
                default.graphsafe_set_state(theirs)
    with _swapping:
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            return op(*args, **kwargs)
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device whose generator an operator would use, or ``None`` if it is none of ours."""
    tensor = args[0] if args else None
    if not isinstance(tensor, Tensor):
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    device = _indexed(kwargs.get("device") or "cpu") if tensor is None else tensor.device
    return device if device.type in ("cpu", "cuda") else None


def _indexed(place: torch.device | str | int) -> torch.device:
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def _draw_seed(default: torch.Generator) -> int:
    if default.device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=default))
    # A draw on the GPU would have to be waited for; its generator is a seed and an offset, both known here.
    offset = default.get_offset()
    default.set_offset(offset + 4)
    return hash((default.initial_seed(), offset))
