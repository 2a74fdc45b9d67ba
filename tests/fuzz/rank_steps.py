"""The steps of a case: on a rank of a pipeline, and on the plain model."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from fuzz.rank_models import WIDTH, Noise, make_layers, make_loss, run_plainly

__all__ = ["batches", "expected", "run"]

RATE = 1e-3
"""Of learning: little, so that no training diverges, which would leave rounding alone to compare."""


def batches(case):
    """Return, for each step and replica, an input and a target."""
    generator = torch.Generator().manual_seed(case["seed"])
    dtype, found = getattr(torch, case["dtype"]), []
    for sizes, length in zip(case["sizes"], case["lengths"], strict=True):
        step = []
        for size in sizes:
            shape = (size, length, WIDTH) if length else (size, WIDTH)
            x, y = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
            if case["loss"] in ("classes", "padded", "weighted"):
                y = torch.randint(WIDTH, (size,), generator=generator)
                if case["loss"] == "padded":
                    y[torch.rand(size, generator=generator) < 0.5] = -7
            elif case["loss"] == "masked":
                mask = torch.rand((*shape[:-1], 1), generator=generator) < 0.6
                y = (y, mask.to(dtype))
            step.append((x, y))
        found.append(step)
    return found


def run(case):
    """Run a case on this rank; return, for each step, loss, output, gradients, buffers and masks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from pipesight.distributed import DistributedPipeline

    pp, dp = case["pp"], case["dp"]
    mesh = DeviceMesh("cpu", torch.arange(pp * dp).view(pp, dp), mesh_dim_names=("pp", "dp"), _init_backend=False)
    replica = dist.get_rank() % dp
    layers = make_layers(case["layers"], case["seed"], case["dtype"])
    pipeline = DistributedPipeline(
        nn.Sequential(*layers),
        case["balance"],
        **{key: case[key] for key in ("chunks", "schedule", "checkpoint", "deferred_batch_norm", "data_parallel")},
        **make_loss(case["loss"], case["dtype"]),
        mesh=mesh,
    )
    parameters = list(pipeline.parameters())
    optimizer = torch.optim.SGD(parameters, RATE) if parameters else None
    torch.manual_seed(case["seed"])  # as all ranks do
    found = []
    for step, mode in zip(batches(case), case["modes"], strict=True):
        x, y = step[replica]
        pipeline.train(mode == "train")
        output, everywhere = None, case["broadcast_loss"]
        if mode == "train":
            if not case["accumulates"]:
                for parameter in parameters:
                    parameter.grad = None
            loss = pipeline.step(x, y, broadcast_loss=everywhere)
        elif mode == "eval":
            loss = pipeline.eval_step(x, y, broadcast_loss=everywhere)
        else:
            loss, output = None, pipeline.predict(x)
        if (loss is not None) != (mode != "predict" and (everywhere or pipeline.is_last)):
            raise AssertionError(f"rank {dist.get_rank()} got the loss {loss}")
        gradients = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
        found.append(
            {
                "loss": None if loss is None else loss.item(),
                "generator": torch.get_rng_state().numpy().tobytes(),
                "output": None if output is None else output.double().numpy(),
                "gradients": {name: g.double().numpy().copy() for name, g in whole.items()},
                "buffers": {name: b.double().numpy().copy() for name, b in pipeline.module.named_buffers()},
                "masks": {
                    int(name): {i: mask.double().numpy() for i, mask in layer.masks.items()}
                    for name, layer in pipeline.module.named_children()
                    if isinstance(layer, Noise)
                },
            }
        )
        if mode == "train" and optimizer is not None:
            optimizer.step()
    del pipeline, optimizer, parameters
    gc.collect()
    return found


def expected(case, masks):
    """Run a case on the plain model, fed the same micro-batches; ``masks`` are those that were drawn, by replica.

    Returns:
        For each step: the loss, the outputs and buffers of replicas, and the gradients.
    """
    dtype = getattr(torch, case["dtype"])
    loss_fn = make_loss(case["loss"], case["dtype"])["loss_fn"]
    first = nn.ModuleList(make_layers(case["layers"], case["seed"], case["dtype"]))
    replicas = [first, *(copy.deepcopy(first) for _ in range(case["dp"] - 1))]
    found = []
    for number, (step, mode) in enumerate(zip(batches(case), case["modes"], strict=True)):
        outputs = []
        for k, (model, (x, _)) in enumerate(zip(replicas, step, strict=True)):
            model.train(mode == "train")
            own = {j: {i: torch.tensor(m).to(dtype) for i, m in of.items()} for j, of in masks[number][k].items()}
            with torch.set_grad_enabled(mode == "train"):
                parts = x.chunk(case["chunks"]) if len(x) else [x]
                deferred = case["deferred_batch_norm"]
                outputs.append(torch.cat(run_plainly(model, case["layers"], parts, own, deferred=deferred)))
        targets = [y for _, y in step]
        if case["loss"] == "masked":
            target = tuple(torch.cat(parts) for parts in zip(*targets, strict=True))
        else:
            target = torch.cat(targets)
        loss = loss_fn(torch.cat(outputs), target)
        gradients = {}
        if mode == "train":
            for model in replicas:
                if not case["accumulates"]:
                    model.zero_grad()
            if loss.requires_grad:
                loss.backward()
            for name, _ in first.named_parameters():
                same = [dict(model.named_parameters())[name].grad for model in replicas]
                if any(g is not None for g in same):
                    gradients[name] = sum(g for g in same if g is not None)
            with torch.no_grad():
                for model in replicas:
                    for name, parameter in model.named_parameters():
                        if name in gradients:
                            parameter -= RATE * gradients[name]
        found.append(
            {
                "loss": loss.item(),
                "outputs": [output.detach().double().numpy() for output in outputs],
                "gradients": {name: g.double().numpy() for name, g in gradients.items()},
                "buffers": [{n: b.double().numpy().copy() for n, b in model.named_buffers()} for model in replicas],
            }
        )
    return found
