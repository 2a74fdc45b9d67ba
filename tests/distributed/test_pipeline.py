"""DistributedPipeline on real processes, compared with the plain model."""

import pytest
import torch
from torch import nn

from pipesight._torch import pipelining
from pipesight.distributed import DistributedPipeline, schedule_names
from pipesight.distributed.agreement import differences
from support.torchrun import torchrun

CURVES = """
mse = nn.functional.mse_loss
for name in schedule_names():
    n = size if name in ("gpipe", "1f1b", "zero-bubble") else 2 * size
    plain = tanhs(n)
    pipeline = DistributedPipeline(copy.deepcopy(plain), [1] * n, chunks=2 * size, schedule=name, loss_fn=mse)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (plain, pipeline)]
    # Whole, with a short last micro-batch, with fewer samples than chunks, than stages, and a single one.
    for k, (x, y) in enumerate(batches([4 * n, 4 * n - 1, size + 1, size - 1, 1] * 2)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = mse(plain(x), y)
        expected.backward()
        loss = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None, broadcast_loss=True)
        torch.testing.assert_close(loss, expected.detach(), msg=lambda text: f"{name}, step {k}: {text}")
        assert_same_gradients(pipeline, plain)
        norms = [pipeline.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
    assert (pipeline.step(x, y) is None) == (not pipeline.is_last)
    with torch.no_grad():
        for x, y in batches([4 * n, 3]):
            loss, output = pipeline.eval_step(x, y), pipeline.predict(x)
            if pipeline.is_last:
                torch.testing.assert_close(loss, mse(plain(x), y))
                torch.testing.assert_close(output, plain(x))
            else:
                assert loss is None and output is None
    if rank == 0:
        print(name)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_curves(ranks, tmp_path):
    """Every schedule gives the losses, gradients and norms of the plain model, over steps of any batch size."""
    output, _ = torchrun(ranks, CURVES, tmp_path)
    assert output.split() == schedule_names()


def test_repr(tmp_path):
    """It shows how the model is cut and run, as those of the other pipelines do, and the layers of this rank alone."""
    body = """
def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
given = dict(chunks=4, schedule="gpipe", checkpoint="always")
text = repr(DistributedPipeline(layers, [2, 1], loss_fn=nn.functional.mse_loss, **given))
assert text.startswith("DistributedPipeline("), text
assert "balance=[2, 1], devices=['cpu', 'cpu'], chunks=4, checkpoint='always', schedule='gpipe'\\n" in text, text
assert f"rank {rank} has partitions [{rank}] of 2" in text, text
assert ("out_features=3" in text, "Tanh" in text) == (rank == 1, rank == 0), text
text = repr(DistributedPipeline(layers, cuts=["2"], loss=lambda output: output.sum(), loss_weight="sum", **given))
assert "cuts=['2'], devices=['cpu', 'cpu'], chunks=4, checkpoint='always', schedule='gpipe'\\n" in text, text
assert "balance" not in text and "data_parallel" not in text, text
if rank == 0:
    print(text)
"""
    output, _ = torchrun(2, body, tmp_path)
    assert "Linear" in output
    assert repr(object.__new__(DistributedPipeline)).startswith("<pipesight.distributed")


def test_initial_weights(tmp_path):
    """A factory's weights depend on the seed and the layer, never on the ranks; no rank holds those of others."""
    body = """
    def factory():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.BatchNorm1d(4), nn.Embedding(3, 4))
        nn.init.orthogonal_(model[1].weight)
        nn.init.trunc_normal_(model[2].weight, std=0.02)
        model[3].register_buffer("scale", torch.tensor([1.0, 2.0]))
        assert all(p.untyped_storage().device.type == "meta" for p in model.parameters())
        return model

    torch.manual_seed(5)
    state = torch.get_rng_state()
    balance = [1, 2, 2, 1] if size == 4 else [3, 3]
    pipeline = DistributedPipeline(factory, balance, chunks=4, loss_fn=nn.functional.mse_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(pipeline.module) == balance[rank]
    assert not any(t.is_meta for t in pipeline.state_dict().values())
    torch.save(pipeline.state_dict(), f"{folder}/{size}-{rank}.pt")
    """
    found = []
    for ranks in (2, 4):
        torchrun(ranks, body, tmp_path)
        found.append({})
        for rank in range(ranks):
            found[-1].update(torch.load(tmp_path / f"{ranks}-{rank}.pt"))
    two, four = found
    assert len(two) == 15
    assert two.keys() == four.keys()
    assert all(torch.equal(two[key], four[key]) for key in two)
    assert not torch.equal(two["0.weight"], two["3.weight"])
    assert 0.3 < two["0.weight"].abs().max() <= 0.5
    torch.testing.assert_close(two["1.weight"] @ two["1.weight"].T, torch.eye(4), atol=1e-5, rtol=0)
    assert 0.01 < two["2.weight"].std() < 0.03
    assert two["3.scale"].tolist() == [1, 2]
    assert two["4.running_var"].tolist() == [1] * 4


def test_initial_weights_as_on_the_cpu(tmp_path):
    """A model that asks where it is built is built as on the CPU; what needs values is, bit by bit, the plain one."""
    body = """
    import logging, numpy

    class Asks(nn.Module):  # as transformers does
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(100, 64)
            self.scale = nn.Parameter(torch.empty(64))
            where = torch.tensor([]).device
            if where == torch.get_default_device() == torch.device("cpu") and not self.scale.is_meta:
                nn.init.normal_(self.embedding.weight, std=0.02)
                self.scale.data.fill_(3.0)
            self.table = torch.linspace(0, 1, 5, device=self.scale.device)
            self.mask = torch.triu(torch.full((3, 3), float("-inf")), 1)
            self.register_buffer("positions", torch.arange(6).to("cpu").unsqueeze(0), persistent=False)
            self.register_buffer("numbers", torch.tensor(data=numpy.arange(4.0)).float())
            self.rates = torch.linspace(0, 1, 3, device="cpu").tolist()

        def forward(self, input):
            return input + self.scale[:4] + self.mask.exp().sum() + self.table.sum() + self.positions.sum()

    class Looks(Asks):
        def __init__(self):
            super().__init__()
            self.drawn = nn.Parameter(torch.randn(8) * torch.linspace(0, 1, 3)[1].item())
            self.other = nn.Parameter(torch.tensor(numpy.random.rand(3)))

    class Skips(Asks):
        def __init__(self):
            super().__init__()
            self.drawn = nn.Parameter(torch.empty(8))
            if self.drawn.untyped_storage().device.type != "meta":
                nn.init.normal_(self.drawn, 7.0)

    told = []
    logger = logging.getLogger("pipesight.distributed.model_building")
    logger.addFilter(lambda record: told.append(record.getMessage()))
    for kind, word in ((Asks, None), (Looks, "item"), (Skips, "leaves '0.drawn' without values")):
        def factory():
            return nn.Sequential(*(kind() for _ in range(4)))

        def seed():
            torch.manual_seed(3)
            numpy.random.seed(4)
            return torch.get_rng_state()

        seed()
        plain, state = factory(), seed()
        told.clear()
        pipeline = DistributedPipeline(factory, [2, 2], chunks=2, loss_fn=nn.functional.mse_loss)
        assert torch.equal(torch.get_rng_state(), state)
        assert len(told) == (word is not None and rank == 0) and all(word in text for text in told), told
        expected = dict([*plain.named_parameters(), *plain.named_buffers()])
        for name, tensor in [*pipeline.named_parameters(), *pipeline.module.named_buffers()]:
            if word is not None or "embedding" not in name:
                assert torch.equal(tensor, expected[name]), name
            else:
                assert 0.019 < tensor.std() < 0.021, tensor.std()
        for name, layer in pipeline.module.named_children():
            assert torch.equal(layer.table, plain[int(name)].table) and torch.equal(layer.mask, plain[int(name)].mask)
        x = torch.ones(4, 4)
        output = pipeline.predict(x)
        assert output is None or torch.allclose(output, plain(x))
    """
    torchrun(2, body, tmp_path)


def test_mistakes(tmp_path):
    """What cannot work is an error on every rank, which says what to do; afterwards the pipeline works."""
    torchrun(
        2,
        """
        mse = nn.functional.mse_loss
        def make(balance=(1, 1), chunks=4, layers=2, **settings):
            return DistributedPipeline(tanhs(layers), balance, chunks=chunks, loss_fn=mse, **settings)

        def expect(kind, *words, function=make, **settings):
            error = error_of(function, **settings)
            assert type(error) is kind, repr(error)
            assert all(word in str(error) for word in words), error

        expect(ValueError, "'gpipe'", "'dualpipev'", "'zb'", schedule="zb")
        expect(ValueError, "chunks=4", "schedule='gpipe'", layers=4, balance=[1] * 4, chunks=3, schedule="dualpipev")
        expect(ValueError, "one partition per rank", "interleaved-1f1b", balance=[1] * 4, layers=4)
        for j in (1, 3):  # several a rank cannot help
            expect(ValueError, "give balance 2 numbers", f"--nproc-per-node {j}", balance=[1] * j, layers=j)
            assert "interleaved" not in str(error_of(make, balance=[1] * j, layers=j))
        expect(ValueError, "multiple of 2", balance=[1, 1, 1], layers=3, schedule="looped-bfs")
        expect(ValueError, "two partitions per rank", schedule="zbv-zero-bubble")
        expect(ValueError, "chunks=4 or 6", balance=[1] * 4, layers=4, schedule="interleaved_1F1B", chunks=5)
        expect(ValueError, "sum of balance", balance=[1, 2])
        assert "GPipe" not in str(error_of(make, balance=[1, 2]))
        expect(TypeError, "loss_fn", function=lambda: DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=None))

        pipeline = make()
        x, y = next(batches([8]))
        def step(x=x, y=y):
            return pipeline.step(x, y)

        expect(ValueError, "first rank needs the input", function=step, x=None)
        expect(ValueError, "last rank needs the target", function=step, y=None)
        expect(ValueError, "same batch size", "rank 0: 8", "rank 1: 7", function=step, y=y[:7])
        expect(TypeError, "input must be a Tensor", function=step, x=[x])
        expect(ValueError, "batch dimension", function=step, x=torch.ones(()))
        expect(RuntimeError, "5", function=step, x=torch.ones(8, 5).double())
        assert "partition 0, layer '0'" in "".join(
            [str(e := error_of(step, x=torch.ones(8, 5).double())), *getattr(e, "__notes__", [])]
        )
        error = error_of(pipeline.step if rank else pipeline.eval_step, x, y)
        assert type(error) is DisagreementError and "rank 0: eval_step" in str(error), repr(error)
        pipeline.train(rank == 0)
        expect(ValueError, "{0: 'train', 1: 'eval'}", function=step)
        pipeline.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
            expect(ValueError, "autocast torch.bfloat16", function=step)
        same = "all ranks must give DistributedPipeline the same arguments"
        for told, settings in {
            "balance: [1, 1] on rank 0, [2, 2] on rank 1": dict(layers=2 + 2 * rank, balance=[1 + rank] * 2),
            "chunks: 4 on rank 0, 5 on rank 1": dict(chunks=4 + rank),
            "schedule: gpipe on rank 0, 1f1b on rank 1; checkpoint: never on rank 0, always on rank 1": dict(
                schedule=("gpipe", "1f1b")[rank], checkpoint=("never", "always")[rank]
            ),
        }.items():
            assert str(error_of(make, **settings)) == f"{same} ({told})", error_of(make, **settings)
        def other():
            layers = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 4))
            DistributedPipeline(layers, [1, 1], chunks=4, loss_fn=mse)
        assert str(error_of(other)) == f"{same} (the layers of the model: some on rank 0, others on rank 1)"
        assert (step() is None) == (rank == 0)
        """,
        tmp_path,
    )


def test_many_ranks_that_differ():
    """Of many ranks and values, a few are named, and the others counted."""
    given = {rank: {"chunks": 4 + (rank == 7), "schedule": f"s{rank}", "checkpoint": "never"} for rank in range(9)}
    chunks, schedule = differences(given).split("; ")
    assert chunks == "chunks: 4 on ranks 0, 1, 2, 3 and 4 more, 5 on rank 7"
    assert schedule == "schedule: s0 on rank 0, s1 on rank 1, s2 on rank 2, s3 on rank 3 and 5 more"
    assert differences(dict.fromkeys(range(9), given[0])) == ""


def test_without_a_process_group():
    """Outside of a job, the error says how to start one."""
    with pytest.raises(RuntimeError, match=r"torchrun.*init_process_group"):
        DistributedPipeline(nn.Sequential(nn.Linear(1, 1)), [1], chunks=1, loss_fn=nn.functional.mse_loss)


def test_old_torch_is_refused(monkeypatch):
    """Before torch 2.10 schedules would not average replicas: the error says so before anything is built."""
    monkeypatch.setattr(pipelining, "SUPPORTED", False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.10 or newer, but this is torch \d"):
        DistributedPipeline(nn.Sequential(nn.Linear(1, 1)), [1], chunks=1, loss_fn=nn.functional.mse_loss)
