"""``on_nonfinite``: the first tensor of a step that goes NaN or Inf is named, and can be kept or raised."""

import re

import pytest
import torch
from torch import nn

import pipesight.stats as debug_api
from logged import config, run_ranks, values
from pipesight import GPipe
from pipesight.stats import NonfiniteError, watch


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


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_warn_under_gpipe_forward(mode, tmp_path, capsys):
    """The report names layer, tensor, iteration, partition, micro-batch and phase; there is one a step."""
    watched = pipe(model(), mode)
    with watch(watched, config(("activation",), ["mean"], on_nonfinite="warn"), log_dir=tmp_path, auto_step=False) as w:
        for _ in range(2):
            watched(batch()).sum().backward()
            w.step()
    found = reports(capsys.readouterr().err)
    assert len(found) == 2
    for i, report in enumerate(found):
        assert report == (
            f"first bad tensor: 'activation' of layer '3' (iteration {i}, partition 1, micro-batch 2, forward) "
            "has 6 NaN and 0 Inf of 6 numbers"
        )


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
    assert report == "first bad tensor: 'activation' of layer '3' (iteration 0) has 18 NaN and 0 Inf of 18 numbers"


def test_call(tmp_path, capsys):
    """Calls of log_tensor_stats are looked at too; with on_nonfinite alone, nothing else is logged."""
    chosen = config()
    del chosen["s"]["LogTensorStats"]["stats"]
    chosen["s"]["LogTensorStats"]["on_nonfinite"] = "warn"
    debug_api.initialize(chosen, log_dir=tmp_path)
    for x in (torch.ones(2), torch.tensor([1.0, -float("inf")]), torch.tensor([float("nan")])):
        assert debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation") == {}
    debug_api.end_debug()
    (report,) = reports(capsys.readouterr().err)
    assert "0 NaN and 1 Inf of 2" in report
    assert values(tmp_path) == {}


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


def test_ranks_report_their_own(tmp_path):
    """Each rank names its own first bad tensor; dumps carry the rank."""
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
