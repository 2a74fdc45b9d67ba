"""The example of training over many processes: as it is, on two nodes, and under SLURM, killed, preempted, resumed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm
from support.nodes import Here, free_port, nodes, started
from support.observed import description

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "distributed"
STEPS = 60
SMALL = f"--steps {STEPS} --save-every 20 --eval-every 30 --batch 8 --chunks 2 --blocks 2 --width 16".split()


def losses(*outputs):
    """Return the losses that were printed, by step, and those of evaluations. A repeated step has the same."""
    found = {}
    for line in "\n".join(outputs).splitlines():
        if match := re.fullmatch(r"step (\d+) ((?:held-out )?loss) (\S+)", line):
            key = int(match[1]), match[2]
            assert found.setdefault(key, match[3]) == match[3], key
    return found


def beginnings(*outputs):
    return [int(number) for number in re.findall(r"^from step (\d+) ", "\n".join(outputs), re.M)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run the example on two ranks of one machine, recorded; return its folder, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    program = warm.command(EXAMPLE / "train.py", *SMALL, "--out", "RUN")
    with started([warm.command("-m", "torch.distributed.run", *options, *program)], folder) as job:
        (output,) = job.ends_well()
    return folder, losses(output)


def test_as_it_is(whole):
    """It trains, evaluates, saves and records."""
    folder, found = whole
    steps = [(step, "loss") for step in range(1, STEPS + 1)]
    assert found.keys() == {*steps, (30, "held-out loss"), (60, "held-out loss")}
    assert float(found[60, "held-out loss"]) < float(found[30, "held-out loss"]) < float(found[1, "loss"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000040", "step-00000060"]
    facts = description(folder / "RUN")
    assert facts["pipelines"][0]["balance"] == [2, 2]
    assert facts["world_size"] == 2


def test_started_again(whole):
    """Where all is done, it says what to do; where the recording is taken, the next goes beside it."""
    folder, _ = whole
    before = (folder / "RUN/run.json").read_bytes()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    said = []
    for more in (0, 1):
        surroundings = {**os.environ, **alone, "MASTER_PORT": str(free_port())}
        options = [*SMALL, "--steps", str(STEPS + more), "--out", "RUN"]
        ended = warm.run(EXAMPLE / "train.py", *options, cwd=folder, env=surroundings)
        assert ended.returncode == 0, ended.stderr
        said.append((ended.stderr if more else ended.stdout).strip().splitlines())
    assert said[0][-1].startswith("nothing to do: checkpoints has step 60;")
    assert said[0][-1].endswith("another --checkpoints to start over")
    assert f"{folder}/RUN already holds a recording; this one goes into {folder}/RUN-2" in said[1]
    assert description(folder / "RUN-2")["outcome"] == "ok"
    assert (folder / "RUN/run.json").read_bytes() == before


def test_killed_on_two_nodes(whole, tmp_path):
    """A rank on one of two nodes is killed: both go on from the last checkpoint, with the losses of a run on one node.

    The schedule is another one, too.
    """
    program = [
        EXAMPLE / "train.py",
        *SMALL,
        "--schedule",
        "interleaved-zero-bubble",
        "--balance",
        "2,2",
        "--out",
        "RUN",
    ]
    with nodes([Here(), Here()], program, tmp_path, options=["--max-restarts", "1"]) as job:
        job.wait_for("step 25 ")
        os.kill(json.loads((tmp_path / "RUN/ranks/rank-00001.json").read_text())["pid"], signal.SIGKILL)
        outputs = job.ends_well()
    first, second = beginnings(*outputs)
    assert first == 0
    assert second in (20, 40)
    found, expected = losses(*outputs), whole[1]
    assert found.keys() == expected.keys()
    for key, loss in expected.items():  # the order of sums may differ
        assert float(found[key]) == pytest.approx(float(loss), rel=1e-3), key


SRUN = f"""#!{sys.executable}
# Starts a task on each node, all of them here; passes SIGTERM on; ends what does not follow the first in time.
import argparse, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--wait", type=int, required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
options = parser.parse_args()
def start(node):
    names = dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID"), str(node)) | dict(SLURM_LOCALID="0", SLURM_STEP_ID="0")
    return subprocess.Popen(options.command, env={{**os.environ, **names}})
tasks = [start(node) for node in range(int(os.environ["SLURM_NNODES"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
until = None
while any(task.poll() is None for task in tasks):
    if until is None and any(task.poll() is not None for task in tasks):
        until = time.monotonic() + options.wait
    if until is not None and time.monotonic() > until:
        for task in tasks:
            task.kill()
    time.sleep(0.05)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""

SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show hostnames") [ "$3" = "node[1-2]" ] && printf 'localhost\\nlocalhost\\n' ;;
    "requeue 4711") echo requeued >>queue ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Put what the script calls on the PATH; return how to run it as SLURM would, for the nth time."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = f'#!/bin/sh\nexec {shlex.join(warm.command())} "$@"\n'
    torchrun = f'#!/bin/sh\nexec {programs}/python -m torch.distributed.run "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun), ("python", python)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHON_EXEC": programs / "python",  # what torchrun starts ranks with
        "PROGRAM": EXAMPLE / "train.py",
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": 2,
    }
    command = ["bash", EXAMPLE / "slurm.sh", *SMALL]
    return lambda restarts: started(
        [command], tmp_path, **job, SLURM_RESTART_COUNT=restarts, RENDEZVOUS_PORT=free_port()
    )


def test_preempted_under_slurm(whole, slurm, tmp_path):
    """Told to leave, the job saves and goes back to the queue; started again, it ends with the losses of one run."""
    with slurm(restarts=0) as job:
        job.wait_for("step 5 ")
        job.processes[0].terminate()
        assert job.processes[0].wait(timeout=120) != 0, job.told("the job was done before it was asked to leave")
        (first,) = job.outputs()
        assert "received SIGTERM: saved" in job.errors()[0], job.told("nothing was saved")
    assert (tmp_path / "queue").read_text() == "requeued\n"
    with slurm(restarts=1) as job:
        (second,) = job.ends_well()
    assert (tmp_path / "queue").read_text() == "requeued\n"
    begin, resumed = beginnings(first, second)
    assert begin == 0
    assert 5 <= resumed == len([key for key in losses(first) if key[1] == "loss"]) < STEPS
    assert losses(first, second) == whole[1]
    recorded = {run.name: description(run)["world_size"] for run in (tmp_path / "runs").iterdir()}
    assert recorded == {"4711-0": 2, "4711-1": 2}


def test_slurm_reads_the_options():
    """SLURM reads options up to the first command: all come before it, and ask for what the script relies on."""
    lines = (EXAMPLE / "slurm.sh").read_text().splitlines()
    head = lines[: next(k for k, line in enumerate(lines) if line and not line.startswith("#"))]
    options = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--ntasks-per-node=1", "--signal=B:TERM@120", "--requeue"} <= options
    assert not any(line.startswith("#SBATCH") for line in lines[len(head) :])
    assert subprocess.run(["bash", "-n", EXAMPLE / "slurm.sh"]).returncode == 0
