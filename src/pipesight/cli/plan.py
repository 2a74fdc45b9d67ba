"""`pipesight plan`: simulate other balances, numbers of chunks, checkpoint modes and schedules."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight.cli._quantities import bandwidth, bytes_text, seconds, seconds_text, size
from pipesight.schedule.argument_checks import CHECKPOINT_MODES, SCHEDULES

if TYPE_CHECKING:
    from pipesight.analysis.measured_costs import Measured
    from pipesight.schedule.costs import Costs, Link
    from pipesight.view.plan_table import Outcome

__all__ = ["add_to", "run"]

FAILED, WRONG = 1, 2
"""Exit codes: reading or writing failed; wrong usage, or nothing fits."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "plan",
        help="simulate other balances, chunks, checkpoint modes and schedules",
        description="Simulate schedules with the times of a recorded run or of a profiled model, and find the best "
        "balance for each.",
        epilog="exit codes: 0 there is a plan; 1 reading or writing failed; 2 wrong usage, or no plan fits",
    )
    add = parser.add_argument
    add("run_path", type=Path, metavar="RUN", nargs="?", help="a run directory, a folder of traces, or one trace")
    add("--partitions", type=_numbers, metavar="N,..", help="numbers of devices or ranks (default: as in the run)")
    add("--chunks", type=_numbers, metavar="M,..", default=[], help="numbers of micro-batches (default: powers of two)")
    add(
        "--schedule",
        type=_words(SCHEDULES),
        metavar="NAME,..",
        default=[*SCHEDULES],
        help=f"{', '.join(SCHEDULES)} (default: all)",
    )
    add(
        "--checkpoint",
        type=_words(CHECKPOINT_MODES),
        metavar="MODE,..",
        default=[*CHECKPOINT_MODES],
        help=f"{', '.join(CHECKPOINT_MODES)} (default: all)",
    )
    add(
        "--rounds",
        type=_number,
        metavar="V",
        help="stages per device in interleaved schedules (default: as in the run, or 2)",
    )
    add(
        "--memory",
        type=size,
        metavar="SIZE",
        default=math.inf,
        help="memory of each device, such as 16GiB (default: no limit)",
    )
    add(
        "--parameter-scale",
        type=float,
        metavar="X",
        default=2.0,
        help="bytes held per byte of parameters: 2 with gradients, 4 with gradients and Adam (default: 2)",
    )
    add(
        "--link-bandwidth",
        type=bandwidth,
        metavar="SPEED",
        help="bandwidth between devices, such as 25GB/s (default: as recorded)",
    )
    add("--link-latency", type=seconds, metavar="TIME", help="latency between devices, such as 10us (default: none)")
    add(
        "--model",
        metavar="MODULE:FACTORY",
        help="profile this model, instead of a run or to learn how much memory its layers need: a function without "
        "arguments, or an nn.Sequential, importable from the current directory",
    )
    add("--sample", metavar="SHAPE", help="shape and type of a batch for the model: 32x3x224x224, or 32x128:int64")
    add("--all", action="store_true", help="show all plans, not only the best of each schedule and checkpoint mode")
    add("--json", action="store_true", help="print JSON")
    add("--html", type=Path, metavar="FILE", help="also draw the recorded and the planned timelines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, and return the exit code."""
    try:
        outcome = _plan(options)
        if options.html is not None:
            options.html.write_text(_page(options, outcome), encoding="utf-8")
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(f"{error.filename or options.run_path}: {error.strerror or error}", FAILED)
    except ValueError as error:
        return _fail(str(error), WRONG)
    _print(options, outcome)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"pipesight plan: error: {message}", file=sys.stderr)
    return code


# Costs and plans.


def _plan(options: argparse.Namespace) -> Outcome:
    from pipesight.plan.plans import best_plans, settings
    from pipesight.schedule.memory import device_bytes
    from pipesight.view.plan_table import Outcome

    costs, measured = _costs(options)
    outcome = Outcome(costs, (), measured)
    if not math.isinf(options.memory) and not outcome.knows_memory:
        raise ValueError(
            "--memory needs the sizes of layers, which the run does not have; add --model MODULE:FACTORY --sample SHAPE"
        )
    counts = options.partitions or ([measured.devices] if measured is not None else [])
    if not options.partitions and measured is not None and measured.crowded and measured.processors is not None:
        counts = [*counts, min(measured.processors, len(costs.layers))]
    if not counts:
        raise ValueError("without a run, the number of devices is needed: --partitions N")
    chunks = options.chunks
    possible = [
        setting
        for n in counts
        for setting in settings(
            costs,
            partitions=n,
            schedules=options.schedule,
            checkpoints=options.checkpoint,
            chunks=chunks,
            recorded=None if measured is None else measured.schedule.chunks,
            rounds=options.rounds or _rounds(measured),
        )
    ]
    if not possible:
        raise ValueError(
            f"no schedule is possible (schedule: {','.join(options.schedule)}, partitions: {counts}, chunks: {chunks}, "
            f"layers: {len(costs.layers)}); interleaved schedules need a layer per stage, and chunks that are a "
            "multiple of the partitions; 1f1b needs at least as many chunks as partitions"
        )
    plans = best_plans(costs, possible, memory=options.memory, parameter_scale=options.parameter_scale)
    devices = measured.facts.devices if measured is not None else None
    kinds = {name.partition(":")[0] for name in devices or ()}
    recorded = None
    if measured is not None:
        recorded = device_bytes(measured.schedule, costs, measured.balance, parameter_scale=options.parameter_scale)
    return Outcome(costs, plans, measured, recorded, kinds.pop() if len(kinds) == 1 else None, options.memory)


def _rounds(measured: Measured | None) -> int:
    """Return the number of stages per device in interleaved schedules, unless it is given."""
    recorded = measured.schedule.stages // measured.devices if measured is not None else 1
    return recorded if recorded > 1 else 2


def _costs(options: argparse.Namespace) -> tuple[Costs, Measured | None]:
    from pipesight.pipeline.profiled_costs import profile, with_sizes

    if options.run_path is None and options.model is None:
        raise ValueError("nothing to plan from; give a run, or a model: --model MODULE:FACTORY --sample SHAPE")
    if (options.model is None) != (options.sample is None):
        raise ValueError(
            "--model and --sample must be given together, as in --model train:build_model --sample 32x3x224x224"
        )
    profiled = None
    if options.model is not None:
        from pipesight.cli._model_option import find_sequential, make_sample

        model, sample = find_sequential(options.model), make_sample(options.sample)
        try:
            profiled = profile(model, sample, link=_link(options))
        except Exception as error:
            if not (notes := getattr(error, "__notes__", [])):
                raise
            told = " ".join([f"{type(error).__name__}: {error},", *notes]).split()
            raise ValueError(
                f"--sample must be a batch that the model takes (--model {options.model}, --sample {options.sample}: "
                f"{' '.join(told)}); give the shape and type of its input, or fix that layer"
            ) from error
    if options.run_path is None:
        assert profiled is not None
        return profiled, None
    from pipesight.analysis.analyse import measure
    from pipesight.runs.reading.run import open_run

    with open_run(options.run_path) as opened:
        measured = measure(opened, link=_link(options))
    return (measured.costs if profiled is None else with_sizes(measured.costs, profiled)), measured


def _link(options: argparse.Namespace) -> Link | None:
    from pipesight.schedule.costs import Link

    if options.link_bandwidth is None and options.link_latency is None:
        return None
    return Link(bandwidth=options.link_bandwidth or math.inf, latency=options.link_latency or 0.0)


# Output.


def _print(options: argparse.Namespace, outcome: Outcome) -> None:
    from pipesight.view.plan_table import HEADINGS, as_json, best_of_each, notes, rows

    if options.json:
        print(json.dumps(as_json(outcome), indent=2, allow_nan=False))
        return
    shown = outcome.plans if options.all else best_of_each(outcome.plans)
    table = [HEADINGS, *rows(outcome, shown, seconds=seconds_text, size=bytes_text)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if any(not plan.proven for plan in shown):
        print("* another balance may be faster: the search stopped before it had ruled out all others")
    if len(shown) < len(outcome.plans):
        print(f"the best of {len(outcome.plans)} plans for each schedule and checkpoint mode; --all shows all of them")
    for note in notes(outcome, shown):
        print(f"note: {note}")
    if (words := outcome.keep()) is not None:
        print(f"\n{words}")
    elif (plan := outcome.fastest_to_run()) is not None:
        print(f"\n{outcome.call(plan)}")
    if options.html is not None:
        print(f"\nthe timelines are in {options.html}")


def _page(options: argparse.Namespace, outcome: Outcome) -> str:
    from pipesight.plan.plans import simulated
    from pipesight.view.plan_page import PlanTimeline, page
    from pipesight.view.plan_table import HEADINGS, best_of_each, notes, rows

    timelines = []
    if (known := outcome.measured) is not None:
        text = f"step {seconds_text(known.step_seconds)}, bubble {known.bubble:.1%}; a typical mini-batch"
        what = f"Recorded: {known.schedule_name}, {known.schedule.chunks} chunks, checkpoint {known.checkpoint}"
        timelines.append(PlanTimeline(what, text, known.schedule, known.begin, known.end))
    drawn = {id(plan): plan for plan in (outcome.fastest_to_run(), outcome.plans[0]) if plan is not None}
    for plan in drawn.values():
        setting, found = plan.setting, simulated(outcome.costs, plan)
        what = f"Planned: {setting.schedule}, {setting.chunks} chunks, checkpoint {setting.checkpoint}"
        text = f"step {seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, balance {list(plan.balance)}"
        timelines.append(PlanTimeline(what, text, found.schedule, found.begin, found.end))
    shown = best_of_each(outcome.plans)
    table = rows(outcome, shown, seconds=seconds_text, size=bytes_text)
    name = options.run_path.resolve().name if options.run_path is not None else options.model
    return page(f"Plans for {name}", timelines, HEADINGS, table, notes(outcome, shown))


# Options.


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part.strip()) for part in text.split(",")]


class _words:  # noqa: N801 (used like a function)
    """Parses known words, separated by commas."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in self._known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(self._known)}")
        return words
