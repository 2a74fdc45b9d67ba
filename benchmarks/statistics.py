"""The cost of statistics: of a large tensor, of a call, over ranks, and of a training step that is watched."""

import importlib.util
import sys
from pathlib import Path

import torch

from benchmarks.harness import Contender, Options, Outcome, measure
from benchmarks.job import Job
from benchmarks.loggers import CALLS, MANY, TENSORS
from benchmarks.tables import Goal, Quantity, show, show_goals

__all__ = ["run"]

STEPS_SECONDS = 5.0  # 20 steps and more, so that two of each ten are the watched ones
MICROSECONDS = Quantity("µs per call", lambda turn: turn.seconds * 1e6 / CALLS)


def run(options: Options) -> bool:
    """Measure; return whether no contender crashed."""
    sound = True
    compiled = ["pipesight+numba"] if importlib.util.find_spec("numba") else []
    for dtype, limit in (("float32", 2.5), ("bfloat16", 6.0)):
        names = [f"{who} {dtype}" for who in ("sum", "pipesight", *compiled, "nvdlfw")]
        outcomes = take(options, names, rounds=11, seconds=0.1)
        title = f"Six statistics of 16M numbers, {dtype}, one thread"
        sound &= show(title, outcomes, reference=f"sum {dtype}", kind="cost")
        show_goals(
            outcomes, [Goal(f"{who} {dtype}", f"sum {dtype}", "cost", limit) for who in compiled or ["pipesight"]]
        )
    for what in ("selected", "unselected", "off"):
        outcomes = take(options, [f"{who} {what}" for who in ("nvdlfw", "pipesight")], rounds=11, seconds=0.05)
        title = f"A call for a tensor of 64 x 64, one of 100 layers: {what}"
        sound &= show(title, outcomes, reference=f"nvdlfw {what}", kind="cost", quantity=MICROSECONDS)
    outcomes = take(options, ["nvdlfw ranks", "pipesight ranks"], rounds=9, seconds=2.0)
    sound &= show("16M numbers on each of two gloo ranks, merged", outcomes, reference="nvdlfw ranks", kind="speed")
    show_goals(outcomes, [Goal("pipesight ranks", "nvdlfw ranks", "speed", 10.0)])
    names = ["train demo", "watched demo", "seldom demo", "watched modules"]
    outcomes = take(options, names, rounds=21, seconds=0.5)
    title = "A training step of the demo's model; activations of all layers, at each step and at each tenth, or modules"
    sound &= show(title, outcomes, reference="train demo", kind="cost")
    show_goals(outcomes, [Goal("watched demo", "train demo", "cost", 1.05)])
    return sound & (not torch.cuda.is_available() or on_gpu(options))


def on_gpu(options: Options) -> bool:
    sound = True
    for exponent in (30, 28, 20):
        for dtype, limit in (("float32", 1.15), ("bfloat16", 1.35)):
            what = f"{dtype}:{exponent}"
            outcomes = take(options, [f"{who} {what}" for who in ("sum", "pipesight", "six")], rounds=9, seconds=0.1)
            sound &= show(
                f"GPU: all moments of {TENSORS} tensors of 2^{exponent} numbers",
                outcomes,
                reference=f"sum {what}",
                kind="cost",
            )
            if exponent > 20:
                show_goals(outcomes, [Goal(f"pipesight {what}", f"sum {what}", "cost", limit)])
    found = [("gpt", how) for how in ("plain", "large", "piped", "compiled")]
    if importlib.util.find_spec("transformers") is not None:
        found += [("gpt2", "plain"), ("gpt2", "any_model")]
    for model, how in found:
        sound &= on_gpt(options, f"{model}:{how}")
    outcomes = take(options, [f"{who} many:12" for who in ("sum", "pipesight", "together")], rounds=9, seconds=0.05)
    sound &= show(f"GPU: {MANY} tensors of 2^12 numbers", outcomes, reference="sum many:12", kind="cost")
    return sound


def on_gpt(options: Options, what: str) -> bool:
    names = {"gpt": "a GPT", "gpt2": "GPT-2 of transformers"}
    model, _, how = what.partition(":")
    outcomes = take(
        options, [f"{who} {what}" for who in ("train", "watched", "seldom")], rounds=9, seconds=STEPS_SECONDS
    )
    title = f"GPU: a training step of {names[model]}, 124M parameters, bfloat16, {how}; activations and gradients"
    sound = show(
        f"{title} of all modules, at each step and at each tenth", outcomes, reference=f"train {what}", kind="cost"
    )
    limits = {"watched": 1.10, "seldom": 1.02}
    show_goals(outcomes, [Goal(f"{who} {what}", f"train {what}", "cost", limit) for who, limit in limits.items()])
    return sound


def job(name: str) -> Job:
    return Job(engine="statistics", workload=name, device="cuda:0" if ":" in name else "cpu")


def take(options: Options, names: list[str], *, rounds: int, seconds: float) -> list[Outcome]:
    here = Path(sys.executable)
    contenders = [Contender(name, job(name), options.peers if name.startswith("nvdlfw") else here) for name in names]
    return measure(contenders, rounds=options.rounds(rounds), turn_seconds=options.turn_seconds(seconds))
