"""The numbers of a run's last step for Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipesight.analysis.latest_step import LatestStep, latest_step
from pipesight.analysis.report import Report
from pipesight.runs.following.follower import Follower

__all__ = ["CONTENT_TYPE", "metrics", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], float]]


def metrics(follower: Follower) -> str:
    """Return the metrics of a run that is followed, or has ended; few, before its first step."""
    from pipesight.analysis.analyse import analyse

    state, report = follower.state, None
    if follower.run.steps():
        report = analyse(follower.run, advice=False)
    return metrics_text(report, phase=state.phase, outcome=state.outcome)


def metrics_text(report: Report | None, *, phase: str, outcome: str | None = None) -> str:
    """Write the metrics of a run.

    The ``phase`` is ``waiting``, ``running`` or ``ended``, the ``outcome`` how it ended.
    """
    ended = phase == "ended"
    found = [
        _metric("run_phase", "Whether the run is in this phase.", _one_of(("waiting", "running", "ended"), phase)),
        _metric("alarm", "Whether something is wrong with the run.", _alarms(report, ended and outcome != "ok")),
    ]
    figures = None if report is None else latest_step(report, ended=ended)
    if report is not None and figures is not None:
        found += _of_steps(figures)
        curves = [({"name": curve.name}, curve.values[-1]) for curve in report.curves]
        found.append(_metric("curve", "The last value of a counter, such as the loss.", curves))
    return "".join(found)


def _of_steps(figures: LatestStep) -> list[str]:
    last, usual = figures.last, figures.usual
    both = ({"of": "last"}, last), ({"of": "median"}, usual)
    speeds = [({"of": "last"}, last.samples_per_second), ({"of": "mean"}, usual.samples_per_second)]
    parts = zip(figures.names, last.parts, strict=True)
    rows = enumerate(figures.partitions)
    return [
        _metric("last_step", "The number of the last complete step.", [({}, last.step)]),
        _metric("step_seconds", "The time of a step.", [(label, step.time / 1e6) for label, step in both]),
        _metric("samples_per_second", "Samples a second.", [(of, speed) for of, speed in speeds if speed is not None]),
        _metric(
            "bubble_ratio",
            "The share of the window in which partitions are idle.",
            [(label, step.bubble) for label, step in both if step.bubble is not None],
        ),
        _metric(
            "schedule_bubble_ratio",
            "The bubble of the schedule alone.",
            [(label, step.bound) for label, step in both if step.bound is not None],
        ),
        _metric(
            "partition_bubble_ratio",
            "The bubble of a partition in the last step.",
            [({"partition": str(number)}, row.last) for number, row in rows],
        ),
        _metric(
            "step_part_seconds",
            "What a part of the last step took.",
            [({"part": name}, spent / 1e6) for name, spent in parts],
        ),
    ]


def _alarms(report: Report | None, failed: bool) -> Samples:
    tensor = report is not None and report.nonfinite is not None
    curve = report is not None and any(curve.first_nonfinite is not None for curve in report.curves)
    kinds = {"failed": failed, "nonfinite_tensor": tensor, "nonfinite_curve": curve}
    return [({"kind": kind}, float(there)) for kind, there in kinds.items()]


def _one_of(names: Sequence[str], chosen: str) -> Samples:
    return [({"phase": name}, float(name == chosen)) for name in names]


def _metric(name: str, meaning: str, samples: Samples) -> str:
    """Write one metric with its samples; nothing if there are none."""
    lines = [f"pipesight_{name}{_labels(labels)} {_number(value)}\n" for labels, value in samples]
    if not lines:
        return ""
    return f"# HELP pipesight_{name} {meaning}\n# TYPE pipesight_{name} gauge\n{''.join(lines)}"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    safe = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return safe.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(float(value)), repr(float(value)))
