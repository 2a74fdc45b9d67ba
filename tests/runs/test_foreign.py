"""`open_run` on what others wrote: DFTracer, PyTorch's profiler, torchtitan, any JSON lines."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.runs.reading._foreign_formats import ChromeReader
from pipesight.runs.reading.event_codes import BACKWARD, CHECKPOINT, DATA, FORWARD, OPTIMIZER, WEIGHT
from pipesight.runs.reading.run import NotARunError, Run, open_run
from pipesight.view.report_json import as_json
from pipesight.view.text_report import render
from support import warm
from support.commands import pipesight
from support.processes import STRICT_PYTHON
from support.schemas import validated
from support.synthetic import Made


def texts(run: Run) -> list[str]:
    return [note.text for note in run.notes]


def names(run: Run) -> dict[str, tuple[int, int]]:
    table = run.names()
    return {
        name: (count, total)
        for name, count, total in zip(table.name.tolist(), table.count.tolist(), table.total.tolist(), strict=True)
    }


# DFTracer.


def dftracer_lines(*, version: str) -> list[str]:
    """Return the lines of a trace by DFTracer 2.0, with brackets, or by 2.2, without and with numbers for phases."""
    old = version == "2.0"

    def line(name: str, category: str, *, dur: int | None, number: int, **args: object) -> str:
        times = {} if dur is None else {"ts": 1794813403069828 + 10 * number, "dur": dur}
        phase = ("M" if dur is None else "X") if old else (4 if dur is None else 1)
        rest = {} if old else {"type": 1}
        event = {"id": number, "name": name, "cat": category, **rest, "pid": 17898, "tid": 17898, **times, "ph": phase}
        return json.dumps({**event, "args": {"hhash": "6882804a826580cd", **args}}, separators=(",", ":"))

    lines = [
        line("HH", "dftracer", dur=None, number=1, value="6882804a826580cd"),
        line("start", "dftracer", dur=0, number=2),
        line("forward", "compute", dur=1126, number=3),
        line("step", "compute", dur=1079, number=4),
        line("fetch.iter", "dataloader", dur=5, number=5, count=1),
        line("fetch.block", "dataloader", dur=7, number=6, count=1),
        line("capture", "checkpoint", dur=9, number=7),
        line("end", "dftracer", dur=0, number=8, num_events=7),
    ]
    return ["[", *lines, "]"] if old else lines


@pytest.mark.parametrize("version", ["2.0", "2.2"])
@pytest.mark.parametrize("packed", [True, False])
def test_dftracer(version, packed, tmp_path):
    """Files of DFTracer are read, of its old format and of its new one, with the names of the ai conventions."""
    text = "\n".join(dftracer_lines(version=version)) + "\n"
    path = tmp_path / f"log-29d90d86398661f3-app.pfw{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with open_run(tmp_path) as run:
        assert run.notes == []
        assert names(run) == {
            "forward": (1, 1126),
            "step": (1, 1079),
            "fetch.iter": (1, 5),
            "fetch.block": (1, 7),
            "capture": (1, 9),
        }
        assert sorted(run.spans().kind.tolist()) == [DATA, OPTIMIZER, CHECKPOINT]


def test_dftracer_that_was_killed(tmp_path):
    """Without its last event, a trace of DFTracer has no end either."""
    (tmp_path / "a.pfw").write_text("\n".join(dftracer_lines(version="2.2")[:-1]) + "\n")
    with open_run(tmp_path) as run:
        assert texts(run) == ["incomplete: its process was killed, or is still writing"]


def test_strings_that_dftracer_does_not_escape(tmp_path):
    """A line that is no JSON, as DFTracer writes names with quotes, is left out and counted."""
    lines = dftracer_lines(version="2.0")
    lines.insert(4, lines[3].replace("forward", 'my "forward"'))
    (tmp_path / "a.pfw").write_text("\n".join(lines) + "\n")
    with open_run(tmp_path) as run:
        assert run.events == 5
        assert texts(run) == ["skipped: 1 line that is no event"]


# PyTorch's profiler.

PROFILE = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
def export(profiler):
    profiler.export_chrome_trace(sys.argv[1])
steps = schedule(wait=0, warmup=1, active=3, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=export) as profiler:
    x = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    for step in range(4):
        for name in ("PP:0F0", "PP:0F1", "PP:0SEND_F1", "PP:0I1", "PP:0W1", "PP:0B0", "PP:10F0"):
            with record_function(name):
                (x @ x).sum().backward()
        optimizer.step()
        profiler.step()
"""


@pytest.mark.parametrize("name", ["rank3.pt.trace.json", "trace.json.gz"])
def test_pytorch_profiler(name, tmp_path):
    """A real profile is read: its steps, its tasks of torch.distributed.pipelining, its operators by name."""
    path = tmp_path / name
    warm.run("-c", PROFILE, path).check_returncode()
    with open_run(path) as run:
        tasks = run.tasks()
        assert run.notes == []
        assert run.ranks() == ([3] if "3" in name else [0])
        assert run.steps() == [1, 2, 3]
        assert len(tasks) == 18
        for step in run.steps():
            rows = tasks.where(tasks.step == step)
            assert rows.minibatch.tolist() == [step] * 6
            assert list(zip(rows.partition.tolist(), rows.phase.tolist(), rows.microbatch.tolist(), strict=True)) == [
                (0, FORWARD, 0),
                (0, FORWARD, 1),
                (0, BACKWARD, 1),
                (0, WEIGHT, 1),
                (0, BACKWARD, 0),
                (10, FORWARD, 0),
            ]
            assert (rows.begin[1:] >= rows.end[:-1]).all()
        assert names(run)["aten::matmul"][0] == 21
        assert run.spans().kind.tolist() == [OPTIMIZER] * 3


def chrome_event(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    """Return a span as PyTorch's profiler writes it."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, **more}


EVENTS = [
    chrome_event('a "b"\n{},[]\u2028é', 1.75, 2.5),
    {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"labels": ["x"]}},
    chrome_event("c", 10, 5, args={"x": {"y": [1, {"z": None}]}}),
    chrome_event("d  e", 15.5, 0.25),
]
EXPECTED = {'a "b"\n{},[]\u2028é': (1, 3), "c": (1, 5), "d  e": (1, 0)}


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("shape", ["object", "array", "lines with commas"])
def test_chrome_traces(indent, ascii_only, shape, tmp_path):
    """A Chrome trace is read in every shape: an object or an array, pretty printed or on one line."""
    value: Any = EVENTS if shape == "array" else {"schemaVersion": 1, "deviceProperties": [{}], "traceEvents": EVENTS}
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if shape == "lines with commas":
        text = "[\n" + ",\n".join(json.dumps(event, ensure_ascii=ascii_only) for event in EVENTS) + "\n]\n"
    path = tmp_path / "trace.json"
    for content in (text.encode(), gzip.compress(text.encode()), b"\xef\xbb\xbf" + text.encode()):
        path.write_bytes(content)
        with open_run(path) as run:
            assert names(run) == EXPECTED
            assert run.notes == []


def test_ranks_and_clocks_of_profiles(tmp_path):
    """A profile says its rank, and what its times count from."""
    for number, (rank, base) in enumerate([(5, 2_000_000), (2, 7_000_000)]):
        trace = {
            "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 8},
            "baseTimeNanoseconds": base,
            "traceEvents": [chrome_event("PP:0F0", 10, 5)],
        }
        (tmp_path / f"{number}.json").write_text(json.dumps(trace))
    with open_run(tmp_path) as run:
        tasks = run.tasks()
        assert (tasks.rank.tolist(), tasks.begin.tolist(), tasks.step.tolist()) == ([5, 2], [2010, 7010], [0, 0])


def test_tasks_without_steps(tmp_path):
    """Where a profile names no steps, a task that comes again begins another."""
    events = [chrome_event(name, 10 * at, 5) for at, name in enumerate(["PP:0F0", "PP:0F1", "PP:0B0"] * 3)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    with open_run(tmp_path) as run:
        assert run.tasks().step.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_gpu_times_of_a_profile(tmp_path):
    """Of tasks that the GPU timed, its times are taken."""
    events = [chrome_event("ProfilerStep#4", 0, 100), chrome_event("PP:1F0", 10, 5), chrome_event("PP:2F0", 20, 5)]
    gpu = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}
    events += [chrome_event("ProfilerStep#4", 50, 100, **gpu), chrome_event("PP:1F0", 120, 30, **gpu)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    with open_run(tmp_path) as run:
        tasks = run.tasks()
        assert (tasks.begin.tolist(), tasks.step.tolist(), tasks.partition.tolist()) == ([20, 120], [4, 4], [2, 1])


def written(path: Path, *events: dict[str, Any], **head: Any) -> Path:
    path.write_text(json.dumps({**head, "traceEvents": list(events)}))
    return path


def rows_of(run: Run) -> list[tuple[int, ...]]:
    tasks = run.tasks()
    columns = (tasks.partition, tasks.phase, tasks.microbatch, tasks.begin, tasks.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_waits_in_annotations(tmp_path):
    """A task begins when what it waits for has arrived, however long ago that was posted."""
    path = written(
        tmp_path / "rank0.json",
        chrome_event("PP:1RECV_F0", 0, 5),
        chrome_event("gloo:recv", 1, 40),
        chrome_event("PP:1RECV_F1", 6, 4),
        chrome_event("gloo:recv", 7, 53),  # arrives while the first task computes
        chrome_event("PP:1F0", 10, 60),
        chrome_event("PP:1F1", 70, 10),
        chrome_event("PP:1RECV_B0", 81, 4),
        chrome_event("gloo:recv", 82, 8),
        chrome_event("PP:1B0", 86, 14),
    )
    with open_run(path) as run:
        assert rows_of(run) == [(1, FORWARD, 0, 41, 70), (1, FORWARD, 1, 70, 80), (1, BACKWARD, 0, 90, 100)]


def test_gpipe_annotations(tmp_path):
    """GPipe's tasks are those of the rank's partition, from what they wait for to what they send."""
    for rank in (0, 1):
        written(
            tmp_path / f"rank{rank}.json",
            chrome_event("Forward 0", 0, 50),
            chrome_event("gloo:recv", 1, 30) if rank else chrome_event("c10d::send", 47, 2, cat="cpu_op"),
            chrome_event("Backward 0", 60, 20),
            distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": []},
        )
    with open_run(tmp_path) as run:
        begins, ends = (0, 31), (47, 50)
        assert sorted(rows_of(run)) == [
            row for j in (0, 1) for row in ((j, FORWARD, 0, begins[j], ends[j]), (j, BACKWARD, 0, 60, 80))
        ]


@pytest.mark.parametrize(("name", "places"), [("mesh_pp", [0, 0, 1, 1]), ("mesh_dp", [])])
def test_places_of_gpipe_annotations(name, places, tmp_path):
    """With several pipelines, the group with their name tells the partition; else a note says what is missing."""
    for rank in range(4):
        groups = [
            {"pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
            {"pg_desc": name, "ranks": [rank % 2, rank % 2 + 2]},
        ]
        written(
            tmp_path / f"rank{rank}.json",
            chrome_event("Forward 0", 0, 50),
            distributedInfo={"rank": rank, "world_size": 4, "pg_config": groups},
        )
    with open_run(tmp_path) as run:
        tasks = run.tasks()
        assert sorted(tasks.partition.tolist()) == places
        assert [text.startswith("'Forward 0' does not say which partition") for text in texts(run)] == (
            [] if places else [True] * 4
        )


@pytest.mark.parametrize("operators", [True, False])
def test_overlapped_annotations(operators, tmp_path):
    """A forward and a backward in one annotation are told apart by autograd's operators; else a note says so."""
    inside = [
        chrome_event("aten::linear", 10, 20, cat="cpu_op"),
        chrome_event("c10d::recv_", 32, 2, cat="cpu_op"),
        chrome_event("autograd::engine::evaluate_function: AddmmBackward0", 40, 20, cat="cpu_op", tid=8),
    ]
    path = written(
        tmp_path / "rank0.json",
        chrome_event("PP:(0F7;3B5)OVERLAP_F_B", 5, 60),
        *(inside if operators else []),
    )
    with open_run(path) as run:
        split = (30, 40) if operators else (5, 5)
        assert sorted(rows_of(run)) == [(0, FORWARD, 7, 5, split[0]), (3, BACKWARD, 5, split[1], 65)]
        assert texts(run) == (
            [] if operators else ["1 overlapped forwards have no time of their own: it is in that of their backwards"]
        )


def kernel(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    """Return what Kineto writes of a kernel, as of torch 2.13: the device is the process, its stream the thread."""
    where = {"device": 0, "stream": stream, "correlation": int(ts)}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": where}


@pytest.mark.parametrize("library", ["nccl", "rccl"])
def test_gpu_of_a_profile(library, tmp_path):
    """Tasks are timed on the stream that computes; the report has what the GPU did, and how the steps went."""
    on_gpu = {"cat": "gpu_user_annotation", "pid": 0}
    path = written(
        tmp_path / "rank0.json",
        chrome_event("ProfilerStep#3", 0, 400),
        chrome_event("ProfilerStep#4", 400, 600),
        chrome_event("PP:0F0", 0, 10),
        chrome_event("PP:0F0", 100, 100, **{**on_gpu, "tid": 7}),
        chrome_event("PP:0F0", 90, 200, **{**on_gpu, "tid": 20}),
        kernel("Memcpy HtoD (Pinned -> Device)", 50, 20, cat="gpu_memcpy"),
        kernel("ampere_sgemm_128x64_tn", 100, 60),
        kernel("void at::native::vectorized_elementwise_kernel<4>", 160, 40),
        kernel(f"{library}DevKernel_SendRecv({library}DevKernelArgsStorage<4096ul>)", 90, 200, stream=20),
    )
    with open_run(path) as run:
        assert rows_of(run) == [(0, FORWARD, 0, 100, 200)]
        report = analyse(run)
    (gpu,) = report.gpus
    assert asdict(gpu) == {
        "rank": 0,
        "window": 240,
        "kernels": 4,
        "compute": 100,
        "communication": 200,
        "memory": 20,
        "exposed_communication": 100,
        "idle": 20,
        "gaps": 1,
        "longest_gap": 20,
    }
    (steps,) = report.profiled
    assert (steps.first, steps.last, steps.count, steps.median, steps.least, steps.most) == (3, 4, 2, 500, 400, 600)
    text = render(report)
    assert "0       41.7%      83.3%    41.7%    8.3%  8.3%     1  20.0 µs" in text
    validated("report", as_json(report))
    plain = written(tmp_path / "plain.json", *(chrome_event(f"ProfilerStep#{k}", 100 * k, 90 + k) for k in (3, 4)))
    with open_run(plain) as run:
        assert "0     3 to 4      2  93.5 µs   93.0 µs  94.0 µs" in render(analyse(run))


def test_our_trace_converted(tmp_path):
    """What `pipesight convert` made is read as the trace that it was made of; processes are ranks."""
    made = Made(tmp_path / "run", chunks=2)
    for rank in range(2):
        made.gpipe(0, lambda phase, i, j: 10 + i, rank=rank, at=7 * rank)
        made.span("compute", "step", begin=900, dur=5, rank=rank)
    path = made.write()
    assert pipesight("convert", path, "-o", tmp_path / "all.json").returncode == 0
    with open_run(path) as run, open_run(tmp_path / "all.json") as converted:
        for before, after in ((run.tasks(), converted.tasks()), (run.spans(), converted.spans())):
            assert {k: v.tolist() for k, v in before.columns().items()} == {
                k: v.tolist() for k, v in after.columns().items()
            }


WHOLE = json.dumps({"traceEvents": EVENTS}, indent=1).encode()
examples = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.mark.slow
@examples
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_chrome_trace_cut_anywhere(cut, tmp_path):
    """Of a Chrome trace that ends anywhere, the events up to there are read."""
    path = tmp_path / "a.json"
    path.write_bytes(WHOLE[:cut])
    whole = [name for name, event in zip(EXPECTED, (EVENTS[0], *EVENTS[2:]), strict=True) if ends(event) <= cut]
    try:
        run = open_run(path)
    except NotARunError:
        assert not whole
        return
    with run:
        assert sorted(names(run)) == sorted(whole)
        if whole and cut < WHOLE.rindex(b"]"):
            assert texts(run) == ["incomplete: it was cut off"]


def ends(event: dict[str, Any]) -> int:
    key = json.dumps(event, indent=1).replace("\n", "\n  ").encode()
    return WHOLE.index(key) + len(key)


@examples
@given(
    pieces=st.lists(st.sampled_from(["{", "}", "[", "]", ",", '"', "\\", "1", "null", "é", '{"ph":"X"}', "\n"])),
    size=st.integers(1, 5),
)
def test_any_mixture_as_a_chrome_trace(pieces, size):
    """Whatever follows the beginning of a list, reading it ends, and gives objects."""
    content = b'{"traceEvents":[' + "".join(pieces).encode()
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    reader = ChromeReader(chunks)
    assert all(isinstance(json.loads(line), dict) for line in reader)


def test_damaged_events_of_a_chrome_trace(tmp_path):
    """An event that is no JSON is left out, and the next one is found."""
    good = json.dumps(chrome_event("good", 1, 1))
    huge = json.dumps(chrome_event("huge", 1, 1, args={"x": "y" * 3_000_000}))
    events = ",\n".join([good, '{"name": "bad"x}', good, "7", huge, good])
    (tmp_path / "a.json").write_text(f'{{"traceEvents":[{events}]}}')
    with open_run(tmp_path) as run:
        assert names(run) == {"good": (3, 3)}
        assert texts(run) == ["skipped: 3 lines that are no events"]


# torchtitan, and any JSON lines.


def titan(kind: str, at: int, **more: Any) -> dict[str, Any]:
    common = {"rank": 1, "pid": 50, "tid": 50, "time_us": at, "step": 3, "event_name": None, "source": "trainer"}
    return {**common, "log_type": "event", "log_type_name": kind, **more}


def test_torchtitan(tmp_path):
    """Of torchtitan's structured log, spans are spans, metrics are statistics, and the rank is in the name."""
    lines = [
        titan("fwd_bwd_start", 1000),
        titan("fetching_batch_start", 1000),
        titan("fetching_batch_end", 1500, value=0.5),
        titan("optim_end", 3000, value=1.25),
        titan("fwd_bwd_end", 2500, value=1.5),
        titan("metric_value", 2500, event_name="train.loss", value=2.5, log_type="instant"),
        titan("metric_value", 2500, event_name="train.grad", value=float("nan"), log_type="instant"),
        titan("training_start", 1, log_type="instant"),
        titan("odd_end", 9000, value="x"),
    ]
    folder = tmp_path / "structured_logs"
    folder.mkdir()
    path = folder / "trainer.global_rank_1.20261115-100000-ABCDEF.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"rank": 1, "st')
    with open_run(tmp_path) as run:
        assert run.ranks() == [1]
        assert names(run) == {"fwd_bwd": (1, 1500), "optim": (1, 1250), "fetching_batch": (1, 500)}
        spans = run.spans()
        assert (spans.kind.tolist(), spans.begin.tolist()) == ([DATA, OPTIMIZER], [1000, 1750])
        assert run.steps() == [3]
        known = {"rank": 1, "iteration": 3, "layer": "", "tensor": ""}
        assert list(run.statistics()) == [
            {**known, "statistic": "train.loss", "value": 2.5},
            {**known, "statistic": "train.grad", "value": None, "nonfinite": "nan"},
        ]


def titan_job(rank: int, passes: list[int]) -> list[dict[str, Any]]:
    """Return the log of a rank: in a step, 10 ms of loading, a forward and backward, 9 of the optimizer, 1 of rest."""
    at, lines = 5_000_000, [titan("model_build_end", 4_000_000, value=3000.0, step=None)]
    for step, milliseconds in enumerate(passes, 1):
        begin = at
        for name, took in (("fetching_batch", 10), ("fwd_bwd", milliseconds), ("optim", 9)):
            at += took * 1000
            lines.append(titan(f"{name}_end", at, value=float(took), step=step))
        loss = math.nan if step == 4 else 8.0 / step + rank
        lines.append(titan("metric_value", at, event_name="loss", value=loss, log_type="instant", step=step))
        at += 1000
        lines.append(titan("step_end", at, value=(at - begin) / 1000, step=step))
    return [{**line, "rank": rank, "pid": 50 + rank, "tid": 50 + rank} for line in lines]


def test_steps_of_torchtitan(tmp_path):
    """Its log gives steps, where their time goes, and curves, as of any program."""
    passes = [80, 90, 100, 90, 120]
    for rank in range(2):
        path = tmp_path / f"trainer.global_rank_{rank}.20261115-100000-ABCDEF.jsonl"
        path.write_text("\n".join(map(json.dumps, titan_job(rank, passes))))
    with open_run(tmp_path) as run:
        report = analyse(run)
    program = report.program
    assert program is not None
    steps = program.steps.where(program.steps.rank == 0)
    assert steps.step.tolist() == [1, 2, 3, 4, 5]
    assert steps.period.tolist() == [(10 + one + 9 + 1) * 1000 for one in passes]
    assert {name: round(time) for name, time in program.parts.items()} == {
        "data_loading": 10_000,
        "optimizer": 9_000,
        "own:fwd_bwd": 96_000,
        "between": 1_000,
    }
    assert report.curves[0].name == "loss"
    assert report.curves[0].values[:3] == (8.5, 4.5, pytest.approx(8 / 3 + 0.5))
    assert report.curves[0].first_nonfinite == 4
    assert report.verdict.text.startswith("The loss is not finite in step 4.")
    assert not any("fwd_bwd" in change.what for change in report.verdict.changes)
    assert any("a bubble of a pipeline in it cannot be told" in remark.text for remark in report.remarks)


def test_tasks_of_asyncio_in_torchtitan(tmp_path):
    """Spans of tasks that take turns on a thread are listed by name: they overlap, and are no parts of a step."""
    lines = [{**line, "task_name": "Task-1"} for line in titan_job(0, [80, 90, 100])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with open_run(tmp_path) as run:
        report = analyse(run)
    assert report.program is None
    assert {name.name: name.count for name in report.names}["fwd_bwd"] == 3


def test_any_json_lines(tmp_path):
    """Of JSON lines by step, the numbers are statistics; other lines are passed over."""
    lines = ['{"step": 1, "loss": 2.5, "name": "x", "on": true}', "no", '{"a": 1}', '{"global_step": 2, "loss": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with open_run(tmp_path / "metrics.jsonl") as run:
        assert [(line["iteration"], line["statistic"], line["value"]) for line in run.statistics()] == [
            (1, "loss", 2.5),
            (2, "loss", 2),
        ]
        assert (run.events, len(run.tasks()), run.steps()) == (0, 0, [])


def test_a_file_of_our_statistics(tmp_path):
    """A file of statistics can be given by itself."""
    made = Made(tmp_path / "run")
    made.stat("a", "output", "mean", 4, 1.5, rank=2)
    path = made.write() / "stats/rank-00002.jsonl"
    with open_run(path) as run:
        (line,) = run.statistics()
        assert (line["rank"], line["iteration"], line["layer"], line["value"]) == (2, 4, "a", 1.5)


def test_little_memory_for_a_large_profile(tmp_path):
    """A large Chrome trace on one line is never held as a whole."""
    event = json.dumps(chrome_event("x", 5, 1, args={"text": "y" * 1000})).encode()
    with gzip.open(tmp_path / "a.json.gz", "wb", 1) as file:
        file.write(b'{"traceEvents":[' + event)
        for _ in range(200):
            file.write((b"," + event) * 1000)
        file.write(b"]}")
    measured = """
import sys
from pathlib import Path
from pipesight.runs.reading.run import open_run
def main():
    with open_run(sys.argv[1]) as run:
        print(run.events, len(run.notes))
main()
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    command = [*STRICT_PYTHON, "-c", measured, str(tmp_path / "a.json.gz")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    found, kilobytes = ended.stdout.splitlines()
    assert found == "200001 0"
    assert int(kilobytes) < 500_000


def test_folder_of_anything(tmp_path):
    """In a folder with anything in it, traces of others are found, and what is none is told."""
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": EVENTS}))
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (tmp_path / "c.json").write_text("[1, 2]")
    (tmp_path / "d.json").touch()
    (tmp_path / "e.txt").write_text("x")
    (tmp_path / "f.bin").write_bytes(bytes(range(256)))
    with open_run(Path(tmp_path)) as run:
        assert names(run) == EXPECTED
        assert len(list(run.statistics())) == 1
        assert {note.path.name: note.text for note in run.notes} == {
            "c.json": "skipped: it contains no events",
            "d.json": "skipped: it is empty",
        }


def test_the_optimizer_alone_makes_no_program(tmp_path):
    """PyTorch's profiler says when the optimizer steps, but not which module computes: names are listed."""
    rows = [("user_annotation", "Optimizer.step#SGD.step", 900, 100), ("cpu_op", "aten::mm", 0, 800)]
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": 1000 * step + at, "dur": dur, "args": {}}
        for step in range(4)
        for category, name, at, dur in rows
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    with open_run(path) as run:
        report = analyse(run)
    assert report.program is None
    assert [entry.name for entry in report.names] == ["aten::mm", "Optimizer.step#SGD.step"]
