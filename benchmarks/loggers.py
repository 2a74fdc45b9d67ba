"""Loggers of statistics, each as a runner. The name of a workload says which, and of what.

sum | pipesight | pipesight+numba | nvdlfw   six statistics of 16M numbers, and one sum   "pipesight bfloat16"
pipesight | nvdlfw                  1,000 calls for small tensors of 100 layers      "nvdlfw selected"
pipesight | nvdlfw                  16M numbers on each of two processes             "pipesight ranks"
train | watched | seldom            steps of the demo's model, activations watched   "watched demo", "watched modules"
sum | six | pipesight               on a GPU, of 10 tensors of 2^n numbers           "six float32:30"
train | watched | seldom            on a GPU, steps of a GPT, all tensors watched    "watched gpt2:plain"
sum | pipesight | together          on a GPU, of many tensors of 2^n numbers         "together many:12"
"""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from benchmarks.job import Job, require_original
from benchmarks.ranks import pin

__all__ = ["CALLS", "MANY", "TENSORS", "Logger"]

SIX = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]
LARGE = 1 << 24
SMALL = (64, 64)
CALLS, LAYERS = 1_000, 100
MANY = 200
TENSORS = 10

Step = Callable[[], object]


class Logger:
    """Runs steps of a workload."""

    def __init__(self, name: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stack = contextlib.ExitStack()
        who, what = name.split(" ")
        kind, on_gpu, _ = what.partition(":")
        self.on_gpu = bool(on_gpu)
        workload = WORKLOADS.get(kind, cuda if on_gpu else large)
        self.step: Step = self.stack.enter_context(workload(who, what, Path(self.folder.name)))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        if self.on_gpu:
            torch.cuda.synchronize()

    def gradient_norms(self) -> list[float]:
        return []

    def close(self) -> None:
        self.stack.close()
        self.folder.cleanup()


def config(**settings: Any) -> dict[str, Any]:
    feature = {"enabled": True, "tensors": ["activation"], "stats": SIX, **settings}
    return {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": "fc.*"}, "LogTensorStats": feature}}


@contextlib.contextmanager
def session(who: str, folder: Path, **settings: Any) -> Iterator[Any]:
    """Initialize ours or the peer's ``debug_api``."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config(**settings)))
    if who != "nvdlfw":
        os.environ["NUMBA_DISABLE_JIT"] = "0" if who == "pipesight+numba" else "1"
        import pipesight.stats as debug_api
    else:
        import nvdlfw_inspect.api as debug_api  # type: ignore[no-redef, unused-ignore]

        require_original(debug_api)
    debug_api.initialize(str(path), feature_dirs=[], log_dir=str(folder))
    yield debug_api
    debug_api.end_debug()


@contextlib.contextmanager
def large(who: str, dtype: str, folder: Path) -> Iterator[Step]:
    torch.manual_seed(0)
    x = torch.randn(LARGE).to(getattr(torch, dtype))
    if who == "sum":
        yield x.sum
        return
    with session(who, folder) as debug_api:
        yield lambda: measure(debug_api, x, skip_reduction=True)


@contextlib.contextmanager
def cuda(who: str, what: str, folder: Path) -> Iterator[Step]:
    from pipesight.stats.moments.cuda_moments import DeviceRows

    dtype, _, exponent = what.partition(":")
    torch.manual_seed(0)
    x = torch.randn(1 << int(exponent), device="cuda", dtype=getattr(torch, dtype))
    y = x.view(1, -1)
    reductions = [torch.amin, torch.amax, torch.mean, torch.std, torch.sum, torch.linalg.vector_norm]
    rows = DeviceRows(torch.device("cuda", 0))

    once: dict[str, Step] = {
        "sum": x.sum,
        "six": lambda: [reduction(y, dim=1) for reduction in reductions],
        "pipesight": lambda: rows.measure([x]),
    }

    def step() -> None:  # as in training: many tensors, then they are read back
        for _ in range(TENSORS):
            once[who]()
        rows.send()

    yield step


@contextlib.contextmanager
def cuda_many(who: str, what: str, folder: Path) -> Iterator[Step]:
    from pipesight.stats.moments.cuda_moments import DeviceRows

    tensors = [torch.randn(1 << int(what.partition(":")[2]), device="cuda") for _ in range(MANY)]
    rows = DeviceRows(torch.device("cuda", 0))

    def one_by_one() -> None:
        for x in tensors:
            rows.measure([x])
        rows.send()

    def together() -> None:
        rows.measure(tensors)
        rows.send()

    steps: dict[str, Step] = {
        "sum": lambda: [x.sum() for x in tensors],
        "pipesight": one_by_one,
        "together": together,
    }
    yield steps[who]


def measure(debug_api: Any, x: torch.Tensor, *, skip_reduction: bool) -> None:
    debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation", iteration=0, skip_reduction=skip_reduction)
    debug_api.step()


@contextlib.contextmanager
def calls(who: str, what: str, folder: Path) -> Iterator[Step]:
    x = torch.randn(SMALL)
    names = [f"{'other' if what == 'unselected' else 'fc'}{i}" for i in range(LAYERS)]
    with session(who, folder, **({"start_step": 1 << 40} if what == "off" else {})) as debug_api:
        log = debug_api.log_tensor_stats
        count = 0

        def step() -> None:
            nonlocal count
            for _ in range(CALLS // LAYERS):
                count += 1
                for name in names:
                    log(name, tensor=x, tensor_name="activation", iteration=count, skip_reduction=True)
            debug_api.step()

        yield step


@contextlib.contextmanager
def ranks(who: str, what: str, folder: Path) -> Iterator[Step]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = mp.get_context("spawn").Process(target=follow, args=(who, folder, port))
    worker.start()
    join(0, port)
    with session(who, folder) as debug_api:
        x = torch.randn(LARGE)

        def step() -> None:
            dist.broadcast(torch.ones(1), 0)
            measure(debug_api, x, skip_reduction=False)

        yield step
        dist.broadcast(torch.zeros(1), 0)
    dist.destroy_process_group()
    worker.join()


def join(rank: int, port: int) -> None:
    pin(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def follow(who: str, folder: Path, port: int) -> None:
    """Be the second rank until the first says 0."""
    torch.set_num_threads(1)
    os.dup2(2, 1)
    join(1, port)
    with session(who, folder) as debug_api:
        x, more = torch.randn(LARGE), torch.ones(1)
        while True:
            dist.broadcast(more, 0)
            if not more.item():
                break
            measure(debug_api, x, skip_reduction=False)
    dist.destroy_process_group()


@contextlib.contextmanager
def training(who: str, what: str, folder: Path) -> Iterator[Step]:
    from pipesight.demo.training import Training, one_thread
    from pipesight.stats import watch

    with one_thread():
        train = Training(partitions=4, chunks=4, checkpoint="except_last", seed=0)
        if who == "train":
            yield train.step
            return
        settings = {"freq": 10} if who == "seldom" else {}
        every = config(**settings)
        every["all"]["layers"] = {"layer_name_regex_pattern": ".*" if what == "modules" else r"^[^.]+$"}
        with watch(train.pipe, every, log_dir=folder):
            yield train.step


@contextlib.contextmanager
def training_gpt(who: str, what: str, folder: Path) -> Iterator[Step]:
    from benchmarks import gpt, gpt2
    from pipesight.stats import watch

    kind, _, how = what.partition(":")
    train: gpt.Training | gpt2.Training
    if kind == "gpt":
        train = gpt.Training(how)
    else:
        engine = "accumulated" if how == "plain" else how
        train = gpt2.Training(Job(engine=engine, workload=kind, partitions=4, chunks=8, device="cuda:0"))
    if who == "train":
        yield train.step
        return
    every = config(tensors=["activation", "gradient"], **({"freq": 10} if who == "seldom" else {}))
    every["all"]["layers"] = {"layer_name_regex_pattern": ".*"}
    with watch(train.model, every, log_dir=folder):
        yield train.step


WORKLOADS: dict[str, Callable[[str, str, Path], contextlib.AbstractContextManager[Step]]] = {
    "selected": calls,
    "unselected": calls,
    "off": calls,
    "ranks": ranks,
    "demo": training,
    "modules": training,
    "many": cuda_many,
    "gpt": training_gpt,
    "gpt2": training_gpt,
}

if __name__ == "__main__":
    logger = Logger(" ".join(sys.argv[1:3]))
    logger.run(int(sys.argv[3]))
    logger.close()
