"""Statistics and ``torch.compile``."""

import contextlib
import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipesight.stats as debug_api
from pipesight.stats import watch
from support.logged import assert_six, config, values


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    debug_api.end_debug()
    torch.compiler.reset()


def layer(x, w):
    x = x @ w
    debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
    x = x.relu() * 2
    debug_api.log_tensor_stats("fc2", tensor=x, tensor_name="activation")
    return x.sum(-1)


@pytest.mark.slow  # before torch 2.7 its compiler starts processes for this
def test_values(tmp_path):
    """A compiled function logs what it logs uncompiled, and computes the same."""
    debug_api.initialize(config(), log_dir=tmp_path)
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    expected = (x @ w).relu().mul(2).sum(-1)
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(3):
        assert torch.allclose(compiled(x, w), expected)
        debug_api.step()
    found = values(tmp_path)
    for i in range(3):
        assert_six(found, i, "fc1", "activation", x @ w)
        assert_six(found, i, "fc2", "activation", (x @ w).relu() * 2)


@pytest.mark.parametrize("freq", [1, 1000])
def test_one_graph_break_a_call(freq, tmp_path):
    """Each call breaks the graph once, on and off: two calls leave three graphs."""
    debug_api.initialize(config(freq=freq), log_dir=tmp_path, init_training_step=1)
    explained = torch._dynamo.explain(layer)(torch.randn(4, 3), torch.randn(3, 2))
    assert explained.graph_break_count == 2
    assert explained.graph_count == 3


def test_nothing_recompiles(tmp_path):
    """Neither steps that are on, nor off, nor the change between them compile anything again."""
    debug_api.initialize(config(freq=3), log_dir=tmp_path)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    compiled(x, w)
    debug_api.step()
    frames = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(6):
            compiled(x, w)
            debug_api.step()
    assert counter.frame_count == frames
    assert sorted({key[0] for key in values(tmp_path)}) == [0, 3, 6]


def test_the_result_of_a_call_in_a_compiled_function(tmp_path):
    """What a call returns can be used there."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path)

    @torch.compile(backend="eager")
    def scaled(x):
        statistics = debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
        return x / statistics["max"].item()

    assert torch.equal(scaled(torch.tensor([1.0, 4.0])), torch.tensor([0.25, 1.0]))


def test_fullgraph_says_why(tmp_path):
    """With fullgraph=True torch's own error names the call."""
    debug_api.initialize(config(), log_dir=tmp_path)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)disable.*log_tensor_stats"):
        compiled(torch.randn(4, 3), torch.randn(3, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile asks for at a graph break
def test_gradients(tmp_path):
    """Gradients of a compiled function are those of the plain one."""
    debug_api.initialize(config(), log_dir=tmp_path)
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        weight = w.clone().requires_grad_()
        function(x, weight).sum().backward()
        results.append(weight.grad)
    assert torch.allclose(*results)


def test_without_a_session():
    """A compiled function that was never meant to log gives the same error as a plain one."""
    compiled = torch.compile(layer, backend="eager")
    with pytest.raises(RuntimeError, match="not initialized"):
        compiled(torch.randn(4, 3), torch.randn(3, 2))


def test_a_new_session(tmp_path):
    """A function compiled in one session logs to the next one too."""
    compiled = torch.compile(layer, backend="eager")
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    for folder in "ab":
        debug_api.initialize(config(stats=["mean"]), log_dir=tmp_path / folder)
        compiled(x, w)
        debug_api.end_debug()
        assert len(values(tmp_path / folder)) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("first", [True, False])
def test_a_watched_model(first, tmp_path):
    """A model may be compiled before or after it is watched; nothing is compiled again from the third step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = [model[:1](x).detach(), model(x).detach()]
    chosen = config(("activation", "gradient"), freq=2)
    counter = torch._dynamo.testing.CompileCounter()
    if first:
        compiled = torch.compile(model, backend=counter)
        watched = watch(compiled, chosen, log_dir=tmp_path)
    else:
        watched = watch(model, chosen, log_dir=tmp_path)
        compiled = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for i in range(6):
        if i == 2:
            frames = counter.frame_count
        compiled(x).sum().backward()
        optimizer.step()
    assert counter.frame_count == frames
    watched.remove()
    found = values(tmp_path)
    assert sorted({key[0] for key in found}) == [0, 2, 4]
    for i in (0, 2, 4):
        assert_six(found, i, "0", "activation", expected[0])
        assert_six(found, i, "2", "activation", expected[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_watching_a_model_that_has_run_compiled(tmp_path):
    """A watch that begins after the model was compiled and called sees it, and so does its end."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(5, 3)
    compiled(x)
    with watch(compiled, config(("activation",), ["numel"]), log_dir=tmp_path):
        compiled(x).sum().backward()
    compiled(x)
    assert values(tmp_path) == {(0, "0", "activation", "numel"): 20, (0, "1", "activation", "numel"): 20}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("how", ["before", "after", "blocks"])
def test_steps_that_are_not_logged(how, start, tmp_path):
    """They run what was compiled, without hooks, which blocks of a kind share; a whole model is logged uncompiled."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(3, 3), nn.Tanh()

        def forward(self, x):
            return x + self.act(self.linear(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(12))), torch.randn(5, 3)
    expected = {str(i): model[: i + 1](x).detach() for i in range(12)}
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter) if how == "before" else model
    with watch(compiled, config(("activation", "gradient"), start_step=start, freq=2), log_dir=tmp_path):
        if how == "after":
            compiled = torch.compile(model, backend=counter)
        elif how == "blocks":
            for layer in model:
                layer.compile(backend=counter, fullgraph=True)
        optimizer, frames = torch.optim.SGD(model.parameters(), 0.0), []
        for _ in range(8):
            compiled(x).sum().backward()
            optimizer.step()
            frames.append(counter.frame_count)
    assert (frames[0] == 0) == (start == 0 and how != "blocks")
    assert 0 < frames[2] == frames[-1]
    found = values(tmp_path)
    assert {key[0] for key in found} == set(range(start, 8, 2))
    for name, activation in expected.items():
        for step in range(start, 8, 2):
            assert_six(found, step, name, "activation", activation)
            assert (step, f"{name}.act", "gradient", "mean") in found


class Deep(nn.Module):
    """A block whose layers return tuples, are changed in place afterwards, and are what it returns."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), None, torch.arange(3)

    def __init__(self):
        super().__init__()
        self.norm, self.pair, self.act = nn.LayerNorm(4), self.Pair(), nn.ReLU(inplace=True)
        self.up, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y, _, _ = self.pair(self.norm(x))
        y += x
        return self.last(self.act(self.up(y)))


def truth_of(model, batches):
    """Return the activations and gradients of each layer, of float64 copies of a model."""
    model, seen = copy.deepcopy(model).double(), {}

    def after(name, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor is not None and tensor.is_floating_point():
                seen.setdefault((name, "activation"), []).append(tensor.detach().clone())
                tensor.register_hook(lambda g: seen.setdefault((name, "gradient"), []).append(g.clone()))

    for name, layer in model.named_modules():
        if name:
            layer.register_forward_hook(lambda _, args, output, name=name: after(name, output))
    for x in batches:
        model(x.double()).square().mean().backward()
    return seen


def run_compiled(model, batches, steps):
    """Train with a learning rate of 0; return the gradients of each step."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.0), []
    for _ in range(steps):
        optimizer.zero_grad()
        for x in batches:
            model(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_inside_compiled_blocks(tmp_path):
    """Logged steps run compiled too, without a break: the same training, one more graph for all blocks, every layer."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 4), *(Deep() for _ in range(10))), torch.randn(3, 5, 4)
    truth = truth_of(model, batches)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model[1:]:
        block.compile(backend=counter, fullgraph=True)
    with watch(model, config(("activation", "gradient"), freq=2), log_dir=tmp_path):
        gradients = run_compiled(model, batches, 5)
    assert counter.frame_count == 2
    for of_step in gradients[1:]:
        assert all(map(torch.equal, of_step, gradients[0]))
    found = values(tmp_path)
    assert {key[:3] for key in found} == {(step, *key) for step in (0, 2, 4) for key in truth}
    for (layer, tensor), parts in truth.items():
        for step in (0, 2, 4):
            assert_six(found, step, layer, tensor, *parts, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", ["breaks", "limit", "checkpointed", "input", "raise"])
def test_blocks_that_cannot_be_compiled_with_hooks(how, tmp_path):
    """Code that falls apart, or hooks that wait for values, log what the plain model does."""

    class Block(Deep):
        plain = True

        def forward(self, x):
            if self.plain:
                return super().forward(x)
            if how == "checkpointed":
                return checkpoint(super().forward, x, use_reentrant=False)
            y, *_ = self.pair(self.norm(x))
            if how == "breaks":
                torch._dynamo.graph_break()
            y += x
            return self.last(self.act(self.up(y)))

    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 4), Block(), Block()), torch.randn(3, 5, 4)
    truth, Block.plain = truth_of(model, batches), False
    limits = torch._dynamo.config.patch(recompile_limit=1) if how == "limit" else contextlib.nullcontext()
    for block in model[1:]:
        block.compile(backend="aot_eager")
    tensors = ("activation", "gradient") + (("input",) if how == "input" else ())
    settings = {"on_nonfinite": "raise"} if how == "raise" else {}
    with limits, watch(model, config(tensors, freq=2, **settings), log_dir=tmp_path):
        run_compiled(model, batches, 3)
    found = values(tmp_path)
    for (layer, tensor), parts in truth.items():
        for step in (0, 2):
            assert_six(found, step, layer, tensor, *parts, rtol=1e-4)
