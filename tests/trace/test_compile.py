"""Spans and ``torch.compile``."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from pipesight.testing import capture_events
from pipesight.trace import ai, counter, instant


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@ai.compute.forward
def decorated(x):
    return x * 2


def compiled(function):
    return torch.compile(function, backend="eager", fullgraph=True)


def blocks(x):
    with ai.data.item:
        y = x * 2
    with ai.data.preprocess(args={"a": 1}):
        return y + 1


def silent_parts(x):
    ai.pipeline.train.start()
    y = decorated(x)
    ai.pipeline.train.stop()
    return y


def derived_parts(x):
    with ai.data.init, ai.data.derive("of its own"):
        return x + 1


def loops(x):
    for n in ai.dataloader.fetch.iter(range(2)):
        x = x + n
    return x


def marks(x):
    instant("moment", n=1)
    counter("curve", n=1)
    return x + 1


FUNCTIONS = [decorated, blocks, silent_parts, derived_parts, loops, marks]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("recording", [False, True])
def test_one_graph_and_no_event(function, recording):
    """Code with spans compiles as one graph; inside, they are silent."""
    x = torch.randn(3)
    expected = function(x)
    if recording:
        with capture_events() as events:
            result = compiled(function)(x)
        assert events == []
    else:
        result = compiled(function)(x)
    assert torch.equal(result, expected)


def test_switching_a_trace_on_later():
    """A function that was compiled without a trace runs on with one, and the other way round."""
    function = compiled(blocks)
    x = torch.randn(3)
    first = function(x)
    with capture_events() as events:
        assert torch.equal(function(x), first)
    assert events == []
    assert torch.equal(function(x), first)


def test_dft_fn():
    """So do events of DFTracer's own interface."""
    from pipesight.trace.dftracer import dft_fn

    event = dft_fn("compute")

    @event.log
    def logged(x):
        with event:
            return x + 1

    x = torch.randn(3)
    assert torch.equal(compiled(logged)(x), x + 1)


def test_around_a_compiled_function():
    """A span around compiled code is recorded as ever."""
    function = compiled(blocks)
    with capture_events() as events:
        with ai.compute.forward:
            function(torch.randn(3))
        decorated(torch.randn(3))
    assert [event["name"] for event in events] == ["forward", "forward"]


def test_decorated_module():
    """A module whose forward is decorated compiles, and trains to the same gradients."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        @ai.compute.forward
        def forward(self, x):
            return self.linear(x)

    model = Model()
    x = torch.randn(2, 3)
    model(x).sum().backward()
    expected = model.linear.weight.grad.clone()
    model.zero_grad()
    compiled(model)(x).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, expected)


PROGRAM = """
import sys
from pipesight.trace import ai
assert "torch" not in sys.modules
import torch
def function(x):
    with ai.data.item:
        return x * 2
print(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
"""


def test_torch_imported_later():
    """The compiler knows about spans also where torch comes after the import of tracing."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[2.0, 2.0]\n", done.stderr
