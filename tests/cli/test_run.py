"""`pipesight run`: real programs, in processes of their own."""

import json
import os
import re
import signal
import subprocess
import textwrap
import time

import pytest

from pipesight.cli import main
from support import warm
from support.observed import description, events, log_lines, statistics, tasks
from support.processes import STRICT_PYTHON

RUN = [*STRICT_PYTHON, "-m", "pipesight", "run", "--out", "RUN"]

TRAIN = """
import logging, sys, time
import torch
from torch import nn
from pipesight import GPipe

def main(steps, pause=0.0):
    torch.manual_seed(0)
    model = GPipe(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), [2, 1], devices=["cpu"] * 2, chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        logging.getLogger("train").info("step %d is done", step)
        print(step, flush=True)
        time.sleep(pause)

if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
"""

STATS = r"""
all:
  enabled: true
  layers: {layer_name_regex_pattern: ".*"}
  LogTensorStats: {enabled: true, tensors: [activation], stats: [mean]}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "stats.yaml").write_text(STATS)
    return tmp_path


def write(folder, code, name="program.py"):
    (folder / name).write_text(textwrap.dedent(code))
    return name


def execute(folder, *arguments, command=RUN, **options):
    """Run a command, by default `pipesight run`, from the very start of Python."""
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=200, **options
    )


def record(folder, *arguments):
    """Run `pipesight run` in a process that has imported torch."""
    return warm.run("-m", "pipesight", "run", "--out", "RUN", *map(str, arguments), cwd=folder, timeout=200)


def test_program_without_a_change(folder):
    """A program that knows nothing of it is recorded, in the steps that are asked for."""
    done = execute(folder, "--stats", "stats.yaml", "--steps", "1:2", "train.py", 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "2", "3"]
    assert done.stderr == "pipesight: recorded in RUN; see it with: pipesight report RUN\n"
    run = folder / "RUN"
    assert {task["args"]["step"] for task in tasks(run)} == {1, 2}
    assert {record["iteration"] for record in statistics(run)} == {1, 2}
    assert {record["layer"] for record in statistics(run)} == {"0", "1", "2"}
    assert sum("INFO train [step" in line for line in log_lines(run)) == 4
    found = description(run)
    assert found["outcome"] == "ok"
    assert found["observed"]["stats"] == "stats.yaml"
    assert found["command"][-2:] == ["train.py", "4"]
    assert found["left_out"]["steps"] == 2


SHOW = """
import sys, os
main = sys.modules["__main__"]
print(__name__, main.__dict__ is globals(), __file__, sys.argv, sys.path[0], __package__, __spec__ and __spec__.name)
print(sorted(name for name in globals() if name not in ("main", "sys", "os")))
"""


def test_as_python_would(folder):
    """A script sees what it sees when Python runs it: name, file, arguments, path."""
    write(folder, SHOW)
    arguments = ["program.py", "--out", "x", "-m", "--", "--steps=3"]
    expected = execute(folder, *arguments, command=STRICT_PYTHON)
    assert execute(folder, *arguments).stdout == expected.stdout


def test_module_as_python_would(folder):
    """So does a module, and a package that has a `__main__`."""
    (folder / "package").mkdir()
    (folder / "package/__init__.py").write_text("")
    write(folder, SHOW, "package/__main__.py")
    write(folder, SHOW, "package/inner.py")
    for name in ("package", "package.inner"):
        expected = execute(folder, "-m", name, "--a", command=STRICT_PYTHON)
        done = record(folder, "--overwrite", "-m", name, "--a")
        assert done.stdout == expected.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('words')", 1),
        ("raise SystemExit", 0),
        ("raise ValueError('x')", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(60)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("1 +", 1),
    ],
)
def test_exit_codes(folder, code, status):
    """The exit code, and what is said about it, is what Python would give."""
    write(folder, code)
    expected = execute(folder, "program.py", command=STRICT_PYTHON)
    done = record(folder, "program.py")
    assert done.returncode == expected.returncode == status
    said = re.sub(r"pipesight: recorded in .*\n", "", done.stderr)
    assert said == expected.stderr


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("raise ValueError('x')", "ValueError: x"),
        ("import os; os._exit(5)", "os._exit(5)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(60)", "SIGTERM"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_outcomes(folder, code, outcome):
    """However a program ends, `run.json` says how, and everything before is there."""
    write(folder, f"import train\ntrain.main(3)\n{code}")
    record(folder, "--stats", "stats.yaml", "program.py")
    run = folder / "RUN"
    found = description(run)
    assert found["outcome"] == outcome
    assert found["ended"] is not None
    assert {task["args"]["step"] for task in tasks(run)} == {0, 1, 2}
    assert {record["iteration"] for record in statistics(run)} >= {0, 1}


def test_killed(folder):
    """After `kill -9`, trace, description and log are readable, up to the last second."""
    program = subprocess.Popen([*RUN, "train.py", "100000", "0.02"], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        began = time.monotonic()
        for line in program.stdout:
            last = int(line)
            if time.monotonic() - began > 3 and last > 20:
                break
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    run = folder / "RUN"
    found = description(run)
    assert (found["ended"], found["outcome"]) == (None, None)
    assert found["pipelines"][0]["balance"] == [2, 1]
    steps = {task["args"]["step"] for task in tasks(run)}
    ends = {e["args"]["step"]: e["ts"] + e["dur"] for e in events(run) if e["name"] == "step"}
    assert steps >= set(range(max(steps)))
    assert max(ends) == max(steps) or max(ends) == max(steps) - 1
    logged = [int(match[1]) for line in log_lines(run) if (match := re.search(r"step (\d+) is done", line))]
    assert max(logged) >= last
    assert max(logged) - max(steps) < 1.5 / 0.02  # what was not yet on disk
    assert found["pid"] == program.pid


def test_interrupted_by_the_keyboard(folder):
    """Ctrl-C ends a program as it ends any, and it is recorded; the last line says where."""
    program = subprocess.Popen(
        [*RUN, "train.py", "100000", "0.01"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in program.stdout:
        if int(line) == 5:
            program.send_signal(signal.SIGINT)
            break
    _, stderr = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert stderr.endswith("KeyboardInterrupt\npipesight: recorded in RUN; see it with: pipesight report RUN\n")
    assert "pipesight/cli" not in stderr
    assert description(folder / "RUN")["outcome"] == "KeyboardInterrupt"
    assert max(task["args"]["step"] for task in tasks(folder / "RUN")) >= 5


RANKS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_torchrun(folder):
    """Under torchrun each rank has its files; rank 0 describes the run, and the others themselves."""
    write(folder, RANKS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    recording = ["-m", "pipesight", "run", "--out", "RUN", "--stats", "stats.yaml", "program.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(*launch, *warm.command(*recording), cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert_two_ranks(folder / "RUN")
    done = warm.torchrun(2, *recording, cwd=folder)
    assert all(rank.returncode != 0 and "must be empty" in rank.stderr for rank in done), done


def assert_two_ranks(run):
    found = description(run)
    assert (found["rank"], found["world_size"], found["outcome"]) == (0, 2, "ok")
    other = json.loads((run / "ranks/rank-00001.json").read_text())
    assert (other["rank"], other["world_size"], other["outcome"]) == (1, 2, "ok")
    assert other["pid"] != found["pid"]
    assert sorted(file.name for file in (run / "trace").iterdir()) == ["rank-00000.pfw.gz", "rank-00001.pfw.gz"]
    assert sorted(file.name for file in (run / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]
    reduced = [e for e in events(run) if e["name"] == "all_reduce"]
    assert {(e["pid"], e["args"]["step"]) for e in reduced} == {
        (pid, step) for pid in (found["pid"], other["pid"]) for step in range(3)
    }
    assert [record["iteration"] for record in statistics(run)] == [0, 1, 2]


SPAWNS = """
import multiprocessing, sys

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(square, range(4)))
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_the_program(folder, method):
    """Processes that a program starts find its functions, and do not run it again."""
    write(folder, SPAWNS)
    done = record(folder, "program.py", method)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 4, 9]\n"), done.stderr
    assert description(folder / "RUN")["outcome"] == "ok"


def test_threads_of_the_program(folder):
    """What threads do after the main one has come to its end is recorded, as Python waits for them."""
    code = """
    import threading, time, train

    def later():
        time.sleep(0.3)
        train.main(2)

    threading.Thread(target=later).start()
    """
    write(folder, code)
    done = record(folder, "program.py")
    assert done.returncode == 0, done.stderr
    assert {task["args"]["step"] for task in tasks(folder / "RUN")} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "can't open 'nowhere.py': No such file or directory\n"),
        (["-m", "nowhere"], "no module named nowhere"),
        (["--steps", "b:a", "train.py", "1"], "steps must look like"),
        (["--every", "0", "train.py", "1"], "every must be"),
        (["--logs", "loud", "train.py", "1"], "logs must be a logging level"),
        (["--max-bytes", "much", "train.py", "1"], "--max-bytes must be a size"),
        (["--stats", "train.py", "train.py", "1"], "train.py"),
        (
            ["--stats", "nowhere.yaml", "train.py", "1"],
            "nowhere.yaml: no such configuration; correct the path\n",
        ),
        (["--stats", "empty.yaml", "train.py", "1"], "is empty; add a section\n"),
    ],
)
def test_refusals(folder, arguments, message):
    """What cannot be is refused in one go, before the program runs, and leaves nothing behind."""
    (folder / "empty.yaml").touch()
    done = record(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("pipesight run: error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (folder / "RUN").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ot", "RUN", "train.py"], "pipesight run: error: unrecognized arguments: --ot; did you mean --out?\n"),
        (["train.py"], "pipesight run: error: the following arguments are required: --out\n"),
        *(
            (
                ["train.py", *after],
                "pipesight run: error: the following arguments are required: --out; options go before PROGRAM, and "
                "what follows train.py is its own\n",
            )
            for after in (["--out", "RUN"], ["5", "--out=RUN"])
        ),
    ],
)
def test_options_that_are_wrong(folder, monkeypatch, capsys, arguments, message):
    """An option that is not known is named, whether or not --out is there."""
    monkeypatch.chdir(folder)
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err == message


def test_directory_that_is_not_empty(folder):
    """A second run does not touch the first, unless told to; reports of the first mention it."""
    assert record(folder, "train.py", 1).returncode == 0
    before = description(folder / "RUN")
    done = record(folder, "train.py", 2)
    assert done.returncode == 0
    there, where = done.stderr.splitlines()
    assert there == f"{folder}/RUN already holds a recording; this one goes into {folder}/RUN-2"
    assert where == f"pipesight: recorded in {folder}/RUN-2; see it with: pipesight report {folder}/RUN-2"
    assert description(folder / "RUN") == before
    assert {task["args"]["step"] for task in tasks(folder / "RUN-2")} == {0, 1}
    reports = [warm.run("-m", "pipesight", "report", name, cwd=folder) for name in ("RUN", "RUN-2")]
    assert [done.stderr for done in reports] == ["pipesight: RUN-2 was recorded after RUN\n", ""]
    assert record(folder, "--overwrite", "train.py", 3).returncode == 0
    assert {task["args"]["step"] for task in tasks(folder / "RUN")} == {0, 1, 2}
    (folder / "mine").mkdir()
    write(folder, "", "mine/file.py")
    done = warm.run("-m", "pipesight", "run", "--out", "mine", "train.py", "1", cwd=folder)
    assert done.returncode == 2
    assert "must be empty" in done.stderr


def test_wrong_statistics_replace_nothing(folder):
    """With a statistics file that cannot be read, the recording that was to be replaced is still there."""
    assert record(folder, "train.py", 1).returncode == 0
    before = {file: file.read_bytes() for file in (folder / "RUN").rglob("*") if file.is_file()}
    done = record(folder, "--overwrite", "--stats", "nope.yaml", "train.py", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nope.yaml" in done.stderr
    assert {file: file.read_bytes() for file in (folder / "RUN").rglob("*") if file.is_file()} == before


def test_program_that_records_itself(folder):
    """What a program asks for itself is ignored, with a sentence each; what it says of steps counts."""
    program = """
    import pipesight, torch, train
    from pipesight import trace

    with pipesight.observe("OWN", stats={}) as run:
        run.step(7)
        train.main(1)
        run.watch(torch.nn.Linear(1, 1))
        run.flush()
        assert run.path.name == "RUN", run
    with trace.start("own") as session:
        train.main(1)
    trace.stop()
    train.main(1)
    """
    done = record(folder, write(folder, program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 3
    own, traced, _ = done.stderr.splitlines()
    assert own == (
        f"`pipesight run` already records this program into {folder}/RUN; observe('{folder}/OWN') records nothing: "
        "give its options to `pipesight run`"
    )
    assert traced.endswith("trace.start('own') is ignored")
    assert len(tasks(folder / "RUN")) == 3 * 4
    assert {task["args"]["step"] for task in tasks(folder / "RUN")} == {7}
    assert description(folder / "RUN")["outcome"] == "ok"
    assert not (folder / "OWN").exists()


def test_no_trace(folder):
    """Statistics alone."""
    done = record(folder, "--no-trace", "--logs", "none", "--stats", "stats.yaml", "train.py", 2)
    assert done.returncode == 0, done.stderr
    run = folder / "RUN"
    assert {record["iteration"] for record in statistics(run)} == {0, 1}
    assert not (run / "trace").exists()
    assert not (run / "logs").exists()
