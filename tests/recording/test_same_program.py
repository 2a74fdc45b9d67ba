"""Programs that know nothing of a recording print the same, and end the same, with and without one."""

import json

import pytest

from support import warm
from support.torchrun import skip_old_torch

LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Samples(Dataset):
    def __len__(self):
        return 7
    def __getitem__(self, index):
        return torch.tensor(index)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(get_worker_info().id if get_worker_info() else 0, 5))

class Broken(Samples):
    def __getitem__(self, index):
        raise KeyError(index)

for name, loader in {
    "plain": DataLoader(Samples(), batch_size=3),
    "single": DataLoader(Samples(), batch_size=None, num_workers=1),
    "kept": DataLoader(Samples(), batch_size=3, num_workers=2, persistent_workers=True),
    "stream": DataLoader(Stream(), batch_size=2, num_workers=2),
    "single stream": DataLoader(Stream(), batch_size=None, num_workers=1),
}.items():
    for epoch in range(2):
        print(name, epoch, [batch.tolist() if torch.is_tensor(batch) else batch for batch in loader])
list(DataLoader(Broken()))
"""

OPTIMIZERS = """
import copy, inspect, torch
from torch import nn, optim

torch.manual_seed(0)
first, x, y = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 4), torch.randn(8, 1)
for name, kind in sorted(vars(optim).items()):
    if not isinstance(kind, type) or not issubclass(kind, optim.Optimizer):
        continue
    for options in ({}, {"foreach": True}, {"fused": True}):
        model = copy.deepcopy(first)
        try:
            optimizer = kind([p for p in model.parameters() if name != "Muon" or p.ndim == 2], **options)
            schedule, calls = optim.lr_scheduler.StepLR(optimizer, 1), []
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            for _ in range(2):
                print(name, options, optimizer.step(closure).item(), calls, schedule.step())
            print(inspect.signature(kind.step))
        except Exception as error:
            print(name, options, type(error), error)
model, scaler = copy.deepcopy(first), torch.amp.GradScaler("cpu")
optimizer = optim.SGD(model.parameters(), 0.1)
for factor in (1.0, float("inf"), 1.0):
    scaler.scale(nn.functional.mse_loss(model(x), y) * factor).backward()
    print(scaler.step(optimizer), scaler.update(), scaler.get_scale(), optimizer.zero_grad())
"""

PIPELINES = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x, y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"):
    torch.manual_seed(0)
    kind = schedules.get_schedule_class(name)
    several, back = issubclass(kind, schedules.PipelineScheduleMulti), name == "ZBVZeroBubble"
    places = [rank, 2 * size - 1 - rank if back else rank + size] if several else [rank]
    total = size * len(places)
    layers = [nn.Linear(4, 4) for _ in range(total)]
    stages = [PipelineStage(layers[place], place, total, torch.device("cpu")) for place in places]
    schedule = kind(stages if several else stages[0], 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for place in places for p in layers[place].parameters()], 0.1)
    for _ in range(2):
        losses = []
        optimizer.zero_grad()
        schedule.step(*[x][rank:], **({"target": y, "losses": losses} if total - 1 in places else {}))
        optimizer.step()
    print(rank, name, [loss.item() for loss in losses], [layers[place].weight.grad.sum().item() for place in places])
dist.destroy_process_group()
"""

THROUGH = {
    "run": ("-m", "pipesight", "run", "--out", "RUN", "program.py"),
    "observe": ("-c", "import pipesight, runpy\nwith pipesight.observe('RUN'): runpy.run_path('program.py')"),
}


@pytest.mark.parametrize("program", [LOADERS, OPTIMIZERS], ids=["loaders", "optimizers"])
def test_one_process(tmp_path, program):
    """Loaders of all kinds, and every optimizer of torch."""
    (tmp_path / "program.py").write_text(program)
    plain = warm.run("program.py", cwd=tmp_path)
    assert plain.stdout.count("\n") >= 10, plain.stderr
    for name, way in THROUGH.items():
        recorded = warm.run(*way, cwd=tmp_path)
        assert (recorded.stdout, recorded.returncode) == (plain.stdout, plain.returncode), (name, recorded.stderr)
    assert (tmp_path / "RUN-2/run.json").exists()


def test_pipelines_of_torch(tmp_path):
    """torch.distributed.pipelining by itself, with its schedules; statistics are merged while ranks wait for others."""
    skip_old_torch()  # in torch 2.6 the plain program hangs with gloo, too
    (tmp_path / "program.py").write_text(PIPELINES)
    chosen = {"enabled": True, "tensors": ["activation"], "stats": ["mean"]}
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": chosen}}
    (tmp_path / "stats.yaml").write_text(json.dumps(config))
    run = ("-m", "pipesight", "run", "--out", "RUN", "--stats", "stats.yaml", "program.py")
    plain, recorded = (warm.torchrun(2, *how, cwd=tmp_path, timeout=300) for how in (("program.py",), run))
    assert [rank.returncode for rank in plain + recorded] == [0] * 4, recorded
    assert [rank.stdout for rank in recorded] == [rank.stdout for rank in plain]
    assert all(rank.stdout.count("\n") == 6 for rank in plain)
