"""Attribution: jobs that are slowed in a known way, and jobs that are not, and what their reports say.

The verdict is right if the first cause it names is the one that was injected, with the rank, the stage or the link.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, Options
from benchmarks.straggling_job import CAUSES, REPLICAS, STAGES, Injected
from benchmarks.tables import Cell, Table, publish, show_limit
from pipesight.report import analyse, open_run

__all__ = ["run"]

RIGHT, FALSE = 48 / 50, 1 / 50


def run(options: Options) -> bool:
    """Run and judge the jobs; return whether as many verdicts are right as should be."""
    causes = {"quick": 6, "brief": 24, "full": 50}[options.size]
    numbers = options.part_of([number for k in range(causes) for number in (k, causes + k)])
    with tempfile.TemporaryDirectory(prefix="pipesight-stragglers-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(STAGES * REPLICAS), "-m", "benchmarks.straggling_job", name]
        command += ["--causes", str(causes), *map(str, numbers)]
        subprocess.run(command, cwd=ROOT, check=True)
        found = [judge(folder / f"run-{number}") for number in numbers]
    rows: list[list[Cell]] = []
    for cause in (*CAUSES, None):
        own = [verdict for injected, right, verdict in found if injected.cause == cause and not right]
        there = sum(injected.cause == cause for injected, _, _ in found)
        rows.append([cause or "none", there, there - len(own), own[0] if own else ""])
    publish(Table("What was injected, and what the report says", ["cause", "runs", "right", "a wrong one"], rows))
    slowed = [right for injected, right, _ in found if injected.cause is not None]
    blamed = [not right for injected, right, _ in found if injected.cause is None]
    right, false = (sum(own) / max(len(own), 1) for own in (slowed, blamed))
    show_limit("runs with a cause named right", right, RIGHT, met=right >= RIGHT, least=True)
    show_limit("runs without a cause that have one", false, FALSE, met=false <= FALSE)
    return True


def judge(path: Path) -> tuple[Injected, bool, str]:
    """Return what was injected into a run, whether its report says so, and what it says."""
    injected = Injected(**json.loads(path.with_suffix(".json").read_text()))
    with open_run(path) as opened:
        found = analyse(opened).what_if
    if found is None:
        return injected, False, "nothing"
    if injected.cause is None:  # what takes longer at times, everywhere, blames nobody
        blamed = any(cause.kind not in ("jitter", "messages", "collective") for cause in found.causes)
        return injected, not blamed, found.verdict
    if not found.causes:
        return injected, False, found.verdict
    first = found.causes[0]
    replica = injected.rank % REPLICAS
    expected = {
        "slow rank": first.kind == "rank" and first.ranks == (injected.rank,),
        "paused process": first.kind == "rank" and first.ranks == (injected.rank,),
        "slow loader": first.kind == "rank" and first.ranks == (injected.rank,) and first.operation == "data-loading",
        "slow link": first.kind == "link" and {*first.ranks} == {replica, replica + REPLICAS},
        "long stage": first.kind == "stage" and first.stage == injected.rank % STAGES,
        "uneven sequences": first.kind == "microbatches",
    }
    return injected, expected[injected.cause], found.verdict
