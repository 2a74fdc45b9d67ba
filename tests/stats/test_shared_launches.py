"""Tensors of a GPU wait to be measured together: what is logged, with a stand-in for the device and its kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipesight.stats as debug_api
from pipesight import GPipe
from pipesight.stats import stats_session, watch
from support.logged import assert_six, config, values
from support.stand_in_gpu import stand_in_gpu  # noqa: F401 (a fixture)

TENSORS = ("activation", "gradient")


class Block(nn.Module):
    """Its output is that of its last layer, and the gradients on both sides of its sum are one tensor."""

    def __init__(self, width=8, inplace=False):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=inplace)
        self.down, self.last = nn.Linear(width, width), nn.Identity()

    def forward(self, x):
        return self.last(x + self.down(self.act(self.up(self.norm(x)))))


def build(**options):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(3)), nn.Linear(8, 2))


def reference(model, batches):
    """Return the tensors of each layer, in all calls of one step."""
    model, seen = copy.deepcopy(model), {}

    def keep(name, tensor):
        return lambda x: seen.setdefault((name, tensor), []).append(x.detach().clone())

    for name, layer in model.named_modules():
        if name:

            def after(_, args, output, name=name):
                keep(name, "activation")(output)
                output.register_hook(keep(name, "gradient"))

            layer.register_forward_hook(after)
    for x in batches:
        model(x).square().mean().backward()
    return seen


def train(model, batches, steps, lr=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(folder, truth, steps):
    found = values(folder)
    assert {key[0] for key in found} == set(steps)
    for (layer, tensor), parts in truth.items():
        for step in steps:
            assert_six(found, step, layer, tensor, *parts, rtol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_micro_batches(inplace, stand_in_gpu, tmp_path):  # noqa: F811
    """Each step logs what the plain model computes; a tensor that two layers return is measured once, for both."""
    model, batches = build(inplace=inplace), [torch.randn(n, 8) for n in (4, 3, 5)]
    truth = reference(build(), batches)
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, batches, 2)
        stand_in_gpu.launches.clear()
        train(model, batches, 3)
    check(tmp_path, truth, range(5))
    layers = 3 * 6 + 1
    calls = 2 * layers * len(batches) * 3
    assert sum(stand_in_gpu.launches) < 0.85 * calls
    assert inplace or max(stand_in_gpu.launches) > 10


@pytest.mark.parametrize("freq", [1, 2, 3])
def test_steps_that_are_not_logged(freq, stand_in_gpu, tmp_path):  # noqa: F811
    """They launch nothing, and their layers have no hooks; users' hooks are called in their order, before and after."""
    model, x, order = build(), torch.randn(4, 8), []
    model[0].up.register_forward_hook(lambda *_: order.append("first"))
    with watch(model, config(TENSORS, freq=freq), log_dir=tmp_path):
        ours = list(model[0].up._forward_hooks.values())[-1]
        model[0].up.register_forward_hook(lambda *_: order.append("last"))
        for step in range(7):
            stand_in_gpu.launches.clear()
            train(model, [x], 1)
            assert not (step % freq > 1 and stand_in_gpu.launches)  # the first after a logged one measures what waits
            logged = (step + 1) % freq == 0  # the hooks are those of the next step
            hooks = list(model[0].up._forward_hooks.values())
            assert hooks.index(ours) == 1 if logged else ours not in hooks
            assert bool(model[1].norm._forward_hooks) == logged
    check(tmp_path, reference(build(), [x]), range(0, 7, freq))
    assert order == ["first", "last"] * 7


def test_parts_called_without_the_model(stand_in_gpu, tmp_path):  # noqa: F811
    """Steps that are not logged are counted too where only parts of a model are called."""
    model, x = build(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, config(TENSORS, freq=3), log_dir=tmp_path):
        for _ in range(7):
            model[1](x).square().mean().backward()
            optimizer.step()
    assert {key[0] for key in values(tmp_path)} == {0, 3, 6}


def test_steps_that_are_numbered_anew(stand_in_gpu, tmp_path):  # noqa: F811
    """What was prepared for the next step is logged under the number that the step is given then."""
    model, x = build(), torch.randn(4, 8)
    truth = reference(build(), [x])
    debug_api.initialize(config(TENSORS), log_dir=tmp_path)
    try:
        with watch(model, auto_step=False):
            for number in (0, 1, 2, 3, 100, 101):
                if number == 100:
                    debug_api.initialize_training_step(number)
                train(model, [x], 1)
                debug_api.step()
    finally:
        debug_api.end_debug()
    check(tmp_path, truth, [0, 1, 2, 3, 100, 101])


def test_steps_that_end_otherwise(stand_in_gpu, tmp_path):  # noqa: F811
    """A step that nobody ends is logged all the same, and one that a call with an iteration ends keeps its number."""
    model, x = build(), torch.randn(4, 8)
    truth = {key: parts for key, parts in reference(build(), [x]).items() if key[0] != "2"}
    debug_api.initialize(config(TENSORS), log_dir=tmp_path)
    try:
        with watch(model, auto_step=False):
            for step in range(7):
                train(model, [x], 1)
                if step == 4:
                    debug_api.log_tensor_stats("2", tensor=x, tensor_name="activation", iteration=50)
                if step < 6:
                    debug_api.step()
            debug_api.end_debug()
    finally:
        debug_api.end_debug()
    found = values(tmp_path)
    assert {key[0] for key in found if key[1] != "2"} == set(range(7))
    for (layer, tensor), parts in truth.items():
        for step in range(7):
            assert_six(found, step, layer, tensor, *parts, rtol=1e-5)
    assert_six(found, 50, "2", "activation", x)


def test_captured_steps(stand_in_gpu, tmp_path, monkeypatch):  # noqa: F811
    """What a CUDA graph captures is not measured, forward and backward, however many steps were before."""
    model, x = build(), torch.randn(4, 8)
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, [x], 5)
        with monkeypatch.context() as capturing:
            capturing.setattr(stats_session, "is_capturing", lambda: True)
            stand_in_gpu.launches.clear()
            train(model, [x], 1)
            assert not stand_in_gpu.launches
        train(model, [x], 2)
    check(tmp_path, reference(build(), [x]), {key[0] for key in values(tmp_path)})


@pytest.mark.parametrize("mode", ["never", "always"])
def test_pipeline(mode, stand_in_gpu, tmp_path):  # noqa: F811
    """A pipeline logs what the plain model does; its recomputations do not count."""
    x = torch.randn(6, 8)
    truth = reference(build(), [x])
    model = GPipe(build(), [2, 2], chunks=3, checkpoint=mode)
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, [x], 4)
    check(tmp_path, truth, range(4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, stand_in_gpu, tmp_path):  # noqa: F811
    """What torch recomputes counts once."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = build()

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    x = torch.randn(6, 8, requires_grad=True)
    truth = {(f"body.{layer}", t): parts for (layer, t), parts in reference(build(), [x.detach()]).items()}
    model = Checkpointed()
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, [x], 4)
    check(tmp_path, truth, range(4))


def test_two_dtypes(stand_in_gpu, tmp_path):  # noqa: F811
    """Under autocast a launch takes the tensors of one dtype, and all are logged."""
    model, x = build(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        truth = reference(build(), [x])
        with watch(model, config(TENSORS), log_dir=tmp_path):
            train(model, [x], 4)
    check(tmp_path, truth, range(4))
    assert max(stand_in_gpu.launches) > 3


def test_a_change_that_comes_later(stand_in_gpu, tmp_path, capsys):  # noqa: F811
    """A tensor that waits and is changed in place is not logged in that step, and at once from then on."""

    class Spoils(nn.Module):
        spoils = False

        def forward(self, x):
            return x.mul_(3) if self.spoils else x * 1

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Spoils(), nn.Linear(8, 1)), torch.randn(4, 8)
    expected = model[0](x)
    with watch(model, config(("activation",)), log_dir=tmp_path):
        for step in range(6):
            model[1].spoils = step > 2
            train(model, [x], 1)
    assert capsys.readouterr().err.count("'activation' of layer '0' is not logged in iteration 3") == 1
    found = values(tmp_path)
    for step in (0, 1, 2, 4, 5):
        assert_six(found, step, "0", "activation", expected)
    assert (3, "0", "activation", "mean") not in found


def test_the_first_bad_tensor(stand_in_gpu, tmp_path, capsys):  # noqa: F811
    """A NaN is reported with the layer, the step and what came first."""
    model, x = build(), torch.randn(4, 8)
    with watch(model, config(TENSORS, on_nonfinite="warn"), log_dir=tmp_path):
        for step in range(5):
            if step == 3:
                with torch.no_grad():
                    model[1].up.bias[0] = torch.nan
            train(model, [x], 1)
    assert "first bad tensor: 'activation' of layer '1.up' (iteration 3" in capsys.readouterr().err


def test_hooks_of_users_on_the_same_tensor(stand_in_gpu, tmp_path):  # noqa: F811
    """A user's hook that changes a gradient changes it for the layers around, not for those inside."""

    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            y = self.inner(x)
            y.register_hook(lambda g: g * 2)
            return y

    torch.manual_seed(0)
    model, x = nn.Sequential(Doubles(), nn.Linear(8, 1)), torch.randn(4, 8)
    truth = reference(model, [x])
    assert not torch.equal(truth["0", "gradient"][0], truth["0.inner", "gradient"][0])
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, [x], 4)
    check(tmp_path, truth, range(4))


def test_a_watch_that_has_ended(stand_in_gpu, tmp_path):  # noqa: F811
    """A graph made while the model was watched can be run backward after that."""
    model, x = build(), torch.randn(4, 8)
    with watch(model, config(TENSORS), log_dir=tmp_path):
        train(model, [x], 3)
        loss = model(x).sum()
    before = values(tmp_path)
    loss.backward()
    assert values(tmp_path) == before
    assert not any(key[0] == 3 and key[2] == "gradient" for key in before)
