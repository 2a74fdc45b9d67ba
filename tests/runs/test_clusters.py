"""The report's queries on clusters: real local ones, whose tables are those of DuckDB, value for value."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesight.runs.reading.run import NotARunError, Run, open_run
from support.processes import STRICT_PYTHON
from support.synthetic import Made

# Dask and Spark warn of the versions of each other that they find.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of three ranks, with everything in it that queries tell apart."""
    folder = tmp_path_factory.mktemp("clusters")
    made = Made(folder / "run", balance=[2, 2], chunks=4)
    for rank in range(3):
        for step in range(4):
            made.gpipe(
                step,
                lambda phase, i, j, rank=rank: 100 + 7 * i + j + rank,
                at=step * 5000,
                checkpointed=2,
                rank=rank,
                layers=lambda j: [f"é{j}", "same"],
            )
            made.transfer(step, partition=1, microbatch=step, begin=step, dur=3, rank=rank)
        made.span("dataloader", "fetch", begin=900, dur=50, rank=rank)
        made.span("compute", "step", begin=990, dur=50, rank=rank)
        made.span("", "named by nobody", begin=1, dur=2**40, rank=rank)
    made.task(0, partition=0, microbatch=0, phase="forward", begin=3, dur=4, device="cuda:0", layers={"same": 3})
    made.event("mine", "in another thread", begin=1, dur=0, rank=2, tid=9)
    with open_run(made.write()) as run:
        run.write_dataset(folder / "dataset")
    return folder / "dataset"


def tables(run: Run) -> dict[str, Any]:
    """Return all that a run is asked for."""
    every_second = range(0, 4, 2)
    found = {
        "tasks": run.tasks(),
        "some tasks": run.tasks(every_second),
        "transfers": run.transfers(range(1, 3)),
        "spans": run.spans(),
        "layer times": run.layer_times(),
        "some layer times": run.layer_times(every_second),
        "layer times without some": run.layer_times(without={0: np.array([1, 2]), 2: np.array([4])}),
        "no layer times": run.layer_times(range(1), without={rank: np.array([1]) for rank in range(3)}),
        "layer runs": run.layer_runs(2),
        "no layer runs": run.layer_runs(77),
        "names": run.names(),
    }
    plain: dict[str, Any] = {
        name: {key: (column.dtype.kind, column.tolist()) for key, column in table.columns().items() if len(column)}
        for name, table in found.items()
    }
    return {**plain, "steps": run.steps(), "ranks": run.ranks(), "events": run.events, "description": run.description}


@pytest.fixture(scope="module")
def expected(dataset: Path) -> dict[str, Any]:
    with open_run(dataset.parent / "run") as run:
        found = tables(run)
    assert len(found["tasks"]["rank"][1]) == 3 * 4 * 20 - 4 * 10 + 1
    assert found["steps"] == [0, 1, 2, 3]
    assert found["ranks"] == [0, 1, 2]
    return found


@pytest.fixture(scope="module")
def dask_client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason='needs Dask: pip install "pipesight[dask]"')
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_duckdb_on_a_dataset(dataset, expected):
    """DuckDB gives the same tables of a dataset as of the run that it was made of."""
    with open_run(dataset) as run:
        assert tables(run) == expected


def test_dask(dask_client, dataset, expected):
    """Dask gives the tables of DuckDB, on a cluster of processes."""
    with open_run(dataset, engine=dask_client) as run:
        assert tables(run) == expected
    assert len(dask_client.scheduler_info()["workers"]) == 2  # the cluster is left as it was


@pytest.mark.parametrize("given", ["the client", "dask"])
def test_dask_computes_on_its_workers(given, dask_client, dataset):
    """Queries run in the processes of the cluster, not in this one, by a client that is given or is there."""
    before = dask_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
    with open_run(dataset, engine=dask_client if given == "the client" else "dask") as run:
        assert len(run.layer_times()) > 0
    after = dask_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
    assert after > before


SPARK = """
import sys
from pyspark.sql import SparkSession
sys.path.insert(0, sys.argv[2])
from runs.test_clusters import Path, open_run, tables
session = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m").getOrCreate()
with open_run(Path(sys.argv[1]).parent / "run") as run:
    expected = tables(run)
for engine in (session, "spark"):
    with open_run(sys.argv[1], engine=engine) as run:
        assert tables(run) == expected
session.stop()
print("equal")
"""


@pytest.mark.timeout(600)
def test_spark(dataset):
    """Spark gives the tables of DuckDB, on a cluster of processes, by a session that is given or is there."""
    pyspark = pytest.importorskip("pyspark", reason='needs Spark: pip install "pipesight[spark]"')
    command = [STRICT_PYTHON[0], "-c", SPARK, str(dataset), str(Path(__file__).parents[1])]
    home = os.environ | {"SPARK_HOME": str(Path(pyspark.__file__).parent)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env=home)
    assert ended.stdout == "equal\n", ended.stderr


@pytest.mark.parametrize("engine", ["polars", 7, None])
def test_unknown_engine(engine, dataset):
    """An engine that is not there is told with those that are."""
    with pytest.raises(ValueError, match=r"engine must be 'duckdb', 'dask', 'spark', .* \(engine: .*\)"):
        open_run(dataset, engine=engine)


def test_run_that_is_no_dataset(dataset):
    """Clusters take datasets; the error says how to make one."""
    with pytest.raises(NotARunError, match=r"make one: pipesight convert .*/run --to parquet"):
        open_run(dataset.parent / "run", engine="dask")


@pytest.mark.parametrize(("engine", "module"), [("dask", "dask.dataframe"), ("spark", "pyspark.sql")])
def test_engine_that_is_not_installed(engine, module, dataset, monkeypatch):
    """Without the engine, the error says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "pipesight\[{engine}\]"'):
        open_run(dataset, engine=engine)


def test_damaged_dataset(dataset, tmp_path):
    """Notes of a dataset that are damaged do not keep it from being read; a file of events that is, is told."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    for content in ("{", "7", '[7, {"path": 1}]', "[]"):
        (copy / "notes.json").write_text(content)
        with open_run(copy) as run:
            assert len(run.notes) == (content == "{")
    (copy / "events/rank-00001-0.parquet").write_bytes(b"nothing")
    with pytest.raises(NotARunError, match="cannot be read"):
        open_run(copy)
