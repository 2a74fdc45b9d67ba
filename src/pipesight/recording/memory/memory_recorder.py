"""Record what is in memory at the ends of tasks, in some steps.

A step is measured if that costs less than 1% of the time since the beginning, with what it has cost so far::

    step    0  1  2 ..  64 .. 128 ..        0 and 1 always: the optimizer makes its state at the end of step 0
            m  m  .      m      m           then those whose number is a multiple of a power of two
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipesight import context
from pipesight._nested import tensors_in
from pipesight._patches import Patches, harmless
from pipesight._torch.autograd import next_sequence_number
from pipesight._torch.cuda_peaks import InsideTask, PeakMeter
from pipesight._torch.saved_tensors import CAN_BE_SEEN
from pipesight.context import Kept, Observer, Where, attach, detach
from pipesight.recording.memory.allocators import allocated, capacity, most_allocated, resident
from pipesight.recording.memory.met_models import MetModels
from pipesight.recording.memory.saved_activations import SavedActivations, saved_by_units
from pipesight.recording.memory.storage_ledger import StorageLedger
from pipesight.recording.pipeline_description import Pipeline, is_pipeline
from pipesight.trace.automatic.modules import ModuleHooks
from pipesight.trace.point_events import memory_counter, memory_instant

__all__ = ["MemoryRecorder"]

COST = 0.01
"""The share of the time of all steps that measuring may take."""
ALWAYS = 2
"""So many steps are measured first, whatever that costs."""
GPU, LOSS = "cuda", "loss_fn"
_PHASES = ("forward", "recompute")


class MemoryRecorder(Observer):
    """Counts bytes by partition and by device, and records them.

    Args:
        modules: What sees the modules of a program without a pipeline.
    """

    def __init__(self, modules: ModuleHooks) -> None:
        self._modules = modules
        self._models = MetModels()
        self._ledgers: dict[torch.device, StorageLedger] = {}
        self._tasks: weakref.WeakKeyDictionary[threading.Thread, SavedActivations] = weakref.WeakKeyDictionary()
        self._inside: dict[torch.device, InsideTask] = {}  # the task under way of each GPU
        self._ended: dict[torch.device, int] = {}  # bytes in use when the last partition's last forward ended
        self._new_pass = False
        self._peaks, self._before_step = PeakMeter(), dict[torch.device, int]()
        self._resident: dict[torch.device, int] = {}
        self._patches = Patches()
        self._counting = threading.Lock()
        self._measuring = False
        self._counted = False  # whether weights, gradients and optimizer state were, in this step
        self._steps, self._interval = 0, 1
        self._step, self._begun, self._spent = 0, 0.0, 0.0
        self._since, self._spent_in_all, self._last_spent = 0.0, 0.0, 0.0

    def attach(self) -> None:
        """Start to measure."""
        if not CAN_BE_SEEN:
            memory_instant("not counted", {"torch": str(torch.__version__)})
            return
        attach(self)
        self._modules.outermost_ended = self._module_ended
        self._patches.keep(register_optimizer_step_pre_hook(self._stepping))
        self._patches.keep(register_optimizer_step_post_hook(self._stepped))
        self._patches.wrap(torch.autograd, "backward", self._backward)

    def detach(self) -> None:
        """Stop it."""
        if self._measuring:
            self._note_peaks()
        self._measuring = False
        detach(self)
        self._patches.undo()
        self._modules.outermost_ended = None

    # Which steps, and what there is.

    def switch(self, step: int, *, recorded: bool) -> None:
        """Turn to another step; ``recorded`` says whether it is one of those to record."""
        now = time.perf_counter()
        self._since = self._since or now
        if self._measuring:
            self._note_peaks()
            self._spent_in_all += self._spent
            self._last_spent, share = self._spent, self._spent / max(now - self._begun, 1e-9)
            self._interval = 1
            while share / self._interval > COST:
                self._interval *= 2
            self._ledgers.clear()
            self._inside.clear()
        affordable = self._spent_in_all + self._last_spent <= COST * (now - self._since)
        due = self._steps < ALWAYS or (step % self._interval == 0 and affordable)
        self._measuring = CAN_BE_SEEN and recorded and due
        self._steps += self._measuring
        self._modules.marks = [] if self._measuring else None
        self._step, self._begun, self._spent = step, now, 0.0
        self._counted = False
        self._models.begin_step()

    def meet_pipeline(self, pipeline: Pipeline) -> None:
        """Learn of a pipeline that is called."""
        if self._models.meet_pipeline(pipeline):
            self._counted = False

    def meet_module(self, module: nn.Module) -> None:
        """Learn of a module that is called from outside all others."""
        if self._models.meet_module(module):
            self._counted = False

    # What a program does outside of pipelines.

    @harmless
    def _module_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count what the call of a module from outside all others has saved."""
        if not self._measuring or not torch.is_grad_enabled() or is_pipeline(module):
            return
        began = time.perf_counter()
        saved = SavedActivations()
        found = list(tensors_in(output))
        saved.walk(found)
        marks, inputs = self._modules.marks or [], list(tensors_in(args))
        layers, of_inputs = saved.by_layer(marks, inputs, self._models.weight_addresses(None))
        if layers:
            memory_instant("kept by layers", {"partition": None, "inputs": of_inputs, "layers": layers})
        with self._counting:
            self._count_fixed()
            for device in {tensor.device for tensor in found}:
                ledger = self._ledger(device)
                ledger.add(inputs, "inputs", None)
                ledger.add(saved.tensors, "activations", None)
                self._write(device, None)
        self._spent += time.perf_counter() - began

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._count_again()
        return result

    @harmless
    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._measuring:
            gpus = [device for device in self._ledgers if device.type == GPU]
            self._before_step = {device: self._peaks.most_since(device)[0] for device in gpus}

    @harmless
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._models.meet_optimizer(optimizer)
        for device, before in self._before_step.items():
            most = self._peaks.most_since(device)[1] - before
            memory_instant("most in the optimizer", {"device": str(device), "most": most})
        self._before_step = {}
        self._count_again(state=True)

    def _count_again(self, *, state: bool = False) -> None:
        """Count gradients and, after an optimizer, its ``state`` anew."""
        if not self._measuring or context.current() is not None:
            return
        began = time.perf_counter()
        with self._counting:
            if not self._counted:
                self._count_fixed()
            else:
                for j in self._models.partitions:
                    self._count_gradients(j)
                if state:
                    self._count_state()
            for device in self._ledgers:
                self._write(device, None, all_partitions=True)
        self._spent += time.perf_counter() - began

    # What the engines call.

    def wanted(self) -> bool:
        """Return whether this step is measured."""
        return self._measuring

    def pass_started(self) -> None:
        """Note that the program had its turn, in which it may have computed a loss."""
        self._new_pass = True

    def task_started(self, where: Where) -> None:
        """Forget what the thread's last task has saved."""
        if where.phase in _PHASES:
            self._tasks[threading.current_thread()] = SavedActivations()
        if (device := where.device) is not None and device.type == GPU:
            before = self._ended.pop(device, None)
            now, most = self._peaks.most_since(device)
            if before is not None and self._new_pass and where.phase in ("backward", "recompute"):
                memory_instant("most outside", {"most": most - before, "left": now - before})
            self._inside[device] = InsideTask(device, self._peaks, now)

    def layer_started(self, where: Where) -> None:
        """Begin to look for the most that a layer takes."""
        self._reach(where, where.layer)

    def layer_ended(self, where: Where) -> None:
        """Walk on in the graph, where the engine cannot say at the end of a task where that ends."""
        self._reach(where, None)
        if where.kept is not None and where.phase in _PHASES:
            began = time.perf_counter()
            saved = self._task()
            saved.walk(where.kept().ends)
            if where.partition == where.partitions - 1:  # what comes after is the loss, or never recomputed like it
                saved.after_layers.append((next_sequence_number(), LOSS))
            self._spent += time.perf_counter() - began

    def task_ended(self, where: Where) -> None:
        """Count what is in memory, and record it."""
        began = time.perf_counter()
        j, device = where.partition, where.device
        if device is None:
            return
        if (inside := self._inside.pop(device, None)) is not None:
            place = {"partition": j, "last": j == where.partitions - 1, "phase": where.phase}
            again = where.phase == "forward" and where.checkpointing
            memory_instant("most in layers", {**place, "checkpointing": again, **inside.found()})
            if where.phase == "forward" and j == where.partitions - 1:
                self._ended[device], self._new_pass = inside.in_use, False
        with self._counting:
            self._count_fixed()
            ledger = self._ledger(device)
            if where.phase in _PHASES:
                saved = self._tasks.pop(threading.current_thread(), None)
                if saved is not None and where.kept is not None:
                    self._count_task(where, where.kept(), saved, ledger)
            else:
                self._count_gradients(j)
                ledger.add(() if where.gradients is None else where.gradients(), "gradients", j)
            self._write(device, j)
        self._spent += time.perf_counter() - began

    # Counting.

    def _reach(self, where: Where, layer: str | None) -> None:
        if where.device is not None and (inside := self._inside.get(where.device)) is not None:
            began = time.perf_counter()
            inside.begin(layer)
            self._spent += time.perf_counter() - began

    def _task(self) -> SavedActivations:
        return self._tasks.setdefault(threading.current_thread(), SavedActivations())

    def _count_fixed(self) -> None:
        """Count weights, gradients and optimizer state once a step."""
        if self._counted:
            return
        self._counted = True
        for j in self._models.partitions:
            for weight in self._models.weights(j):
                self._ledger(weight.device).add([weight], "weights", j)
            self._count_gradients(j)
        self._count_state()

    def _count_gradients(self, j: int | None) -> None:
        for gradient in self._models.gradients(j):
            self._ledger(gradient.device).add([gradient], "gradients", j)

    def _count_state(self) -> None:
        for j, tensor in self._models.optimizer_state():
            self._ledger(tensor.device).add([tensor], "optimizer_state", j)

    def _count_task(self, where: Where, kept: Kept, saved: SavedActivations, ledger: StorageLedger) -> None:
        j = where.partition
        saved.walk(kept.ends)
        ledger.add(kept.inputs, "inputs", j)
        ledger.add(saved.tensors, "activations", j)
        ledger.add(kept.outputs, "activations", j)
        marks = sorted([*saved.after_layers, *where.marks], key=lambda mark: mark[0])
        weights = self._models.weight_addresses(j)
        layers, of_inputs = saved.by_layer(marks, kept.inputs, weights)
        waiting = saved.waiting_by_layer(marks, weights)
        saved.forget()
        if kept.recomputed and where.phase == "recompute":
            for _, _, tensors in kept.recomputed:
                ledger.add(tensors, "activations", j)
            of_units, of_inputs = saved_by_units(kept.recomputed, weights)
            layers |= of_units
        if layers or waiting:
            place = {"step": where.step, "partition": j, "microbatch": where.microbatch, "phase": where.phase}
            sizes = {"inputs": of_inputs, "output_kept": saved.output_kept, "layers": layers, "waiting": waiting}
            memory_instant("kept by layers", {**place, **sizes})

    def _write(self, device: torch.device, j: int | None, *, all_partitions: bool = False) -> None:
        by_partition, total = self._ledgers[device].sums(lasting=all_partitions)
        for partition, sums in by_partition.items():
            if partition is not None and (all_partitions or partition == j):
                memory_counter(f"memory of partition {partition}", sums)
        found, own = allocated(device), resident(device)
        if own is not None:
            self._resident[device] = max(own, self._resident.get(device, 0))
        if found is not None and found >= sum(total.values()):
            total = {**total, "other": found - sum(total.values())}
        memory_counter(f"memory of {device}", total)

    def _note_peaks(self) -> None:
        for device in self._ledgers:
            known = {"allocated": most_allocated(device), "capacity": capacity(device)}
            known["resident"] = self._resident.get(device)
            if numbers := {name: number for name, number in known.items() if number is not None}:
                memory_counter(f"peak of {device}", numbers)

    def _ledger(self, device: torch.device) -> StorageLedger:
        found = self._ledgers.get(device)
        if found is None:
            found = self._ledgers[device] = StorageLedger()
        return found
