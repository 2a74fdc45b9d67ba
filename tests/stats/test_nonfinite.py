"""``on_nonfinite``: the first tensor of a step that goes NaN or Inf is named, and can be kept or raised."""

import re

import pytest
import torch
from torch import nn

import pipesight.stats as debug_api
from pipesight import GPipe
from pipesight.stats import NonfiniteError, watch
from support.logged import config, lines, run_ranks, values


@pytest.fixture(autouse=True)
def _ended():
    yield
    debug_api.end_debug()


def model(phase="forward", value=float("nan")):
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity(), Marked(phase, value), nn.Linear(3, 2))


class Marked(nn.Module):
    """Spoils the micro-batch that holds the number 0.5."""

    def __init__(self, phase, value):
        super().__init__()
        self.phase, self.value, self.weight = phase, value, nn.Parameter(torch.ones(3))

    def forward(self, x):
        bad = (x == 0.5).any()
        y = x * self.weight
        if self.phase == "forward":
            return y * self.value if bad else y
        if y.requires_grad and bad:
            y.register_hook(lambda g: g * self.value)
        return y


def batch(spoiled=True):
    """Return six rows, of which the fifth is marked: the third of three micro-batches."""
    x = torch.randn(6, 3)
    if spoiled:
        x[4, 0] = 0.5
    return x


def pipe(layers, mode="except_last"):
    return GPipe(layers, [2, 3], chunks=3, checkpoint=mode)


def reports(text):
    return re.findall("first bad tensor: .*", text)


def said(capsys):
    """Return the warnings."""
    return re.findall(r"WARNING - (.*)", capsys.readouterr().err)


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_warn_under_gpipe_forward(mode, tmp_path, capsys):
    """The report names layer, tensor, iteration, partition, micro-batch and phase; a second bad step is counted."""
    watched = pipe(model(), mode)
    with watch(watched, config(("activation",), ["mean"], on_nonfinite="warn"), log_dir=tmp_path, auto_step=False) as w:
        for _ in range(2):
            watched(batch()).sum().backward()
            w.step()
    assert said(capsys) == [
        "first bad tensor: 'activation' of layer '3' (iteration 0, partition 1, micro-batch 2, forward) "
        "has 6 NaN and 0 Inf of 6 numbers; 1 more tensor has NaN or Inf in this iteration",
        "NaN or Inf in 2 of 2 logged iterations, first in 0 and last in 1, in 2 tensors",
    ]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_warn_under_gpipe_backward(mode, tmp_path, capsys):
    """A gradient is named with the backward phase."""
    watched = pipe(model("backward", float("inf")), mode)
    chosen = config(("activation", "gradient"), ["mean"], on_nonfinite="warn")
    with watch(watched, chosen, log_dir=tmp_path):
        watched(batch()).sum().backward()
    (report,) = reports(capsys.readouterr().err)
    assert "'gradient' of layer '3' (iteration 0, partition 1, micro-batch 2, backward)" in report or (
        "'gradient' of layer '2' (iteration 0, partition 1, micro-batch 2, backward)" in report
    )
    assert "6 Inf of 6" in report


def test_plain_model(tmp_path, capsys):
    """Without a pipeline there is no micro-batch to name."""
    plain = model()
    with watch(plain, config(("activation", "wgrad"), ["mean"], on_nonfinite="warn"), log_dir=tmp_path):
        plain(batch()).sum().backward()
    (report,) = reports(capsys.readouterr().err)
    assert report.startswith("first bad tensor: 'activation' of layer '3' (iteration 0) has 18 NaN and 0 Inf of 18 ")


def test_call(tmp_path, capsys):
    """Calls of log_tensor_stats are looked at too; with on_nonfinite alone, nothing is logged but what is bad."""
    chosen = config()
    del chosen["s"]["LogTensorStats"]["stats"]
    chosen["s"]["LogTensorStats"]["on_nonfinite"] = "warn"
    debug_api.initialize(chosen, log_dir=tmp_path)
    for x in (torch.ones(2), torch.tensor([1.0, -float("inf")]), torch.tensor([float("nan")])):
        assert debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation") == {}
    debug_api.end_debug()
    (report,) = reports(capsys.readouterr().err)
    assert "0 NaN and 1 Inf of 2" in report
    assert values(tmp_path) == {(0, "fc1", "activation", "nans"): 1, (0, "fc1", "activation", "infs"): 1}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_raise_under_gpipe(phase, tmp_path):
    """The error reaches the caller from the worker thread, and the model can be used again."""
    watched = pipe(model(phase))
    chosen = config(("activation", "gradient"), ["mean"], on_nonfinite="raise")
    with watch(watched, chosen, log_dir=tmp_path, auto_step=False) as w:
        for _ in range(2):
            with pytest.raises(NonfiniteError, match=f"micro-batch 2, {phase}.*on_nonfinite: warn"):
                watched(batch()).sum().backward()
            w.step()
        x = batch(spoiled=False)
        watched.zero_grad()
        watched(x).sum().backward()
        gradient = watched[4].weight.grad.clone()
    plain = model(phase)
    plain(x).sum().backward()
    assert torch.allclose(gradient, plain[4].weight.grad, atol=1e-6)


def test_raise_in_a_plain_model(tmp_path):
    """The training loop gets the error where the tensor was made."""
    plain = model()
    with watch(plain, config(("activation",), ["mean"], on_nonfinite="raise"), log_dir=tmp_path):
        with pytest.raises(NonfiniteError, match="layer '3'"):
            plain(batch())
        plain(batch(spoiled=False)).sum().backward()


def test_raise_for_weights(tmp_path):
    """A weight that went bad is found at the optimizer's step; the step is left undone."""
    plain = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with watch(plain, config(("weight", "wgrad"), ["mean"], on_nonfinite="raise"), log_dir=tmp_path):
        (plain(torch.ones(1, 2)) * float("inf")).sum().backward()
        before = plain[0].weight.detach().clone()
        with pytest.raises(NonfiniteError, match="'wgrad' of layer '0'"):
            optimizer.step()
        assert torch.equal(plain[0].weight, before)


def test_dump(tmp_path, capsys):
    """The tensor is saved with its place, and loads with weights_only."""
    watched = pipe(model())
    with watch(watched, config(("activation",), ["mean"], on_nonfinite="dump"), log_dir=tmp_path):
        watched(batch())
    (report,) = reports(capsys.readouterr().err)
    (path,) = (tmp_path / "stats" / "nonfinite").iterdir()
    assert str(path) in report
    saved = torch.load(path, weights_only=True)
    values = saved.pop("values")
    assert values.shape == (2, 3)
    assert values.isnan().all()
    assert saved == {
        "layer": "3",
        "tensor": "activation",
        "iteration": 0,
        "partition": 1,
        "microbatch": 2,
        "phase": "forward",
        "rank": 0,
    }


def test_dump_of_a_parameter(tmp_path):
    """What is saved equals the tensor and is apart from it."""
    debug_api.initialize(config(on_nonfinite="dump"), log_dir=tmp_path)
    x = nn.Parameter(torch.tensor([1.0, float("nan"), 3.0])[::2].repeat(2))
    bad = nn.Parameter(torch.tensor([[1.0, float("inf")], [2.0, float("nan")]]).t())
    debug_api.log_tensor_stats("a/b c", tensor=x, tensor_name="activation")
    debug_api.log_tensor_stats("a/b c", tensor=bad, tensor_name="activation")
    (path,) = (tmp_path / "stats" / "nonfinite").iterdir()
    saved = torch.load(path, weights_only=True)["values"]
    assert torch.equal(saved.nan_to_num(7.0), bad.detach().nan_to_num(7.0))
    assert type(saved) is torch.Tensor


def test_dump_without_space(tmp_path, capsys):
    """Where the tensor cannot be saved the report says so and training goes on."""
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "nonfinite").write_text("in the way")
    debug_api.initialize(config(on_nonfinite="dump"), log_dir=tmp_path)
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([float("nan")]), tensor_name="activation")
    debug_api.end_debug()
    (report,) = reports(capsys.readouterr().err)
    assert "could not be saved" in report


def test_raise_and_dump(tmp_path):
    """Two features that ask for different things both get theirs."""
    chosen = config(on_nonfinite="raise")
    feature = {"enabled": True, "tensors": ["activation"], "stats": ["cur_amax"], "on_nonfinite": "dump"}
    chosen["s"]["transformer_engine"] = {"LogTensorStats": feature}
    debug_api.initialize(chosen, log_dir=tmp_path)
    with pytest.raises(NonfiniteError):
        debug_api.log_tensor_stats("fc1", tensor=torch.tensor([float("nan")]), tensor_name="activation")
    assert len(list((tmp_path / "stats" / "nonfinite").iterdir())) == 1


def test_ranks_keep_their_own(tmp_path):
    """The rank with a bad tensor names it; dumps carry the rank."""
    outputs = run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["nans"], on_nonfinite="dump"), log_dir=folder)
        x = torch.tensor([1.0, float("nan")]) if rank else torch.ones(2)
        debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
        debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    assert [len(reports(error)) for _, error in outputs] == [0, 1]
    assert [path.name for path in (tmp_path / "stats" / "nonfinite").iterdir()] == [
        "iteration-000000-rank-00001-fc1-activation.pt"
    ]
    assert list(values(tmp_path, 0).values()) == [1]


def test_raises_each_time(tmp_path):
    """A loop that skips bad batches is told of every one, not only of the first of an iteration."""
    model = nn.Sequential(nn.Linear(2, 1))
    layers = {"enabled": True, "layers": {"layer_types": "all"}}
    section = {**layers, "LogTensorStats": {"enabled": True, "tensors": ["input"], "on_nonfinite": "raise"}}
    bad = torch.full((1, 2), torch.nan)
    with watch(model, {"s": section}, log_dir=tmp_path):
        for _ in range(3):
            with pytest.raises(NonfiniteError, match="2 NaN"):
                model(bad)


EVERYTHING = ("input", "activation", "gradient", "weight", "wgrad")


def train(watched, batches, tensors, tmp_path, *, optimizer=None, loss=lambda y: y.sum(), **settings):
    """Train on batches, each a step, and watch everything that is bad."""
    optimizer = optimizer or torch.optim.SGD(watched.parameters(), 0.1)
    with watch(watched, config(tensors, ["mean"], **settings), log_dir=tmp_path):
        for x in batches:
            optimizer.zero_grad()
            loss(watched(x)).backward()
            optimizer.step()


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("settings", [{}, {"on_nonfinite": "warn"}, {"on_nonfinite": "dump"}])
def test_the_first_is_the_first_of_the_computation(mode, settings, tmp_path, capsys):
    """Weights and their gradients are at hand before small activations are measured; still the activation is first."""
    train(pipe(model(), mode), [batch()], ("activation", "gradient", "weight", "wgrad"), tmp_path, **settings)
    (report,) = said(capsys)
    assert "'activation' of layer '3' (iteration 0, partition 1, micro-batch 2, forward) has 6 NaN" in report
    assert ("nonfinite" in report) == (settings == {"on_nonfinite": "dump"})


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def blocks(width=3):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Tanh(), Root(), nn.Sequential(nn.Linear(width, width))
    )


@pytest.mark.parametrize(
    ("tensors", "first"),
    [
        (EVERYTHING, "'gradient' of layer '1'"),  # of the root's input
        (("activation", "wgrad", "weight"), "'wgrad' of layer '0.0'"),
        (("gradient", "wgrad"), "'gradient' of layer '1'"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: GPipe(model, [2, 2], chunks=2)])
def test_only_the_backward_is_bad(wrap, tensors, first, tmp_path, capsys):
    """The derivative of a root at 0: the forward is finite."""
    bad = wrap(blocks())
    with torch.no_grad():
        for parameter in bad.parameters():
            parameter.zero_()
    train(bad, [torch.ones(4, 3)], tensors, tmp_path, loss=lambda y: (y * torch.tensor(0.0)).sum(), on_nonfinite="warn")
    (report,) = said(capsys)
    assert report.startswith(f"first bad tensor: {first} (iteration 0")


def test_gradient_of_a_weight_before_the_layers_above(tmp_path, capsys):
    """The backward overflows in the weight of the last layer, then again in the gradient of the first."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(torch.float32)
    with torch.no_grad():
        layers[0].weight.fill_(1e25)
        layers[1].weight.fill_(1e25)
    train(layers, [torch.full((1, 2), 1.0)], ("gradient", "wgrad"), tmp_path, loss=lambda y: (y * 1e15).sum())
    (report,) = said(capsys)
    assert report.startswith("first bad tensor: 'wgrad' of layer '1' (iteration 0)")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_was_there_before_the_forward(frozen, tmp_path, capsys):
    """A bad weight is the first, however late it is looked at; the layer is named, not one that it is part of."""
    bad = GPipe(blocks(), [2, 2], chunks=2)
    with torch.no_grad():
        bad.partitions[1][1][0].weight[0, 0] = torch.nan
    bad.partitions[1][1].requires_grad_(not frozen)
    train(bad, [torch.ones(4, 3)] * 2, EVERYTHING, tmp_path, on_nonfinite="warn")
    report, _ = said(capsys)
    assert report.startswith("first bad tensor: 'weight' of layer '3.0' (iteration 0, partition 1) has 1 NaN")


def test_born_in_the_optimizer(tmp_path, capsys):
    """Gradients are finite, the step is not: the weights of the next iteration are the first."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(layers.parameters(), lr=float("inf"))
    train(layers, [torch.randn(4, 2)] * 3, ("activation", "gradient", "weight", "wgrad"), tmp_path, optimizer=optimizer)
    report, count = said(capsys)
    assert re.match("first bad tensor: 'weight' of layer '[02]' .iteration 1.", report)
    assert count.startswith("NaN or Inf in 2 of 3 logged iterations, first in 1 and last in 2")


def test_weights_that_an_unknown_optimizer_changed(tmp_path, capsys):
    """What is measured after an update says nothing of the forward: the gradient was first."""
    layers = nn.Sequential(nn.Linear(2, 1, bias=False))
    with watch(layers, config(("weight", "wgrad"), ["mean"]), log_dir=tmp_path, auto_step=False) as watching:
        (layers(torch.ones(1, 2)) * torch.inf).sum().backward()
        with torch.no_grad():
            layers[0].weight -= layers[0].weight.grad
        watching.step()
    (report,) = said(capsys)
    assert report.startswith("first bad tensor: 'wgrad' of layer '0'")


def test_accumulated_passes(tmp_path, capsys):
    """A backward comes before the forward of the next pass of the same step."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    with watch(layers, config(("activation", "gradient", "wgrad"), ["mean"]), log_dir=tmp_path):
        (layers(torch.ones(1, 2)) * torch.inf).sum().backward()
        layers(torch.full((1, 2), torch.nan)).sum().backward()
        optimizer.step()
    (report,) = said(capsys)
    assert report.startswith("first bad tensor: 'gradient' of layer '1' (iteration 0) has 0 NaN and 2 Inf of 2")


def test_raise_names_the_first(tmp_path):
    """An error about a gradient names the activation that was bad before, though nobody asked to raise for that."""
    chosen = config(("activation",), ["mean"])
    chosen["s"]["transformer_engine"] = {
        "LogTensorStats": {"enabled": True, "tensors": ["wgrad"], "stats": ["mean"], "on_nonfinite": "raise"}
    }
    watched = pipe(model())
    optimizer = torch.optim.SGD(watched.parameters(), 0.1)
    watched(batch()).sum().backward()
    with watch(watched, chosen, log_dir=tmp_path):
        watched(batch()).sum().backward()
        with pytest.raises(
            NonfiniteError,
            match=r"^'wgrad' of layer '.' .iteration 0, partition 1.*; first bad tensor: 'activation' of layer '3' "
            r".iteration 0, partition 1, micro-batch 2, forward.",
        ):
            optimizer.step()
    assert {line["order"] for line in lines(tmp_path) if line["layer"] == "3" and line["tensor"] == "activation"} == {0}


@pytest.mark.slow
def test_one_line_for_many_tensors_and_steps(tmp_path, capsys):
    """A run that stays bad is reported once, counted after 10 and 100 bad steps and at the end."""
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    batches = [torch.ones(1, 2)] * 3 + [torch.full((1, 2), torch.nan)] * 120
    train(layers, batches, EVERYTHING, tmp_path, on_nonfinite="warn")
    first, *counts = said(capsys)
    assert first == (
        "first bad tensor: 'input' of layer '0' (iteration 3) has 2 NaN and 0 Inf of 2 numbers; "
        "59 more tensors have NaN or Inf in this iteration"
    )
    assert counts == [
        "NaN or Inf in 10 of 13 logged iterations so far, first in 3 and last in 12, in 99 tensors",
        "NaN or Inf in 100 of 103 logged iterations so far, first in 3 and last in 102, in 99 tensors",
        "NaN or Inf in 120 of 123 logged iterations, first in 3 and last in 122, in 99 tensors",
    ]


def log_each(steps, tmp_path):
    """Log tensors of given names in each step, some of them bad."""
    debug_api.initialize(config(("a", "b", "mask"), ["max"]), log_dir=tmp_path)
    for bad in steps:
        for name in ("mask", "a", "b"):
            x = torch.tensor([1.0, -torch.inf if name in bad else 0.0])
            debug_api.log_tensor_stats("fc1", tensor=x, tensor_name=name)
        debug_api.step()
    debug_api.end_debug()


def test_bad_beside_what_always_is(tmp_path, capsys):
    """A mask of -Inf does not hide a tensor that turns bad later."""
    log_each([["mask"]] * 4 + [["mask", "b"]] * 3, tmp_path)
    first, second, count = said(capsys)
    assert first.startswith("first bad tensor: 'mask' of layer 'fc1' (iteration 0)")
    assert second.startswith("first bad tensor: 'b' of layer 'fc1' (iteration 4)")
    assert count.startswith("NaN or Inf in 7 of 7 logged iterations")


def test_now_and_then(tmp_path, capsys):
    """Single bad steps, as of a loss scale that is tried out, are reported ever more seldom."""
    log_each(([["a"], []]) * 100, tmp_path)
    found = said(capsys)
    assert [int(re.search(r"iteration (\d+)", line)[1]) for line in found[:-1]] == [0, 2, 6, 14, 30, 62, 126]
    assert found[-1] == "NaN or Inf in 100 of 200 logged iterations, first in 0 and last in 198, in 1 tensor"


def test_lines_say_where(tmp_path):
    """A line of a bad tensor has its place in the order of computation, and in the pipeline."""
    train(pipe(model()), [batch()], ("activation", "wgrad"), tmp_path)
    found = {(line["layer"], line["tensor"]): line for line in lines(tmp_path) if "nans" in line}
    keys = ("order", "partition", "microbatch", "phase")
    assert [found["3", "activation"].get(key) for key in keys] == [0, 1, 2, "forward"]
    assert [found["4", "activation"].get(key) for key in keys] == [1, 1, 2, "forward"]
    assert [found["4", "wgrad"].get(key) for key in keys] == [2, 1, None, None]
    assert all("order" not in line for line in lines(tmp_path) if "nans" not in line)


def test_a_whole_tensor_overflows(tmp_path, capsys):
    """Nothing but one Inf, in float16 and large, is no constant."""
    layers = nn.Sequential(nn.Linear(1, 50_000, bias=False)).half()
    torch.nn.init.constant_(layers[0].weight, 300.0)
    with watch(layers, config(("activation",), ["max"], on_nonfinite="warn"), log_dir=tmp_path):
        layers(torch.full((1, 1), 300.0, dtype=torch.float16))
    (report,) = said(capsys)
    assert "has 0 NaN and 50000 Inf of 50000 numbers" in report


@pytest.mark.parametrize("reduced", [True, False])
def test_one_rank_speaks(reduced, tmp_path):
    """Of ranks with bad tensors, the one speaks that was first by the way of the data; the others are silent."""
    outputs = run_ranks(
        3,
        f"""
        debug_api.initialize(config(("weight", "activation", "gradient"), ["max"]), log_dir=folder)
        bad, good = torch.tensor([1.0, float("nan")]), torch.ones(2)
        names = {{0: ("gradient",), 1: ("activation", "gradient"), 2: ("gradient",)}}[rank]
        for step in range(6):
            for name in ("activation", "gradient"):
                x = bad if (step > 1 and name in names) or step > 2 else good
                debug_api.log_tensor_stats("fc1", tensor=x, tensor_name=name, skip_reduction={not reduced})
            debug_api.step()
            dist.barrier()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    said = [re.findall("WARNING - (.*)", error) for _, error in outputs]
    assert said[0] == said[2] == []
    first, count = said[1]
    assert first == (
        "first bad tensor: 'activation' of layer 'fc1' (iteration 2) has 1 NaN and 0 Inf of 2 numbers; "
        "1 more tensor has NaN or Inf in this iteration; on rank 1 first, of 3 ranks"
    )
    assert count.startswith("NaN or Inf in 4 of 6 logged iterations, first in 2 and last in 5")
    merged = [line for line in lines(tmp_path, 0) if line["tensor"] == "activation" and line["iteration"] == 2]
    assert [line.get("order") for line in merged] == ([0] if reduced else [None])
