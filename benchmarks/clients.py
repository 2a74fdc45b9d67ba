"""Run programs written for torchgpipe, DFTracer and nvdlfw_inspect on the shims, and trainers around a pipeline.

Usage: make clients, or python -m benchmarks.clients [NAME ...]

Each runs in a virtual environment of its own, under build/clients, with wheels of pipesight and the shims, and with the
torch of this environment. Where the real package can be installed too, the same program runs on it, and both must give
the same. The table is the one of docs/compatibility.md.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLIENTS", "main"]

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "clients"
PROJECTS = [ROOT, *(ROOT / "shims" / name for name in ("torchgpipe", "dftracer", "nvdlfw_inspect"))]


@dataclass(frozen=True)
class Client:
    """A program, what it needs beside torch, and how to run it with the Python of an environment, in a folder."""

    needs: tuple[str, ...]
    alone: tuple[str, ...]  # installed without what they require
    run: Callable[[str, Path], str]
    real: tuple[str, ...] = ()  # the package that the shim stands for, installed without what it requires


def main(names: list[str]) -> int:
    """Run the named clients, or all; return 1 if one fails."""
    unknown = [name for name in names if name not in CLIENTS]
    if unknown:
        print(f"no such client: {', '.join(unknown)} (clients: {', '.join(CLIENTS)})", file=sys.stderr)
        return 2
    wheels = _wheels()
    failed = False
    for name in names or CLIENTS:
        client = CLIENTS[name]
        try:
            ours = client.run(_environment(name, client, wheels), _folder(f"{name}/with the shim"))
            theirs = ours
            if client.real:
                python = _environment(f"{name}-real", client, list(client.real))
                theirs = client.run(python, _folder(f"{name}/with the real one"))
        except subprocess.CalledProcessError as error:
            print(f"{name}: failed\n{error.stdout}{error.stderr}")
            failed = True
            continue
        failed |= ours != theirs
        print(f"{name}: {'equal' if client.real and ours == theirs else 'different' if client.real else 'ran'}")
        for line in (ours if ours == theirs else f"shim:\n{ours}\nreal:\n{theirs}").splitlines():
            print(f"    {line}")
    return int(failed)


def _wheels() -> list[str]:
    folder = FOLDER / "wheels"
    for project in PROJECTS:
        _call([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], project)
    return sorted(str(path) for path in folder.glob("*.whl"))


def _environment(name: str, client: Client, packages: list[str]) -> str:
    """Make a virtual environment that sees torch; return its Python. What is there from before is used."""
    folder = FOLDER / "environments" / name
    python = str(folder / "bin" / "python")
    if not folder.exists():
        _call([sys.executable, "-m", "venv", str(folder)], ROOT)
        # A path in a .pth file shows the packages of this environment, but not those that are editable.
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _pip(python, "setuptools<81", "wheel", *client.needs)  # torchgpipe builds with the setuptools of its day
    _pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", *packages, *client.alone)
    return python


def _pip(python: str, *arguments: str) -> None:
    _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], ROOT)


def _folder(name: str) -> Path:
    folder = FOLDER / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _call(command: list[str], folder: Path, **variables: str) -> str:
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("DFTRACER_", "PIPESIGHT_"))}
    ended = subprocess.run(
        command, cwd=folder, env={**surroundings, **variables}, check=True, capture_output=True, text=True
    )
    return ended.stdout


# The programs.

TORCHGPIPE = """
import torch
from torch import nn
from torchgpipe import GPipe
from torchgpipe.balance import blockpartition
from torchgpipe.skip import Namespace, pop, skippable, stash

@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, input):
        yield stash("skip", input)
        return nn.functional.avg_pool2d(input, 2)

@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, input):
        skip = yield pop("skip")
        return nn.functional.interpolate(input, scale_factor=2) + skip

torch.manual_seed(0)
conv = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
outer, inner = Namespace(), Namespace()
layers = [conv(3, 8), Down().isolate(outer), conv(8, 8), Down().isolate(inner), conv(8, 8),
          Up().isolate(inner), conv(8, 8), Up().isolate(outer), nn.Conv2d(8, 1, 1)]
blocks = blockpartition.solve([1] * len(layers), partitions=3)
model = GPipe(nn.Sequential(*layers).double(), [len(block) for block in blocks], devices=["cpu"] * 3, chunks=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.rand(8, 3, 16, 16, dtype=torch.float64)
for step in range(5):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    print(f"step {step}: loss {loss.item():.10f}, norm of gradients {norm.item():.10f}")
"""


def _torchgpipe(python: str, folder: Path) -> str:
    return _call([python, "-c", TORCHGPIPE], folder)


DFTRACER = """
from dftracer.python import ai, dft_fn, dftracer

log = dftracer.initialize_log("trace.pfw", None, -1)
io = dft_fn("io")

@io.log
def read(step):
    return step

@ai.compute.forward
def forward(x):
    return x

@ai.pipeline.train
def train():
    for epoch in ai.pipeline.epoch.iter(range(2)):
        for step in ai.dataloader.fetch.iter(range(3)):
            ai.update(epoch=epoch, step=step)
            with ai.data.io.read:
                read(step)
            forward(step)
            with ai.comm.all_reduce(enable=False):
                pass

train()
log.finalize()
"""


def _dftracer(python: str, folder: Path) -> str:
    for path in folder.glob("*.pfw"):
        path.unlink()
    variables = {"DFTRACER_ENABLE": "1", "DFTRACER_INC_METADATA": "1", "DFTRACER_TRACE_COMPRESSION": "0"}
    _call([python, "-c", DFTRACER], folder, **variables, DFTRACER_DISABLE_IO="1")
    (path,) = folder.glob("*.pfw")
    return _counted(path)


def _nvdlfw_inspect(python: str, folder: Path) -> str:
    """Run a stand-in for Transformer Engine and Megatron-LM, with their calls, twice in a process."""
    client = ROOT / "tests/shims/nvdlfw_client"
    said = _call([python, str(client / "client.py"), str(client / "features"), "first", "second"], folder)
    sessions = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    differ = ("names", "gemms", "messages")  # on purpose: test_nvdlfw_clients.py says how
    seen = [(n, key, value) for n, session in enumerate(sessions) for key, value in session.items()]
    return "".join(f"session {n}, {key}: {value}\n" for n, key, value in seen if key not in differ)


DLIO = {
    "workflow.generate_data": True,
    "workflow.train": True,
    "workflow.checkpoint": False,
    "dataset.num_files_train": 8,
    "dataset.num_samples_per_file": 1,
    "dataset.record_length_bytes": 4096,
    "dataset.record_length_bytes_stdev": 0,
    "dataset.record_length_bytes_resize": 4096,
    "reader.batch_size": 2,
    "reader.read_threads": 1,
    "train.epochs": 2,
    "train.computation_time": 0.01,
    "output.folder": "out",
}


def _dlio(python: str, folder: Path) -> str:
    for path in folder.glob("out/*.pfw*"):
        path.unlink()
    options = [f"++workload.{name}={value}" for name, value in DLIO.items()]
    command = [python, "-m", "dlio_benchmark.main", "workload=unet3d_a100", *options, "hydra.run.dir=out"]
    _call(command, folder, DFTRACER_ENABLE="1", DFTRACER_INC_METADATA="1")
    traces = sorted(folder.glob("out/*.pfw.gz"))  # of the training process, and of each worker of its loaders
    return "".join(f"file {number}\n{_counted(path)}" for number, path in enumerate(traces))


def _counted(path: Path) -> str:
    """Return how many events of each kind a trace has: those of the program."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    events = [json.loads(line) for line in text.splitlines() if line not in "[]"]
    kinds = Counter((event["cat"], event["name"]) for event in events if event["cat"] != "dftracer")
    return "".join(f"{count} {category} {name}\n" for (category, name), count in sorted(kinds.items()))


def _lightning(python: str, folder: Path) -> str:
    """Compare a pipeline with the plain model, both trained by Lightning: a test that needs it to be installed."""
    test = ROOT / "tests/pipeline/test_trainers.py::test_lightning"
    said = _call([python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"{test}"], ROOT)
    if "skipped" in said.lower():
        raise subprocess.CalledProcessError(1, "pytest", said, "")
    return "losses of 3 steps are those of the plain model"


CLIENTS = {
    "torchgpipe": Client((), (), _torchgpipe, real=("torchgpipe==0.0.7",)),
    "dftracer": Client((), (), _dftracer, real=("dftracer==2.2.0", "pydftracer==2.0.6")),
    "nvdlfw_inspect": Client((), (), _nvdlfw_inspect, real=("nvdlfw-inspect==0.2.2",)),
    "dlio": Client(
        ("mpi4py", "mpich", "hydra-core", "pandas", "h5py", "pillow", "psutil", "tensorflow-cpu"),
        ("dlio-benchmark==2.0.0",),
        _dlio,
    ),
    "lightning": Client(("lightning>=2.5",), (), _lightning),
}
"""By name."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
