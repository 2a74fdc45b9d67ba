"""The cut of a plan in the formats of other programs, which are read back by what they mean there."""

from __future__ import annotations

import re

import pytest
from torch import nn

from pipesight.analysis.plan_outcome import Outcome
from pipesight.plan import Costs, Layer, Setting, best_plans, predict
from pipesight.plan.large_layers import large_layer
from pipesight.view.plan_formats import plan_as
from pipesight.view.plan_table import notes_on

NAMES = ["embed", *(f"layers.{k}" for k in range(6)), "norm", "head"]


def costs(names=NAMES, head=1.0):
    return Costs(tuple(Layer(name, head if name == "head" else 1.0, head if name == "head" else 2.0) for name in names))


def planned(schedule="1f1b", balance=(3, 4, 2), rounds=1, names=NAMES):
    setting = Setting(schedule, len(balance) // rounds, 8, "never", rounds)
    return costs(names), predict(costs(names), setting, balance)


def test_torchtitan():
    """It is Python: names of modules for each stage, and a schedule that torch knows by name, or the path of a file."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    def read(*given, file=None):
        found = eval(f"dict({plan_as('torchtitan', *given, file=file)})", {"ParallelismConfig": dict})["parallelism"]
        return found, schedules.get_schedule_class(found["pipeline_parallel_schedule"]).__name__

    found, schedule = read(*planned())
    assert found["module_fqns_per_model_part"] == [NAMES[:3], NAMES[3:7], NAMES[7:]]
    assert (found["pipeline_parallel_degree"], found["num_pp_microbatches"], schedule) == (3, 8, "Schedule1F1B")
    assert read(*planned("zbv-zero-bubble", (2, 2, 2, 3), 2))[1] == "ScheduleZBVZeroBubble"
    found, schedule = read(*planned(), file="mine.csv")
    assert (found["pipeline_parallel_schedule_csv"], schedule) == ("mine.csv", "PipelineScheduleMulti")
    # Of a file, the name says only that stages lie in a V.
    assert read(*planned("v-min", (2, 2, 2, 3), 2), file="mine.csv")[1] == "ScheduleZBVZeroBubble"
    with pytest.raises(ValueError, match="no class for the schedule v-min"):
        plan_as("torchtitan", *planned("v-min", (2, 2, 2, 3), 2))
    with pytest.raises(ValueError, match=r"named transformer\.h\.0"):
        plan_as("torchtitan", *planned(names=["embed", *(f"transformer.h.{k}" for k in range(6)), "norm", "head"]))


def unfolded(layout):
    """Return the symbols of each stage of a Megatron layout."""
    return [re.sub(r"t\*(\d+)", lambda found: "t" * int(found[1]), stage) for stage in layout.split("|")]


def test_megatron():
    """The layout has all transformer layers, the embedding in the first stage and the loss in the last."""
    text = plan_as("megatron", *planned())
    assert "--pipeline-model-parallel-size 3" in text
    assert unfolded(re.search(r'layout "(.*)"', text)[1]) == ["Ett", "tttt", "L"]
    text = plan_as("megatron", *planned("interleaved", (2, 2, 2, 3), 2))
    assert "--pipeline-model-parallel-size 2" in text
    assert unfolded(re.search(r'layout "(.*)"', text)[1]) == ["Et", "tt", "tt", "tL"]
    text = plan_as("megatron", *planned(balance=(2, 2, 2, 3)))
    assert "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1" in text
    with pytest.raises(ValueError, match="no schedules in a V"):
        plan_as("megatron", *planned("dualpipev", (2, 2, 2, 3), 2))
    with pytest.raises(ValueError, match=r"names such as layers\.3"):
        plan_as("megatron", *planned(names=[*"abcdefghi"]))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
def test_torch_splits_there():
    """The code splits a model where the plan does, as torch's own `pipeline` understands it."""
    import torch

    if not hasattr(pytest.importorskip("torch.distributed.pipelining.schedules"), "ScheduleDualPipeV"):
        pytest.skip("this torch cannot split an nn.Sequential whose layers are referred to by index")
    names = [str(k) for k in range(5)]
    text = plan_as("torch", *planned(balance=(2, 1, 2), names=names))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in names))
    found = {"model": model, "example_args": (torch.ones(2, 4),)}
    exec(text, found)
    pipe = found["pipe"]
    assert pipe.num_stages == 3
    weights = [sorted(name.split(".")[0] for name in pipe.get_stage_module(s).state_dict()) for s in range(3)]
    assert weights == [["0", "0", "1", "1"], ["2", "2"], ["3", "3", "4", "4"]]
    assert "Schedule1F1B" in text
    assert "[[0, 3], [1, 2]]" in plan_as("torch", *planned("v-half", (2, 2, 2, 3), 2))


def test_a_head_that_is_too_large():
    """If a layer alone takes more than a partition's share, a note says so, and what splitting it gives is kept."""
    large = costs(head=8.0)
    (plan,) = best_plans(large, [Setting("1f1b", 4, 16, "never")])
    found = large_layer(large, plan)
    assert found is not None
    assert (found.name, found.fair) == ("head", 0.25)
    assert found.share == pytest.approx(16 / (16 + 24))
    halves = [Layer(f"head{k}", 8.0 / found.parts, 8.0 / found.parts) for k in range(found.parts)]
    split = Costs((*large.layers[:-1], *halves))
    (better,) = best_plans(split, [plan.setting])
    assert better.step_seconds == pytest.approx(found.step_seconds)
    assert found.gain == pytest.approx(1 - better.step_seconds / plan.step_seconds)
    assert any("layer 'head' takes 40%" in note for note in notes_on(Outcome(large, [plan]), [plan]))
    assert large_layer(costs(), predict(costs(), Setting("1f1b", 2, 8, "never"), [4, 5])) is None
