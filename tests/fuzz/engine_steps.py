"""What the engine's fuzzer does with a pipeline and, in the same words, with the plain model; and what it looks at."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import signal
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.engine_layers import DEVICE, Bomb, Drop, plain
from pipesight import context


class Planted(Exception):  # noqa: N818 (it is meant to be raised)
    """What a bomb raises."""


class Truth(nn.Module):
    """The plain model, fed with the micro-batches that a pipeline would make, one after the other."""

    def __init__(self, model, chunks):
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, x):
        inputs = x if isinstance(x, tuple) else (x,)
        parts = zip(*(t.chunk(self.chunks) for t in inputs), strict=True) if len(inputs[0]) else [inputs]
        outputs = []
        for plain.i, part in enumerate(parts):
            values = tuple(t.clone() for t in part)  # a layer may change it in place
            outputs.append(self.model(values if isinstance(x, tuple) else values[0]))
        for norm in (m for m in self.model.modules() if isinstance(m, WholeBatchNorm)):
            norm.track()
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(same) for same in zip(*outputs, strict=True))
        return torch.cat(outputs)


class WholeBatchNorm(nn.BatchNorm1d):
    """Normalises micro-batches one by one, and tracks the statistics of all of them together."""

    seen = ()

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        self.seen = (*self.seen, x.detach())
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def track(self):
        if self.seen:
            with torch.no_grad():
                F.batch_norm(
                    torch.cat(self.seen), self.running_mean, self.running_var, None, None, training=True, momentum=0.1
                )
                self.num_batches_tracked += 1
            self.seen = ()


def defer(model):
    """Let a plain model's batch norms track whole batches."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.BatchNorm1d:
                child.__class__ = WholeBatchNorm
                parent._modules[name] = child
    return model


class Log:
    """What the hooks of a model were called with."""

    def __init__(self, model, layers, kinds, skip):
        self.calls = collections.defaultdict(list)
        self.last = {}
        named = {name.removeprefix("model."): p for name, p in model.named_parameters()}
        for name, p in named.items():
            name = name.split(".", 2)[2] if name.startswith("partitions.") else name
            if not p.requires_grad or name in skip:
                continue
            if "parameter" in kinds:
                # A backward hook of the whole model ties its outputs together. Then plain autograd calls this one with
                # None for a parameter that only an output leads to which the loss leaves out.
                p.register_hook(
                    lambda g, name=name: None if g is None and "module" in kinds else self.note("hook", name, g)
                )
            if "scale" in kinds:
                p.register_hook(lambda g: None if g is None else g * 2)
            if "after" in kinds:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self.after(name, p.grad))
        for name, layer in layers.items():
            if "forward" in kinds:
                layer.register_forward_pre_hook(lambda m, x, name=name: self.forward("pre", name, x))
                layer.register_forward_hook(lambda m, x, y, name=name: self.forward("forward", name, y))
            if "backward" in kinds:
                layer.register_full_backward_pre_hook(lambda m, g, name=name: self.note("backward pre", name, *g))
                layer.register_full_backward_hook(lambda m, gi, go, name=name: self.note("backward", name, *gi, *go))
        if "module" in kinds:
            model.register_forward_hook(lambda m, x, y: self.note("module", "", *engine_tensors(y)))
            model.register_full_backward_hook(lambda m, gi, go: self.note("module backward", "", *gi, *go))

    def note(self, kind, name, *tensors):
        if "backward" in kind and all(t is None for t in tensors):
            return  # such a hook ties the outputs of its module together, too: None goes on from those left out
        self.calls[kind, name].append([None if t is None else t.detach().clone() for t in tensors])

    def after(self, name, grad):
        # Where a gradient that is None comes to a parameter, plain autograd calls the hook, though it added nothing.
        last, version = self.last.get(name, (None, 0))
        if grad is not None and (grad is not last or grad._version != version):
            self.note("after", name, grad)
        self.last[name] = grad, 0 if grad is None else grad._version

    def forward(self, kind, name, value):
        where = context.current()
        if where is None or where.phase == "forward":
            self.note(kind, name, *engine_tensors(value))


def engine_tensors(value):
    """Return the tensors of a tensor or of tuples of them."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(t for item in value for t in engine_tensors(item))


def loss_of(output, used):
    """Return a loss of some of the outputs that weighs every number differently; ``None`` if there is none."""
    terms = [t for k, t in enumerate(engine_tensors(output)) if t.requires_grad and (used >> k) & 1]
    if not terms:
        return None
    return sum(
        (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.double).view(t.shape)).sum() for t in terms
    )


MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def take_step(step, model, inputs, autocast):
    """Do one step with a model; return what came out of it, gradients of the parameters aside."""
    model.train(step.training)
    plain.run += 1
    seen = {}
    x = tuple(t.clone().requires_grad_(step.grad_input and t.is_floating_point()) for t in inputs)
    given = x if len(x) > 1 else x[0]

    def call(value):
        with MODES[step.mode](), torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=autocast):
            return model(value)

    output = call(given)
    seen["outputs"] = [t.detach().clone() for t in engine_tensors(output)]
    seen["flags"] = [t.requires_grad for t in engine_tensors(output)]
    loss = loss_of(output, step.used)
    if loss is None or step.kind == "forward":
        return seen
    parameters = [p for p in model.parameters() if p.requires_grad]
    some = [p for k, p in enumerate(parameters) if (step.chosen >> (k % 16)) & 1] or parameters[:1]
    if step.kind == "grad":
        seen["grads"] = torch.autograd.grad(loss, [*(t for t in x if t.requires_grad), *some], allow_unused=True)
    elif step.kind == "inputs":
        loss.backward(inputs=[*some, *(t for t in x if t.requires_grad)])
    elif step.kind == "retain":
        loss.backward(retain_graph=True)
        loss.backward()
    elif step.kind == "twice":
        plain.run += 1
        second = loss_of(call(tuple(t.roll(1, 0) for t in inputs) if len(x) > 1 else inputs[0].roll(1, 0)), 1)
        for one in (loss, second) if step.chosen % 2 else (second, loss):
            if one is not None:
                one.backward()
    else:
        loss.backward()
    seen["input gradients"] = [t.grad for t in x]
    return seen


def arm(model, step, interrupt=None):
    """Let a bomb of a model go off in a step, if it comes to that micro-batch in that phase; return it."""
    bombs = [m for m in model.modules() if isinstance(m, Bomb)]
    bomb = bombs[step.bomb % len(bombs)]

    def explode():
        if interrupt is None:
            bomb.armed = None
            raise Planted
        bomb.armed = None
        interrupt()

    bomb.armed = (step.bomb_at[0], step.bomb_at[1], explode)
    return bomb


def interrupted(function, how):
    """Call a function and interrupt it, as Ctrl-C or a watchdog would; return whether it noticed.

    ``function`` gets what interrupts, to call it at some moment, from any thread.
    """
    caller = threading.get_ident()
    sent = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def interrupt():
        sent.set()
        if how == "signal":
            signal.pthread_kill(caller, signal.SIGINT)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(caller), ctypes.py_object(KeyboardInterrupt))

    try:
        function(interrupt)
        if sent.is_set():
            for _ in range(1000):  # it is on its way
                time.sleep(0.001)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGINT, before)
    assert not sent.is_set(), "an interrupt was lost"
    return False


def bring_in_line(truth, pipe):
    """After a pass that failed, whose end the plain model does not share: go on from where the pipeline is."""
    truth.model.load_state_dict(copy.deepcopy(pipe.plain_state_dict()))
    for model in (truth, pipe):
        model.zero_grad()
    for module in truth.modules():
        if isinstance(module, WholeBatchNorm):
            module.seen = ()
    drops = [m for m in pipe.modules() if isinstance(m, Drop)]
    passes = max((len(drop.order) for drop in drops), default=0)
    for drop in drops:
        drop.order += [None] * (passes - len(drop.order))  # it was not reached
    plain.run = passes - 1
