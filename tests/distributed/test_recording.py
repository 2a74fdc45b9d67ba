"""Runs of several ranks, recorded: what each rank writes, and that it fits together."""

import concurrent.futures
import itertools
import json
import threading

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.runs.directory import RunDirectory
from pipesight.runs.reading.run import open_run
from support.observed import description, events
from support.torchrun import RANK, torchrun

TRAIN = (
    RANK
    + """
def train(pipeline, steps, width=4, samples=16):
    parameters = list(pipeline.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01) if parameters else None
    for _ in range(steps):
        x = torch.randn(samples, width)
        if optimizer is not None:
            optimizer.zero_grad()
        pipeline.step(x, x)
        if optimizer is not None:
            optimizer.step()
"""
)


def of_rank(run, name, category="compute"):
    """Return the events of one name, by rank."""
    found = {}
    for event in events(run):
        if event["ph"] == "X" and (event["name"], event["cat"]) == (name, category):
            found.setdefault(event["pid"], []).append(event["args"])
    facts = [json.loads(file.read_text()) for file in (run / "ranks").glob("*.json")] + [description(run)]
    return {fact["rank"]: found.get(fact["pid"], []) for fact in facts}


def tasks(args):
    return sorted((a["step"], a["partition"], a["microbatch"]) for a in args)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record four ranks, the third of which has no parameters and so no optimizer, with no change to the program."""
    folder = tmp_path_factory.mktemp("recorded")
    torchrun(
        4,
        """
        layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 4)]
        pipeline = DistributedPipeline(nn.Sequential(*layers), [1, 1, 2, 1], chunks=4, loss_fn=nn.functional.mse_loss,
                                       checkpoint="except_last")
        pipeline.predict(torch.randn(64, 4))
        train(pipeline, 5)
        """,
        folder,
        begin=TRAIN,
        through=("-m", "pipesight", "run", "--out", str(folder / "RUN"), "--steps", "1:3"),
    )
    return folder / "RUN"


def test_one_directory(recorded):
    """Each rank writes its own trace, log and description into one run directory."""
    ranks = [f"rank-{rank:05}" for rank in range(4)]
    assert sorted(file.name for file in (recorded / "trace").iterdir()) == [f"{name}.pfw.gz" for name in ranks]
    assert sorted(file.name for file in (recorded / "logs").iterdir()) == [f"{name}.log" for name in ranks]
    assert sorted(file.stem for file in (recorded / "ranks").iterdir()) == ranks[1:]
    for rank, name in enumerate(ranks):
        lines = (recorded / "logs" / f"{name}.log").read_text().splitlines()
        assert sum(f"[step 2 partition {rank} micro-batch 3 forward]" in line for line in lines) == 1, lines


def test_tasks_of_each_rank(recorded):
    """Each rank records its own tasks, of the same steps on all of them, also where there is nothing to optimize."""
    for name, chunks in (("forward", 4), ("forward.recompute", 3), ("backward", 4)):
        for rank, args in of_rank(recorded, name).items():
            own = [(step, rank, i) for step in (1, 2, 3) for i in range(chunks)]
            assert tasks(args) == own, (name, rank, tasks(args))
    layers = {rank: {a["layer"] for a in args} for rank, args in of_rank(recorded, "backward.layer").items()}
    assert layers == {0: {"0"}, 1: {"1"}, 2: {"2", "3"}, 3: {"4"}}


def test_messages_of_each_rank(recorded):
    """What a rank sends, receives and waits for says whose it is, how large, and where it comes from or goes to."""
    for name in ("send", "receive"):
        for event in (name, f"{name}.wait"):
            for rank, args in of_rank(recorded, event, "comm").items():
                neighbours = {rank - 1, rank + 1} & {0, 1, 2, 3}
                assert {a["peer"] for a in args} == neighbours
                for peer in neighbours:
                    own = [a for a in args if a["peer"] == peer]
                    assert tasks(own) == [(step, rank, i) for step in (1, 2, 3) for i in range(4)], (event, rank)
                    assert {a["size"] for a in own} == {4 * 4 * 4}
    for rank, args in of_rank(recorded, "transfer", "device").items():
        assert {(a["from"], a["to"]) for a in args} == {
            (f"rank {peer}", f"rank {rank}") for peer in (rank - 1, rank + 1) if 0 <= peer < 4
        }
    for args in of_rank(recorded, "all_gather", "comm").values():
        assert {a["step"] for a in args} >= {1, 2, 3}  # the ranks agree on each step before it


def test_arrows_between_ranks(recorded):
    """The way of a micro-batch begins in the trace of one rank, and ends in that of its neighbour."""
    ends = {end: {} for end in "sf"}
    for event in events(recorded):
        if event["ph"] in ends:
            ends[event["ph"]][event["id"]] = event["pid"]
    assert len(ends["s"]) == 3 * 4 * 3 * 2  # steps, micro-batches, cuts, ways
    assert ends["s"].keys() == ends["f"].keys()
    assert all(ends["s"][arrow] != ends["f"][arrow] for arrow in ends["s"])


def test_description(recorded):
    """The description says how the pipeline is cut, which rank has what, and all ranks have their own."""
    facts = description(recorded)
    (pipeline,) = facts["pipelines"]
    layers = pipeline.pop("layers")
    assert all(1e-7 < seconds < 1e-3 for seconds in pipeline.pop("operator_seconds"))
    assert pipeline == {
        "schedule": "1f1b",
        "ranks": [[0], [1], [2], [3]],
        "partitions": 4,
        "chunks": 4,
        "balance": [1, 1, 2, 1],
        "devices": ["cpu"] * 4,
        "checkpoint": "except_last",
        "batch_size": 16,
    }
    assert [(e["name"], e["class"], e["partition"], e["parameter_bytes"]) for e in layers] == [
        ("0", "Linear", 0, 80),
        ("1", "Linear", 1, 80),
        ("2", "Tanh", 2, 0),
        ("3", "ReLU", 2, 0),
        ("4", "Linear", 3, 80),
    ]
    assert facts["world_size"] == 4
    assert facts["outcome"] == "ok"
    assert facts["left_out"]["steps"] == 2
    for rank in range(1, 4):
        own = json.loads((recorded / "ranks" / f"rank-{rank:05}.json").read_text())
        assert own["rank"] == rank
        assert own["pid"] != facts["pid"]
        sizes = {e["name"]: e["output_bytes"] for e in own["pipelines"][0]["layers"]}
        mine = [e["name"] for e in layers if e["partition"] == rank]
        assert sizes == {e["name"]: 16 * 4 * 4 if e["name"] in mine else None for e in layers}


def test_samples(recorded):
    """Samples are those of the training steps; a larger prediction before them does not count."""
    with open_run(recorded) as run:
        report = analyse(run)
    assert report.steps.samples.tolist() == [16, 16, 16]
    assert report.overall is not None
    seconds = report.overall.elapsed / 1e6
    assert report.overall.samples_per_second == pytest.approx(16 * report.overall.steps / seconds)


def test_open_span_and_statistics(tmp_path):
    """A span around steps stays open from one to the next, and statistics are found on each rank by themselves."""
    torchrun(
        2,
        """
        import pipesight
        from pipesight.trace import ai
        from support.observed import STATS
        pipeline = DistributedPipeline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), [2, 2], chunks=2,
                                       loss_fn=nn.functional.mse_loss)
        with pipesight.observe(os.path.join(folder, "RUN"), stats=STATS):
            with ai.pipeline.epoch:
                train(pipeline, 2)
        """,
        tmp_path,
        begin=TRAIN,
    )
    run = tmp_path / "RUN"
    found = [event for event in events(run) if event["ph"] == "X"]
    for epoch in (event for event in found if event["name"] == "epoch"):
        inside = [e for e in found if e["pid"] == epoch["pid"] and e["name"] == "step" and e["cat"] == "compute"]
        assert [e["args"]["p_idx"] for e in inside] == [epoch["id"]] * 2
    for rank in (0, 1):
        lines = (run / "stats" / f"rank-{rank:05}.jsonl").read_text().splitlines()
        values = [json.loads(line) for line in lines]
        own = {(v["iteration"], v["layer"], v["tensor"]) for v in values}
        assert own == {
            (step, str(2 * rank + k), tensor) for step in (0, 1) for k in (0, 1) for tensor in ("activation", "wgrad")
        }, own


def test_a_rank_fails(tmp_path):
    """All ranks say how it ended, and wait for nobody; clocks may have drifted since they were compared."""
    torchrun(
        2,
        """
        import pipesight
        pipeline = DistributedPipeline(tanhs(2, width=4).float(), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
        with pipesight.observe(os.path.join(folder, "RUN")):
            train(pipeline, 3)
            time.sleep(1)
            if rank == 1:
                next(iter(pipeline.module)).register_forward_hook(lambda *_: 1 / 0)
            train(pipeline, 1)
        """,
        tmp_path,
        begin=TRAIN,
        fails=True,
    )
    run = tmp_path / "RUN"
    own = json.loads((run / "ranks" / "rank-00001.json").read_text())
    cause = "ZeroDivisionError: division by zero in partition 1, layer '1', micro-batch 0, forward"
    assert own["outcome"] == cause
    assert description(run)["outcome"] == f"RankFailedError: rank 1 failed: {cause}"
    for clock in (own["clock"], description(run)["clock"], description(run)["clock"]["ranks"]["1"]):
        assert clock["error_ns"] > 100_000  # what they may drift apart in a second
    assert own["clock"]["drift"] == 0
    with open_run(run) as opened:
        report = analyse(opened)
    assert report.overall is not None
    assert report.overall.steps == 3
    assert report.left.incomplete == 1


def test_clocks_that_cannot_be_compared(tmp_path):
    """If rank 0 cannot be reached, that is logged, noted and reported, and training goes on."""
    torchrun(
        2,
        """
        import logging, socket
        import pipesight
        def refuse(*args, **kwargs):
            raise ConnectionRefusedError("no way through")
        if rank == 1:
            socket.create_connection = refuse
        pipeline = DistributedPipeline(tanhs(2, width=4).float(), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
        with pipesight.observe(os.path.join(folder, "RUN")):
            train(pipeline, 3)
            time.sleep(0.5)
        """,
        tmp_path,
        begin=TRAIN,
    )
    run = tmp_path / "RUN"
    log = (run / "logs" / "rank-00001.log").read_text()
    assert "the clock of rank 1 cannot be compared with that of rank 0 (no way through); training goes on" in log
    assert description(run)["clock"]["error_ns"] is None
    own = json.loads((run / "ranks" / "rank-00001.json").read_text())
    assert own["outcome"] == "ok"
    assert own["clock"]["error_ns"] is None
    with open_run(run) as opened:
        remarks = [remark.text for remark in analyse(opened).remarks]
    assert "not all ranks' clocks were compared, so waits between ranks may be wrong" in remarks


def test_claimed_while_others_write(tmp_path, monkeypatch):
    """Rank 0 takes no file of another rank, which may come at any moment, for that of another run."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    folder = tmp_path / "RUN" / "ranks"
    folder.mkdir(parents=True)
    ended = threading.Event()

    def write():
        for number in itertools.count():
            (folder / f".rank-00001.json.{number}").write_text("{}")
            (folder / f".rank-00001.json.{number}").replace(folder / "rank-00001.json")
            if ended.is_set():
                break

    with concurrent.futures.ThreadPoolExecutor() as pool:
        written = pool.submit(write)
        try:
            for _ in range(300):
                RunDirectory(tmp_path / "RUN").claim()
        finally:
            ended.set()
        written.result()
    (folder / "rank-00004.json").write_text("{}")  # there is no such rank
    with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'ranks/rank-00004.json'"):
        RunDirectory(tmp_path / "RUN").claim()
