"""The cut of a plan as other programs take it: torchtitan, Megatron-LM, and torch.distributed.pipelining."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

from pipesight.plan.plans import Plan
from pipesight.schedule.costs import Costs

__all__ = ["FORMATS", "plan_as"]


def plan_as(name: str, costs: Costs, plan: Plan, *, file: str | None = None) -> str:
    """Write the cut of a plan as a program takes it.

    ``file`` is where the order of tasks is written, if it is.

    Raises:
        ValueError: The program has no such schedule, or cannot be told of the cut.
    """
    return _WRITERS[name](costs, plan, file)


def _torchtitan(costs: Costs, plan: Plan, file: str | None) -> str:
    setting, known = plan.setting, _torch_name(plan).removeprefix("Schedule")
    if file is None and not known:
        raise ValueError(f"torch has no class for the schedule {plan.schedule_name}: write its order, --out FILE.csv")
    parts = _parts(costs, plan)
    for name in (name for part in parts for name in part):
        if name.count(".") > 1:
            raise ValueError(
                "torchtitan cuts at children of the model and of its lists, such as norm and layers.3, but a layer is "
                f"named {name}"
            )
    if file is not None:  # its name says no more than where stages are
        known = "ZBVZeroBubble" if setting.in_v else "PipelineScheduleMulti"
    lines = [
        "parallelism=ParallelismConfig(",
        f"    pipeline_parallel_degree={setting.partitions},",
        f"    pipeline_parallel_schedule={json.dumps(known)},",
        *([] if file is None else [f"    pipeline_parallel_schedule_csv={json.dumps(file)},"]),
        f"    num_pp_microbatches={setting.chunks},",
        "    module_fqns_per_model_part=[",
        *(f"        {json.dumps(names)}," for names in parts),
        "    ],",
        ")",
    ]
    return "\n".join(lines)


def _megatron(costs: Costs, plan: Plan, file: str | None) -> str:
    if plan.setting.in_v or file is not None:
        raise ValueError(
            "Megatron-LM has no schedules in a V, and takes no order of tasks; plan with --schedule 1f1b,interleaved"
        )
    blocks = _blocks([layer.name for layer in costs.layers])
    ends = [0, *itertools.accumulate(plan.balance)]
    stages = []
    for begin, end in itertools.pairwise(ends):
        count = sum(begin <= k < end for k in blocks)
        words = ["E"] if begin == 0 else []
        words += [f"t*{count}"] if count > 1 else ["t"] * count
        stages.append("".join([*words, *(["L"] if end == len(costs.layers) else [])]))
    lines = [f"--pipeline-model-parallel-size {plan.setting.partitions}"]
    lines += [f'--pipeline-model-parallel-layout "{"|".join(stages)}"']
    counts = [sum(begin <= k < end for k in blocks) for begin, end in itertools.pairwise(ends)]
    if plan.setting.rounds == 1 and len(counts) > 2 and len({*counts[1:-1]}) == 1 and min(counts) > 0:
        lines.append(
            f"# or, instead of the layout: --decoder-first-pipeline-num-layers {counts[0]} "
            f"--decoder-last-pipeline-num-layers {counts[-1]}"
        )
    lines.append("# E is all before the first of the repeated layers, L all after the last of them")
    lines.append(f"# {plan.setting.chunks} micro-batches: set --micro-batch-size accordingly")
    if plan.setting.schedule not in ("1f1b", "interleaved"):
        lines.append(f"# Megatron-LM runs 1F1B, not {plan.setting.schedule}, which the plan is for")
    return "\n".join(lines)


def _torch(costs: Costs, plan: Plan, file: str | None) -> str:
    starts = itertools.accumulate(plan.balance[:-1])
    spec = ", ".join(f"{json.dumps(costs.layers[start].name)}: SplitPoint.BEGINNING" for start in starts)
    lines = ["from torch.distributed.pipelining import SplitPoint, pipeline", "", f"split_spec = {{{spec}}}"]
    lines.append("pipe = pipeline(model, mb_args=example_args, split_spec=split_spec)")
    known = _torch_name(plan)
    homes = plan.schedule.device_of_stage
    mine = [[s for s, home in enumerate(homes) if home == rank] for rank in range(plan.setting.partitions)]
    lines.append(f"# stages of each rank: {mine}; {plan.setting.chunks} micro-batches")
    if file is not None or not known:
        where = "FILE.csv, written by --out" if file is None else file
        lines.append(f"# the order of tasks is in {where}")
    else:
        lines.append(f"# schedule: torch.distributed.pipelining.{known}")
    return "\n".join(lines)


_WRITERS: dict[str, Callable[[Costs, Plan, str | None], str]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "torch": _torch,
}

FORMATS = (*_WRITERS,)
"""The programs whose formats there are."""


def _torch_name(plan: Plan) -> str:
    """Return torch's class for the schedule of a plan; empty if there is none, or if it needs other micro-batches."""
    return "" if plan.order is not None else plan.setting.torch_name


def _parts(costs: Costs, plan: Plan) -> list[list[str]]:
    ends = [0, *itertools.accumulate(plan.balance)]
    return [[layer.name for layer in costs.layers[begin:end]] for begin, end in itertools.pairwise(ends)]


def _blocks(names: Sequence[str]) -> range:
    """Return the indices of the layers that repeat: those with most numbers below one name.

    >>> _blocks(["embed", "layers.0", "layers.1", "norm"])
    range(1, 3)
    """
    parents = [found[1] if (found := re.fullmatch(r"(.+)\.\d+", name)) else None for name in names]
    known = Counter(parent for parent in parents if parent is not None)
    if not known:
        raise ValueError(
            "Megatron-LM's layout counts transformer layers, which have names such as layers.3, but there are none "
            f"(layers: {', '.join(names[:6])})"
        )
    parent = known.most_common(1)[0][0]
    places = [k for k, found in enumerate(parents) if found == parent]
    if places != [*range(places[0], places[-1] + 1)]:
        raise ValueError(f"the layers of {parent} must follow each other, but others are between them")
    return range(places[0], places[-1] + 1)
