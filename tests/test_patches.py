"""What is watched of torch stays what it is: to programs that compare, pickle, inspect, compile or patch it."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import isend as imported_before
from torch.utils.data import DataLoader, Dataset

import pipesight
from pipesight import trace
from pipesight._patches import Patches, harmless
from pipesight.testing import capture_events
from support import warm

TO = torch.Tensor.to
STATS = {"enabled": True, "tensors": ["activation"], "stats": ["mean"]}
FUNCTIONS = [
    torch.save,
    torch.load,
    torch.autograd.grad,
    torch.autograd.backward,
    nn.Module.to,
    dist.all_reduce,
    dist.isend,
    dist.init_process_group,
    torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
]


@pytest.fixture
def watched():
    """Everything that `instrument` watches, with a trace to be written."""
    with trace.instrument(), capture_events():
        yield


def facts(function):
    """Return what a program can find out about a function without calling it."""
    return (
        function,
        function.__name__,
        function.__qualname__,
        function.__module__,
        function.__doc__,
        function.__defaults__,
        inspect.signature(function),
        inspect.getsource(function),
        vars(function).keys() - {"__wrapped__"},
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_functions_stay_what_they_are(function):
    """Name, signature, source, and pickles are the same; afterwards so are code and all attributes."""
    code, known, more, attributes = function.__code__, function.__kwdefaults__, facts(function), dict(vars(function))
    with trace.instrument():
        assert facts(function) == more
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
    assert (function.__code__, function.__kwdefaults__, dict(vars(function))) == (code, known, attributes)


def test_names_imported_before_are_the_same():
    """A name that a program imported before is the function that torch compares with, and is recorded."""
    with trace.instrument():
        from torch.distributed import isend as imported_during

        assert imported_before is dist.isend is dist.distributed_c10d.isend is imported_during
    assert imported_during is dist.isend


def test_methods_written_in_c_are_equal(watched):
    """`__torch_function__` finds a method in tables of before and of now, by its name, and sees no question of ours."""
    table, seen = {TO: "to"}, []

    class Shown(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append((func.__name__, table.get(func), func is torch.Tensor.to, func == TO))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Shown)
    assert type(tensor.to("meta")) is Shown
    assert seen == [("to", "to", True, True)]
    assert pickle.loads(pickle.dumps(torch.Tensor.to)) == torch.Tensor.to
    assert torch.overrides.is_tensor_method_or_property(torch.Tensor.to)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tools_of_torch(watched):
    """Scripts that take gradients, symbolic traces, lazy modules and compiled ones work as they do otherwise."""

    class Moves(nn.Module):
        def forward(self, x):
            return torch.ones(1).to(x)

    @torch.jit.script
    def gradient(x: torch.Tensor):
        return torch.autograd.grad([(x * x).sum()], [x])[0]

    assert gradient(torch.ones(2, requires_grad=True)).tolist() == [2, 2]
    nodes = [(node.op, node.target) for node in torch.fx.symbolic_trace(Moves()).graph.nodes]
    assert nodes[2] == ("call_method", "to")
    nn.LazyLinear(2).to("meta")
    compiled = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)  # warnings are errors here
    assert compiled(torch.ones(1, 2)).shape == (1, 2)


def test_works_are_waited_for_afterwards(tmp_path):
    """Waiting works after the end, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = vars(dist.Work)["wait"]
        with trace.instrument(), capture_events():
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert vars(dist.Work)["wait"] is before
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    finally:
        dist.destroy_process_group()


class Samples(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


def test_loader_without_batches(watched, caplog):
    """Workers are asked for single samples by whatever a sampler yields."""
    assert sorted(DataLoader(Samples(), batch_size=None, num_workers=1)) == [0, 1, 2]
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripts_of_watched_models(tmp_path, capsys):
    """A model whose statistics are logged can be scripted; one that has been is left alone, with a sentence."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), torch.ones(3, 2)
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": STATS}}
    with pipesight.observe(tmp_path / "RUN", stats=config):
        expected = model(x)
        hooks = list(model[0]._forward_hooks.items())
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(x), expected)
        assert list(model[0]._forward_hooks.items()) == hooks != []
    with pipesight.observe(tmp_path / "RUN", stats=config):
        assert torch.equal(scripted(x), expected)
    assert "2 layers of this RecursiveScriptModule, such as '0', are not watched" in capsys.readouterr().err


# What is watched, and by whom.


class Thing:
    def method(self, x, *, factor=2):
        """Multiply."""
        return x * factor


def adding(number):
    return lambda original, *args, **kwargs: original(*args, **kwargs) + number


def test_any_order_of_ends():
    """Several may watch, and end in any order; the last to come is the outermost."""
    thing, first, second = Thing(), Patches(), Patches()
    first.wrap(Thing, "method", adding(1))
    second.wrap(Thing, "method", lambda original, *args, **kwargs: 10 * original(*args, **kwargs))
    assert thing.method(3) == 70
    first.undo()
    assert thing.method(3) == 60
    first.wrap(Thing, "method", adding(1))
    assert thing.method(3) == 61
    second.undo()
    first.undo()
    assert thing.method(3) == 6
    assert Thing.method.__kwdefaults__ == {"factor": 2}


@pytest.mark.parametrize("name", ["save", "Tensor.to"])
def test_others_patch_in_between(name, monkeypatch):
    """What somebody else puts around a function stays there, and so does what they put back."""
    owner = torch.Tensor if "." in name else torch
    name = name.rpartition(".")[2]
    ours, before, calls = Patches(), getattr(owner, name), []
    ours.wrap(owner, name, lambda original, *args, **kwargs: [calls.append("ours"), original(*args, **kwargs)][1])
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        calls.append("theirs")
        return inner(*args, **kwargs)

    def use():
        calls.clear()
        torch.save(torch.ones(1).to("meta"), io.BytesIO())
        return calls

    monkeypatch.setattr(owner, name, theirs)
    assert use() == ["theirs", "ours"]
    ours.undo()
    assert getattr(owner, name) is theirs
    assert use() == ["theirs"]
    monkeypatch.undo()
    assert use() == []
    ours.wrap(owner, name, adding(0))
    monkeypatch.setattr(owner, name, before)  # they kept the original and restore it
    ours.undo()
    assert getattr(owner, name) is before


def test_watching_that_fails(caplog):
    """An error of our own is reported once and does not reach the program; the function is called exactly once."""

    calls = []

    def count():
        calls.append(None)
        return len(calls)

    class Owner:
        before = staticmethod(count)

    def fails_before(original):
        raise KeyError("ours")

    def fails_after(original):
        original()
        raise KeyError("ours")

    for around in (fails_before, fails_after):
        patches, start = Patches(), count()
        patches.wrap(Owner, "before", around)
        assert [count(), count()] == [start + 1, start + 2]
        patches.undo()
    assert [record.message for record in caplog.records] == [
        "Owner.before could not be recorded; the program continues"
    ] * 2
    caplog.clear()
    harmless(fails_before)(None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [ValueError("theirs"), StopIteration(), KeyboardInterrupt()])
def test_errors_of_the_program(error, caplog):
    """An error of the function itself is the program's, even if ours fails while it passes."""

    def function():
        raise error

    class Owner:
        name = staticmethod(function)

    def fails_too(original):
        try:
            original()
        finally:
            raise KeyError("ours")

    def plain(original):
        original()

    for around, reported in ((plain, 0), (fails_too, 1)):
        patches = Patches()
        patches.wrap(Owner, "name", around)
        with pytest.raises(type(error)) as caught:
            function()
        patches.undo()
        assert caught.value is error
        assert len(caplog.records) == reported


# Programs.

POINT_TO_POINT = """
import torch, torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend
from pipesight import trace

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def operations(send=isend, receive=irecv):
    sent, received = torch.full((2,), float(rank)), torch.zeros(2)
    return received, [P2POp(send, sent, (rank + 1) % size), P2POp(receive, received, (rank - 1) % size)]

def exchange(received, operations, batch=batch_isend_irecv):
    for work in batch(operations):
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 2, received

early = operations()
with trace.start("trace"), trace.instrument():
    from torch.distributed import irecv as later_irecv, isend as later_isend
    exchange(*early)
    exchange(*operations(), dist.batch_isend_irecv)
    exchange(*operations(dist.isend, dist.distributed_c10d.irecv))
    kept = operations(later_isend, later_irecv)
exchange(*kept)
exchange(*operations(later_isend, later_irecv))
dist.destroy_process_group()
"""


def test_batches_of_point_to_point(tmp_path):
    """Operations made before, during and after, with names imported at any time, work at any time."""
    (tmp_path / "program.py").write_text(POINT_TO_POINT)
    for done in warm.torchrun(2, "program.py", cwd=tmp_path, timeout=120):
        assert done.returncode == 0, done.stderr


HANDLER = """
import os, signal
from pipesight import trace

def handle(number, frame):
    if callable(before):
        before(number, frame)
    print("in peace", flush=True)

with trace.start("trace"):
    before = signal.signal(signal.SIGTERM, handle)
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on")
"""


def test_handlers_that_call_the_one_before(tmp_path):
    """A program that handles SIGTERM, and calls the handler that it found, is not ended by ours."""
    done = warm.run("-c", HANDLER, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "in peace\ngoes on\n"), done.stderr
