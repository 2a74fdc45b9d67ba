"""The top of a page: what the run was, the verdict, the alarm, key figures and findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipesight.analysis.lane_bubbles import Lane
from pipesight.analysis.report import Report
from pipesight.runs.reading.event_codes import PHASES
from pipesight.view.finding_sentences import finding_groups, nonfinite_in, remarks_in, warm_up_in
from pipesight.view.payload.nonfinite_marks import lanes_of_tensor

__all__ = ["alarm_of", "facts_of", "figures_of", "findings_of", "title_of", "verdict_of"]

FINDINGS = 100
"""How many findings of a kind the page lists."""


def title_of(path: Path) -> str:
    """Return what to call a run."""
    return path.name or path.absolute().name


def facts_of(report: Report) -> list[list[str]]:
    """Return the facts about the run, as pairs of a name and a value."""
    known = report.description
    facts: list[list[str]] = []

    def add(name: str, value: object) -> None:
        if value not in (None, "", [], ()):
            facts.append([name, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)])

    command = known.get("command")
    add("command", " ".join(map(str, command)) if isinstance(command, list) else command)
    add("ranks", len(report.ranks) if len(report.ranks) > 1 else None)
    for pipeline in report.pipelines:
        add("schedule", pipeline.facts.schedule)
        add("partitions", pipeline.partitions)
        add("replicas", pipeline.replicas if pipeline.replicas > 1 else None)
        add("chunks", pipeline.chunks)
        add("balance", pipeline.facts.balance)
        add("checkpoint", pipeline.facts.checkpoint)
        add("batch", pipeline.facts.batch_size)
    for name in ("host", "started", "ended", "outcome", "python", "torch", "cuda", "pipesight"):
        add(name, known.get(name))
    add("events", f"{report.events:,}")
    return facts


def verdict_of(report: Report) -> dict[str, Any]:
    """Return the verdict and what would help."""
    changes = [
        {"what": change.what, "why": change.why, "gain": round(change.gain, 4), "promise": change.promise}
        for change in report.verdict.changes
    ]
    return {"text": report.verdict.text, "changes": changes}


def figures_of(report: Report) -> dict[str, Any] | None:
    """Return the numbers beside the verdict, if there is a complete step."""
    overall = report.overall
    if overall is None:
        return None
    return {
        "bubble": overall.bubble,
        "bound": overall.bound,
        "steps": overall.steps,
        "median_step": overall.time.median,
        "mean_step": overall.time.mean,
        "elapsed": overall.elapsed,
        "samples_per_second": overall.samples_per_second,
        "steps_per_second": overall.steps_per_second,
        "recompute": overall.recompute,
    }


def alarm_of(report: Report, lanes: Sequence[Lane], shown: Sequence[int]) -> dict[str, Any] | None:
    """Return the first tensor that was not finite, which comes before all else, and where it is on the page."""
    said, found = nonfinite_in(report), report.nonfinite
    if said is None or found is None:
        return None
    partitions = {layer.name: layer.partition for layer in reversed(report.layers)}
    if found.partition is not None:
        partitions[found.layer] = found.partition
    own, phase = lanes_of_tensor(found.layer, found.tensor, found.rank, lanes=lanes, partitions=partitions)
    return {
        "text": said.text,
        "step": found.iteration if found.iteration in shown else None,
        "layer": found.layer,
        "tensor": found.tensor,
        "lane": own[0] if own else None,
        "phase": PHASES.index(found.phase) if found.phase in PHASES else phase,
        "microbatch": found.microbatch,
    }


def findings_of(report: Report) -> list[dict[str, Any]]:
    """Return what stands out, under the terminal's headings."""
    left_out = [*filter(None, [warm_up_in(report)]), *remarks_in(report)]
    groups = [*finding_groups(report), ("Exclusions and remarks", left_out)]
    return [
        {
            "title": title,
            "entries": [[finding.text, list(finding.steps)] for finding in findings[:FINDINGS]],
            "more": max(len(findings) - FINDINGS, 0),
        }
        for title, findings in groups
        if findings
    ]
