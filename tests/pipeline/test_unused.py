"""Parameters that get no gradient, and outputs that want none, are those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipesight import GPipe
from pipesight.skip import pop, skippable, stash
from support.against_plain import Fn, assert_equal_tensors, fresh, modes, named, rand, run_plain, tensors_of, total

a, b = (lambda s, x: x * s.a), (lambda s, x: x * s.b)
both = lambda s, x: x * s.a + s.b


@skippable(stash=["skip"])
class Stash(Fn):
    def forward(self, input):
        yield stash("skip", input * self.b)
        return input * self.a


@skippable(pop=["skip"])
class Pop(Fn):
    def forward(self, input):
        skip = yield pop("skip")
        return self.function(self, (input, skip))


def frozen():
    layer = Fn(both)
    layer.a.requires_grad_(False)
    return layer


MODELS = {
    "unused": lambda: [Fn(a), Fn(b), Fn(lambda s, x: x)],
    "frozen": lambda: [frozen(), Fn(both), frozen()],
    "in some micro-batches": lambda: [Fn(lambda s, x: x * (s.a if x[0, 0] > 0 else s.b)), Fn(a)],
    "in no micro-batch but the last": lambda: [Fn(lambda s, x: x * s.a if len(x) == 1 else x), Fn(a)],
    "detached by a later partition": lambda: [Fn(both), Fn(both), Fn(lambda s, x: x.detach() * s.a)],
    "detached in some micro-batches": lambda: [Fn(both), Fn(lambda s, x: (x if x[0, 0] > 0 else x.detach()) * s.a)],
    "dropped by a later partition": lambda: [Fn(lambda s, x: (x * s.a, x * s.b)), Fn(lambda s, x: x[0] * s.a)],
    "detached beside others": lambda: [Fn(lambda s, x: (x * s.a, (x * s.b).detach())), Fn(lambda s, x: x[0] * x[1])],
    "handed through": lambda: [
        Fn(lambda s, x: (x * s.a, x * s.b)),
        Fn(lambda s, x: (x[0], x[1] * s.a)),
        Fn(lambda s, x: x),
    ],
    "output detached": lambda: [Fn(both), Fn(lambda s, x: (x * s.a).detach())],
    "one output detached": lambda: [Fn(both), Fn(lambda s, x: (x * s.a, (x * s.b).detach(), x.argmax(1), x > 0))],
    "skip dropped": lambda: [Stash(None), Fn(both), Pop(lambda s, pair: pair[0] * s.a)],
    "skip detached": lambda: [Stash(None), Fn(both), Pop(lambda s, pair: pair[0] * s.a + pair[1].detach())],
    "all but the skip dropped": lambda: [Stash(None), Fn(both), Pop(lambda s, pair: pair[1] * s.a)],
}


def hooked(model):
    """Note what the hooks of each parameter are called with, and those of the node that accumulates its gradient."""
    calls = {}
    for name, parameter in named(model.named_parameters()).items():
        calls[name] = seen = []
        if parameter.requires_grad:
            parameter.register_hook(lambda g, seen=seen: seen.append(("tensor", None if g is None else g.clone())))
            parameter.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(("after", p.grad.clone())))
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, seen=seen: seen.append(("node", None)))
            seen.append(("keep", node))  # its hooks go with it
    return calls


def compare(ours, theirs):
    assert list(ours) == list(theirs)
    for name in theirs:
        assert [kind for kind, _ in ours[name]] == [kind for kind, _ in theirs[name]], name
        for (kind, one), (_, other) in zip(ours[name][1:], theirs[name][1:], strict=True):
            assert_equal_tensors(one, other, f"{kind} hook of {name}")


@modes
@pytest.mark.parametrize("kind", MODELS)
def test_hooks_are_called_for_what_gets_a_gradient(kind, checkpoint):
    """Hooks see what those of the plain model see, which calls none for a parameter that the output leaves out."""
    plain = nn.Sequential(*MODELS[kind]())
    pipe = GPipe(copy.deepcopy(plain), [1] * len(plain), chunks=3, checkpoint=checkpoint)
    ours, theirs = hooked(pipe), hooked(plain)
    x = rand(5, 3)
    for _ in range(2):
        for model, run in ((pipe, pipe), (plain, lambda t: run_plain(plain, t, 3))):
            output = run(fresh(x))
            flags = [t.requires_grad for t in tensors_of(output)]
            if model is pipe:
                expected = flags
            assert flags == expected
            if any(flags):
                total(output).backward()
        compare(ours, theirs)


@modes
@pytest.mark.parametrize("used", [0, 1])
def test_hooks_behind_an_output_that_the_loss_leaves_out(used, checkpoint):
    """They are not called, though the pipeline is one node for all outputs; multi-grad hooks know which came."""
    plain = nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.b)), Fn(lambda s, x: (x[0] * s.a, x[1] * s.b)))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint)
    calls = []
    for model in (pipe, plain):
        seen = {name: [] for name, _ in named(model.named_parameters()).items()}
        for name, parameter in named(model.named_parameters()).items():
            parameter.register_hook(seen[name].append)
            parameter.register_post_accumulate_grad_hook(lambda p, to=seen[name]: to.append(p.grad))
        multi = []
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), multi.append)
        for _ in range(2):
            output = model(rand(5, 3))
            output[used].sum().backward()
        calls.append((seen, multi))
    (ours, our_multi), (theirs, their_multi) = calls
    assert {name: len(seen) for name, seen in ours.items()} == {name: len(seen) for name, seen in theirs.items()}
    assert len(our_multi) == len(their_multi) == 2
    for one, other in zip(our_multi[0], their_multi[0], strict=True):
        assert_equal_tensors(one, other, "multi-grad hook")


@modes
def test_hooks_after_a_backward_that_did_not_call_them(checkpoint):
    """What torch.autograd.grad reached inside of a partition is forgotten when the next backward begins."""
    plain = nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.b)))
    pipe = GPipe(copy.deepcopy(plain), [1], chunks=2, checkpoint=checkpoint)
    calls = []
    for model in (pipe, plain):
        seen = []
        model[0].b.register_hook(seen.append)
        for _ in range(2):
            total(model(rand(5, 3))).backward()
            torch.autograd.grad(total(model(rand(5, 3))), [model[0].a])
            model(rand(5, 3))[0].sum().backward()
        calls.append(seen)
    ours, theirs = calls
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_equal_tensors(one, other, "hook")


@modes
def test_distributed_data_parallel_finds_unused_parameters(checkpoint, tmp_path):
    """What no rank used has no gradient, rather than zeros that an optimizer would act on."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.b)), Fn(lambda s, x: x[0].detach() * s.a))
        pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
        ddp = DistributedDataParallel(pipe, find_unused_parameters=True)
        for _ in range(2):
            ddp(rand(4, 3)).sum().backward()
        used = {name for name, p in named(pipe.named_parameters()).items() if p.grad is not None}
        assert used == {"1.a"}
    finally:
        torch.distributed.destroy_process_group()


@modes
def test_asking_for_the_gradient_of_an_unused_parameter(checkpoint):
    """torch.autograd.grad raises, or gives None if that is allowed."""
    pipe = GPipe(nn.Sequential(Fn(a), Fn(b)), [1, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(pipe(rand(4, 3)).sum(), [pipe[0].b])
    used, unused = torch.autograd.grad(pipe(rand(4, 3)).sum(), [pipe[0].a, pipe[0].b], allow_unused=True)
    assert used is not None
    assert unused is None
