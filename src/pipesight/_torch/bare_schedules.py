"""What schedules and stages of ``torch.distributed.pipelining`` keep to themselves, from torch 2.6 on.

Import it once the program has imported ``torch.distributed.pipelining.schedules``: that takes a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import schedules, stage

__all__ = [
    "CLASSES",
    "COMPUTES_LOSS",
    "HAND_BUILT",
    "REHEARSAL",
    "SCHEDULE",
    "STAGE",
    "batch_dim",
    "class_name",
    "computes_loss",
    "has_backward",
    "kept_of_forward",
    "last_loss",
    "microbatches",
    "missing_names",
    "peer_rank",
    "stages_of",
]

SCHEDULE: Any = getattr(schedules, "_PipelineSchedule", None)
"""The base class of all schedules."""

STAGE: Any = getattr(stage, "_PipelineStageBase", None)
"""The base class of stages, whether they were built by hand or by ``pipeline()``."""

CLASSES: tuple[Any, ...] = tuple(
    getattr(schedules, name, None) for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")
)
"""The classes whose ``step`` runs a mini-batch."""

COMPUTES_LOSS = "_maybe_compute_loss"
"""The function of schedules that computes the loss of a micro-batch, after its last forward."""

REHEARSAL = ("_prepare_forward_infra", "_prepare_backward_infra")
"""The functions of `HAND_BUILT` that run a forward, and in newer torch a backward, on values that mean nothing."""

HAND_BUILT: Any = getattr(stage, "PipelineStage", None)
"""The class of stages that were built by hand. Those of ``pipeline()`` know their shapes."""

_NEEDED = (
    (CLASSES[0], "PipelineScheduleSingle", ("step",)),
    (CLASSES[1], "PipelineScheduleMulti", ("step",)),
    (STAGE, "_PipelineStageBase", ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")),
)


def missing_names() -> list[str]:
    """Return what this torch lacks of what is needed to follow its schedules."""
    wanted = [(owner, title, name) for owner, title, names in _NEEDED for name in names]
    return [f"{title}.{name}" for owner, title, name in wanted if not callable(getattr(owner, name, None))]


def stages_of(schedule: Any) -> Sequence[Any]:
    """Return the stages of a schedule on this rank."""
    several = getattr(schedule, "_stages", None)
    return [schedule._stage] if several is None else list(several)


def class_name(schedule: Any) -> str:
    """Return the name of a schedule's class; of torch's runtime for orders that are loaded, what that is."""
    name = type(schedule).__name__
    return "own order" if name == "_PipelineScheduleRuntime" else name


def microbatches(schedule: Any) -> int:
    """Return how many micro-batches a schedule cuts a mini-batch into."""
    return int(schedule._n_microbatches)


def computes_loss(schedule: Any) -> bool:
    """Tell whether a schedule computes the loss of each micro-batch right after its last forward."""
    return getattr(schedule, "_loss_fn", None) is not None and hasattr(SCHEDULE, COMPUTES_LOSS)


def last_loss(schedule: Any) -> Any:
    """Return the loss that a schedule has computed last in the call under way; ``None`` if there is none."""
    losses = getattr(schedule, "_internal_losses", None)
    return losses[-1] if losses else None


def kept_of_forward(stage: Any, i: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return what a stage keeps of a micro-batch after its forward: ends of its graph, inputs, outputs.

    From torch 2.15 on, it keeps no outputs that it sends.
    """
    states = getattr(stage, "_forward_chunk_states", None)
    if states is None:
        ends, inputs = stage.fwd_cache.get(i, ((), ()))
        return ends, inputs, ends
    if (state := states.get(i)) is None:
        return (), (), ()
    stays = [end for end, leaves in zip(state.live_outputs, state.releasable, strict=True) if not leaves]
    return state.stage_output_for_backward(), state.input_values, stays


def has_backward(schedule: Any) -> bool:
    """Tell whether a call of a schedule's ``step`` trains; its ``eval`` calls that, too."""
    return bool(getattr(schedule, "_has_backward", getattr(schedule, "_loss_fn", None) is not None))


def batch_dim(schedule: Any) -> int:
    """Return the dimension along which the first argument is cut."""
    chosen = getattr(schedule, "_args_chunk_spec", None)
    dim = getattr(chosen[0], "split_dim", 0) if chosen else 0
    return dim if isinstance(dim, int) else 0


def peer_rank(stage: Any, index: int) -> int:
    """Return the rank, in the group of the pipeline, that has the stage of this number."""
    return int(stage.stage_index_to_group_rank[index])
