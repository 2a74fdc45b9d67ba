"""One call of a pipeline of any model on this rank: the ranks agree on it and plan it, torch's schedule runs it."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesight import context
from pipesight.distributed.agreement import Message
from pipesight.distributed.dry_run import ModelOutline
from pipesight.distributed.minibatch import BatchLoss
from pipesight.distributed.model_placement import Placement
from pipesight.distributed.model_plan import Plan
from pipesight.distributed.model_stage import ModelBatch
from pipesight.distributed.model_verification import verify_step
from pipesight.distributed.model_walk import ModelCall, whole_output
from pipesight.distributed.step_runner import CallRunner
from pipesight.distributed.target_counts import TargetCounts, Weighing
from pipesight.pipeline.batch_dims import BatchDims
from pipesight.pipeline.calls import SplitCall, split_call
from pipesight.pipeline.flattening import Flat, flatten
from pipesight.pipeline.loss_merging import LossMerging, weights_of
from pipesight.pipeline.outputs import Merge, flatten_output
from pipesight.pipeline.randomness import PassRandomness, draw_seed, next_seed, seed_of
from pipesight.pipeline.step_losses import TARGET, LossOf

__all__ = ["ModelStepRunner"]


class ModelStepRunner(CallRunner):
    """Makes the calls of a pipeline of any model.

    ``adjusted`` returns what is called with a plan if it moves parameters or units between partitions; ``settings`` are
    as for :class:`CallRunner`.
    """

    def __init__(
        self,
        outline: ModelOutline,
        placement: Placement,
        chunks: int,
        dims: BatchDims,
        loss_of: LossOf,
        loss_weight: Any,
        adjusted: Callable[[], Callable[[Plan], None] | None],
        *settings: Any,
    ) -> None:
        super().__init__(*settings)
        self._outline, self._placement, self._chunks = outline, placement, chunks
        self._dims, self._loss_of, self._adjusted = dims, loss_of, adjusted
        self._loss_weight = "sum" if loss_weight is None and loss_of.sums else loss_weight
        self._placed: list[Plan] = []
        self._merging = LossMerging()
        self._checked: dict[str, int] = {}
        self._noted = False  # the weights of this call follow from how the loss was computed
        self._counts = TargetCounts(len(self._mesh.pipelines))

    def run(
        self,
        pipeline: Any,
        call: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        learns: bool,
        with_loss: bool = True,
        scale: float | None = None,
    ) -> tuple[ModelBatch, SplitCall]:
        """Run one call with the model's own arguments; ``scale`` is what the loss is multiplied by."""
        with self._monitor.presence.calls.running(call, self._calls + 1):
            return self._run(pipeline, call, given, learns, with_loss, scale)

    def _run(
        self,
        pipeline: Any,
        call: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        learns: bool,
        with_loss: bool,
        scale: float | None,
    ) -> tuple[ModelBatch, SplitCall]:
        step = context.step_of_call(pipeline, self.steps)
        message: Message = {"call": f"{call} {self._calls}", "arguments": {"scale": scale}}
        message |= {"leaves": self.preemption.asked, "step": context.counted_step(), "seed": next_seed()}
        error: Exception | None = None
        try:
            surroundings = self._outline.follow()
            flat = flatten(given)
            message["given"] = _described(flat, self._dims)
            message["values"] = _checksum(flat)
            message["mode"] = hashlib.blake2b(repr(surroundings).encode(), digest_size=8).hexdigest()
            args, kwargs = self._here(flat)
            split = split_call(args, kwargs, self._chunks, self._dims)
            if with_loss and self._loss_of.takes_target:
                self._loss_of.check_target(split, kwargs[TARGET], self._dims)
        except Exception as found:
            error = found
        messages = self._agreement.settle(message, error)
        self._compare(messages)
        if any(answer["leaves"] for answer in messages.values()):
            self.preemption.leave()
        self._calls += 1
        seed = messages[self._mesh.members[0]]["seed"]
        run = self._loss_of.of_call if with_loss else whole_output
        plans, weighing, totals = self._agree(call, split, run, surroundings, seed)
        if any(plan.random for plan in plans):
            draw_seed()  # on every rank, so that shuffles give the same samples on each
        else:
            seed = seed_of(seed, self.steps, self._since)
        self._enter_step(step, [answer["step"] for answer in messages.values() if answer["step"] is not None])
        replicas = len(self._mesh.pipelines)
        share = replicas / (1.0 if weighing.sums else totals[0]) if totals[0] else 0.0
        weights = list(weighing.weights)
        loss = BatchLoss(_no_function, list(split.calls), weights, share, 1.0 if scale is None else scale)
        n, m = self._outline.partitions, len(plans)
        where = self._enter_pass(sum(split.sizes), m, n, learns)
        random = self._randomness(seed)
        batch = ModelBatch(plans, [], loss, learns, random, where, where.observers, self._monitor)
        batch.calls, batch.run, batch.with_loss = split.calls, run, with_loss
        batch.factors = weighing.factors(totals)
        checks = with_loss and self._loss_weight is None and m > 1
        if checks or batch.factors:
            batch.loss_parts, batch.watches = {}, () if learns else self._merging.watches(split)
        self.steps, self._since = self.steps + learns, 0 if learns else self._since + 1
        with self._monitor.explaining("the weights that partitions share"):
            self._placement.send_values()
        self._schedule_runner.run(batch)
        if learns:
            with self._monitor.explaining("the gradients of weights that partitions share"):
                self._placement.collect_gradients()
        if checks:
            self._check_weights(call, batch, split, weighing)
        return batch, split

    def _check_weights(self, call: str, batch: ModelBatch, split: SplitCall, weighing: Weighing) -> None:
        """Raise if the losses of micro-batches were not weighed by what they are means over.

        Weights must be known before the losses are, so that they come from the arguments. At the first call, the
        second, the fourth and so on, all ranks raise; at others the last one does, and the rest when they wait for it.
        """
        error: Exception | None = None
        parts, values, weights = batch.loss_parts, batch.loss.values, weighing.weights
        if batch.factors and parts and len(parts) < len(weights):
            error = RuntimeError(
                "the losses of micro-batches are made of different parts; say how to weigh them: loss_weight"
            )
        unclear = parts and all(part.kind in ("other", "parameter") for mine in parts.values() for part in mine)
        if parts and len(parts) == len(weights) and not (unclear and self._noted):
            order = range(len(weights))
            try:
                mine, losses = [parts[i] for i in order], [values[i] for i in order]
                found = self._merging.weigh_parts("loss", mine, losses, split).shares
                used = weights if weighing.sums else [weight / sum(weights) for weight in weights if sum(weights)]
                if any(not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, used, strict=True)):
                    raise ValueError(
                        f"the losses of micro-batches count {_numbers(found)} by what they are means or sums over, but "
                        f"were weighed {_numbers(used)}; say what the loss of a micro-batch is a mean over, by its "
                        "arguments: loss_weight=lambda *args, **kwargs: ...; or use loss_weight='samples' or 'sum'"
                    )
            except Exception as wrong:  # of a warning, too, where these are errors
                error = wrong
        number = self._checked[call] = self._checked.get(call, 0) + 1
        if number & (number - 1) == 0:
            self._agreement.settle({"call": f"check of the loss {self._calls}"}, error)
        elif error is not None:
            self._monitor.fail(error)
            raise error

    def verify(
        self,
        pipeline: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        placement: Placement,
        buffers: dict[str, int],
        last: int,
    ) -> None:
        """Compare a step with the plain model; it does not count."""

        def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
            flat = flatten(given)
            args, kwargs = flat.rebuild([tensor.detach().to(self._mesh.device, copy=True) for tensor in flat.tensors])
            return args, kwargs

        def run() -> ModelBatch:
            steps, since = self.steps, self._since
            batch, _ = self.run(pipeline, "step", fresh(), learns=True)
            self.steps, self._since = steps, since
            return batch

        def split() -> SplitCall:
            return split_call(*fresh(), self._chunks, self._dims)

        with self._monitor.explaining("the comparison with the plain model"):
            mesh, agreement, where = self._mesh, self._agreement, self._where
            verify_step(self._module, placement, buffers, last, mesh, agreement, where, run, split)

    def output(self, batch: ModelBatch, split: SplitCall) -> Any:
        """Return the output of the model for the whole mini-batch, on the last rank."""
        flats = [flatten_output(batch.results[i], split.dims) for i in range(len(split.calls))]
        merge = Merge(flats, split)
        parts = [[flat.tensors[k] for flat in flats] for k in range(merge.count)]
        return merge.rebuild([merge.join(k, mine) for k, mine in enumerate(parts)])

    def _here(self, flat: Flat) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with their tensors on the device of this rank and without a graph."""
        args, kwargs = flat.rebuild([tensor.detach().to(self._mesh.device) for tensor in flat.tensors])
        return args, kwargs

    def _compare(self, messages: dict[int, Message]) -> None:
        """Raise if ranks of one pipeline have other arguments, or are in another mode."""
        for pipeline in self._mesh.pipelines:
            first = messages[pipeline[0]]
            for rank in pipeline[1:]:
                other = messages[rank]
                if other["given"] != first["given"]:
                    raise ValueError(
                        f"every rank of a pipeline must be given the same arguments (rank {pipeline[0]}: "
                        f"{first['given']}; rank {rank}: {other['given']})"
                    )
                if other["values"] != first["values"]:
                    raise ValueError(
                        f"every rank of a pipeline must be given the same batch, but the values differ between rank "
                        f"{pipeline[0]} and rank {rank}; shuffle with the same seed on every rank: "
                        "torch.manual_seed(...) before the DataLoader is made"
                    )
        modes = {rank: message["mode"] for rank, message in messages.items()}
        if len(set(modes.values())) > 1:
            raise ValueError(
                "all ranks must be in the same mode; call train() or eval(), freeze parameters and use autocast alike "
                "on every rank"
            )

    def _agree(
        self, call: str, split: SplitCall, run: ModelCall, surroundings: Any, seed: int
    ) -> tuple[list[Plan], Weighing, list[float]]:
        """Return the plan of each micro-batch, how losses are weighed, and the totals of all replicas for that.

        Ranks compare their plans where these are new, so that none waits for what another does not send.
        """
        message: Message = {"call": f"plan of {call} {self._calls}"}
        error: Exception | None = None
        plans: list[Plan] = []
        weighing, known = Weighing([]), self._outline.made
        try:
            random = self._randomness(seed)
            with split.told():
                plans = [self._plan(split, i, run, surroundings, random) for i in range(len(split.calls))]
            for i, plan in enumerate(plans):
                split.refuse_changes(i, plan.changes)
            self._place(plans)
            weighing = self._weigh(split, plans, run, surroundings, random)
        except Exception as found:
            error = found
        if self._outline.made == known and error is None and len(self._mesh.pipelines) == 1:
            return plans, weighing, weighing.totals
        text = repr([plan.fingerprint() for plan in plans])
        message["plan"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        message["totals"] = weighing.totals
        message["copies"] = self._placement.copies
        messages = self._agreement.settle(message, error)
        # What one replica uses, all have: they average the same gradients.
        if self._placement.add_copies([pair for answer in messages.values() for pair in answer["copies"]]):
            self._placed = []
            self._place(plans)
        for pipeline in self._mesh.pipelines:
            if len({messages[rank]["plan"] for rank in pipeline}) > 1:
                raise RuntimeError(
                    "the model makes other calls on one rank than on others, for the same arguments: it depends on "
                    "something that differs between ranks, such as the rank itself or an unseeded random number"
                )
        totals = [messages[pipeline[0]]["totals"] for pipeline in self._mesh.pipelines]
        if len(set(map(len, totals))) > 1:
            raise RuntimeError(
                "replicas compute the losses of their batches in different ways, so that they cannot be weighed "
                "against each other; say what the loss of a micro-batch is a mean over: loss_weight=..."
            )
        return plans, weighing, [sum(numbers) for numbers in zip(*totals, strict=True)]

    def _plan(
        self,
        split: SplitCall,
        i: int,
        run: ModelCall,
        surroundings: Any,
        random: PassRandomness,
        *,
        anew: bool = False,
    ) -> Plan:
        return self._outline.plan(split.calls[i], run, surroundings, i, random, anew=anew)

    def _place(self, plans: list[Plan]) -> None:
        """Take over what plans say of who uses what, unless the last call had the same."""
        different = list({id(plan): plan for plan in plans}.values())
        if len(different) != len(self._placed) or any(a is not b for a, b in zip(different, self._placed, strict=True)):
            for plan in different:
                if (adjusted := self._adjusted()) is not None:
                    adjusted(plan)
            self._placed = different

    def _weigh(
        self,
        split: SplitCall,
        plans: list[Plan],
        run: ModelCall,
        surroundings: Any,
        random: PassRandomness,
    ) -> Weighing:
        """Return how losses are weighed."""
        self._noted = False
        if self._loss_weight == "sum" or split.arguments[0].get("num_items_in_batch") is not None:
            return Weighing([1.0] * len(plans), sums=True)
        if callable(self._loss_weight):
            return Weighing(weights_of(self._loss_weight, split))
        samples, replicas = [float(size) for size in split.sizes], len(self._mesh.pipelines)
        if self._loss_weight == "samples" or run is whole_output or (len(plans) == replicas == 1):
            return Weighing(samples)

        def anew() -> list[Plan]:
            return [self._plan(split, i, run, surroundings, random, anew=True) for i in range(len(plans))]

        counts = self._counts.find(split, plans, anew)
        self._noted = bool(counts)
        return Weighing.by_counts(counts, samples, replicas)


def _numbers(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.4g}" for share in shares[:4]) + (" ..." if len(shares) > 4 else "")


def _described(flat: Flat, dims: BatchDims) -> str:
    """Return the names, types and shapes of all tensors among the arguments, and other values with their names."""

    def named(path: str) -> str:
        way, _, name = path.partition(".")
        first, dot, rest = name.partition(".")
        return f"{dims.name_of(int(first))}{dot}{rest}" if way == "0" else name

    tensors = [
        f"{named(names[0])} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for names, tensor in zip(flat.names, flat.tensors, strict=True)
    ]
    pairs = zip(flat.value_names, flat.values, strict=True)
    values = ", ".join(f"{named(path)}={value!r}" for path, value in pairs if isinstance(value, (int, float, str)))
    if len(values) > _SHOWN:
        values = f"other values with the digest {hashlib.blake2b(values.encode(), digest_size=4).hexdigest()}"
    return ", ".join([*tensors, *filter(None, [values])])


_SHOWN = 200  # characters


def _checksum(flat: Flat) -> int:
    """Return a number that differs between batches: on a GPU a sum of all bytes, in small tensors weighed by place."""
    total = 0
    for k, tensor in enumerate(flat.tensors):
        if tensor.numel():
            content = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if content.is_cpu:
                total = zlib.crc32(content.numpy().data, total + k & 0xFFFFFFFF)
                continue
            if content.numel() <= _WEIGHED:
                content = content * (torch.arange(content.numel(), device=content.device) % 997 + 1)
            total = (total * 31 + k + int(content.sum(dtype=torch.int64))) & (1 << 62) - 1
    return total


_WEIGHED = 2**20  # bytes


def _no_function(_output: Any, _target: Any) -> Tensor:
    raise AssertionError("the model computes its loss itself")
