"""GPipe as a module: what it is made of, what it is called, what it loads, and what it refuses."""

from __future__ import annotations

import copy
import importlib
import io
import re
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from pipesight import GPipe
from pipesight.balance import balance_by_time
from support.against_plain import mlp, modes, rand


def named_model():
    """Return a model with layers that have names, parameters, buffers and layers inside."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 3),
            norm=nn.BatchNorm1d(3),
            block=nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
            last=nn.Linear(3, 3, bias=False),
        )
    )


def changed(model):
    """Return a copy whose parameters and buffers all have other values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    return other


def assert_same_values(state, other):
    assert list(state) == list(other)
    for key in state:
        assert torch.equal(state[key], other[key]), key


# What it is made of.


def test_attributes():
    """The arguments can be read from the model, the devices as torch.device."""
    pipe = GPipe(mlp(), (1, 3), devices=["cpu", torch.device("cpu"), "cpu"], chunks=5, checkpoint="never")
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert all(isinstance(device, torch.device) for device in pipe.devices)
    assert pipe.chunks == 5
    assert pipe.checkpoint == "never"
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert [len(partition) for partition in pipe.partitions] == [1, 3]


def test_integers_are_gpus():
    """A device can be the number of a GPU; layers without parameters need none of them."""
    pipe = GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 1], devices=[5, 2])
    assert pipe.devices == [torch.device("cuda:5"), torch.device("cuda:2")]


def test_gpus_are_taken_in_order(monkeypatch):
    """Without devices, partitions take the GPUs there are, from the first on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    pipe = GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 1])
    assert pipe.devices == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_defaults():
    """Without further arguments there is one micro-batch, and all but the last are checkpointed."""
    pipe = GPipe(mlp(), [4])
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")


def test_options_are_keyword_only():
    """Only the module and the balance can be given by position."""
    with pytest.raises(TypeError):
        GPipe(mlp(), [4], ["cpu"])


@pytest.mark.parametrize("balance", [(1, 3), [1, 3], iter([1, 3]), (n for n in (1, 3))])
def test_balance_is_any_iterable(balance):
    """The balance may be a list, a tuple or a generator."""
    assert GPipe(mlp(), balance).balance == [1, 3]


def test_chunks_and_checkpoint_can_be_changed_later():
    """Chunks and checkpoint are read by each forward."""
    pipe = GPipe(mlp(), [2, 2], chunks=2)
    calls = []
    pipe[0].register_forward_hook(lambda *_: calls.append(1))
    pipe.chunks, pipe.checkpoint = 3.0, "always"
    pipe(rand(6, 3)).sum().backward()
    assert len(calls) == 6


def test_chunks_and_checkpoint_are_checked_when_they_are_changed():
    """A wrong value is refused by the assignment, and the old one stays."""
    pipe = GPipe(mlp(), [2, 2], chunks=2)
    with pytest.raises(ValueError, match="sometimes"):
        pipe.checkpoint = "sometimes"
    with pytest.raises(ValueError, match="chunks"):
        pipe.chunks = 0
    with pytest.raises(TypeError, match="chunks"):
        pipe.chunks = 2.5
    assert (pipe.chunks, pipe.checkpoint) == (2, "except_last")


def test_balance_and_devices_cannot_be_changed():
    """Assigning them is an AttributeError with code that builds a new model; changing the lists changes nothing."""
    model = GPipe(mlp(), [2, 2], chunks=2)
    for name, value in (("balance", [1, 3]), ("devices", ["cpu"])):
        with pytest.raises(AttributeError, match=f"{name} of a GPipe cannot be changed.*build a new one") as caught:
            setattr(model, name, value)
    model.balance.append(1)
    model.devices.clear()
    assert (model.balance, model.devices) == ([2, 2], [torch.device("cpu")] * 2)
    code = str(caught.value).partition("build a new one: ")[2]
    code = code.replace("balance=[...]", "balance=[1, 3]").replace("devices=[...]", "devices=['cpu'] * 2")
    other = eval(code, {"GPipe": GPipe, "nn": nn, "model": model})
    assert other.balance == [1, 3]
    assert torch.equal(other(rand(4, 3)), model(rand(4, 3)))


def test_layers_are_the_originals():
    """len, index, negative index and iteration give the layers of the original model, in order."""
    model = mlp()
    layers = list(model)
    pipe = GPipe(model, [1, 2, 1])
    assert len(pipe) == 4
    assert list(pipe) == layers
    assert [pipe[k] for k in range(4)] == layers
    assert [pipe[k] for k in range(-4, 0)] == layers
    assert layers[2] in list(pipe)


@pytest.mark.parametrize("index", [4, -5, 100])
def test_index_out_of_range(index):
    """An index without a layer is an IndexError."""
    with pytest.raises(IndexError):
        GPipe(mlp(), [1, 3])[index]


def test_names():
    """Layers keep their names inside their partition: partitions.J.NAME."""
    pipe = GPipe(named_model(), [2, 2])
    assert [name for name, _ in pipe.named_children()] == ["partitions"]
    assert [name for name, _ in pipe.partitions[0].named_children()] == ["first", "norm"]
    names = [name for name, _ in pipe.named_parameters()]
    assert names[:2] == ["partitions.0.first.weight", "partitions.0.first.bias"]
    assert names[-3:] == ["partitions.1.block.0.weight", "partitions.1.block.0.bias", "partitions.1.last.weight"]
    assert pipe.get_submodule("partitions.1.block.1") is pipe[2][1]


def test_training_mode_of_each_layer_is_kept():
    """The model starts in the mode of the original, and so does each layer, such as a frozen batch norm."""
    assert GPipe(mlp(), [4]).training
    evaluating = GPipe(mlp().eval(), [2, 2])
    assert not any(module.training for module in evaluating.modules())
    model = named_model()
    model.norm.eval()
    model.block[1].eval()
    pipe = GPipe(model, [2, 2])
    assert [layer.training for layer in pipe] == [True, False, True, True]
    assert not pipe[2][1].training


def test_repr_shows_the_layers():
    """The representation shows the partitions and their layers."""
    assert re.search(
        r"\(partitions\).*\(0\).*\(first\): Linear.*\(1\).*\(last\): Linear", repr(GPipe(named_model(), [2, 2])), re.S
    )


def test_children_of_a_sequential_subclass():
    """A subclass of nn.Sequential without a forward of its own is welcome."""

    class Mine(nn.Sequential):
        pass

    x = rand(2, 3)
    assert torch.equal(GPipe(Mine(nn.Identity()), [1])(x), x)


@pytest.mark.parametrize("input", [rand(2, 3), (rand(2, 3), rand(3))])
def test_empty_model_returns_its_input(input):
    """A model without layers gives back the very input."""
    pipe = GPipe(nn.Sequential(), [])
    assert pipe(input) is input
    assert len(pipe) == 0
    assert list(pipe) == []
    assert pipe.devices == []


def test_empty_model_refuses_what_others_refuse():
    """A model without layers does not take what is no tensor either."""
    with pytest.raises(TypeError, match="list"):
        GPipe(nn.Sequential(), [])([rand(2, 3)])


def test_inside_another_module():
    """A pipeline may be a child of an ordinary module that trains."""
    head = nn.Linear(3, 1).double()
    model = nn.Sequential(GPipe(mlp(), [2, 2], chunks=2), head)
    plain = nn.Sequential(mlp(), copy.deepcopy(head))
    model(rand(4, 3)).sum().backward()
    plain(rand(4, 3)).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_saved_whole():
    """torch.save and torch.load of the whole model, after a pass, give a model that works."""
    pipe = GPipe(named_model(), [2, 2], chunks=2, checkpoint="always").double()
    pipe(rand(4, 3)).sum().backward()
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert (other.balance, other.chunks, other.checkpoint, other.devices) == ([2, 2], 2, "always", pipe.devices)
    assert torch.equal(other.eval()(rand(4, 3)), pipe.eval()(rand(4, 3)))


# Its state.


def test_state_dict_keys():
    """The keys of the state are those of the original model under partitions.J."""
    model = named_model()
    keys = list(model.state_dict())
    pipe = GPipe(model, [2, 2])
    places = {"first": 0, "norm": 0, "block": 1, "last": 1}
    assert list(pipe.state_dict()) == [f"partitions.{places[key.split('.')[0]]}.{key}" for key in keys]


@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]])
def test_own_state_is_loaded(balance):
    """A pipeline loads its own state."""
    pipe = GPipe(named_model(), balance)
    state = changed(pipe).state_dict()
    assert pipe.load_state_dict(state, strict=True) == ([], [])
    assert_same_values(pipe.state_dict(), state)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]])
def test_plain_state_is_loaded(balance, strict):
    """A pipeline loads the state of the original model, strictly, and leaves that state as it was."""
    model = named_model()
    state = changed(model).state_dict()
    keys = list(state)
    pipe = GPipe(model, balance)
    assert pipe.load_state_dict(state, strict=strict) == ([], [])
    assert_same_values(pipe.plain_state_dict(), state)
    assert list(state) == keys


def test_plain_state_is_loaded_with_assign():
    """With assign=True the tensors of the plain state become the parameters."""
    state = changed(named_model()).state_dict()
    pipe = GPipe(named_model(), [2, 2])
    pipe.load_state_dict(state, assign=True)
    assert pipe[0].weight.data_ptr() == state["first.weight"].data_ptr()


@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]])
def test_plain_state_dict(balance):
    """plain_state_dict has the keys, in order, and the values that the original model loads."""
    plain = named_model()
    pipe = changed(GPipe(named_model(), balance))
    state = pipe.plain_state_dict()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state, strict=True)
    assert_same_values(plain.state_dict(), state)


def test_state_moves_between_balances():
    """The state of one balance is loaded by another through the plain keys."""
    one, other = changed(GPipe(named_model(), [1, 3])), GPipe(named_model(), [3, 1])
    other.load_state_dict(one.plain_state_dict())
    assert_same_values(one.plain_state_dict(), other.plain_state_dict())


class Around(nn.Module):
    """A model with a pipeline, or the plain model, for a child, beside one of the same name as a layer."""

    def __init__(self, body):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.body = body


@pytest.mark.parametrize("strict", [True, False])
def test_plain_state_is_loaded_by_a_parent(strict):
    """A module with a pipeline inside loads the state of the module with the plain model inside."""
    state = changed(Around(named_model())).state_dict()
    around = Around(GPipe(named_model(), [2, 2]))
    assert around.load_state_dict(state, strict=strict) == ([], [])
    assert_same_values(around.body.plain_state_dict(), {k[5:]: v for k, v in state.items() if k.startswith("body.")})
    assert torch.equal(around.first.weight, state["first.weight"])
    state = changed(around).state_dict()
    around.load_state_dict(state)
    assert_same_values(around.state_dict(), state)


def test_wrong_keys_are_named():
    """Strict loading names the missing and the unexpected keys."""
    state = named_model().state_dict()
    state["other.weight"] = state.pop("last.weight")
    pipe = GPipe(named_model(), [2, 2])
    with pytest.raises(RuntimeError) as caught:
        pipe.load_state_dict(state)
    assert "other.weight" in str(caught.value)
    assert "partitions.1.last.weight" in str(caught.value)
    missing, unexpected = pipe.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["partitions.1.last.weight"], ["other.weight"])


@pytest.mark.parametrize("inner", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))])
@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_layer_called_partitions(inner, balance):
    """Both kinds of keys are loaded if a layer has the unlucky name "partitions"."""
    model = nn.Sequential(OrderedDict(partitions=inner, other=nn.Linear(2, 2)))
    plain = changed(model)
    pipe = GPipe(copy.deepcopy(model), balance)
    pipe.load_state_dict(plain.state_dict())
    assert_same_values(pipe.plain_state_dict(), plain.state_dict())
    state = changed(pipe).state_dict()
    pipe.load_state_dict(state)
    assert_same_values(pipe.state_dict(), state)
    model.load_state_dict(pipe.plain_state_dict())


class Versioned(nn.Linear):
    """A layer whose format has changed, as nn.BatchNorm's has: old states are converted."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_of_layers_are_kept():
    """A layer sees the version of the state it loads, so that only old states are converted."""
    plain = nn.Sequential(Versioned(2, 2), nn.Sequential(Versioned(2, 2)))
    pipe = GPipe(copy.deepcopy(plain), [1, 1])
    expected = copy.deepcopy(plain).state_dict()
    pipe.load_state_dict(copy.deepcopy(pipe.state_dict()))
    assert_same_values(pipe.plain_state_dict(), expected)
    pipe.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same_values(pipe.plain_state_dict(), expected)
    plain.load_state_dict(copy.deepcopy(pipe.plain_state_dict()))
    assert_same_values(plain.state_dict(), expected)


class Extra(nn.Identity):
    value = 0

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


def test_extra_state():
    """What a layer adds with get_extra_state is saved and loaded too."""
    plain = nn.Sequential(Extra(), Extra())
    plain[1].value = 7
    pipe = GPipe(nn.Sequential(Extra(), Extra()), [1, 1])
    pipe.load_state_dict(plain.state_dict())
    assert [layer.value for layer in pipe] == [0, 7]
    other = nn.Sequential(Extra(), Extra())
    other.load_state_dict(pipe.plain_state_dict())
    assert other[1].value == 7


# Dtypes, yes; devices, no.


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda m: m.to(torch.float64), torch.float64),
        (lambda m: m.to(dtype=torch.bfloat16), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.half().float(), torch.float32),
        (lambda m: m.type(torch.float64), torch.float64),
    ],
)
def test_dtype_can_be_changed(change, dtype):
    """The dtype can be changed in every way that an ordinary module has."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2)
    pipe(torch.rand(4, 3))
    assert change(pipe) is pipe
    assert {p.dtype for p in pipe.parameters()} == {dtype}
    output = pipe(torch.rand(4, 3).to(dtype))
    output.sum().backward()
    assert output.dtype == pipe[0].weight.grad.dtype == dtype


def test_memory_format_can_be_changed():
    """The memory format can be changed."""
    pipe = GPipe(nn.Sequential(nn.Conv2d(2, 2, 3)), [1]).to(memory_format=torch.channels_last)
    assert pipe[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.device("cpu")),
        lambda m: m.to(device="meta"),
        lambda m: m.to("cpu", torch.float64),
        lambda m: m.to(torch.rand(1)),
        lambda m: m.to(tensor=torch.rand(1)),
        lambda m: m.to("cuda:0"),
        lambda m: m.to(0),
        lambda m: m.to(device=1),
        lambda m: m.cpu(),
        lambda m: m.cuda(),
        lambda m: m.cuda(0),
        lambda m: m.to_empty(device="cpu"),
    ],
)
def test_moving_is_denied(move):
    """Moving the model to a device is denied with a TypeError that says what to do, and changes nothing."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3)), [1])
    with pytest.raises(TypeError, match=r"denied to move.*devices=\[\.\.\.\]"):
        move(pipe)
    assert pipe[0].weight.dtype == torch.float32
    assert pipe[0].weight.device.type == "cpu"


def parent_of(pipe):
    """Return a model as people wrap one, on the CPU."""
    return nn.ModuleDict({"body": pipe, "head": nn.Linear(3, 3)})


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("meta"),
        lambda m: m.to(device="meta", dtype=torch.float64),
        lambda m: m.to(torch.rand(1, device="meta")),
        lambda m: m.to_empty(device="meta"),
    ],
)
def test_moving_by_a_parent_is_denied(move):
    """A module around the pipeline cannot move the partitions either; nothing of them is changed."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1])
    with pytest.raises(TypeError, match=r"denied to move.*devices=\[\.\.\.\]"):
        move(parent_of(pipe))
    assert {t.device.type for t in pipe.state_dict().values()} == {"cpu"}
    assert pipe[0].weight.dtype == torch.float32
    assert pipe(torch.rand(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.to(torch.rand(1)),
        lambda m: m.to("cpu", torch.float32),
        lambda m: m.share_memory(),
        lambda m: copy.deepcopy(m),
        lambda m: m.to(memory_format=torch.channels_last),
    ],
)
def test_parent_that_moves_nothing(change):
    """What trainers do to any model is fine where the partitions are at the place already."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1], chunks=2)
    model = parent_of(pipe)
    pipe(torch.rand(4, 3)).sum().backward()
    changed = change(model)
    changed["body"](torch.rand(4, 3)).sum().backward()
    assert changed["body"][0].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parent_that_changes_the_dtype(dtype):
    """A module around the pipeline may change the dtype, with gradients in place."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2)
    pipe(torch.rand(4, 3)).sum().backward()
    parent_of(pipe).to("cpu", dtype)
    assert {t.dtype for p in pipe.parameters() for t in (p, p.grad)} == {dtype}
    assert pipe(torch.rand(4, 3, dtype=dtype)).dtype == dtype


# What it refuses.


class Mine(nn.Sequential):
    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), [nn.Linear(2, 2)], None])
def test_non_sequential_module(module):
    """Only nn.Sequential can be partitioned; a note of the error names the class and says what to do."""
    with pytest.raises(TypeError) as caught:
        GPipe(module, [1])
    assert str(caught.value) == "non-sequential module cannot be partitioned"
    (note,) = caught.value.__notes__
    assert f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}; write" in note
    page = note.rpartition("see ")[2]
    assert (Path(__file__).parents[2] / page).is_file()


def test_sequential_with_its_own_forward():
    """An nn.Sequential whose forward is its own would run otherwise than it says, so it is refused."""
    with pytest.raises(TypeError, match=r"^non-sequential module cannot be partitioned: Mine"):
        GPipe(Mine(nn.Linear(2, 2)), [1])


def test_duplicate_children():
    """A layer that is there twice cannot be in two partitions; the error names both places."""
    layer = nn.Linear(2, 2)
    message = r"^module with duplicate children is not supported \(layers '0' and '2' are the same Linear\); put them"
    with pytest.raises(ValueError, match=message):
        GPipe(nn.Sequential(layer, nn.Tanh(), layer), [1, 2])


def test_duplicate_parameters():
    """A parameter that two layers share cannot be in two partitions; the error names the layers."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.bias = one.bias
    model = nn.Sequential(OrderedDict(one=one, between=nn.Tanh(), other=nn.Sequential(other)))
    with pytest.raises(ValueError, match=r"duplicate parameters in distinct children.*'one' and 'other'"):
        GPipe(model, [1, 2])


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ([2, 3], r"sum of balance must equal the number of layers \(balance: \[2, 3\] = 5, layers: 4\)"),
        ([1, 2], r"balance: \[1, 2\] = 3, layers: 4"),
        ([], r"balance: \[\] = 0, layers: 4"),
        ([0, 4], "must be positive integers"),
        ([-1, 5], "must be positive integers"),
        ([4, 0], "must be positive integers"),
        ([True, 3], "must be positive integers"),
        ([1.0, 3], "must be positive integers"),
        ("1111", "must be positive integers"),
        ([None, 4], "must be positive integers"),
    ],
)
def test_wrong_balance(balance, message):
    """A wrong balance is a ValueError with the rule and the values, in one line."""
    with pytest.raises(ValueError, match=message) as caught:
        GPipe(mlp(), balance)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("balance", [2, 2.5, True])
def test_balance_that_is_no_list(balance):
    """A number instead of a list is a TypeError with the rule and the value, in one line."""
    with pytest.raises(TypeError, match=rf"balance must be a list.*\(balance: {balance}, layers: 4\)") as caught:
        GPipe(mlp(), balance)
    assert "\n" not in str(caught.value)


def recipe_of(error):
    """Return the code that an error message ends with."""
    return textwrap.dedent("".join(line for line in str(error).splitlines(True) if line.startswith("    ")))


@pytest.mark.parametrize("package", ["pipesight", "torchgpipe"])
def test_recipe_for_a_balance_runs(package, monkeypatch):
    """Without a balance, the error has code that gives a model once the dots are filled in, by the package in use."""
    if package == "torchgpipe":
        importlib.import_module("torchgpipe")
    else:
        monkeypatch.delitem(sys.modules, "torchgpipe", raising=False)
    model = mlp()
    with pytest.raises(ValueError, match=r"^balance is required") as caught:
        GPipe(model)
    assert f"from {package}.balance import" in str(caught.value)
    assert ("torchgpipe" in str(caught.value)) == (package == "torchgpipe")
    recipe = recipe_of(caught.value).replace("torch.rand(...)", "torch.rand(4, 3, dtype=torch.float64)")
    recipe = recipe.replace("model, balance, ...", "model, balance, devices=['cpu'] * partitions")
    namespace = {"torch": torch, "model": model}
    exec(recipe, namespace)
    assert isinstance(namespace["model"], GPipe)
    assert namespace["balance_by_time"] is balance_by_time


def test_too_few_devices():
    """Too few devices is an IndexError that says how many there are, with devices that would do."""
    with pytest.raises(IndexError, match=r"devices: 1, partitions: 2") as caught:
        GPipe(mlp(), [2, 2], devices=["cpu"])
    fix = str(caught.value).rpartition("devices=")[2]
    assert GPipe(mlp(), [2, 2], devices=eval(fix)).devices == [torch.device("cpu")] * 2
    with pytest.raises(IndexError, match=r"devices: 0, partitions: 1"):
        GPipe(mlp(), [4], devices=[])


@pytest.mark.parametrize(
    ("devices", "got"), [("cpu", "the string 'cpu'"), (torch.device("cpu"), "the device 'cpu'"), (0, "the int 0")]
)
def test_one_device_instead_of_a_list(devices, got):
    """A device that is in no list is a TypeError that shows the list."""
    with pytest.raises(TypeError, match=f"devices must be a list, but got {got}: devices=") as caught:
        GPipe(mlp(), [2, 2], devices=devices)
    fix = eval(str(caught.value).rpartition("devices=")[2])
    assert fix == [devices if isinstance(devices, int) else "cpu"] * 2


@pytest.mark.parametrize("chunks", [0, -1])
def test_chunks_must_be_positive(chunks):
    """Less than one micro-batch is a ValueError."""
    with pytest.raises(ValueError, match=rf"positive integer \(chunks: {chunks}\)"):
        GPipe(mlp(), [4], chunks=chunks)


@pytest.mark.parametrize("chunks", [2.5, float("inf"), "2", None, [2]])
def test_chunks_must_be_an_integer(chunks):
    """A number of micro-batches that is no integer is a TypeError."""
    with pytest.raises(TypeError, match=f"chunks must be an integer, but got {type(chunks).__name__}"):
        GPipe(mlp(), [4], chunks=chunks)


@pytest.mark.parametrize("checkpoint", ["sometimes", "", "Always", None, True])
def test_checkpoint_must_be_known(checkpoint):
    """Another word for checkpoint is a ValueError that lists the right ones."""
    with pytest.raises(ValueError, match="'always', 'except_last', or 'never'") as caught:
        GPipe(mlp(), [4], checkpoint=checkpoint)
    assert repr(checkpoint) in str(caught.value)


@pytest.mark.parametrize("input", [[rand(2, 3)], {"x": rand(2, 3)}, "x", None, 1, [rand(2, 3)] * 2])
def test_input_that_is_no_tensor(input):
    """The input must be a tensor or a tuple of tensors."""
    with pytest.raises(
        TypeError, match=f"input must be a Tensor or a tuple of Tensors, but got {type(input).__name__}"
    ):
        GPipe(mlp(), [2, 2])(input)


@pytest.mark.parametrize("wrong", ["label", None, 3, [rand(2, 3)], (rand(2, 3),)])
def test_tuple_with_something_else(wrong):
    """Every item of an input tuple must be a tensor; the error names the one that is not."""
    with pytest.raises(TypeError, match=f"item 1 of the tuple is {type(wrong).__name__}"):
        GPipe(nn.Sequential(nn.Identity()), [1])((rand(2, 3), wrong))


def test_input_without_tensors():
    """An empty tuple is a ValueError."""
    with pytest.raises(ValueError, match="at least one Tensor"):
        GPipe(nn.Sequential(nn.Identity()), [1])(())


@pytest.mark.parametrize("input", [torch.tensor(1.0), (rand(2, 3), torch.tensor(1.0))])
def test_input_without_batch_dimension(input):
    """A 0-d tensor cannot be cut into micro-batches."""
    with pytest.raises(ValueError, match="batch dimension"):
        GPipe(nn.Sequential(nn.Identity()), [1])(input)


def test_unequal_batch_sizes():
    """The tensors of a tuple must have the same batch size; the error names the sizes."""
    with pytest.raises(ValueError, match=r"same batch size.*\[4, 3\]"):
        GPipe(nn.Sequential(nn.Identity()), [1], chunks=2)((rand(4, 3), rand(3, 3)))
    with pytest.raises(ValueError, match=r"same batch size.*\[0, 3\]"):
        GPipe(nn.Sequential(nn.Identity()), [1], chunks=2)((rand(0, 3), rand(3, 3)))


def test_several_inputs():
    """The input is one argument: several are a TypeError that shows the tuple."""
    model = GPipe(nn.Sequential(nn.Identity()), [1])
    with pytest.raises(TypeError, match=r"one input, but got 2; pass several tensors as one tuple: model\(\(a, b\)\)"):
        model(rand(4, 3), rand(4, 3))
    assert len(model((rand(4, 3), rand(4, 3)))) == 2


def test_layer_with_several_arguments():
    """A layer gets one argument; the error of one that wants two says where it is."""
    model = GPipe(nn.Sequential(nn.Identity(), nn.Bilinear(3, 3, 3).double()), [1, 1], chunks=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        model(rand(4, 3))
    assert "partition 1, layer '1', micro-batch 0" in caught.value.__notes__[0]


class Give(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, input):
        return self.make(input)


@modes
@pytest.mark.parametrize("balance", [[1, 1], [2]])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: [x], "got list"),
        (lambda x: {"x": x}, "got dict"),
        (lambda x: "x", "got str"),
        (lambda x: None, "got NoneType"),
        (lambda x: (x, "label"), "item 1 of the tuple is str"),
        (lambda x: (x, (x,)), "item 1 of the tuple is tuple"),
    ],
)
def test_output_that_is_no_tensor(make, message, balance, checkpoint):
    """The output of a partition must be a tensor or a tuple of tensors; the error says where it was not."""
    model = nn.Sequential(nn.Linear(3, 3).double(), Give(make))
    with pytest.raises(TypeError, match=message) as caught:
        GPipe(model, balance, chunks=2, checkpoint=checkpoint)(rand(4, 3))
    assert f"partition {len(balance) - 1}" in caught.value.__notes__[0]


def test_output_without_batch_dimension():
    """A layer that returns a 0-d tensor, such as a loss, gets an error that says what to do."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3).double(), Give(lambda x: x.sum())), [1, 1], chunks=2)
    with pytest.raises(RuntimeError, match="0-d Tensor; compute the loss outside"):
        pipe(rand(4, 3))


def test_number_of_outputs_that_changes():
    """Every micro-batch must give the same number of outputs."""
    pipe = GPipe(nn.Sequential(Give(lambda x: (x,) * len(x))), [1], chunks=2)
    with pytest.raises(RuntimeError, match=r"same number of outputs.*\[1, 2\]"):
        pipe(rand(3, 3))


def test_a_refused_call_does_no_harm():
    """After an error about the input, the model works."""
    pipe = GPipe(mlp(), [2, 2], chunks=2)
    for wrong in ([rand(2, 3)], (), torch.tensor(1.0), rand(4, 5)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            pipe(wrong)
    torch.testing.assert_close(pipe(rand(4, 3)), mlp()(rand(4, 3)))
