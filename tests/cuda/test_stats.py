"""Statistics on a GPU: the kernels against float64, reading back, batches, streams, and a watched pipeline."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import pipesight.stats as debug_api
from pipesight import GPipe, Pipeline
from pipesight.stats import watch
from pipesight.stats.moments import FIELDS, Moments
from pipesight.stats.moments.cpu_moments import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = (1, 31, 1000, 8192, 8193, 100_000, (1 << 22) + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)


def on_gpu(tensor: torch.Tensor, **options: bool) -> Moments:
    from pipesight.stats.moments.cuda_moments import DeviceRows

    return DeviceRows(torch.device("cuda", 0)).measure([tensor], **options)[0].moments()


def check(tensor: torch.Tensor, *, powers: bool = False) -> None:
    """Compare with float64 on the CPU."""
    found = on_gpu(tensor, powers=powers)
    x = tensor.detach().cpu().double().reshape(-1)
    finite = x[x.isfinite()]
    assert found.count == finite.numel()
    assert found.nans == x.isnan().sum().item()
    assert found.infs == x.isinf().sum().item()
    if not finite.numel():
        return
    assert found.zeros == (finite == 0).sum().item()
    assert found.min == finite.min().item()
    assert found.max == finite.max().item()
    nonzero = finite[finite != 0].abs()
    assert found.smallest == (nonzero.min().item() if nonzero.numel() else math.inf)
    centred = finite - finite.mean()
    spread = centred.square().sum().item()
    scale = max(abs(finite.mean().item()), math.sqrt(spread / finite.numel()))
    assert found.mean == pytest.approx(finite.mean().item(), rel=1e-6, abs=1e-7 * scale)
    assert found.m2 == pytest.approx(spread, rel=2e-6, abs=1e-300)
    assert found.l1 == pytest.approx(finite.abs().sum().item(), rel=1e-6)
    if powers:
        assert found.m4 == pytest.approx(centred.pow(4).sum().item(), rel=1e-9)
    else:
        assert math.isnan(found.m4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_dtypes(size: int, dtype: torch.dtype) -> None:
    """Every size and dtype is right to 1e-6, ragged ends included."""
    torch.manual_seed(size)
    check((torch.randn(size, device="cuda") * 50).to(dtype))


HARD = {
    "constant": lambda n: torch.full((n,), 0.1, device="cuda"),
    "alternating": lambda n: 0.1 * (torch.arange(n, device="cuda") % 2 * 2 - 1),
    "far from zero": lambda n: torch.randn(n, device="cuda") + 1e6,
    "outlier first": lambda n: torch.cat([torch.full((1,), 1e6, device="cuda"), torch.randn(n - 1, device="cuda")]),
    "huge": lambda n: torch.randn(n, device="cuda") * 1e25,
    "tiny": lambda n: torch.randn(n, device="cuda") * 1e-25,
    "huge and tiny": lambda n: torch.randn(n, device="cuda") * torch.tensor([1e25, 1e-25], device="cuda").repeat(n)[:n],
    "sorted": lambda n: torch.randn(n, device="cuda").sort().values,
    "relu": lambda n: torch.randn(n, device="cuda").relu(),
    "zeros": lambda n: torch.zeros(n, device="cuda"),
    "nan": lambda n: torch.where(torch.rand(n, device="cuda") > 0.999, torch.nan, torch.randn(n, device="cuda")),
    "inf": lambda n: torch.where(torch.rand(n, device="cuda") > 0.999, torch.inf, torch.randn(n, device="cuda")),
    "only nan": lambda n: torch.full((n,), torch.nan, device="cuda"),
    "only inf": lambda n: torch.full((n,), torch.inf, device="cuda"),
    "only -inf": lambda n: torch.full((n,), -torch.inf, device="cuda"),
    "half inf": lambda n: torch.randn(n, device="cuda").index_fill_(0, torch.arange(n // 2, device="cuda"), torch.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hard_numbers(name: str, dtype: torch.dtype) -> None:
    """Numbers that other tools get wrong."""
    torch.manual_seed(0)
    check(HARD[name](1_000_003).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_only_one_infinity(value: float, dtype: torch.dtype) -> None:
    """A tensor that overflowed everywhere has no finite element: by the kernels, alone, at once, and without them."""
    from pipesight.stats.moments.cpu_moments import measure_on_device
    from pipesight.stats.moments.cuda_moments import DeviceRows

    wholes = [torch.full((n,), value, dtype=dtype, device="cuda") for n in (1, 16_384, 40_960, 1_000_003)]
    for x in wholes:
        check(x)
        check(x.expand(2, -1))
        assert measure_on_device(x) == Moments(infs=x.numel())
    for x, row in zip(wholes, DeviceRows(torch.device("cuda", 0)).measure(wholes), strict=True):
        assert (row.moments().count, row.moments().infs) == (0, x.numel())


def test_powers() -> None:
    """The fourth moment is there when it is asked for."""
    check(torch.randn(100_001, device="cuda"), powers=True)


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x.reshape(-1)[1:],
        lambda x: x[:1].expand(64, -1),
        lambda x: x.repeat(20, 20)[:, :5999].t(),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(shape, dtype: torch.dtype) -> None:
    """Views, whatever their strides and their address."""
    check(shape(torch.randn(300, 301, device="cuda").to(dtype)))


def test_same_as_on_the_cpu() -> None:
    """Both ways to measure agree in every field."""
    x = torch.randn(100_000)
    x[:7] = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 1e25, 1e-25, 0.0])
    ours, theirs = on_gpu(x.cuda()).row(), measure(x).row()
    for field, a, b in zip(FIELDS, ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True), field


def test_many_at_once() -> None:
    """Many tensors are measured by one kernel for so many of a dtype, each to its own row."""
    from pipesight.stats.moments.cuda_launch import TOGETHER
    from pipesight.stats.moments.cuda_moments import DeviceRows

    torch.manual_seed(0)
    tensors = [torch.randn(n, device="cuda") + n for n in (1, 5, 8192, 100_000, 3, 70_000, *range(10, 300))]
    tensors += [t.bfloat16() for t in tensors[:20]]
    rows = DeviceRows(torch.device("cuda", 0))
    rows.measure(tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        found = rows.measure(tensors)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.name.startswith("measure")]
    assert len(kernels) == -(-296 // TOGETHER) + 1
    rows.send()
    for row, tensor in zip(found, tensors, strict=True):
        assert row.moments().mean == pytest.approx(tensor.double().mean().item(), rel=1e-5)
        assert row.moments().count == tensor.numel()


def test_steps_on_their_way_do_not_mix() -> None:
    """What is launched in a step is not overwritten by the next ones, however far the device is behind."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows, found, dtypes = DeviceRows(torch.device("cuda", 0)), [], (torch.float32, torch.bfloat16)
    rows.measure([torch.ones(10, device="cuda", dtype=dtype) for dtype in dtypes])  # compiling takes its time
    rows.send()
    torch.cuda.synchronize()
    for step in range(40):
        if step % 8 == 0:  # in between, the memory of earlier steps is used again
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)
        tensors = [torch.full((10 + i,), float(step), device="cuda", dtype=dtypes[i % 2]) for i in range(300)]
        found.append(rows.measure(tensors))
        rows.send()
        assert step % 8 or not found[step][0].ready
        assert all(
            of_step[0].ready for of_step in found[: max(0, step - 8)]
        )  # asked for, as at each step of a training
    for step, of_step in enumerate(found):
        for i, row in enumerate(of_step):
            moments = row.moments()
            assert (moments.count, moments.min, moments.max, moments.mean) == (10 + i, step, step, step)


def test_one_launch_for_one() -> None:
    """One tensor takes one kernel, however many programs measure it."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows, x = DeviceRows(torch.device("cuda", 0)), torch.randn(1 << 20, device="cuda")
    rows.measure([x])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        rows.measure([x])
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_share_their_scratch_memory(dtype: torch.dtype) -> None:
    """Kernels that follow each other on a stream, of any number of programs, leave no trace for the next."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows = DeviceRows(torch.device("cuda", 0))
    torch.manual_seed(0)
    sizes = torch.randint(1, 1 << 23, (400,)).tolist()
    tensors = [torch.full((size,), float(i % 7), device="cuda", dtype=dtype) for i, size in enumerate(sizes)]
    found = [rows.measure_one(x) for x in tensors]
    rows.send()
    for i, (row, size) in enumerate(zip(found, sizes, strict=True)):
        moments = row.moments()
        assert (moments.count, moments.min, moments.max, moments.mean, moments.m2) == (size, i % 7, i % 7, i % 7, 0)


def test_merged_calls_are_those_of_the_whole() -> None:
    """Rows of many calls, merged at once, have the moments of all their elements."""
    from pipesight.stats.moments.cuda_moments import DeviceRows
    from pipesight.stats.moments.moments import merge_each

    rows = DeviceRows(torch.device("cuda", 0))
    torch.manual_seed(0)
    wholes = [torch.randn(8 * 5000, device="cuda") * (i + 1) + i for i in range(20)]
    wholes[3][77] = torch.nan
    calls = [[rows.measure_one(part) for part in whole.chunk(1 + i % 8)] for i, whole in enumerate(wholes)]
    rows.send()
    assert [any(row.is_bad for row in of_one) for of_one in calls] == [i == 3 for i in range(20)]
    merged = merge_each([[row.row() for row in of_one] for of_one in calls]).tolist()
    for moments, whole in zip(map(Moments.from_row, merged), wholes, strict=True):
        x = whole.double().cpu()
        x = x[x.isfinite()]
        assert moments.count == len(x)
        assert moments.mean == pytest.approx(x.mean().item(), rel=1e-6, abs=1e-6)
        assert moments.m2 == pytest.approx((x - x.mean()).square().sum().item(), rel=1e-5)


def test_nothing_waits() -> None:
    """Neither measuring nor sending waits for the device."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows, x = DeviceRows(torch.device("cuda", 0)), torch.randn(1 << 20, device="cuda")
    rows.measure([x])
    rows.send()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    row = rows.measure([x])[0]
    rows.send()
    assert not row.ready
    assert row.moments().count == x.numel()
    assert row.ready


def test_streams() -> None:
    """Rows written on several streams are all read."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows = DeviceRows(torch.device("cuda", 0))
    x = torch.randn(1 << 16, device="cuda")
    torch.cuda.synchronize()
    found = []
    for number in range(20):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            y = x + number
            found.append(rows.measure([y])[0])
    rows.send()
    for number, row in enumerate(found):
        assert row.moments().mean == pytest.approx((x.double() + number).mean().item(), abs=1e-5)


def test_memory_is_flat() -> None:
    """Steps leave nothing on the device."""
    from pipesight.stats.moments.cuda_moments import DeviceRows

    rows, x = DeviceRows(torch.device("cuda", 0)), torch.randn(1 << 16, device="cuda")
    for number in range(60):
        if number == 10:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        for _ in range(300):
            rows.measure([x])
        rows.send()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


CONFIG = {
    "all": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "LogTensorStats": {
            "enabled": True,
            "tensors": ["activation", "gradient", "weight", "wgrad", "input"],
            "stats": ["min", "max", "mean", "std", "l1_norm", "l2_norm", "zeros%", "numel"],
        },
        "transformer_engine": {
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["underflows%", "mxfp8_mse"]}
        },
    }
}


def train(folder, wrap, device: str, depth: int = 1) -> dict[tuple[int, str, str, str], float]:
    torch.manual_seed(0)
    inner = [nn.Linear(64, 64) for _ in range(depth)]
    model = wrap(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), *inner, nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, CONFIG, log_dir=folder):
        for number in range(4):
            x = torch.randn(24, 32, generator=torch.Generator().manual_seed(number)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = (folder / "stats" / "rank-00000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {(r["iteration"], r["layer"], r["tensor"], r["statistic"]): r["value"] for r in records}


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"]], ids=str)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_watched_pipeline(tmp_path, devices: list[str], checkpoint: str) -> None:
    """A pipeline on a GPU logs what the plain model on the CPU logs."""
    plain = train(tmp_path / "plain", lambda model: model, "cpu")

    def wrap(model):
        return GPipe(model, [2, 2], devices=devices, chunks=3, checkpoint=checkpoint)

    piped = train(tmp_path / "piped", wrap, devices[0])
    check_equal(piped, plain)


def test_watched_pipeline_of_any_model(tmp_path) -> None:
    """Tensors of several micro-batches share a launch, also where a `Pipeline` looks at all that a unit uses."""
    plain = train(tmp_path / "plain", lambda model: model, "cpu", depth=60)

    def wrap(model):
        return Pipeline(model, cuts=["31"], devices=["cuda:0", "cuda:0"], chunks=4)

    check_equal(train(tmp_path / "piped", wrap, "cuda:0", depth=60), plain)


Values = dict[tuple[int, str, str, str], float]


def check_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 1e-2 if "mse" in key[3] or "flow" in key[3] else 1e-3
        assert found[key] == pytest.approx(value, rel=tolerance, abs=1e-5), key


@pytest.mark.parametrize("how", ["relu_", "data", "later"])
def test_tensors_that_change_in_place(tmp_path, capfd, how: str) -> None:
    """What a layer changes of the layer before is measured as it was, whether torch knows of the change or not."""

    class Spoil(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if how == "relu_":
                return torch.relu_(x)
            if how == "data":
                x.data.mul_(3)
            elif self.calls > 3:  # not while it is found out which tensors change
                return x.mul_(3)
            return x * 1

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Spoil(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(32, 64, device="cuda")
    expected = nn.functional.linear(x, model[0].weight, model[0].bias).double()
    feature = {"enabled": True, "tensors": ["activation", "gradient"], "stats": ["l2_norm"]}
    section = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": feature}
    with watch(model, {"all": section}, log_dir=tmp_path):
        for _ in range(6):
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
    records = [json.loads(line) for line in (tmp_path / "stats" / "rank-00000.jsonl").read_text().splitlines()]
    norms = [r for r in records if (r["layer"], r["tensor"]) == ("0", "activation")]
    for record in norms:
        assert record["value"] == pytest.approx(expected.norm().item(), rel=1e-5), record["iteration"]
    said = "'activation' of layer '0' is not logged in iteration 3: it was changed in place" in capfd.readouterr().err
    assert [record["iteration"] for record in norms] == ([0, 1, 2, 4, 5] if said else [0, 1, 2, 3, 4, 5])
    assert said == (how == "later")


def test_first_bad_tensor(tmp_path, capfd) -> None:
    """A NaN on the device is reported when it is read back."""
    config = {**CONFIG, "all": {**CONFIG["all"]}}
    config["all"]["LogTensorStats"] = {**CONFIG["all"]["LogTensorStats"], "on_nonfinite": "warn"}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    with watch(model, config, log_dir=tmp_path, auto_step=False) as watching:
        x = torch.randn(2, 4, device="cuda")
        x[0, 0] = torch.nan
        model(x)
        watching.step()
    assert "first bad tensor: 'input' of layer '0'" in capfd.readouterr().err


class Block(nn.Module):
    """Layers whose output is changed in place, and one whose output the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(inplace=True)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.norm(x))
        y += 0.5
        return self.down(self.drop(self.act(y)))


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:`torch.jit.script_method`", "ignore:The .grad attribute")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_blocks(tmp_path, dropout: float) -> None:
    """Layers inside compiled blocks are logged as plain ones are, and logged steps train as the others do."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(10)), nn.Linear(64, 3)).cuda()
    for block in model[:-1]:
        block.drop.p = dropout
    batches, seen = torch.randn(2, 32, 64, device="cuda"), {}
    plain = copy.deepcopy(model).double()

    def after(name: str, output: torch.Tensor) -> None:
        seen.setdefault((name, "activation"), []).append(output.detach().clone())
        output.register_hook(lambda g: seen.setdefault((name, "gradient"), []).append(g.clone()))

    for name, layer in plain.named_modules():
        if name:
            layer.register_forward_hook(lambda _, args, output, name=name: after(name, output))
    for x in batches:
        plain(x.double()).square().mean().backward()
    for block in model[:-1]:
        block.compile(fullgraph=True)
    feature = {"enabled": True, "tensors": ["activation", "gradient"], "stats": ["l2_norm", "min"], "freq": 2}
    section = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": feature}
    optimizer, gradients = torch.optim.SGD(model.parameters(), 0.0), []
    with watch(model, {"all": section}, log_dir=tmp_path):
        for _ in range(5):
            torch.manual_seed(1)
            optimizer.zero_grad()
            for x in batches:
                model(x).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
    for of_step in gradients[1:]:
        for one, other in zip(of_step, gradients[0], strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())
    records = [json.loads(line) for line in (tmp_path / "stats" / "rank-00000.jsonl").read_text().splitlines()]
    found = {(r["iteration"], r["layer"], r["tensor"], r["statistic"]): r["value"] for r in records}
    assert {key[:3] for key in found} == {(step, *key) for step in (0, 2, 4) for key in seen}
    for (layer, tensor), parts in seen.items() if not dropout else ():
        whole = torch.cat([part.reshape(-1) for part in parts])
        for step in (0, 2, 4):
            assert found[step, layer, tensor, "l2_norm"] == pytest.approx(whole.norm().item(), rel=1e-4)
            assert found[step, layer, tensor, "min"] == pytest.approx(whole.min().item(), rel=1e-3, abs=1e-9)


def capture(function) -> torch.cuda.CUDAGraph:
    """Capture a call in a CUDA graph, after one that is not captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.parametrize("iterations", [False, True])
def test_calls_in_a_captured_graph(tmp_path, capfd, iterations: bool) -> None:
    """What is logged while a CUDA graph is captured is left out with one warning, and the graph is right."""
    x, y = torch.ones(8, 32, device="cuda"), torch.zeros(8, 32, device="cuda")
    calls = []

    def work() -> None:
        y.copy_(x * 2)
        for tensor in ("activation", "input"):
            iteration = len(calls) if iterations else None
            calls.append(debug_api.log_tensor_stats("0", tensor=y, tensor_name=tensor, iteration=iteration))
        debug_api.step()

    debug_api.initialize(CONFIG, log_dir=tmp_path)
    try:
        graph = capture(work)
        x.fill_(3)
        graph.replay()
        calls.append(debug_api.log_tensor_stats("0", tensor=y, tensor_name="activation"))
    finally:
        debug_api.end_debug()
    assert calls[2:4] == [{}, {}]
    assert [call["mean"].item() for call in (calls[0], calls[1], calls[4])] == [2, 2, 6]
    assert capfd.readouterr().err.count("nothing is measured while a CUDA graph is captured") == 1


def test_training_in_a_captured_graph(tmp_path, capfd) -> None:
    """A watched training step can be captured; the steps before and after the capture are logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(24, 32, device="cuda")

    def train_step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    with watch(model, CONFIG, log_dir=tmp_path):
        graph = capture(train_step)
        before = model[0].weight.detach().clone()
        graph.replay()
        assert not torch.equal(model[0].weight, before)
        train_step()
    records = [json.loads(line) for line in (tmp_path / "stats" / "rank-00000.jsonl").read_text().splitlines()]
    assert {record["iteration"] for record in records} == {0, 1}
    for iteration in (0, 1):
        sizes = {
            (record["layer"], record["tensor"]): record["value"]
            for record in records
            if record["iteration"] == iteration and record["statistic"] == "numel"
        }
        assert {tensor for _, tensor in sizes} == {"activation", "gradient", "weight", "wgrad", "input"}
        assert sizes["0", "activation"] == 24 * 64
    assert capfd.readouterr().err.count("nothing is measured while a CUDA graph is captured") == 1
