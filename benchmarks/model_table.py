"""The table of docs/any-model-table.md: which models can be cut in two as they are, by pipesight and by torch.

Usage: python -m benchmarks.model_table [--only NAME ...]

The models are those that the tests run, of tests/zoo. For each:

- pipesight: `Pipeline(model, cuts=[...])` runs a mini-batch forward and backward; outputs and every gradient are
  compared with those of the plain model fed the same micro-batches.
- `torch.distributed.pipelining.pipeline()` captures the model for the same cut, as it is and with `use_cache=False`;
  what it captured runs another micro-batch forward and backward, and is compared with the plain model, too.
- stages written by hand: the lines of the model's own forward functions that the cut goes through. They are what is
  written anew, as nothing smaller can begin and end there.
"""

import argparse
import ast
import copy
import importlib
import inspect
import logging
import platform
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import ROOT

__all__ = ["PAGE", "main"]

PAGE = ROOT / "docs" / "any-model-table.md"
FIX = "config.use_cache = False"

INTRODUCTION = """\
<!-- Written by `python -m benchmarks.model_table`. Do not edit. -->

# Models that can be cut as they are

Each model is unmodified, in training mode, and called as its users call it: padded batches, keyword arguments, its own
loss. It is cut in two at the module in the second column. `make test` runs all of them in 2 and 4 partitions, and over
2 ranks.

- **pipesight**: `pipesight.Pipeline(model, cuts=[cut], chunks=3)`; the figure is the largest difference of a gradient
  from the plain model fed the same micro-batches, relative to the largest number of that gradient.
- **pipelining**: `torch.distributed.pipelining.pipeline(model, args, kwargs, split_spec={cut: ...})`, which captures a
  graph. Where it fails as it is, it is tried again with `config.use_cache = False`.
- **by hand**: the lines of the model's own `forward` functions that the cut goes through, and that a user writes anew
  as stages. With pipesight it is the one line above.
"""


def main(arguments: list[str]) -> int:
    """Write the page; return 1 if pipesight fails on a model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_table", description="Write the table of models.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="print the rows of these models, and write nothing")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests"))
    entries = [entry for entry in importlib.import_module("zoo").ZOO if not chosen.only or entry.name in chosen.only]
    if unknown := set(chosen.only or ()) - {entry.name for entry in entries}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    rows, works, captured, fixed = [], 0, 0, 0
    for entry in entries:
        ours, theirs = _attempt(_piped, entry), _attempt(_captured, entry)
        works += ours.startswith("works")
        captured += theirs == "works"
        lines = lines_by_hand(entry.build(), entry.cuts[1])
        if theirs != "works" and hasattr(getattr(entry.build(), "config", None), "get_text_config"):
            again = _attempt(lambda one: _captured(one, use_cache=False), entry)
            fixed += again == "works"
            if again != theirs:
                theirs += f"; with `{FIX}`: {again}"
        rows.append(f"| {entry.name} | `{entry.cuts[1]}` | {ours} | {theirs} | {lines} |")
        print(rows[-1], flush=True)
    summary = (
        f"pipesight: {works} of {len(rows)}. pipelining: {captured} of {len(rows)} as they are, {fixed} more with "
        f"`{FIX}`."
    )
    print(summary)
    if chosen.only is None:
        versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
        versions += [f"{name} {importlib.import_module(name).__version__}" for name in ("transformers", "timm")]
        head = ["", summary, "", f"Measured with {', '.join(versions)}.", ""]
        head += ["| model | cut | pipesight | pipelining | by hand |", "|---|---|---|---|---:|"]
        PAGE.write_text("\n".join([INTRODUCTION.rstrip(), *head, *rows, ""]), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(works < len(rows))


def _attempt(run: Callable[[Any], str], entry: Any) -> str:
    """Return what is found of an engine, or its error."""
    try:
        return run(entry)
    except Exception as error:
        return _said(error)


def _said(error: BaseException) -> str:
    """Return the first sentence of an error, of the one that caused it."""
    cause = error.__cause__
    if cause is not None and str(cause).strip():
        return _said(cause)
    first = re.split(r"(?<=[.!]) ", str(error).strip().splitlines()[0])[0] if str(error).strip() else "no message"
    text = first if len(first) <= 160 else f"{first[:160].rsplit(' ', 1)[0]} …"
    return f"{type(error).__name__}: {text}".replace("|", "/").replace("<", "&lt;")


def _piped(entry: Any) -> str:
    """Run a mini-batch through a pipeline of two partitions."""
    import pipesight

    reference, zoo = importlib.import_module("zoo.reference"), importlib.import_module("zoo")
    model, call = entry.build(), entry.batch()
    truth = reference.plain_microbatches(entry, model, call)
    pipe = pipesight.Pipeline(model, [entry.cuts[1]], chunks=zoo.CHUNKS, **entry.options)
    ours = reference.piped(pipe, call)
    reference.assert_same(ours, truth)
    return f"works ({reference.worst_gradient(ours, truth)[0]:.0e})"


def _captured(entry: Any, use_cache: bool | None = None) -> str:
    """Capture a model with its first micro-batch, and run the second one."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    reference = importlib.import_module("zoo.reference")
    model = entry.build()
    if use_cache is not None:
        model.config.get_text_config().use_cache = use_cache
    (args, kwargs), other, *_ = reference.micro_batches(entry, entry.batch())
    pipe = pipeline(copy.deepcopy(model), tuple(args), kwargs, split_spec={entry.cuts[1]: SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        return f"captured, but cut into {pipe.num_stages}"
    # The forward() of what is returned detaches what goes from one stage to the next.
    try:
        found = torch.fx.Interpreter(pipe.split_gm).run(*other[0], *other[1].values())
    except Exception as error:
        return f"captured, but does not run: {_said(error)}"
    expected = model(*other[0], **other[1])
    (found[0] if entry.items else reference.objective(found)).backward()
    reference.objective(expected).backward()
    difference = _gradient_difference(model, pipe)
    return "works" if difference <= reference.RELATIVE else f"captured, but gradients differ by {difference:.0e}"


def _gradient_difference(model: nn.Module, pipe: nn.Module) -> float:
    """Return by how much gradients differ at most; copies of one parameter, such as of tied weights, are added up."""
    canonical = {}
    by_id: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical[name] = by_id.setdefault(id(parameter), name)
    sums: dict[str, Tensor] = {}
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            own = canonical[re.sub(r"^split_gm\.submod_pp_\d+\.", "", name)]
            sums[own] = sums[own] + parameter.grad if own in sums else parameter.grad
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    worst = 0.0
    for name, parameter in model.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = (sums.get(name, torch.zeros_like(truth)) - truth).abs().max().item()
        worst = max(worst, difference / (truth.abs().max().item() + 0.03 * largest))
    return worst


def lines_by_hand(model: nn.Module, cut: str) -> int:
    """Count the lines of the functions on the way from the model's forward to the module it is cut at."""
    modules, names = dict(model.named_modules()), cut.split(".")
    found: dict[str, int] = {}
    for depth, attribute in enumerate(names):
        kind = type(modules[".".join(names[:depth])])
        if issubclass(kind, nn.ModuleList):
            continue
        for name in dir(kind):
            if name == "forward" or (name.startswith("forward_") and hasattr(kind, name)):
                function = inspect.unwrap(getattr(kind, name))
                lines, used = _lines(function)
                if name == "forward" or attribute in used:
                    found[function.__qualname__] = lines
    return sum(found.values())


def _lines(function: Callable[..., Any]) -> tuple[int, set[str]]:
    """Count the lines of a function that have code; return the attributes that it uses, too."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    lines = {line for node in nodes if isinstance(node, ast.stmt | ast.expr) for line in (node.lineno, node.end_lineno)}
    return len(lines), {node.attr for node in nodes if isinstance(node, ast.Attribute)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
