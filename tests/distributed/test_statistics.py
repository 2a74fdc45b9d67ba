"""Statistics of pipelines over ranks: of the whole batch, stage by stage, and each of them written once."""

import collections
import re

import pytest
import torch
import yaml
from torch import nn

from pipesight.analysis.analyse import analyse
from pipesight.runs.reading.run import open_run
from pipesight.view.payload.run_payload import page_payload
from support.commands import pipesight
from support.logged import SIX, assert_six, config, lines, six, values
from support.torchrun import RANK, batches, tanhs, torchrun

TENSORS = ("input", "activation", "gradient", "weight", "wgrad")
SIZES = [16, 14, 16]  # of batches; the first replica takes eight samples, the other the rest

TRAIN = (
    RANK
    + """
from torch.distributed.device_mesh import init_device_mesh
import pipesight
from support.logged import *
mse = nn.functional.mse_loss
TENSORS = ("input", "activation", "gradient", "weight", "wgrad")


def mesh_of(pp, dp):
    return init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))


def train(pipeline, replica, sizes=(16, 14, 16), poison=None):
    parameters = list(pipeline.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for step, (x, y) in enumerate(batches(sizes)):
        part = slice(0, 8) if replica == 0 else slice(8, None)
        if poison == step:
            y[-1, 0] = float("nan")
        pipeline.eval_step(x[part], y[part])
        if optimizer is not None:
            optimizer.zero_grad()
        pipeline.step(x[part], y[part])
        if optimizer is not None:
            optimizer.step()
    pipeline.eval()
    pipeline.eval_step(x[part], y[part])
    pipeline.train()
"""
)


def truth(model, sizes=SIZES, *, each=1, part=slice(None)):
    """Return the tensors of the plain model, in float64 and on whole batches, by step, layer and name.

    So many batches, ``each``, make a step, and of each only a ``part`` counts.
    """
    found = collections.defaultdict(list)
    step = 0

    def forward(name, _, inputs, output):
        found[step, name, "input"] += [tensor.detach().clone() for tensor in inputs]
        found[step, name, "activation"].append(output.detach().clone())
        output.register_hook(lambda gradient, at=step: found[at, name, "gradient"].append(gradient.clone()))

    layers = {name: layer for name, layer in model.named_modules() if name}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *args, name=name: forward(name, *args))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for number, (x, y) in enumerate(batches(sizes)):
        step = number // each
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        if number % each != each - 1:
            continue
        for name, layer in layers.items():
            weight = getattr(layer, "weight", None)
            for parameter in layer.parameters() if weight is None else [weight]:
                found[step, name, "weight"].append(parameter.detach().clone())
                found[step, name, "wgrad"].append(parameter.grad.clone())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return found


def written(run, ranks=4):
    """Return all values of a run, each of which one rank has written, and the ranks that have written any."""
    of_ranks = {rank: values(run, rank) for rank in range(ranks)}
    found = {key: value for own in of_ranks.values() for key, value in own.items()}
    assert len(found) == sum(map(len, of_ranks.values())), "a value is there twice"
    return found, {rank: {layer.split(".")[0] for _, layer, *_ in own} for rank, own in of_ranks.items()}


def assert_true(found, expected):
    """Compare the values of a run with the tensors of the plain model: none is missing, and there are no others."""
    assert {key[:3] for key in found} == expected.keys()
    assert len(found) == len(expected) * len(SIX)
    for key, tensors in expected.items():
        assert_six(found, *key, *tensors, rtol=1e-12)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record a program that says nothing of statistics; of its fourth target, the second replica has a NaN."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "stats.yaml").write_text(yaml.safe_dump(config(TENSORS)))
    torchrun(
        4,
        """
        mesh = mesh_of(2, 2)
        pipeline = DistributedPipeline(
            tanhs(4), [2, 2], chunks=4, loss_fn=mse, mesh=mesh, checkpoint="except_last"
        )
        train(pipeline, mesh.get_local_rank("dp"), [16, 14, 16, 16], poison=3)
        """,
        folder,
        begin=TRAIN,
        through=("-m", "pipesight", "run", "--out", str(folder / "RUN"), "--stats", "stats.yaml"),
    )
    return folder / "RUN"


def test_whole_batch_written_once(recorded):
    """With no user code, values are those of the plain model on the whole batch, and one rank of a stage has them."""
    found, writers = written(recorded)
    assert writers == {0: {"0", "1"}, 1: set(), 2: {"2", "3"}, 3: set()}
    assert_true({key: value for key, value in found.items() if key[0] < 3}, truth(tanhs(4)))
    for rank in range(4):
        log = (recorded / "logs" / f"rank-{rank:05}.log").read_text()
        assert "is not watched" not in log
        assert "logged without the other ranks" not in log


def test_rank_with_a_nan(recorded):
    """A value says on which rank it leaves out NaN, whichever rank wrote it; so do log, report and page."""
    assert {tuple(line["ranks"]) for line in lines(recorded, 2) if line["tensor"] == "gradient" and "nans" in line} == {
        (3,)
    }
    assert {tuple(line["ranks"]) for line in lines(recorded, 0) if line["tensor"] == "gradient" and "nans" in line} == {
        (1,)
    }
    assert not [line for line in lines(recorded, 0) + lines(recorded, 2) if "ranks" in line and line["iteration"] < 3]
    logs = [(recorded / "logs" / f"rank-{rank:05}.log").read_text() for rank in range(4)]
    assert [re.findall(r"WARNING.*(?:bad tensor|NaN or Inf)", log) != [] for log in logs] == [False, False, False, True]
    assert re.search(
        r"first bad tensor: 'gradient' of layer '3(\.2)?' .iteration 3, partition 1, micro-batch 3, backward. has 1 "
        r"NaN and 0 Inf of \d+ numbers; 7 more tensors have NaN or Inf in this iteration; on rank 3 first, of 4 ranks",
        logs[3],
    ), logs[3]
    done = pipesight("report", recorded)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(
        r"First non-finite tensor: gradient of layer 3(\.2)?, in iteration 3, partition 1, micro-batch 3, backward "
        r"\(1 NaN\), on rank 3",
        said,
    ), said
    with open_run(recorded) as run:
        payload = page_payload(run, analyse(run))
    (step,) = [step for step in payload["shown"] if step["number"] == 3]
    lanes = {payload["lanes"][lane]["rank"] for _, lane, _, _, text in step["nonfinite"] if "gradient" in text}
    assert lanes == {1, 3}


def test_schedules(tmp_path):
    """Whatever the order of micro-batches, the partitions of a rank and the way of replicas, values are the same."""
    torchrun(
        4,
        """
        mesh = mesh_of(2, 2)
        for kind, names in {"ddp": schedule_names(), "fsdp": ["1f1b", "interleaved-zero-bubble"]}.items():
            for name in names:
                n = 2 if name in ("gpipe", "1f1b", "zero-bubble") else 4
                pipeline = DistributedPipeline(
                    tanhs(4), [4 // n] * n, chunks=4, schedule=name, loss_fn=mse, mesh=mesh, data_parallel=kind,
                    checkpoint="always" if kind == "ddp" else "never",
                )
                trace = (kind, name) == ("ddp", "interleaved-1f1b")
                with pipesight.observe(f"{folder}/{kind} {name}", stats=config(TENSORS), trace=trace):
                    train(pipeline, mesh.get_local_rank("dp"))
        """,
        tmp_path,
        begin=TRAIN,
    )
    expected = truth(tanhs(4))
    runs = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(runs) >= 4 + 2
    for run in runs:
        found, _ = written(run)
        assert_true(found, expected)
    # Rank 0 has the partitions 0 and 2, and rows are in the order of the model all the same.
    with open_run(tmp_path / "ddp interleaved-1f1b") as run:
        tables = page_payload(run, analyse(run))["statistics"]
    rows = [tables["names"][k].split(".")[0] for k in tables["groups"][0]["layers"]]
    assert rows == sorted(rows)
    assert set(rows) == {"0", "1", "2", "3"}


def linears(*places):
    """Return four layers, of which only those at these places have parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) if k in places else nn.Tanh() for k in range(4)]).double()


def test_stages_that_differ(tmp_path):
    """Stages without replicas, without parameters, without layers that are logged: nobody waits for another stage."""
    torchrun(
        4,
        """
        import pipesight.stats as stats
        def linears(*places):
            torch.manual_seed(0)
            return nn.Sequential(*[nn.Linear(6, 6) if k in places else nn.Tanh() for k in range(4)]).double()
        def observed(name, **settings):
            return pipesight.observe(f"{folder}/{name}", stats=config(TENSORS, **settings), trace=False)

        pipeline = DistributedPipeline(linears(0, 1, 3), [1, 1, 1, 1], chunks=4, loss_fn=mse)
        with observed("alone"):
            train(pipeline, 1, [16, 16, 16])

        mesh = mesh_of(2, 2)
        replica = mesh.get_local_rank("dp")
        def make(*places, **settings):
            return DistributedPipeline(linears(*places), [2, 2], chunks=4, loss_fn=mse, mesh=mesh, **settings)
        with observed("no parameters"):
            train(make(0, 1), replica)
        with observed("last layer", layers="3"):
            train(make(0, 3), replica)

        # A group that the user has set goes first: here that of the rank alone.
        own = [dist.new_group([r]) for r in range(4)][rank]
        with observed("own"):
            stats.set_tensor_reduction_group(own)
            train(make(0, 3), replica)
        del own

        class Asks(nn.Module):
            def forward(self, x):
                context.current_microbatch()
                return x.tanh()
        model = linears(0, 1, 2, 3)
        model[1], model[3] = Asks(), Asks()
        pipeline = DistributedPipeline(model, [2, 2], chunks=4, loss_fn=mse, mesh=mesh, checkpoint="always")
        with observed("not repeatable"):
            train(pipeline, replica)

        # Two mini-batches a step, and the second stage has no optimizer that would say when it ends.
        pipeline = make(0, 1)
        parameters = list(pipeline.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
        with stats.watch(pipeline, config(TENSORS), log_dir=f"{folder}/watched") as watch:
            assert list(watch.layers) == (["0", "1"] if rank < 2 else ["2", "3"])
            for number, (x, y) in enumerate(batches([16, 16, 16, 16])):
                part = slice(0, 8) if replica == 0 else slice(8, None)
                pipeline.step(x[part], y[part])
                if optimizer is not None and number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        assert context.counted_step() is None
        assert "call watch(model, " in str(error_of(stats.watch, config(), pipeline))
        """,
        tmp_path,
        begin=TRAIN,
    )
    found, writers = written(tmp_path / "alone")
    assert writers == {rank: {str(rank)} for rank in range(4)}
    assert_true(found, truth(linears(0, 1, 3), [16] * 3, part=slice(8, None)))
    found, writers = written(tmp_path / "no parameters")
    assert writers == {0: {"0", "1"}, 1: set(), 2: {"2", "3"}, 3: set()}
    assert_true(found, truth(linears(0, 1)))
    found, writers = written(tmp_path / "last layer")
    assert writers == {0: set(), 1: set(), 2: {"3"}, 3: set()}
    assert_true(found, {key: tensors for key, tensors in truth(linears(0, 3)).items() if key[1] == "3"})
    expected = truth(linears(0, 3))
    for rank in range(4):
        part, own = slice(8, None) if rank % 2 else slice(0, 8), values(tmp_path / "own", rank)
        for (step, layer, tensor), tensors in expected.items():
            if tensor == "activation" and (layer in ("0", "1")) == (rank < 2):
                assert_six(own, step, layer, tensor, *[t[part] for t in tensors], rtol=1e-12)
    found, _ = written(tmp_path / "not repeatable")
    model = linears(0, 1, 2, 3)
    model[1], model[3] = nn.Tanh(), nn.Tanh()
    assert_true(found, truth(model))
    # Outside of a run directory, every rank that has a value logs it: only some may have a writer.
    expected = truth(linears(0, 1), [16] * 4, each=2)
    for rank in range(4):
        mine = {key: t for key, t in expected.items() if (key[1] in ("0", "1")) == (rank < 2)}
        assert_true(values(tmp_path / "watched", rank), mine)


# A program that calls the API of nvdlfw_inspect itself, on two replicas of two partitions.
BY_HAND = """
import nvdlfw_inspect.api as debug_api
from torch.utils.tensorboard import SummaryWriter

mesh = mesh_of(2, 2)
pipeline = DistributedPipeline(tanhs(4), [2, 2], chunks=4, loss_fn=mse, mesh=mesh)


def train(**how):
    def log(name, output):
        debug_api.log_tensor_stats(name, tensor=output, tensor_name="activation", **how)

    for name, layer in pipeline.module.named_children():
        layer.register_forward_hook(lambda _, __, output, name=name: log(name, output))
    for x, y in batches([16, 14, 16]):
        part = slice(0, 8) if mesh.get_local_rank("dp") == 0 else slice(8, None)
        pipeline.step(x[part], y[part])
        debug_api.step()
    debug_api.end_debug()
"""


def test_last_stage_has_the_writer(tmp_path):
    """Ranks of the last partition have a writer each, which gets what the replicas have together."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = """
writer = SummaryWriter(f"{folder}/board_{rank}") if pipeline.is_last else None
debug_api.initialize(config(["activation"]), extensions=None, log_dir=folder, tb_writer=writer)
debug_api.set_tensor_reduction_group(pipeline.data_parallel_group)
train()
if writer:
    writer.close()
assert (writer is not None) == (rank >= 2)
"""
    torchrun(4, code, tmp_path, begin=TRAIN + BY_HAND)
    expected = forwards(tanhs(4))
    assert [(tmp_path / f"board_{rank}").exists() for rank in range(4)] == [False, False, True, True]
    for rank in (2, 3):
        events = EventAccumulator(str(tmp_path / f"board_{rank}")).Reload()
        assert len(events.Tags()["scalars"]) == 2 * len(SIX)
        for layer in ("2", "3"):
            for statistic in SIX:
                scalars = {event.step: event.value for event in events.Scalars(f"{layer}_activation_{statistic}")}
                # A writer keeps float32.
                assert scalars == {
                    step: pytest.approx(six(*expected[step, layer])[statistic], rel=1e-6, abs=1e-7) for step in range(3)
                }
    for rank in range(4):  # and the others have it in their files
        own = values(tmp_path, rank)
        assert {layer for _, layer, *_ in own} == ({"0", "1"} if rank < 2 else {"2", "3"})
        for step, layer, *_ in own:
            assert_six(own, step, layer, "activation", *expected[step, layer], rtol=1e-12)


def test_every_rank_has_its_file(tmp_path):
    """With default_logging_enabled and skip_reduction, each rank writes what it has to a file of its own."""
    code = """
debug_api.initialize(config(["activation"]), log_dir=folder, default_logging_enabled=True)
train(skip_reduction=True)
"""
    torchrun(4, code, tmp_path, begin=TRAIN + BY_HAND)
    expected = forwards(tanhs(4))
    parts = [values(tmp_path, rank) for rank in range(4)]
    for (step, layer), tensors in expected.items():
        two = parts[:2] if layer in ("0", "1") else parts[2:]
        for own, part in zip(two, (slice(0, 8), slice(8, None)), strict=True):
            assert_six(own, step, layer, "activation", *[tensor[part] for tensor in tensors], rtol=1e-12)
    for rank in range(4):
        assert len(parts[rank]) == 3 * 2 * len(SIX)
        text = (tmp_path / "nvdlfw_inspect_statistics_logs" / f"nvdlfw_inspect_globalrank-{rank}.log").read_text()
        assert text.count("activation_mean") == 3 * 2


def forwards(model):
    """Return the outputs of the model's layers on whole batches, by step and layer; nothing is optimized."""
    found = {}
    for step, (x, _) in enumerate(batches(SIZES)):
        for name, layer in model.named_children():
            x = layer(x).detach()
            found[step, name] = [x]
    return found
