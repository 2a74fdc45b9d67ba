"""PyTorch's own events, without code changes."""

import contextlib
import inspect
import subprocess
import sys
import textwrap
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipesight import GPipe, trace
from pipesight.testing import capture_events
from pipesight.trace import ai
from support import warm
from support.trace_files import lines_of


@pytest.fixture
def instrumented():
    """PyTorch, instrumented one module deep."""
    with trace.instrument() as instrumentation:
        yield instrumentation


def names(events):
    return [f"{event['cat']}.{event['name']}" for event in events if event["ph"] == "X"]


def loader(items=4, **options):
    return DataLoader(TensorDataset(torch.arange(items)), batch_size=2, **options)


def test_dataloader(instrumented):
    """Each batch is a fetch, and the loop over all of them an epoch; its end waits for no batch."""
    with capture_events() as events:
        for _ in loader():
            with ai.compute.step:
                pass
    assert names(events) == ["dataloader.fetch", "compute.step"] * 2 + ["pipeline.epoch"]
    fetches = [event for event in events if event["name"] == "fetch"]
    assert [event["args"]["batch"] for event in fetches] == [0, 1]
    epoch = events[-1]
    assert epoch["args"]["batches"] == 2
    assert epoch["ts"] <= fetches[0]["ts"]
    assert fetches[-1]["ts"] + fetches[-1]["dur"] <= epoch["ts"] + epoch["dur"]


def test_dataloader_left_early(instrumented):
    """A loop that is left has no epoch, and the next loop is not disturbed."""
    with capture_events() as events:
        for _ in loader():
            break
        for _ in loader(2):
            pass
    assert names(events) == ["dataloader.fetch", "dataloader.fetch", "pipeline.epoch"]


def test_dataset_that_raises(instrumented):
    """A fetch that fails is recorded, and its error comes through."""

    class Broken(IterableDataset):
        def __iter__(self):
            yield torch.zeros(())
            raise KeyError("gone")

    with capture_events() as events, pytest.raises(KeyError):
        for _ in DataLoader(Broken(), batch_size=1):
            pass
    assert names(events) == ["dataloader.fetch"] * 2


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
from pipesight import trace

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)

def work():
    trace.instrument()
    with trace.start(sys.argv[1] + "/trace"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[2])
        assert sum(batch.sum().item() for batch in loader) == 28

if __name__ == "__main__":
    work()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])  # a forkserver hands on what spawned ones get
def test_dataloader_workers(tmp_path, method):
    """Workers, however they are started, record their own fetches in files of their own."""
    program = tmp_path / "program.py"
    program.write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, tmp_path, method], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("trace*.pfw.gz"))
    assert len(files) == 3
    events = {file.name: lines_of(file) for file in files}
    main = events.pop("trace.pfw.gz")
    assert sum(event["name"] == "fetch" for event in main) == 4
    fetches = [event for worker in events.values() for event in worker if event["name"] == "fetch"]
    assert sorted(event["args"]["worker"] for event in fetches) == [0, 0, 1, 1]
    assert len({event["pid"] for event in fetches}) == 2


def test_training_step():
    """Forward and backward of a model, of its children if asked, and the optimizer's step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace.instrument(depth=2), capture_events() as events:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    forwards = [(e["args"]["depth"], e["args"].get("layer")) for e in events if e["name"] == "forward"]
    assert forwards == [(1, "0"), (1, "1"), (0, None)]
    backwards = [(e["args"].get("depth"), e["args"].get("layer")) for e in events if e["name"] == "backward"]
    assert backwards == [(1, "1"), (1, "0"), (0, None)]
    by_id = {e["id"]: e for e in events}
    for event in events:
        parent = by_id.get(event["args"].get("p_idx"))
        if parent is not None:
            assert parent["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"]
    (step,) = [e for e in events if e["name"] == "step"]
    assert step["args"]["optimizer"] == "SGD"


def test_closure(instrumented):
    """What an optimizer's step calls is told apart from the optimizer, however often and however it is passed."""
    model = nn.Linear(3, 1)
    adam, lbfgs = torch.optim.Adam(model.parameters()), torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    with capture_events() as events:
        assert adam.step(closure).item() > 0
        lbfgs.step(closure=closure)
    events = [e for e in events if e["cat"] == "compute"]
    parents = {e["id"]: e["name"] for e in events}
    assert [parents[e["args"]["p_idx"]] for e in events if e["name"] == "step.closure"] == ["step"] * 3
    assert [parents[e["args"]["p_idx"]] for e in events if e["name"] == "forward"] == ["step.closure"] * 3


def test_backward_time_counts_once(instrumented):
    """The backwards of the modules that a program calls follow one another, and take no longer than the call."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.02)
            return gradient

    class Layer(nn.Linear):
        def forward(self, x):
            return Slow.apply(super().forward(x))

    model, criterion = Layer(3, 3), nn.MSELoss()
    with capture_events() as events:
        loss = criterion(model(torch.randn(2, 3)), torch.randn(2, 3))
        begin = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - begin
    backwards = [e for e in events if e["name"] == "backward"]
    assert [e["args"]["module"] for e in backwards] == ["MSELoss", "Layer"]
    assert backwards[0]["ts"] + backwards[0]["dur"] <= backwards[1]["ts"]
    assert backwards[1]["dur"] >= 20_000
    assert sum(e["dur"] for e in backwards) <= took * 1e6
    assert {e["args"]["p_idx"] for e in backwards} == {6}


@pytest.mark.parametrize("keyword", [False, True])
def test_backward_between_modules_is_that_of_the_model(keyword):
    """What a module computes between two modules inside it counts as its own in the backward, too."""

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with ai.derive("between"):
                return gradient

    class Out(nn.Linear):
        def forward(self, x=None):
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.out = nn.Linear(3, 3), nn.Linear(3, 3), Out(3, 3)

        def forward(self, x):
            x = Between.apply(self.query(x) * self.key(x))
            return self.out(x=x) if keyword else self.out(x)

    model = Model()
    with trace.instrument(depth=2), capture_events() as events:
        output = model(torch.randn(2, 3, requires_grad=True))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    backwards = [e for e in events if e["name"] == "backward"]
    assert [e["args"].get("layer") for e in backwards] == ["out", "key", "query", None] * 2
    models = [e["id"] for e in backwards if "layer" not in e["args"]]
    assert [e["args"]["p_idx"] for e in events if e["name"].endswith("between")] == models


def test_backward_without_modules(instrumented):
    """A backward that reaches no module, or no outermost one, is one span of its own."""

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            return types.SimpleNamespace(loss=self.inner(x).sum())

    with capture_events() as events:
        torch.ones(3, requires_grad=True).sum().backward()
    assert [e["args"].get("module") for e in events if e["name"] == "backward"] == [None]
    with trace.instrument(depth=2), capture_events() as events:
        opaque, plain = Opaque(), nn.Linear(3, 3)
        opaque(plain(torch.ones(1, 3))).loss.backward()
    found = [(e["args"].get("module"), e["args"].get("depth")) for e in events if e["name"] == "backward"]
    assert found == [("Linear", 1), ("Linear", 0), (None, None)]


@pytest.mark.parametrize(("depth", "count"), [(0, 0), (1, 1), (2, 3), (9, 5)])
def test_depth(depth, count):
    """Modules nested less deep than asked are recorded."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    with trace.instrument(depth=depth), capture_events() as events, torch.no_grad():
        model(torch.randn(2, 3))
    assert len(names(events)) == count


def test_same_numbers(instrumented):
    """Instrumented or not, the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.randn(5, 3)
    with capture_events():
        model(x).sum().backward()
    recorded = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    instrumented.remove()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), recorded, strict=True))


def test_module_that_raises(instrumented):
    """A forward that fails is recorded, and the next one is where it belongs."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    with capture_events() as events:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3))
        nn.Linear(3, 3)(torch.randn(2, 3))
    assert [e["args"]["module"] for e in events] == ["Sequential", "Linear"]
    assert {e["args"]["p_idx"] for e in events} == {6}


def test_pipeline(instrumented):
    """A pipeline is one module to the program; its layers are recorded by the pipeline alone."""
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2, chunks=2)
    with capture_events() as events:
        model(torch.randn(4, 3)).sum().backward()
    modules = [e["args"].get("module") for e in events if e["name"] == "forward" and "module" in e["args"]]
    assert modules == ["GPipe"]
    assert sum(e["name"] == "forward.layer" for e in events) == 4


def test_transfers(instrumented):
    """Copies to another device are recorded with their size; casts and copies to the same device are not."""
    tensor, module = torch.ones(4), nn.Linear(2, 2)
    with capture_events() as events:
        tensor.to("meta")
        tensor.to(torch.float64)
        tensor.cpu()
        module.to("meta")
        module.to(torch.float16)
    assert names(events) == ["device.transfer"] * 2
    assert [e["args"]["size"] for e in events] == [16, 24]
    assert {(e["args"]["from"], e["args"]["to"]) for e in events} == {("cpu", "meta")}


def test_checkpoints(instrumented, tmp_path):
    """Saving and loading, with file and size."""
    path = tmp_path / "model.pt"
    with capture_events() as events:
        torch.save({"a": torch.ones(3)}, path)
        torch.load(path)
    assert names(events) == ["checkpoint.capture", "checkpoint.restart"]
    assert {e["args"]["path"] for e in events} == {str(path)}
    assert {e["args"]["size"] for e in events} == {path.stat().st_size}


def test_safetensors(instrumented, tmp_path):
    """Files of safetensors are checkpoints too."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    path = tmp_path / "model.safetensors"
    with capture_events() as events:
        safetensors.save_file({"weight": torch.ones(2)}, path)
        assert safetensors.load_file(path)["weight"].tolist() == [1, 1]
    assert names(events) == ["checkpoint.capture", "checkpoint.restart"]
    assert {(e["args"]["path"], e["args"]["size"]) for e in events} == {(str(path), path.stat().st_size)}


@pytest.mark.filterwarnings("ignore")  # it says that there is one process
def test_distributed_checkpoints(instrumented, tmp_path):
    """So do checkpoints in shards, each once."""
    from torch.distributed import checkpoint

    state = {"a": torch.ones(3)}
    with capture_events() as events:
        checkpoint.save(state, checkpoint_id=str(tmp_path / "shards"))
        checkpoint.load(state, checkpoint_id=str(tmp_path / "shards"))
    outer = [e for e in events if e["args"]["level"] == 2 and e["cat"] == "checkpoint"]
    assert names(outer) == ["checkpoint.capture", "checkpoint.restart"]
    assert {e["args"]["path"] for e in outer} == {str(tmp_path / "shards")}


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives(instrumented, group):
    """Each under its convention, with bytes, group, whether asynchronous, and the wait."""
    ones = torch.ones(4)
    with capture_events() as events:
        dist.all_reduce(ones)
        dist.all_reduce(ones, async_op=True).wait()
        dist.broadcast(ones, src=0)
        dist.all_gather([torch.empty(4)], ones)
        dist.reduce(ones, dst=0)
        dist.barrier()
        dist.broadcast_object_list([1], src=0)
    assert names(events) == [
        "comm.all_reduce",
        "comm.all_reduce",
        "comm.all_reduce.wait",
        "comm.bcast",
        "comm.all_gather",
        "comm.reduce",
        "comm.barrier",
        "comm.bcast",
    ]
    assert [e["args"].get("async") for e in events[:3]] == [False, True, None]
    assert events[0]["args"]["size"] == 16
    assert {e["args"].get("group", "world") for e in events} == {"world"}


def test_all_reduces_of_ddp(group):
    """C++ makes one for each bucket; the backward waits for all of them after its last module, and nothing changes."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    x = torch.randn(8, 512)
    plain(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    replica = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1)
    for accumulates in (False, True, False):
        how = replica.no_sync() if accumulates else contextlib.nullcontext()
        with trace.instrument(depth=9), capture_events() as events, how:
            replica(x).sum().backward()
        calls = [e for e in events if e["name"] == "all_reduce"]
        waits = [e for e in events if e["name"] == "all_reduce.wait"]
        if accumulates:
            assert not calls
            continue
        assert len(calls) == len(waits) > 0
        assert sum(e["args"]["size"] for e in calls) == sum(grad.nbytes for grad in wanted)
        assert all(e["args"]["async"] and e["args"]["group"] == "world" for e in calls)
        (whole,) = (e for e in events if e["name"] == "backward" and e["args"]["depth"] == 0)
        assert all(e["args"]["p_idx"] == whole["id"] for e in waits)
        inner = [e["ts"] + e["dur"] for e in events if e["name"] == "backward" and e["args"]["depth"] > 0]
        assert all(max(inner) <= e["ts"] for e in waits if e["dur"])
    assert len(calls) > 1  # DDP makes its buckets in the first backward
    assert all(torch.equal(p.grad, 3 * grad) for p, grad in zip(plain.parameters(), wanted, strict=True))


def test_every_collective_is_recorded(group):
    """Every function of torch.distributed that may run in the background is watched, by all the names it has had."""
    public = {name: getattr(dist, name, None) for name in dist.distributed_c10d.__all__}
    functions = {name: f for name, f in public.items() if type(f) is types.FunctionType}
    background = {name for name, f in functions.items() if "async_op" in inspect.signature(f).parameters}
    before = {name: functions[name].__code__ for name in background}
    gather = functions.get("all_gather_single", dist.all_gather_into_tensor)  # as FSDP2 calls it
    with trace.instrument(), capture_events() as events:
        missing = {name for name in background if functions[name].__code__ is before[name]}
        gather(torch.empty(4), torch.ones(4))
    assert missing <= {"all_gather_coalesced"}  # which torch warns of
    assert [(e["name"], e["args"]["size"]) for e in events if e["cat"] == "comm"] == [("all_gather", 16)]


PAIR = """
import sys, torch, torch.distributed as dist
from pipesight import trace
trace.instrument()
with trace.start(sys.argv[1] + "/trace"):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
        dist.isend(torch.ones(2), dst=1).wait()
    else:
        dist.recv(torch.empty(4), src=0)
        dist.irecv(torch.empty(2), src=0).wait()
    dist.destroy_process_group()
"""


def test_point_to_point(tmp_path):
    """Sends and receives of two ranks, started as by torchrun, in a file for each."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PAIR))
    for done in warm.torchrun(2, program, tmp_path, timeout=200):
        assert done.returncode == 0, done.stderr
    for rank, name in enumerate(("send", "receive")):
        events = [e for e in lines_of(tmp_path / f"trace-rank-{rank:05}.pfw.gz") if e["cat"] == "comm"]
        assert [e["name"] for e in events if e["name"].startswith(name)] == [name, name, f"{name}.wait"]
        assert [e["args"].get("size") for e in events if e["name"] == name] == [16, 8]


def test_idempotent_and_removable():
    """Twice is once, and everything is put back."""
    before = (
        torch.Tensor.to,
        torch.save,
        nn.Module.to,
        torch.autograd.backward,
        dist.all_reduce,
        "to" in vars(torch.Tensor),
    )
    first = trace.instrument()
    assert trace.instrument() is first
    deeper = trace.instrument(depth=3)
    assert deeper is not first
    deeper.remove()
    first.remove()
    assert before == (
        torch.Tensor.to,
        torch.save,
        nn.Module.to,
        torch.autograd.backward,
        dist.all_reduce,
        "to" in vars(torch.Tensor),
    )
    with capture_events() as events:
        nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()
        for _ in loader():
            pass
    assert events == []


def forwards():
    """Return how many events a forward of two nested modules gives now."""
    with capture_events() as events:
        nn.Sequential(nn.Linear(2, 2))(torch.randn(1, 2))
    return len(events)


def test_blocks_in_blocks():
    """The end of an inner block leaves the outer one as it was, of whatever depth; the last one ends it."""
    original = torch.save
    with trace.instrument():
        with trace.instrument():
            assert forwards() == 1
        assert forwards() == 1
        with trace.instrument(depth=2):
            with trace.instrument(depth=0):
                assert forwards() == 0
            assert forwards() == 2
        assert forwards() == 1
    assert forwards() == 0
    assert torch.save is original


def test_block_after_a_call():
    """What was instrumented for good outlives a block; what a block was given ends with it; remove ends both."""
    instrumentation = trace.instrument()
    with trace.instrument():
        pass
    with trace.instrument(depth=2):
        assert forwards() == 2
    assert forwards() == 1
    with instrumentation, instrumentation:
        assert forwards() == 1
    assert forwards() == 0
    with trace.instrument() as inner:
        inner.remove()
        assert forwards() == 0
    with trace.instrument(), trace.instrument(depth=2) as inner:
        inner.remove()
        assert forwards() == 0
    assert forwards() == 0


@pytest.mark.parametrize("depth", [-1, 1.5, True, "1"])
def test_wrong_depth(depth):
    """A depth that is none is refused, and nothing is instrumented."""
    with pytest.raises(ValueError, match=r"depth must be an integer of 0 or more \(depth: "):
        trace.instrument(depth=depth)
