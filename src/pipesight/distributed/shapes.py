"""The shapes of what each micro-batch sends from partition to partition, inferred without running the model.

Every rank keeps the whole model as a skeleton: the layers with tensors that have a shape, a dtype and a device, but no
memory. Running it costs next to nothing, draws no random number, updates no statistic and calls no hook. All ranks run
the same skeleton on the same shapes, so they agree on what comes, and fail alike if a layer does not fit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipesight._torch.module_internals import HOOK_TABLES, uncompiled
from pipesight._torch.operators import FAKE_TENSOR_LOGGER, FakeTensorMode
from pipesight.context import Where, enter_thread
from pipesight.distributed.random_detector import RandomDetector
from pipesight.pipeline.aliasing import Changes, Region, region_of
from pipesight.pipeline.microbatch import Form, as_tuple, form_of, lone
from pipesight.pipeline.partition import Partition, SkipRoutes
from pipesight.pipeline.skip import SkipKey, SkipTracker, use_tracker

__all__ = ["Cut", "Flow", "Meta", "Skeleton"]


@dataclass(frozen=True, slots=True)
class Meta:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def learns(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def meta_of(tensor: Tensor) -> Meta:
    """Return the shape and dtype of ``tensor``."""
    return Meta(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one micro-batch sends from a partition to the next: the output, then skips on their way to a later one."""

    output: tuple[Meta, ...]
    form: Form
    """Makes of the tensors of the output what the next layer takes."""
    skips: dict[SkipKey, Meta | None]
    """A stashed ``None`` is not sent."""

    @property
    def tensors(self) -> list[Meta]:
        """All that is sent, in order."""
        return [*self.output, *(meta for meta in self.skips.values() if meta is not None)]


@dataclass(frozen=True, slots=True)
class Flow:
    """The cuts of one micro-batch: before the first partition, after it, and so on."""

    cuts: tuple[Cut, ...]
    random: bool
    """Whether a layer draws random numbers."""
    changed: tuple[tuple[int, ...], ...]
    """For each partition, which of the tensors of the cut before it change in place."""


Signature: TypeAlias = tuple[Any, ...]
Seen: TypeAlias = tuple[list[Region | None], tuple[int, ...]]


class Skeleton:
    """The whole model without its memory."""

    _REMEMBERED = 256

    def __init__(self, module: nn.Sequential, balance: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        hollow = self._hollow(module)
        layers = iter(hollow.named_children())
        self.partitions = [Partition(OrderedDict(next(layers) for _ in range(size))) for size in balance]
        for partition in self.partitions:
            partition.training = module.training
        self.routes = SkipRoutes(self.partitions)
        self._known: dict[Signature, Flow] = {}

    def _hollow(self, module: nn.Sequential) -> nn.Sequential:
        """Copy the layers without their values and hooks."""
        memo: dict[int, Any] = {}
        attributes = [t for child in module.modules() for t in vars(child).values() if isinstance(t, Tensor)]
        with self._mode:
            for tensor in (*module.parameters(), *module.buffers(), *attributes):
                empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if _is_parameter(tensor) else empty
        for child in module.modules():
            for name in HOOK_TABLES:
                if name in child.__dict__:
                    memo[id(child.__dict__[name])] = type(child.__dict__[name])()
        hollow = copy.deepcopy(module, memo)
        for parent in list(hollow.modules()):
            for name, child in parent.named_children():
                parent._modules[name] = uncompiled(child)  # not its compiled form
        return hollow

    def train(self, mode: bool) -> None:
        """Set the mode of all partitions, as ``nn.Module.train`` does."""
        for partition in self.partitions:
            partition.train(mode)

    def flow(self, inputs: Sequence[Meta], form: Form = lone) -> Flow:
        """Return what a micro-batch like ``inputs`` sends over each cut.

        Raises:
            Exception: What a layer raised for such an input, with a note that names the layer.
            RuntimeError: A partition changes a tensor in place that goes over the cut before it twice.
        """
        signature = (tuple(inputs), form, self._surroundings())
        if signature not in self._known:
            if len(self._known) > self._REMEMBERED:
                self._known.clear()
            self._known[signature] = self._run(inputs, form)
        return self._known[signature]

    @property
    def mode(self) -> str:
        """What else shapes and dtypes depend on, in words, for all ranks to compare."""
        autocast, default, training = self._surroundings()
        words = ["train" if all(training) else "eval" if not any(training) else "some in train"]
        words += [] if autocast is None else [f"autocast {autocast}"]
        return ", ".join([*words, *([] if default is torch.float32 else [f"default {default}"])])

    def fingerprint(self) -> str:
        """Return a hash of the shapes, dtypes and names of all tensors, and of the balance."""
        tensors = [
            [j, name, list(t.shape), str(t.dtype)]
            for j, partition in enumerate(self.partitions)
            for name, t in (*partition.named_parameters(), *partition.named_buffers())
        ]
        sizes = [len(partition) for partition in self.partitions]
        return hashlib.blake2b(repr((sizes, tensors)).encode(), digest_size=8).hexdigest()

    def _surroundings(self) -> Signature:
        """Return what else shapes and dtypes depend on."""
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return autocast, torch.get_default_dtype(), tuple(p.training for p in self.partitions)

    def _run(self, inputs: Sequence[Meta], form: Form) -> Flow:
        tracker = SkipTracker()
        detector = RandomDetector()
        inside = Where()
        inside.phase = "forward"  # so that hooks on all modules, those of tracing among them, let these alone
        enter_thread(inside)
        try:
            cuts, seen = self._run_inside(inputs, form, tracker, detector)
        finally:
            inside.phase = None
        for j, (regions, changed) in enumerate(seen):
            Changes().note(j, regions, changed)
        return Flow(tuple(cuts), detector.seen, tuple(changed for _, changed in seen))

    def _run_inside(
        self, inputs: Sequence[Meta], form: Form, tracker: SkipTracker, detector: RandomDetector
    ) -> tuple[list[Cut], list[Seen]]:
        """Return the cuts, and for each partition where its inputs and the skips are, and which of them changed."""
        routes = self.routes
        seen: list[Seen] = []
        # Tensors of inference mode have no version.
        with torch.inference_mode(False), torch.no_grad(), self._mode, detector, use_tracker(tracker), _quietly():
            tensors = tuple(meta.empty(self._device) for meta in inputs)
            value = form(list(tensors))
            cuts = [Cut(tuple(inputs), form, {})]
            for j, partition in enumerate(self.partitions):
                came = [*tensors, *(t for key in cuts[-1].skips if (t := tracker.tensors[key]) is not None)]
                versions = [t._version for t in came]
                regions = [region_of(t) for t in came]
                value = _call(partition, value, j)
                seen.append((regions, tuple(k for k, t in enumerate(came) if t._version != versions[k])))
                tensors = as_tuple(value, f"the output of partition {j}")
                carried: dict[SkipKey, Meta | None] = {}
                for key, source in routes.source.items():
                    if source <= j < routes.target[key]:
                        stashed = tracker.tensors[key]
                        carried[key] = None if stashed is None else meta_of(stashed)
                cuts.append(Cut(tuple(map(meta_of, tensors)), form_of(value), carried))
        return cuts, seen


def _call(partition: Partition, value: Any, j: int) -> Any:
    for name, layer in partition.named_children():
        try:
            value = layer(value)
        except Exception as error:
            error.add_note(
                f"in partition {j}, layer '{name}', while inferring shapes with tensors that have no values: a layer "
                "must not depend on values to decide on shapes"
            )
            raise
    return value


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from logging a traceback before it raises the error."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
