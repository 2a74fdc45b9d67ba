"""`GPipe`: a sequential model as a pipeline over the devices of one process."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from pipesight import context
from pipesight._torch.module_internals import not_compiled, set_state_metadata, state_metadata, target_device
from pipesight._torch.tensors import in_transform
from pipesight.pipeline.argument_text import argument_text
from pipesight.pipeline.autograd_node import connect
from pipesight.pipeline.caller_state import CallerState
from pipesight.pipeline.devices import choose_devices
from pipesight.pipeline.forward import ForwardPass
from pipesight.pipeline.microbatch import TensorOrTensors, as_tuple, form_of, gather, scatter
from pipesight.pipeline.minibatch import Engine, MiniBatch, Tape
from pipesight.pipeline.partition import Partition, PlacedPartition, SkipRoutes, split, verify_sequential
from pipesight.pipeline.skip import verify_skippables
from pipesight.pipeline.workers import Workers
from pipesight.schedule.argument_checks import (
    CheckpointMode,
    check_balance,
    check_checkpoint,
    check_chunks,
    checkpoint_stop,
)

__all__ = ["GPipe", "balance_recipe"]

_RECIPE = """

If you do not know a good balance, time the layers on a sample of your input:

    from {package} import GPipe
    from {package}.balance import balance_by_time

    partitions = torch.cuda.device_count() or 2
    sample = torch.rand(...)
    balance = balance_by_time(model, sample, partitions=partitions)
    model = GPipe(model, balance, ...)
"""


class GPipe(nn.Module):
    """Runs an ``nn.Sequential`` as a pipeline: partitions of consecutive layers, each on its device.

    Gradients, hooks and optimizers work as for an ordinary module. ::

        pipe = GPipe(nn.Sequential(embed, encoder, decoder, head), balance=[2, 2], chunks=4)
        pipe(batch).mean().backward()

    Args:
        module: The model; its layers are moved to the devices.
        balance: How many layers each partition takes.
        devices: One per partition, such as ``["cuda:0", "cuda:1"]`` or ``[0, 1]``; extra ones are ignored. By default
            the CUDA devices in order, or the CPU for every partition if there is no GPU.
        chunks: Number of micro-batches per mini-batch.
        checkpoint: Which micro-batches are recomputed in backward instead of keeping their activations:
            ``"always"`` all of them, ``"except_last"``, or ``"never"``.
        deferred_batch_norm: Let ``nn.BatchNorm*`` track the statistics of the whole mini-batch instead of those of
            each micro-batch.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        verify_sequential(module)
        verify_skippables(module)
        self._balance = check_balance(balance, len(module), balance_recipe())
        self._devices = choose_devices(devices, len(self._balance))
        self._chunks = check_chunks(chunks)
        self._checkpoint = check_checkpoint(checkpoint)
        self.training = module.training
        self.partitions = nn.ModuleList(split(module, self._balance, self._devices, deferred_batch_norm))
        self.partitions.training = module.training
        self._steps = 0

    @property
    def balance(self) -> list[int]:
        """How many layers each partition takes."""
        return list(self._balance)

    @balance.setter
    def balance(self, _: Any) -> None:
        _deny_change("balance")

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._devices)

    @devices.setter
    def devices(self, _: Any) -> None:
        _deny_change("devices")

    @property
    def chunks(self) -> int:
        """Number of micro-batches per mini-batch. It may be changed between calls."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed in backward. It may be changed between calls."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode) -> None:
        self._checkpoint = check_checkpoint(checkpoint)

    def extra_repr(self) -> str:
        """Say how the model is cut and run."""
        return argument_text(
            balance=self._balance, devices=self._devices, chunks=self._chunks, checkpoint=self._checkpoint
        )

    def __len__(self) -> int:
        return sum(self._balance)

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its index in the original model."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    @not_compiled  # torch.compile around it compiles nothing: it cannot follow into the workers
    def forward(self, input: TensorOrTensors, *more: Any) -> TensorOrTensors:
        """Run ``input``, a tensor or a tuple of tensors on ``devices[0]``; the output is on ``devices[-1]``."""
        if more:
            names = ", ".join("abcdefgh"[: 1 + len(more)])
            raise TypeError(
                f"GPipe takes one input, but got {1 + len(more)}; pass several tensors as one tuple: model(({names}))"
            )
        if in_transform():
            raise RuntimeError("torch.func transforms such as vmap and grad cannot see into GPipe; use torch.autograd")
        inputs = as_tuple(input, "input")
        if not self._balance:
            return input
        microbatches = scatter(tuple(t.detach() for t in inputs), self._chunks)
        engine = self._engine()
        caller = CallerState(engine.workers)
        if self.training and not caller.in_backward:  # else it repeats a call that was counted
            self._steps += 1
        minibatch = MiniBatch(
            engine,
            caller,
            [tensors[0].size(0) for tensors in microbatches],
            checkpoint_stop=checkpoint_stop(self._checkpoint, len(microbatches)) if self.training else 0,
            step=context.step_of_call(self, max(0, self._steps - self.training)),
        )
        tape = Tape(minibatch, [t.requires_grad for t in inputs])
        packets = ForwardPass(tape).run(microbatches, form_of(input))
        with torch.no_grad():
            outputs = gather([[t for t in packet.tensors if t is not None] for packet in packets])
        wanted = [any(needed) for needed in zip(*(packet.needed for packet in packets), strict=True)]
        form = packets[0].form
        del packets
        if any(wanted):
            outputs = list(connect(tape, inputs, outputs, wanted))
        output: TensorOrTensors = form(outputs)
        return output

    def _engine(self) -> Engine:
        """Return what runs the partitions, created on first use and again after a copy or a fork."""
        engine: Engine | None = self.__dict__.get("_running")
        if engine is None or not engine.workers.alive:
            partitions = cast(list[Partition], list(self.partitions))
            routes = SkipRoutes(partitions)
            pairs = enumerate(zip(partitions, self._devices, strict=True))
            placed = [PlacedPartition(j, partition, device, routes) for j, (partition, device) in pairs]
            engine = self.__dict__["_running"] = Engine(placed, routes, Workers(self._devices))
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state under the keys of the original model: ``original.load_state_dict(...)`` takes it."""
        state = self.state_dict()
        plain = OrderedDict((key.split(".", 2)[2], value) for key, value in state.items())
        names = {f"partitions.{j}.{name}": name for j, p in enumerate(self.partitions) for name in p._modules}
        metadata = {
            _replace_prefix(key, names): value
            for key, value in state_metadata(state).items()
            if key == "" or key.count(".") > 1
        }
        set_state_metadata(plain, metadata)
        return plain

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Accept the keys of the original model too; ``state_dict`` is ``load_state_dict``'s own copy."""
        names = {name: f"partitions.{j}.{name}" for j, p in enumerate(self.partitions) for name in p._modules}
        for keys in (state_dict, state_metadata(state_dict)):
            for key in [key for key in keys if key.startswith(prefix)]:
                inner = key.removeprefix(prefix)
                if not any(inner == ours or inner.startswith(f"{ours}.") for ours in names.values()):
                    keys[prefix + _replace_prefix(inner, names)] = keys[key]
                    if keys is state_dict and inner != _replace_prefix(inner, names):
                        del keys[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype or memory format. Moving to a device raises ``TypeError``."""
        if target_device(*args, **kwargs) is not None:
            self._deny_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise ``TypeError``: the devices are chosen in the constructor."""
        self._deny_move()

    def cpu(self) -> NoReturn:
        """Raise ``TypeError``: the devices are chosen in the constructor."""
        self._deny_move()

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Raise ``TypeError``: the devices are chosen in the constructor."""
        self._deny_move()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let an enclosing module change the dtype, but not the device, which each tensor here keeps."""

        def stay(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.device != tensor.device:
                self._deny_move()
            return changed

        return super()._apply(stay, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _deny_move(self) -> NoReturn:
        raise TypeError(
            "denied to move parameters and buffers, because GPipe manages the devices of its partitions "
            f"(devices: {[str(d) for d in self._devices]}); choose them in the constructor, GPipe(..., devices=[...]), "
            "and move the modules around it one by one"
        )


def balance_recipe() -> str:
    """Return code that finds a balance, by the names that the program uses."""
    return _RECIPE.format(package="torchgpipe" if "torchgpipe" in sys.modules else "pipesight")


def _deny_change(what: str) -> NoReturn:
    raise AttributeError(
        f"{what} of a GPipe cannot be changed, because its layers are already on their devices; build a new one: "
        "GPipe(nn.Sequential(*model), balance=[...], devices=[...])"
    )


def _replace_prefix(key: str, names: Mapping[str, str]) -> str:
    """Replace the module at the start of a dotted key."""
    for name, other in names.items():
        if key == name or key.startswith(f"{name}."):
            return other + key.removeprefix(name)
    return key
