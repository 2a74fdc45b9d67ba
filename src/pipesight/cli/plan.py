"""`pipesight plan`: simulate other balances, numbers of chunks, checkpoint modes and schedules."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight.cli._failures import failing_in_one_line
from pipesight.cli._quantities import bandwidth, seconds, size
from pipesight.schedule.argument_checks import CHECKPOINT_MODES, SCHEDULES

if TYPE_CHECKING:
    from pipesight.analysis.measured_costs import Measured
    from pipesight.analysis.plan_outcome import Outcome
    from pipesight.schedule.costs import Costs, Link

__all__ = ["add_to", "run"]

NO_STATE = (
    "what the optimizer keeps is not known, so it is not in the memory; add --parameter-scale 4 for Adam, 3 for SGD "
    "with momentum"
)


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
        help="memory of each device, such as 16G or 16GiB (default: no limit)",
    )
    add(
        "--parameter-scale",
        type=float,
        metavar="X",
        help="bytes held per byte of parameters: 2 with gradients, 4 with gradients and Adam (default: as counted "
        "in the run, or 2)",
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
    add(
        "--sample",
        metavar="SHAPE,..",
        help="shape and type of each argument of the model: 32x3x224x224, or 32x128:int64,mask=32x128:bool; or "
        "MODULE:FUNCTION, which returns the batch",
    )
    add(
        "--search",
        action="store_true",
        help="also search for an order of tasks that is faster than those that have a name, within --memory",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help="write the order of tasks of the fastest plan; Pipeline(schedule=FILE) and DistributedPipeline run it",
    )
    add(
        "--format",
        choices=("torchtitan", "megatron", "torch"),
        help="print the cut of the fastest plan as this program takes it, instead of the table",
    )
    add(
        "--all",
        action="store_true",
        help="show all plans, not only those that are faster than all that need as little memory",
    )
    add("--json", action="store_true", help="print JSON")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write the page of RUN with the plans in it, drawn; without RUN, of the plans alone",
    )
    parser.set_defaults(run=run)


@failing_in_one_line("plan")
def run(options: argparse.Namespace) -> int:
    """Plan, and return the exit code."""
    outcome = _plan(options)
    text = _text(options, outcome)  # which may refuse, before anything is written
    if options.html is not None:
        _write_page(options, outcome)
    if options.out is not None:
        from pipesight.plan.schedule_files import save_schedule

        save_schedule(outcome.plans[0].schedule, options.out)
    print(text)
    return 0


def _plan(options: argparse.Namespace) -> Outcome:
    from pipesight.analysis.plan_outcome import make_plans

    costs, measured = _costs(options)
    if not math.isinf(options.memory) and not costs.sizes_known:
        raise ValueError(
            "--memory needs the sizes of layers, which the run does not have; add --model MODULE:FACTORY --sample SHAPE"
        )
    if options.out is not None and options.out.suffix != ".csv":
        raise ValueError(f"--out writes a schedule as CSV, so its name must end in .csv (name: {options.out})")
    if measured is None and not options.partitions:
        raise ValueError("without a run, the number of devices is needed: --partitions N")
    scale = _parameter_scale(options, measured)
    if scale is None and costs.sizes_known:
        costs = replace(costs, notes=(*costs.notes, NO_STATE))
    return make_plans(
        costs,
        measured,
        partitions=options.partitions or (),
        schedules=options.schedule,
        checkpoints=options.checkpoint,
        chunks=options.chunks,
        rounds=options.rounds,
        memory=options.memory,
        parameter_scale=scale or 2.0,
        search=options.search,
        **({} if options.out is None else {"file": str(options.out)}),
    )


def _costs(options: argparse.Namespace) -> tuple[Costs, Measured | None]:
    if options.run_path is None and options.model is None:
        raise ValueError("nothing to plan from; give a run, or a model: --model MODULE:FACTORY --sample SHAPE")
    if (options.model is None) != (options.sample is None):
        raise ValueError(
            "--model and --sample must be given together, as in --model train:build_model --sample 32x3x224x224"
        )
    profiled = None
    if options.model is not None:
        from pipesight.cli._model_option import profile_model

        profiled = profile_model(options.model, options.sample, link=_link(options))
    if options.run_path is None:
        assert profiled is not None
        return profiled, None
    from pipesight.analysis.analyse import measure
    from pipesight.runs.reading.run import open_run

    with open_run(options.run_path) as opened:
        measured = measure(opened, link=_link(options))
    if profiled is None:
        return measured.costs, measured
    from pipesight.pipeline.profiled_costs import with_sizes

    return with_sizes(measured.costs, profiled), measured


def _parameter_scale(options: argparse.Namespace, measured: Measured | None) -> float | None:
    """Return the bytes that are held for each byte of parameters, as given or recorded."""
    recorded = measured.parameter_scale if measured is not None else None
    given: float | None = options.parameter_scale
    return recorded if given is None else given


def _link(options: argparse.Namespace) -> Link | None:
    from pipesight.schedule.costs import Link

    if options.link_bandwidth is None and options.link_latency is None:
        return None
    return Link(bandwidth=options.link_bandwidth or math.inf, latency=options.link_latency or 0.0)


def _text(options: argparse.Namespace, outcome: Outcome) -> str:
    """Return what is printed."""
    if options.json:
        from pipesight.view.plan_json import plans_as_json

        return json.dumps(plans_as_json(outcome), indent=2, allow_nan=False)
    if options.format is not None:
        from pipesight.view.plan_formats import plan_as
        from pipesight.view.plan_table import large_layer_note

        file = None if options.out is None else str(options.out)
        cut, large = plan_as(options.format, outcome.costs, outcome.plans[0], file=file), outcome.too_large()
        return cut if large is None else f"{cut}\n# note: {large_layer_note(large)}"
    from pipesight.view.plan_table import plan_text
    from pipesight.view.text_layout import broken_code

    width = min(shutil.get_terminal_size((80, 24)).columns, 200)
    lines = [plan_text(outcome, all_plans=options.all, width=width, with_call=options.out is None)]
    if options.html is not None:
        lines += ["", f"the timelines are in {options.html}"]
    if options.out is not None:
        lines += ["", f"the order of the fastest plan is in {options.out}; this runs it"]
        for where, call in outcome.calls_with_file(outcome.plans[0]).items():
            lines += [f"{where}:", *broken_code(call, width)]
    return "\n".join(lines)


def _write_page(options: argparse.Namespace, outcome: Outcome) -> None:
    """Write the page of the run with the plans in it; without a run, that of the plans."""
    from pipesight.view.page import write_page
    from pipesight.view.plan_page import plan_page, plan_sections

    if options.run_path is None:
        options.html.write_text(plan_page(options.model, outcome), encoding="utf-8")
    else:
        write_page(options.run_path, output=options.html, plans=plan_sections(outcome))


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
