"""The code of the specifications runs as it stands, and does what the text around it says."""

from __future__ import annotations

import doctest
import logging
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torchgpipe
from torch import Tensor, nn
from torch.nn import functional as F

from support.spec import document

GUIDE, LAYERS, FORWARD = "gpipe-user-guide.rst", "layer-logging.md", "forward-pass.md"
TEXTS = {name: document(name) for name in (GUIDE, LAYERS, FORWARD)}
PYTHON_BLOCKS = {GUIDE: 14, LAYERS: 5, FORWARD: 6}

NOT_RUN = {
    (GUIDE, 6): "marked as failing; nn.Sequential(..., MyModule(), ...) is a fragment",
    (GUIDE, 12): "marked as failing: the micro-batches overwrite each other's skip_buf",
    (FORWARD, 1): "excerpt from pipeline.py with (input, partition=partition, ...), which is not Python",
    (FORWARD, 3): "excerpt from worker.py whose last line is a comment where a statement must be",
    (FORWARD, 5): "fragment: return outside of a function",
}

MODES = ["always", "except_last", "never"]


def literal_blocks(text: str) -> list[str]:
    """Return the literal blocks of a reStructuredText: what is indented below a paragraph that ends with ``::``."""
    blocks, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if not line.endswith("::") or line.lstrip().startswith(".."):
            continue
        indent = len(line) - len(line.lstrip())
        block = []
        for below in lines[number + 1 :]:
            if below.strip() and len(below) - len(below.lstrip()) <= indent:
                break
            block.append(below)
        blocks.append(textwrap.dedent("\n".join(block)).strip("\n"))
    return blocks


def fences(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a Markdown text that are marked with ``language``."""
    return [code for mark, code in re.findall(r"^```(.*?)\n(.*?)^```$", text, re.M | re.S) if mark == language]


def python_blocks(file: str) -> list[str]:
    return literal_blocks(TEXTS[file]) if file.endswith(".rst") else fences(TEXTS[file], "python")


def example_outputs() -> list[list[str]]:
    return [block.splitlines() for block in fences(TEXTS[LAYERS], "")]


def layers(count: int) -> dict[str, nn.Module]:
    """Return ``layer1``, ``layer2``, ... of 4 features, in double precision."""
    torch.manual_seed(0)
    return {f"layer{k}": nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for k in range(1, count + 1)}


def five_layers() -> list[nn.Module]:
    return [nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]


COMMON = {
    "__name__": "block",
    "torch": torch,
    "nn": nn,
    "F": F,
    "Tensor": Tensor,
    "Tuple": tuple,
    "Dict": dict,
    "GPipe": torchgpipe.GPipe,
    "is_recomputing": torchgpipe.is_recomputing,
}


def layers_and_input() -> dict[str, Any]:
    return layers(8) | {"input": torch.rand(16, 4, dtype=torch.float64, requires_grad=True)}


def linear_and_relu() -> dict[str, Any]:
    numbered = {f"layer{k}": layer for k, layer in enumerate(five_layers(), 1)}
    return numbered | {"data_loader": [torch.rand(8, 100)], "input": torch.rand(8, 100)}


# The names that the reader of a block is to think of.
PRESUPPOSED: dict[tuple[str, int], Callable[[], dict[str, Any]]] = {
    (GUIDE, 1): lambda: {name: nn.Linear(4, 4) for name in "abcd"} | {"data_loader": [torch.rand(16, 4)] * 2},
    # Without parameters, so that the GPUs need not be there.
    (GUIDE, 2): lambda: {"model": nn.Sequential(*(nn.ReLU() for _ in range(4)))},
    (GUIDE, 3): lambda: {
        "model": torchgpipe.GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), [1, 1], chunks=2),
        "data_loader": [(torch.rand(8, 4), torch.randint(3, (8,)))] * 2,
    },
    (GUIDE, 4): lambda: {"model": nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(147, 8), nn.ReLU())},
    (GUIDE, 8): layers_and_input,
    (GUIDE, 9): layers_and_input,
    (GUIDE, 10): lambda: {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))},
    (GUIDE, 11): layers_and_input,
    (GUIDE, 13): layers_and_input,
    (LAYERS, 2): linear_and_relu,
    (LAYERS, 3): linear_and_relu,
    (FORWARD, 6): lambda: {"model": nn.Sequential(*five_layers()), "input": torch.rand(8, 100)},
}


def run(file: str, ordinal: int, **more: Any) -> dict[str, Any]:
    """Run a block verbatim and return its names."""
    names = COMMON | PRESUPPOSED.get((file, ordinal), dict)() | more
    exec(compile(python_blocks(file)[ordinal - 1], f"{file}, block {ordinal}", "exec"), names)
    return names


@contextmanager
def fresh_logging() -> Iterator[None]:
    """Let the root and torchgpipe loggers look as in a new process, and put them back afterwards."""
    changed = [logging.getLogger(name) for name in (None, "torchgpipe")]
    before = [(logger.handlers[:], logger.level) for logger in changed]
    changed[0].setLevel(logging.WARNING)
    changed[0].handlers.clear()
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(changed, before, strict=True):
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers[:] = handlers
            logger.setLevel(level)


def expected_lines(partition: list[tuple[str, str]], j: int, chunks: int, stop: int) -> list[str]:
    lines = []
    for i in range(chunks):
        lines.append(f"INFO - Micro-batch {i} (partition {j}): checkpoint_stop={stop}, using_checkpointing={i < stop}")
        lines += [f"DEBUG - Executing layer '{name}' in partition {j}: {kind}" for name, kind in partition]
    return lines


def lines_of(text: str, j: int) -> list[str]:
    """Return the lines about partition j, from their level on."""
    return [re.sub(r"^.*?(?=(DEBUG|INFO) )", "", line) for line in text.splitlines() if f"partition {j}" in line]


FIVE = [("0", "Linear"), ("1", "ReLU"), ("2", "Linear"), ("3", "ReLU"), ("4", "Linear")]


@pytest.mark.parametrize(("file", "count"), PYTHON_BLOCKS.items())
def test_every_block_is_found(file, count):
    """The specification has as many Python blocks as one counts by eye."""
    assert len(python_blocks(file)) == count


def test_blocks_not_run_cannot_run_or_are_said_to_fail():
    """The table of exceptions names real blocks, and only those that are no Python, or that the text says fail."""
    for file, ordinal in NOT_RUN:
        source = python_blocks(file)[ordinal - 1]
        if "FAIL" not in source:
            with pytest.raises(SyntaxError):
                compile(source, file, "exec")


@pytest.mark.parametrize(
    ("file", "ordinal"),
    [
        pytest.param(file, ordinal, id=f"{file}-{ordinal}")
        for file, count in PYTHON_BLOCKS.items()
        for ordinal in range(1, count + 1)
        if (file, ordinal) not in NOT_RUN and (file, ordinal) != (GUIDE, 5)  # a session, see below
    ],
)
def test_block_runs(file, ordinal, monkeypatch, tmp_path):
    """A block that is not in the table of exceptions runs."""
    monkeypatch.chdir(tmp_path)
    with fresh_logging():
        run(file, ordinal)


def test_int_devices_are_gpus():
    """Guide: devices=[4, 5, 6, 7] puts the partitions on these GPUs."""
    assert run(GUIDE, 2)["mode"].devices == [torch.device("cuda", index) for index in (4, 5, 6, 7)]


def test_training_loop_gives_gradients_and_moves_input_and_target():
    """Guide: with input on devices[0] and target on devices[-1], backward reaches every parameter."""
    names = run(GUIDE, 3)
    assert (names["in_device"], names["out_device"]) == (names["model"].devices[0], names["model"].devices[-1])
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_automatic_balance_covers_the_model():
    """Guide: balance_by_time(model, sample, partitions=4) gives four partitions that hold every layer."""
    names = run(GUIDE, 4)
    assert len(names["balance"]) == 4
    assert sum(names["balance"]) == len(names["model"])


def test_resnet_session_ends_with_the_error_it_shows(monkeypatch):
    """Guide: wrapping a model that is not sequential raises the TypeError shown."""
    resnet = types.ModuleType("torchvision.models.resnet")
    exec("from torch import nn\nclass ResNet(nn.Module): pass\nresnet101 = ResNet", resnet.__dict__)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchvision.models.resnet", resnet)

    names = dict(COMMON)
    *steps, last = doctest.DocTestParser().get_examples(python_blocks(GUIDE)[4])
    for step in steps:
        value = names["_"] = eval(step.source, names) if step.want else exec(step.source, names)
        if step.want:
            assert f"{value.__module__}.{value.__name__}" == step.want.strip()
    with pytest.raises(TypeError) as caught:
        exec(last.source, names)
    assert f"TypeError: {caught.value}" == last.want.splitlines()[-1].strip()


def test_layer_with_several_arguments_fails():
    """Guide: a layer that takes three arguments cannot be called with one, and the error says where it was."""
    source = python_blocks(GUIDE)[5].partition("\n\n")[0]
    names = dict(COMMON)
    exec(source, names)
    model = torchgpipe.GPipe(nn.Sequential(nn.ReLU(), names["MyModule"]()), [1, 1], chunks=2)
    with pytest.raises(TypeError, match="missing 2 required positional arguments") as caught:
        model(torch.rand(4, 2))
    assert any("partition 1, layer '1', micro-batch 0" in note for note in caught.value.__notes__)


class Give(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, input):
        return self.give(input)


def test_tensor_or_tuple_of_tensors_may_pass_between_layers():
    """Guide: Tensor -> Tuple[Tensor, Tensor] -> Tensor is fine, also across partitions."""
    model = torchgpipe.GPipe(
        nn.Sequential(Give(lambda x: (x, 2 * x)), Give(lambda xs: xs[0] + xs[1])), [1, 1], chunks=2
    )
    input = torch.rand(4, 2)
    assert torch.equal(model(input), 3 * input)


@pytest.mark.parametrize("give", [lambda x: {"x": x}, lambda x: (x, "label")], ids=["dict", "tuple with str"])
def test_other_outputs_are_errors(give):
    """Guide: Dict[str, Tensor] and Tuple[Tensor, str] are errors."""
    model = torchgpipe.GPipe(nn.Sequential(Give(give), Give(lambda x: x)), [1, 1], chunks=2)
    with pytest.raises(TypeError, match="must be a Tensor or a tuple of Tensors"):
        model(torch.rand(4, 2))


def test_other_inputs_are_errors():
    """Guide: (Tensor, str) is an error as input too."""
    model = torchgpipe.GPipe(nn.Sequential(Give(lambda x: x)), [1], chunks=2)
    with pytest.raises(TypeError, match="item 1 of the tuple is str"):
        model((torch.rand(4, 2), "label"))


def gradients(output: Tensor, names: dict[str, Any], count: int) -> list[Tensor]:
    """Return the gradients of the input and of ``layer1`` to ``layer<count>``."""
    parameters = [p for k in range(1, count + 1) for p in names[f"layer{k}"].parameters()]
    return list(torch.autograd.grad(output.square().sum(), [names["input"], *parameters]))


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("checkpoint", MODES)
def test_skip_as_tuple_equals_the_plain_model(checkpoint):
    """Guide: a skip that travels as a second tensor gives the output and gradients of the plain code."""
    names = run(GUIDE, 9)
    for k, layer in enumerate(names["model"], 1):
        layer.inner = names[f"layer{k}"]  # the guide's layers are globals; a model owns its parameters
    names = run(GUIDE, 10, **names)
    names["model"].checkpoint = checkpoint
    plain = run(GUIDE, 8, **names)["output"]
    output = names["model"](names["input"])
    assert_same([output, *gradients(output, names, 3)], [plain, *gradients(plain, names, 3)])


@pytest.mark.parametrize("memory", [dict, weakref.WeakKeyDictionary])
@pytest.mark.parametrize("balance", [[1] * 8, [3, 5]], ids=str)
@pytest.mark.parametrize("checkpoint", MODES)
def test_long_skip_by_microbatch_equals_the_plain_model(checkpoint, balance, memory):
    """Guide: current_microbatch() is a dictionary key and the target of a weak reference, whatever is checkpointed."""
    names = run(GUIDE, 13)
    assert names["skips"] == {}
    names["skips"] = memory()
    folded = [Give(names[f"layer{k}"]) for k in range(2, 8)]
    model = nn.Sequential(names["Layer1"](), *folded, names["Layer8"]())
    model[0].inner, model[7].inner = names["layer1"], names["layer8"]
    model = torchgpipe.GPipe(model, balance, chunks=8, checkpoint=checkpoint)
    plain = run(GUIDE, 11, **names)["output"]
    expected = [plain, *gradients(plain, names, 8)]
    for _ in range(2):
        output = model(names["input"])
        assert len(names["skips"]) == 0
        assert_same([output, *gradients(output, names, 8)], expected)


@pytest.mark.parametrize("checkpoint", MODES)
def test_counter_counts_each_microbatch_once(checkpoint):
    """Guide: a layer that asks is_recomputing() counts once a micro-batch."""
    counter = run(GUIDE, 14)["Counter"]()
    model = torchgpipe.GPipe(
        nn.Sequential(nn.Linear(2, 2), counter, nn.Linear(2, 2)), [2, 1], chunks=4, checkpoint=checkpoint
    )
    for step in range(1, 4):
        model(torch.rand(8, 2)).sum().backward()
        assert counter.counter == 4 * step


def test_counter_counts_once_beside_a_layer_that_asks_for_the_microbatch():
    """Guide: once a micro-batch, also where a later layer of the partition calls current_microbatch()."""
    counter = run(GUIDE, 14)["Counter"]()
    asking = Give(lambda x: (torchgpipe.current_microbatch(), x)[1])
    model = torchgpipe.GPipe(nn.Sequential(nn.Linear(2, 2), counter, asking), [3], chunks=4, checkpoint="always")
    model(torch.rand(8, 2)).sum().backward()
    assert counter.counter == 4


def test_layer_lines_per_partition(capsys):
    """Layer logging, method 1: each partition logs its micro-batch, then its layers in order, every line once."""
    with fresh_logging():
        names = run(LAYERS, 2)
        text = capsys.readouterr().err
        names["model"](torch.rand(8, 100))
        assert "DEBUG" not in capsys.readouterr().err  # the hooks are gone
    assert lines_of(text, 0) == expected_lines(FIVE[:2], 0, chunks=4, stop=3)
    assert lines_of(text, 1) == expected_lines(FIVE[2:], 1, chunks=4, stop=3)


def test_layer_lines_are_those_of_the_example(capsys):
    """Layer logging: without checkpointing, the lines of the first micro-batch are the example output."""
    with fresh_logging():
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s - %(message)s")
        model = torchgpipe.GPipe(nn.Sequential(*five_layers()), balance=[2, 3], chunks=4, checkpoint="never")
        torchgpipe.register_layer_logging_hooks(model.partitions)
        model(torch.rand(8, 100))
    text = capsys.readouterr().err
    example = example_outputs()[0]
    assert example == lines_of(text, 0)[:3] + lines_of(text, 1)[:4]


def test_partition_lines_alone(capsys):
    """Layer logging, method 2: at INFO there is one line for every micro-batch and partition, and nothing else."""
    with fresh_logging():
        run(LAYERS, 3)
    text = capsys.readouterr().err
    for j in range(2):
        assert lines_of(text, j) == expected_lines([], j, chunks=4, stop=3)
    assert len(text.splitlines()) == 8


def test_partition_lines_are_those_of_the_example(capsys):
    """Layer logging: the lines of the second example output come, in the order of each partition."""
    with fresh_logging():
        logging.basicConfig(level=logging.INFO, format="%(levelname)s - %(message)s")
        torchgpipe.GPipe(nn.Sequential(*five_layers()), [2, 3], chunks=4).eval()(torch.rand(8, 100))
    text = capsys.readouterr().err
    for j, count in enumerate((2, 1)):
        assert lines_of(text, j)[:count] == lines_of("\n".join(example_outputs()[1]), j)


def test_log_file(capsys, monkeypatch, tmp_path):
    """Layer logging, to a file: the file gets every line once, the console errors only."""
    monkeypatch.chdir(tmp_path)
    with fresh_logging():
        run(LAYERS, 4)
        model = torchgpipe.GPipe(nn.Sequential(*five_layers()), [2, 3], chunks=4)
        torchgpipe.register_layer_logging_hooks(model.partitions)
        model(torch.rand(8, 100))
    text = (tmp_path / "layer_execution.log").read_text()
    assert lines_of(text, 0) == expected_lines(FIVE[:2], 0, chunks=4, stop=3)
    assert lines_of(text, 1) == expected_lines(FIVE[2:], 1, chunks=4, stop=3)
    assert capsys.readouterr().err == ""


def test_complete_script(capsys):
    """Layer logging, complete script: ten epochs, each with its lines; a recomputed layer is logged again."""
    with fresh_logging():
        names = run(LAYERS, 5)
    printed, logged = capsys.readouterr()
    assert [line.split(",")[0] for line in printed.splitlines()] == [f"Epoch {epoch}" for epoch in range(10)]
    assert names["model"].balance == [2, 2, 1]
    assert logged.count("INFO - Micro-batch") == 10 * 4 * 3
    for name, kind in FIVE:
        assert logged.count(f"DEBUG - Executing layer '{name}' in partition {int(name) // 2}: {kind}\n") == 10 * (4 + 3)


def test_forward_pass_lines(capsys):
    """Forward pass: the lines in the comments of the example come, once a micro-batch, with basicConfig's format."""
    with fresh_logging():
        run(FORWARD, 6)
    text = capsys.readouterr().err
    shown = re.findall(r"# DEBUG: (Executing .*)", python_blocks(FORWARD)[5])
    assert len(shown) == 3
    for line in shown:
        assert text.count(f"DEBUG:pipesight.pipeline:{line}\n") == 4


def test_partition_is_the_loop_over_its_layers():
    """Forward pass: a partition called by itself runs its layers one after the other."""
    names = run(FORWARD, 4)
    input = torch.rand(3, 100)
    first = names["model"].partitions[0]
    assert torch.equal(first(input), first[1](first[0](input)))
