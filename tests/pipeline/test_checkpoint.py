"""Checkpointing changes memory and time, never a number: random numbers, buffers and gradients stay what they were."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipesight import GPipe, context, is_checkpointing, is_recomputing
from pipesight.pipeline.checkpoint import Buffers
from support.against_plain import MODES, Fn, assert_same, assert_same_state, mlp, modes, rand, run_plain, total

RECOMPUTED = {"always": 3, "except_last": 2, "never": 0}  # of three micro-batches


@pytest.fixture(params=[False, True], ids=["default", "deterministic"])
def algorithms(request):
    """Run with and without ``torch.use_deterministic_algorithms``."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(before)


# Random numbers.


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=3, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def attend(_, x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


RANDOM = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "RReLU": nn.RReLU,
    "LSTM": Lstm,
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
    "dropout": lambda: Fn(lambda s, x: F.dropout(x, 0.5) * s.a[:1]),
    "attention": lambda: Fn(attend),
    "gumbel": lambda: Fn(lambda _, x: F.gumbel_softmax(x)),
    "rand": lambda: Fn(lambda _, x: x * torch.rand(x.shape, dtype=x.dtype)),
    "randn": lambda: Fn(lambda _, x: x * torch.randn(x.size(-1), dtype=x.dtype)),
    "rand_like": lambda: Fn(lambda _, x: x + x * torch.rand_like(x)),
    "randn_like": lambda: Fn(lambda _, x: x * torch.randn_like(x)),
    "randint": lambda: Fn(lambda _, x: x * torch.randint(1, 9, x.shape)),
    "randperm": lambda: Fn(lambda _, x: x[..., torch.randperm(x.size(-1))]),
    "normal": lambda: Fn(lambda _, x: x * torch.normal(torch.zeros_like(x), 1.0)),
    "bernoulli": lambda: Fn(lambda _, x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "multinomial": lambda: Fn(lambda _, x: x[..., torch.multinomial(torch.ones(4), 4)]),
    "poisson": lambda: Fn(lambda _, x: x * torch.poisson(torch.full_like(x, 3.0))),
    "uniform_": lambda: Fn(lambda _, x: x * torch.empty_like(x).uniform_(1, 2)),
    "exponential_": lambda: Fn(lambda _, x: x * torch.empty_like(x).exponential_()),
    "random_": lambda: Fn(lambda _, x: x * torch.empty(4, dtype=torch.int64).random_(9)),
    "out": lambda: Fn(lambda _, x: x * torch.rand(4, dtype=x.dtype, out=torch.empty(4, dtype=x.dtype))),
    "distribution": lambda: Fn(lambda _, x: x * torch.distributions.Gamma(x.detach().abs() + 1, 1.0).sample()),
    "trunc_normal_": lambda: Fn(lambda _, x: x * nn.init.trunc_normal_(torch.empty(4, dtype=x.dtype))),
}
randoms = pytest.mark.parametrize("kind", RANDOM)


def random_model(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), RANDOM[kind](), nn.Linear(4, 4), RANDOM[kind](), nn.Tanh()).double()


def run(model, *, checkpoint, seed=5, chunks=3, passes=2, balance=(2, 1, 2)):
    """Return all numbers of some passes: outputs and gradients."""
    pipe = GPipe(copy.deepcopy(model), balance, chunks=chunks, checkpoint=checkpoint)
    torch.manual_seed(seed)
    numbers = []
    for _ in range(passes):
        x = rand(6, 2, 4, grad=True)
        output = pipe(x)
        total(output).backward()
        numbers += [output.detach(), x.grad]
    return numbers + [p.grad for p in pipe.parameters() if p.grad is not None]


def equal(numbers, others):
    return len(numbers) == len(others) and all(torch.equal(a, b) for a, b in zip(numbers, others, strict=True))


@randoms
def test_modes_are_equal_bit_for_bit(kind, algorithms):
    """All checkpoint modes give the same outputs and gradients to the last bit, whatever is random in a layer."""
    model = random_model(kind)
    expected = run(model, checkpoint="never")
    assert equal(run(model, checkpoint="always"), expected)
    assert equal(run(model, checkpoint="except_last"), expected)
    assert not equal(run(model, checkpoint="never", seed=6), expected)


def test_modes_are_equal_bit_for_bit_without_randomness(algorithms):
    """All checkpoint modes give the same outputs and gradients to the last bit."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 4), nn.GELU()).double()
    expected = run(model, checkpoint="never")
    assert equal(run(model, checkpoint="always"), expected)
    assert equal(run(model, checkpoint="except_last"), expected)


@modes
@pytest.mark.parametrize("kind", sorted(RANDOM.keys() - {"distribution"}))  # whose numbers depend on the input
def test_gradients_fit_the_random_numbers(kind, checkpoint):
    """The gradient is the slope of the output for the numbers that were drawn in forward."""
    pipe = GPipe(random_model(kind), [2, 1, 2], chunks=2, checkpoint=checkpoint)

    def loss(x):
        torch.manual_seed(5)
        return pipe(x).square().sum()

    x = rand(4, 2, 4, grad=True)
    loss(x).backward()
    step = 1e-6 * rand(2, 4).sign()
    with torch.no_grad():
        slope = (loss(x + step) - loss(x - step)) / 2
    torch.testing.assert_close((x.grad * step).sum(), slope, rtol=1e-4, atol=1e-12)


@modes
def test_repeatable_whatever_the_timing(checkpoint):
    """The same seed gives the same numbers, however the threads happen to run."""

    class Nap(nn.Module):
        def forward(self, x):
            time.sleep(random.random() * 0.003)
            return F.dropout(x, 0.5)

    model = nn.Sequential(*(Nap() for _ in range(5))).double()
    expected = run(model, checkpoint=checkpoint, balance=[1] * 5, passes=1)
    for _ in range(9):
        assert equal(run(model, checkpoint=checkpoint, balance=[1] * 5, passes=1), expected)


@modes
def test_every_draw_is_different(checkpoint):
    """Passes, micro-batches, partitions and layers within a partition all get numbers of their own."""

    class Draw(nn.Module):
        def forward(self, x):
            return (*x, torch.rand(x[0].size(0), 64))

    pipe = GPipe(nn.Sequential(Draw(), Draw(), Draw(), Draw()), [1, 2, 1], chunks=3, checkpoint=checkpoint)
    draws = [row for _ in range(2) for drawn in pipe((rand(3, 1, grad=True),))[1:] for row in drawn]
    assert len(draws) == 2 * 4 * 3
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 0.6


@modes
def test_default_generator_without_randomness(checkpoint):
    """A model that draws nothing leaves the default generator as it was."""
    pipe = GPipe(mlp(), [2, 2], chunks=2, checkpoint=checkpoint)
    before = torch.get_rng_state()
    pipe(rand(4, 3)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3).double(), nn.Dropout(0.5)), [1, 1], checkpoint=checkpoint).eval()
    before = torch.get_rng_state()
    pipe(rand(4, 3)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@modes
def test_default_generator_with_randomness(checkpoint):
    """A forward that draws advances the default generator; the backward that repeats it does not."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3).double(), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=checkpoint)
    before = torch.get_rng_state()
    output = pipe(rand(4, 3))
    after = torch.get_rng_state()
    assert not torch.equal(after, before)
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)


@modes
def test_draws_between_forward_and_backward(checkpoint):
    """What the caller draws or seeds between forward and backward does not matter."""
    pipe = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(40, 3, grad=True)
    output = pipe(x)
    torch.manual_seed(9)
    torch.rand(3)
    output.sum().backward()
    assert torch.equal(output != 0, x.grad != 0)


@modes
def test_backward_again_repeats_the_numbers(checkpoint):
    """With retain_graph the second backward uses the numbers of the forward too."""
    pipe = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(40, 3, grad=True)
    output = pipe(x)
    output.sum().backward(retain_graph=True)
    first = x.grad.clone()
    output.sum().backward()
    assert torch.equal(x.grad, 2 * first)


@modes
def test_users_generator(checkpoint):
    """A layer that passes a generator of its own draws from that, and gradients fit what it drew."""
    generator = torch.Generator().manual_seed(3)
    layer = Fn(lambda _, x: x * torch.empty_like(x).bernoulli_(0.5, generator=generator))
    pipe = GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(40, 3, grad=True)
    before = torch.get_rng_state()
    output = pipe(x)
    assert torch.equal(torch.get_rng_state(), before)
    twin = torch.Generator().manual_seed(3)
    masks = [torch.empty(20, 3, dtype=torch.float64).bernoulli_(0.5, generator=twin) for _ in range(2)]
    assert torch.equal(output, x * torch.cat(masks))
    output.sum().backward()
    assert torch.equal(x.grad, torch.cat(masks))
    assert torch.equal(generator.get_state(), twin.get_state())


@modes
def test_dropout_in_a_checkpoint_within_a_layer(checkpoint):
    """torch.utils.checkpoint in a layer repeats the numbers of the layer's forward."""
    layer = Fn(lambda _, x: torch_checkpoint(lambda t: F.dropout(t, 0.5).sin(), x, use_reentrant=False))
    pipe = GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(40, 3, grad=True)
    output = pipe(x)
    output.sum().backward()
    assert torch.equal(output != 0, x.grad != 0)


@modes
@pytest.mark.parametrize("inner_checkpoint", ["always", "never"])
def test_dropout_in_a_pipeline_within_a_pipeline(checkpoint, inner_checkpoint):
    """A pipeline that is a layer of another one repeats its numbers when it is recomputed, and from run to run."""
    inner = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=inner_checkpoint)
    pipe = GPipe(nn.Sequential(nn.Dropout(0.1), inner, nn.Identity()), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        x = rand(40, 3, grad=True)
        outputs.append(pipe(x))
        outputs[-1].sum().backward()
        assert torch.equal(outputs[-1] != 0, x.grad != 0)
    assert torch.equal(*outputs)


def test_numbers_of_the_caller_are_not_disturbed():
    """What another thread draws from the default generator meanwhile is what it would have drawn alone."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5) for _ in range(3))).double()
    pipe = GPipe(model, [1, 1, 1], chunks=4, checkpoint="always")
    pipe(rand(8, 2, 4))  # so that the seed of the pass below is the only draw of the pipeline
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(1000)
    torch.manual_seed(1)
    output = pipe(rand(8, 2, 4))
    drawn = []
    thread = threading.Thread(target=lambda: drawn.extend(torch.rand(1) for _ in range(1000)))
    thread.start()
    output.sum().backward()
    thread.join()
    assert torch.equal(torch.cat(drawn), torch.cat([expected]))


# Buffers.


class Count(nn.Module):
    """Keeps a buffer that it changes in place, and one that it assigns anew; both matter to its output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("late", None)
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        self.late = self.calls.clone() if self.late is None else self.late + 1
        return x * self.weight * self.calls.clone() + self.mean * self.late


class CountingNorm(nn.BatchNorm1d):
    """A batch normalisation with a buffer of its own."""

    def __init__(self, features):
        super().__init__(features)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Late(nn.Module):
    """Keeps a buffer that changes only when there is something to count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positive", torch.zeros(()))
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        if x[0, 0] > 0.5:
            self.positive += 1
        return x * self.weight + self.positive.clone()


class Lazy(nn.Module):
    """Makes its buffer in the first forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return x * self.weight + self.calls.clone()


class Shared(nn.Module):
    """Has one buffer in two modules."""

    def __init__(self):
        super().__init__()
        self.one, self.other = Late(), Late()
        self.other.positive = self.one.positive

    def forward(self, x):
        return self.other(self.one(x))


def spectral():
    torch.manual_seed(0)
    return parametrizations.spectral_norm(nn.Linear(3, 3).double())


BUFFERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm1d, average": lambda: nn.BatchNorm1d(3, momentum=None),
    "BatchNorm1d, nothing tracked": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "subclass": lambda: CountingNorm(3),
    "nested": lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), Count())),
    "counter": Count,
    "late": Late,
    "lazy": Lazy,
    "shared": Shared,
    "spectral_norm": spectral,
}


@modes
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_change_once(kind, checkpoint):
    """Buffers go through the values that the plain model's do, and recomputation sees those of its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(BUFFERS[kind](), nn.Tanh(), BUFFERS[kind](), nn.Linear(3, 3)).double()
    x = rand(9, 3)
    x[:, 0] = torch.tensor([-1, -1, -1, 1, -1, -1, 1, 1, 1])  # the first micro-batch changes nothing in `Late`
    x.requires_grad_()
    for balance in ([2, 2], [1, 1, 1, 1], [4]):
        assert_same(copy.deepcopy(model), x, balance, chunks=3, checkpoint=checkpoint, passes=3)


def test_parameters_without_memory_are_left_alone():
    """Over ranks, a block may have parameters that its rank does not use, and so does not have."""
    layers = nn.Sequential(nn.Linear(2, 2))
    layers.unused = nn.Parameter(torch.empty(3, device="meta"))
    buffers = Buffers(layers)
    saved = buffers.save()
    with torch.no_grad():
        layers[0].bias += 1
    buffers.learn(saved)
    assert set(saved.values) == {(layers[0], "bias")}


@modes
def test_large_buffer_that_changes_late(checkpoint):
    """A large buffer that did not change at first is updated once all the same."""

    class Large(Late):
        def __init__(self):
            super().__init__()
            self.positive = torch.zeros(100_000)

        def forward(self, x):
            if x[0, 0] > 0.5:
                self.positive += 1
            return x * self.weight

    x = rand(9, 3)
    x[:, 0] = torch.tensor([-1, -1, -1, 1, -1, -1, 1, 1, 1])
    assert_same(nn.Sequential(Large()), x, [1], chunks=3, checkpoint=checkpoint, passes=3)


@modes
def test_layer_that_changes_its_weight_in_forward(checkpoint):
    """An embedding with max_norm, which rescales rows as it uses them, can be recomputed, also more than once."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 3)).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.tensor([0, 1, 2, 3])
    loss, expected = total(pipe(x)), total(run_plain(plain, x, 2))
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
        assert_same_state(pipe, plain)


@modes
def test_instance_norm_changes_once(checkpoint):
    """Instance normalisation that tracks statistics updates them once."""
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True, affine=True), nn.Tanh()).double()
    assert_same(model, rand(6, 3, 5, grad=True), [1, 1], chunks=3, checkpoint=checkpoint, passes=3)


@modes
def test_buffers_with_several_passes_under_way(checkpoint):
    """Each backward recomputes with the buffers of its own forward, in any order, and leaves the latest ones."""
    plain = nn.Sequential(nn.Linear(3, 3), Count(), nn.Tanh()).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    losses = [total(pipe(rand(4, 3) + k)) for k in range(3)]
    expected = [total(run_plain(plain, rand(4, 3) + k, 2)) for k in range(3)]
    for k in (1, 0, 2):
        for _ in range(2):
            losses[k].backward(retain_graph=True)
            expected[k].backward(retain_graph=True)
        assert_same_state(pipe, plain)


@modes
def test_buffers_stay_the_same_objects(checkpoint):
    """A buffer that is changed in place stays the tensor it was, for whoever holds it."""
    pipe = GPipe(nn.Sequential(Count(), nn.BatchNorm1d(3).double()), [1, 1], chunks=3, checkpoint=checkpoint)
    calls, mean = pipe[0].calls, pipe[1].running_mean
    pipe(rand(9, 3)).sum().backward()
    assert pipe[0].calls is calls
    assert calls == 3
    assert pipe[1].running_mean is mean
    assert pipe[1].track_running_stats


# When a layer runs, and what it is told.


class Record(nn.Module):
    """Notes how it is called."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        self.calls.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return x * self.weight


FIRST, AGAIN, KEPT = (True, False, True), (False, True, True), (False, False, True)


@modes
def test_what_a_layer_is_told(checkpoint):
    """A checkpointed layer runs twice, in the grad mode of the plain model; it can ask which time it is."""
    pipe = GPipe(nn.Sequential(Record(), Record(), Record()), [1, 2], chunks=3, checkpoint=checkpoint)
    output = pipe(rand(6, 3))
    n = RECOMPUTED[checkpoint]
    assert all(layer.calls == [FIRST] * n + [KEPT] * (3 - n) for layer in pipe)
    output.sum().backward()
    assert all(layer.calls == [FIRST] * n + [KEPT] * (3 - n) + [AGAIN] * n for layer in pipe)


@modes
def test_each_layer_is_recomputed_once(checkpoint):
    """A checkpointed micro-batch runs each layer twice, any other once; each backward repeats it once."""
    pipe = GPipe(nn.Sequential(*(Record() for _ in range(4))), [1, 2, 1], chunks=3, checkpoint=checkpoint)
    output = pipe(rand(6, 3))
    for k in (1, 2, 3):
        output.sum().backward(retain_graph=True)
        assert [len(layer.calls) for layer in pipe] == [3 + k * RECOMPUTED[checkpoint]] * 4


@modes
@pytest.mark.parametrize("asks", [False, True])
def test_layer_that_counts_microbatches(asks, checkpoint):
    """A layer that asks is_recomputing() counts each micro-batch once, beside one that asks for the micro-batch too."""
    counted = []

    def count(s, x):
        counted.extend([] if is_recomputing() else ["once"])
        return x * s.a

    ask = Fn(lambda s, x: (context.current_microbatch() if asks else None, x * s.b)[1])
    pipe = GPipe(nn.Sequential(Fn(count), ask), [2], chunks=3, checkpoint=checkpoint)
    for step in (1, 2):
        pipe(rand(6, 3)).sum().backward()
        assert len(counted) == 3 * step


def test_a_lone_microbatch_is_the_last():
    """With one micro-batch, except_last checkpoints nothing."""
    pipe = GPipe(nn.Sequential(Record()), [1], chunks=3, checkpoint="except_last")
    pipe(rand(1, 3)).sum().backward()
    assert pipe[0].calls == [KEPT]


@modes
@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode", "frozen"])
def test_nothing_is_checkpointed_without_need(how, checkpoint):
    """In eval, without grad, and where nothing wants a gradient, nothing is checkpointed or recomputed."""
    pipe = GPipe(nn.Sequential(Record(), Record()), [1, 1], chunks=3, checkpoint=checkpoint)
    if how == "eval":
        output = pipe.eval()(rand(6, 3))
        output.sum().backward()
    elif how == "frozen":
        pipe.requires_grad_(False)(rand(6, 3))
    else:
        with getattr(torch, how)():
            pipe(rand(6, 3))
    grad = how in ("eval", "frozen")
    assert all(layer.calls == [(False, False, grad)] * 3 for layer in pipe)


def test_frozen_partition_in_front_is_not_checkpointed():
    """A partition that needs no backward is not recomputed, though others are."""
    pipe = GPipe(nn.Sequential(Record(), Record()), [1, 1], chunks=3, checkpoint="always")
    pipe[0].requires_grad_(False)
    pipe(rand(6, 3)).sum().backward()
    assert [len(layer.calls) for layer in pipe] == [3, 6]


@modes
def test_outside_of_a_layer(checkpoint):
    """Outside of a layer's forward both questions are answered no, in backward and in hooks too."""
    answers = []

    def ask(*_):
        answers.append((is_checkpointing(), is_recomputing()))

    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), [1, 1], chunks=3, checkpoint=checkpoint)
    pipe[1].register_full_backward_hook(ask)
    pipe[0].weight.register_hook(ask)
    pipe.register_forward_pre_hook(ask)
    ask()
    output = pipe(rand(6, 3))
    ask()
    output.sum().backward()
    ask()
    assert Counter(answers) == {(False, False): 3 + 1 + 1 + 3}


def test_other_threads_are_not_asked():
    """Another thread, also one that a layer starts, gets its own answer."""
    answers = []

    def ask():
        answers.append((is_checkpointing(), is_recomputing()))

    def forward(s, x):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return x * s.a

    pipe = GPipe(nn.Sequential(Fn(forward)), [1], chunks=2, checkpoint="always")
    pipe(rand(4, 3)).sum().backward()
    assert answers == [(False, False)] * 4


class Wait(torch.autograd.Function):
    """Does not pass a gradient on before something has happened."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.event.wait(20), "the recomputation waits for the gradient"
        return gradient, None


def test_recomputation_does_not_wait_for_the_gradient():
    """While the next partition is still at work on the gradient of a micro-batch, the one before recomputes it."""
    events = [threading.Event() for _ in range(3)]

    def before(s, x):
        if is_recomputing():
            events[int(x[0, 0])].set()
        return torch.cat([x[:, :1], x[:, 1:] * s.a[1:]], 1)

    def after(s, x):
        return Wait.apply(x * s.b, events[int(x[0, 0])])

    model = nn.Sequential(Fn(lambda s, x: x + 0 * s.a), Fn(before), Fn(after))
    pipe = GPipe(model, [1, 1, 1], chunks=3, checkpoint="always")
    x = rand(3, 3)
    x[:, 0] = torch.arange(3)
    pipe(x).sum().backward()
    assert all(event.is_set() for event in events)


# Deferred batch normalisation.


def normed(norm, *shape):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 3, 1) if len(shape) == 3 else nn.Identity(), norm, nn.Tanh()).double()


NORMS = {
    "1d": (lambda: nn.BatchNorm1d(3), (12, 3)),
    "1d, sequence": (lambda: nn.BatchNorm1d(3), (12, 3, 4)),
    "2d": (lambda: nn.BatchNorm2d(3), (12, 3, 4, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (12, 3, 2, 2, 2)),
    "average": (lambda: nn.BatchNorm1d(3, momentum=None), (12, 3)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False), (12, 3)),
    "momentum": (lambda: nn.BatchNorm2d(3, momentum=0.7), (12, 3, 4, 2)),
    "nothing tracked": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (12, 3)),
    "fewer rows than chunks": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 2)),
    "rows left over": (lambda: nn.BatchNorm2d(3), (7, 3, 4, 2)),
    "nested": (lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.BatchNorm1d(3))), (12, 3)),
}


@modes
@pytest.mark.parametrize("kind", NORMS)
def test_deferred_statistics(kind, checkpoint):
    """Running statistics are those of a plain model that sees each mini-batch whole."""
    norm, shape = NORMS[kind]
    plain = normed(norm(), *shape)
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    assert list(pipe.plain_state_dict()) == list(plain.state_dict())
    for step in range(3):
        x = rand(*shape) * (step + 1) + 3 * step
        total(pipe(x.requires_grad_())).backward()
        plain(x)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(pipe.plain_state_dict()[key], value, msg=lambda text, key=key: f"{key}: {text}")
    if kind != "nothing tracked":
        x = rand(*shape)
        torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))


@modes
def test_deferred_gradients(checkpoint):
    """Each micro-batch is normalised by itself: outputs and gradients are those of the plain model on it."""
    plain = normed(nn.BatchNorm1d(3))
    pipe = GPipe(copy.deepcopy(plain), [2, 1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
    ours, theirs = rand(9, 3, grad=True), rand(9, 3, grad=True)
    output, expected = pipe(ours), run_plain(plain, theirs, 3)
    total(output).backward()
    total(expected).backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_deferred_in_low_precision(dtype, checkpoint):
    """Large numbers in half precision do not overflow the statistics."""
    plain = nn.Sequential(nn.BatchNorm1d(3))
    pipe = GPipe(copy.deepcopy(plain), [1], chunks=2, checkpoint=checkpoint, deferred_batch_norm=True)
    x = (rand(600, 3) * 200 + 100).to(dtype)
    pipe(x.requires_grad_()).sum().backward()
    plain(x.detach().float())
    torch.testing.assert_close(pipe[0].running_mean, plain[0].running_mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pipe[0].running_var, plain[0].running_var, rtol=1e-3, atol=1e-3)
    pipe = pipe.to(dtype)
    pipe(x).sum().backward()
    assert pipe[0].running_mean.dtype == dtype
    assert pipe[0].running_var.isfinite().all()


@modes
def test_deferred_after_a_failure(checkpoint):
    """A mini-batch that failed half way leaves nothing in the statistics of the next."""

    tripping = True

    def trip(layer, x):
        if tripping and context.current().microbatch == 1:
            raise ValueError("trip")

    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()).double()
    pipe = GPipe(copy.deepcopy(plain), [2], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
    pipe[1].register_forward_pre_hook(trip)
    with pytest.raises(ValueError, match="trip"):
        pipe(rand(9, 3) + 100)
    tripping = False
    pipe(rand(9, 3)).sum().backward()
    plain(rand(9, 3))
    torch.testing.assert_close(pipe[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(pipe[0].running_var, plain[0].running_var)
    assert pipe[0].num_batches_tracked == 1


def test_deferred_layer_outside_of_the_pipeline():
    """Called by itself, a converted layer is a plain batch normalisation."""
    plain = nn.BatchNorm1d(3).double()
    pipe = GPipe(nn.Sequential(copy.deepcopy(plain)), [1], chunks=2, deferred_batch_norm=True)
    for _ in range(2):
        torch.testing.assert_close(pipe[0](rand(4, 3)), plain(rand(4, 3)))
        torch.testing.assert_close(pipe[0].state_dict(), plain.state_dict())
    with pytest.raises(ValueError, match="2D or 3D input"):
        pipe[0](rand(2, 3, 4, 5))


def test_deferred_checks_its_input():
    """In the pipeline too, an input of the wrong dimensions is the plain layer's error."""
    pipe = GPipe(nn.Sequential(nn.BatchNorm2d(3)), [1], chunks=2, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="expected 4D input"):
        pipe(rand(4, 3))


def test_deferred_layer_in_eval_tracks_nothing():
    """A frozen batch normalisation in a model that trains stays frozen."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()).double()
    pipe = GPipe(model, [1, 1], chunks=2, deferred_batch_norm=True)
    pipe[0].eval()
    pipe(rand(4, 3)).sum().backward()
    assert pipe[0].num_batches_tracked == 0
    assert torch.equal(pipe[0].running_mean, torch.zeros(3, dtype=torch.float64))


def test_batch_norm_is_converted_only_if_asked():
    """Without deferred_batch_norm the layers stay what they were."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(3)))
    pipe = GPipe(model, [1, 1])
    assert type(pipe[0]) is nn.BatchNorm1d
    assert type(pipe[1][0]) is nn.BatchNorm2d


@modes
def test_deferred_layer_called_twice(checkpoint):
    """A batch normalisation that its layer calls twice tracks both, as the plain one does."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x) + self.norm(3 * x + 1)

    plain = nn.Sequential(Twice()).double()
    pipe = GPipe(copy.deepcopy(plain), [1], chunks=2, checkpoint=checkpoint, deferred_batch_norm=True)
    for _ in range(2):
        plain(rand(6, 3))
        pipe(rand(6, 3)).sum().backward()
        torch.testing.assert_close(pipe.plain_state_dict(), dict(plain.state_dict()))


def test_deferred_layer_with_two_names():
    """A batch normalisation that has two names in a layer is still one."""

    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.other = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.other(x)

    pipe = GPipe(nn.Sequential(Names()).double(), [1], chunks=2, deferred_batch_norm=True)
    assert pipe[0].one is pipe[0].other
    pipe(rand(6, 3))
    assert pipe[0].one.num_batches_tracked == 1


def test_deferred_subclass_keeps_its_forward():
    """A batch normalisation with a forward of its own keeps it."""
    pipe = GPipe(nn.Sequential(CountingNorm(3)).double(), [1], chunks=2, deferred_batch_norm=True)
    pipe(rand(6, 3))
    assert pipe[0].calls == 2


def test_modes_agree_with_deferred_batch_norm():
    """All checkpoint modes give the same numbers with deferred batch normalisation, to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 3), nn.BatchNorm1d(3))
    results = []
    for checkpoint in MODES:
        pipe = GPipe(copy.deepcopy(model), [2, 1, 2], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
        torch.manual_seed(1)
        for _ in range(3):
            pipe(rand(9, 3, dtype=torch.float32)).square().sum().backward()
        results.append([*pipe.state_dict().values(), *(p.grad for p in pipe.parameters())])
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
