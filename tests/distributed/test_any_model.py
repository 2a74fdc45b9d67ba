"""DistributedPipeline of models that are no nn.Sequential, on real processes, compared with the plain model."""

import pytest
import torch

from pipesight.distributed.stand_ins import ValueNeededError, call
from support.torchrun import RANK, torchrun

MODELS = """
from collections import namedtuple

class EncoderDecoder(nn.Module):
    \"\"\"Tied embedding, a residual that jumps over partitions, a mask from arguments, a scale outside any unit.\"\"\"

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        kind = dict(dim_feedforward=32, dropout=dropout, batch_first=True)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(width, 2, **kind) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(width, 2, **kind) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.5))

    def forward(self, source, target, *, ignore=None, labels=None):
        x = self.embed(source) * self.scale
        residual = x.mean(1, keepdim=True)
        padding = None if ignore is None or not bool((source == ignore).any()) else source == ignore
        for block in self.encoder:
            x = block(x, src_key_padding_mask=padding)
        y = self.embed(target)
        for block in self.decoder:
            y = block(y, x)
        logits = (y + residual + self.shift) @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (target if labels is None else labels).flatten())
        return {"loss": loss, "logits": logits}


def batch(size=8):
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randint(1, 50, (size, length), generator=generator) for length in (6, 5)]
    return draw[0], draw[1]


def plain_step(plain, calls, weights):
    \"\"\"Feed a plain model the same micro-batches; return the loss.\"\"\"
    total = torch.zeros(())
    for (args, kwargs), weight in zip(calls, weights, strict=True):
        loss = plain(*args, **kwargs)["loss"] * weight / sum(weights)
        loss.backward()
        total = total + loss.detach()
    return total


def same_gradients(pipeline, plain):
    expected, seen = dict(plain.named_parameters()), set()
    for name, parameter in pipeline.named_parameters():
        gradient = expected[name].grad
        off = (parameter.grad - gradient).norm() / gradient.norm()
        assert off < 1e-5, (name, off)
    return sorted(name for name, _ in pipeline.named_parameters())
"""

BEGIN = RANK + MODELS


def test_gradients(tmp_path):
    """Every schedule that is supported gives the losses, gradients, norms and outputs of the plain model."""
    body = """
    source, target = batch()
    calls = [((s, t), {"ignore": 7}) for s, t in zip(source.chunk(4), target.chunk(4))]
    for name, cuts in [("gpipe", ["decoder.0"]), ("1f1b", ["encoder.1"]),
                       ("interleaved-1f1b", ["encoder.1", "decoder.0", "decoder.1"]),
                       ("zbv-zero-bubble", ["encoder.1", "decoder.0", "decoder.1"])]:
        for checkpoint in ("never", "always"):
            torch.manual_seed(0)
            plain = EncoderDecoder()
            # Cuts may be the second argument, as in one process.
            pipeline = DistributedPipeline(copy.deepcopy(plain), cuts, chunks=4, schedule=name, checkpoint=checkpoint)
            for step in range(2):
                loss = pipeline.step(source, target, ignore=7, broadcast_loss=True)
                torch.testing.assert_close(loss, plain_step(plain, calls, [1] * 4))
                same_gradients(pipeline, plain)  # the second step adds to the first
            norms = [pipeline.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
            torch.testing.assert_close(*norms)
            found = pipeline.eval_step(source, target, ignore=7), pipeline.predict(source, target, ignore=7)
            if pipeline.is_last:
                with torch.no_grad():
                    expected = plain(source, target, ignore=7)
                torch.testing.assert_close(found[0], expected["loss"])
                torch.testing.assert_close(found[1]["logits"], expected["logits"])
            else:
                assert found == (None, None)
            names = [None] * size
            dist.all_gather_object(names, [name for name, _ in pipeline.named_parameters()])
            assert sorted(sum(names, [])) == sorted(name for name, _ in plain.named_parameters())
            if rank == 0:
                print(name, checkpoint)
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert len(output.splitlines()) == 8


def test_training(tmp_path):
    """An optimizer per rank trains as one on the plain model does; tied weights stay equal; ignored targets count."""
    body = """
    source, target = batch(9)
    labels = target.clone()
    labels[:4, 2:] = -100
    parts = list(zip(source.chunk(4), target.chunk(4), labels.chunk(4)))
    calls = [((s, t), {"labels": l}) for s, t, l in parts]
    weights = [(l != -100).sum().item() for _, _, l in parts]
    torch.manual_seed(0)
    plain = EncoderDecoder().double()  # Adam would blow up the rounding of gradients that are 0
    sample = ((source[:2], target[:2]), {"labels": labels[:2]})
    pipeline = DistributedPipeline(copy.deepcopy(plain), cuts=["encoder.1", "decoder.1"], chunks=4, sample=sample)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, pipeline)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipeline.step(source, target, labels=labels, broadcast_loss=True)
        torch.testing.assert_close(loss, plain_step(plain, calls, weights))
        same_gradients(pipeline, plain)
        for optimizer in optimizers:
            optimizer.step()
    pipeline.save(folder + "/saved", optimizers[1])
    pipeline.step(source, target, labels=labels)
    optimizers[1].step()
    pipeline.load(folder + "/saved", optimizers[1])
    state = plain.state_dict()
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)
    dist.barrier()
    if rank == 0:  # the plain model reads it
        fresh = EncoderDecoder().double()
        state = fresh.state_dict()
        import torch.distributed.checkpoint as dcp
        from pathlib import Path
        import warnings
        with warnings.catch_warnings(action="ignore"):  # of a load in one process
            dcp.load({"model": state}, checkpoint_id=next(Path(folder, "saved").glob("step-*")), no_dist=True)
        fresh.load_state_dict(state)
        torch.testing.assert_close(fresh.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-7)
    """
    torchrun(3, body, tmp_path, begin=BEGIN)
    resumed = """
    torch.manual_seed(1)
    pipeline = DistributedPipeline(lambda: EncoderDecoder().double(), cuts=["decoder.0"], chunks=2)
    assert pipeline.load(folder + "/saved") is None and pipeline._runner.steps == 4
    source, target = batch(9)
    print(pipeline.eval_step(source, target, broadcast_loss=True).item() < 4.5)
    """
    output, _ = torchrun(2, resumed, tmp_path, begin=BEGIN)
    assert output.split() == ["True", "True"]


def test_initial_weights(tmp_path):
    """A factory's weights depend on the seed and the module, not on ranks or cuts; no rank holds those of others."""
    body = """
    torch.manual_seed(5)
    state = torch.get_rng_state()
    cuts = ["decoder.0"] if size == 2 else ["encoder.1", "decoder.1"]
    pipeline = DistributedPipeline(EncoderDecoder, cuts=cuts, chunks=4)
    assert torch.equal(torch.get_rng_state(), state)
    held = sum(p.numel() for p in pipeline._part.model.parameters() if not p.is_meta)
    whole = sum(p.numel() for p in EncoderDecoder().parameters())
    assert held < 0.8 * whole, (held, whole)
    loss = pipeline.step(*batch(), broadcast_loss=True)
    if rank == 0:
        print(loss.item())
    """
    losses = [float(torchrun(ranks, body, tmp_path, begin=BEGIN)[0]) for ranks in (2, 3)]
    assert abs(losses[0] - losses[1]) < 1e-5


def test_randomness(tmp_path):
    """Dropout does not depend on ranks, repeats in a recomputation, and leaves all generators where one would be."""
    body = """
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        model = EncoderDecoder(dropout=0.2)
        pipeline = DistributedPipeline(model, cuts=["decoder.0"], chunks=4, checkpoint=checkpoint)
        losses = [pipeline.step(*batch(), broadcast_loss=True).item() for _ in range(2)]
        found.append([losses, pipeline.clip_grad_norm_(1.0).item(), torch.rand(1).item()])
    assert found[0] == found[1], found
    assert found[0][0][0] != found[0][0][1]
    print(found[0])
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert len(set(output.splitlines())) == 1


def test_what_cannot_work(tmp_path):
    """Every rank raises an error that names the rule and the place; none hangs."""
    body = """
    class Branching(EncoderDecoder):
        def forward(self, source, target, **kwargs):
            x = self.encoder[0](self.embed(source))
            if x.mean() > 0:  # the branch
                x = x * 2
            return {"loss": self.encoder[1](x).sum()}

    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        def forward(self, x):
            return self.third(self.first(x)).sum()

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(4), nn.Linear(4, 4)
        def forward(self, x):
            return (self.inner(self.norm(x)) - self.inner(self.norm(2 * x))).sum()

    class Moody(nn.Linear):
        calls = 0
        def forward(self, x):
            Moody.calls += 1
            y = super().forward(x)
            if Moody.calls == 1:
                y = y * 1
            self.most, self.least = y.amax(), y.amin()
            return y

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Moody(4, 4), nn.Linear(4, 4)
        def forward(self, x):
            return (self.second(self.first(x)) + self.first.most).sum()

    class Reversible(torch.autograd.Function):  # calls modules, and calls them again in its backward
        @staticmethod
        def forward(ctx, x, model):
            return model.second(model.first(x))

    class Inside(Swapped):
        def forward(self, x):
            return self.third(Reversible.apply(x, self)).sum()

    line = next(k for k, text in enumerate(open(folder + "/script.py"), start=1) if "# the branch" in text)
    one = dict(chunks=2, timeout=20)
    x = torch.ones(4, 4)
    errors = [
        error_of(DistributedPipeline(Branching(), cuts=["encoder.1"], **one).step, *batch()),
        error_of(DistributedPipeline(Swapped(), cuts=["second"], **one).step, x),
        error_of(DistributedPipeline(EncoderDecoder(), cuts=["decoder.0"], **one).step, *batch(4 + 4 * rank)),
        error_of(DistributedPipeline(EncoderDecoder(), cuts=["decoder.0"], **one).step, batch()[0] + rank, batch()[1]),
        error_of(DistributedPipeline(EncoderDecoder(), cuts=["decoder.0"], **one).step, *batch(), ignore=3 + rank),
        error_of(DistributedPipeline(Twins(), cuts=["inner"], **one).step, x),
        error_of(DistributedPipeline(Hidden(), cuts=["second"], **one).step, x),
        error_of(DistributedPipeline(Inside(), cuts=["second"], **one).step, x),
        error_of(DistributedPipeline, EncoderDecoder(), cuts=["decodr.0"], **one),
        error_of(DistributedPipeline, EncoderDecoder(), chunks=2),
        error_of(DistributedPipeline(Swapped(), cuts=["third"], loss=lambda y: y, **one).predict, x),
    ]
    if rank == 0:
        assert f"script.py:{line}" in str(errors[0]), errors[0]
        for error in errors:
            print(type(error).__name__, str(error).splitlines()[0] if error else None)
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    lines = output.splitlines()
    parts = [
        "asks for the values of a tensor that another rank computes",
        "never called 'second'",
        "must be given the same arguments (rank 0: source int64[4, 6]",
        "must be given the same batch",
        "int64[8, 5], ignore=3; rank 1: source int64[8, 6], target int64[8, 5], ignore=4)",
        "partitions 0 and 1 both change the buffer 'norm.num_batches_tracked'",
        "in a block that has made other calls before than when the ranks found out what it sends",
        "'second', which begins partition 1, inside a torch.autograd.Function, Reversible",
        "did you mean 'decoder.0'",
        "cut at modules",
        "None",
    ]
    assert len(lines) == len(parts), output
    for line, part in zip(lines, parts, strict=True):
        assert part in line


@pytest.mark.parametrize("read", [torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item])
def test_what_has_no_values_is_not_read(read):
    with pytest.raises(ValueNeededError, match=rf"test_any_model\.py.*asks for the values of .*{read.__name__}"):
        call(read, (torch.empty((), device="meta"),), {}, torch.device("cpu"))


def test_slices_need_values():
    """As experts take them of sorted tokens, by cumulative counts: the block is then run on zeros for its shapes."""
    start, tokens = torch.empty((), dtype=torch.int64, device="meta"), torch.empty(4, 2, device="meta")
    with pytest.raises(ValueNeededError, match=r"asks for the values of .*__getitem__"):
        call(torch.Tensor.__getitem__, (tokens, slice(start, None)), {}, torch.device("cpu"))


def test_what_models_do_between_layers(tmp_path):
    """What crosses may be written into a tensor, changed in place, packed, left in an attribute, or go through an
    autograd function or a checkpoint; vmap runs; a table is made by the first call."""
    body = """
    class Reversal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    class Doubled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Expert(nn.Module):  # branches on its own activations, inside a block
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            chosen = (x[:, 0] > 0).nonzero().flatten()
            return x.index_add(0, chosen, self.inner(x[chosen])) if chosen.numel() else x + 0 * self.inner.weight.sum()

    class Aside(nn.Linear):  # leaves something for the model in an attribute, as an expert's auxiliary loss
        def forward(self, x):
            output = super().forward(x)
            self.left = {"aside": output.square()}
            return output

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert, self.rnn = Expert(), nn.GRU(1, 8, batch_first=True)
            self.a, self.b, self.c, self.d = Aside(8, 8), *(nn.Linear(8, 8) for _ in range(3))
            self.norm, self.weight = nn.BatchNorm1d(8), nn.Parameter(torch.ones(8))
            self.register_buffer("table", None, persistent=False)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(8, dtype=x.dtype) / 8
            h = self.a(x + self.table)
            lengths = torch.arange(1, x.size(0) + 1)
            packed = nn.utils.rnn.pack_padded_sequence(h[..., None], lengths, batch_first=True, enforce_sorted=False)
            h = h + nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].sum(1)
            ones = torch.ones(2, 8, dtype=x.dtype)
            h = h * torch.vmap(lambda row: Doubled.apply(row) * 0 + ones[0])(ones).mean(0)
            h = h * torch.vmap(lambda row: ones[0] + 1)(ones)[0]  # not batched at its end
            pair = torch.zeros(x.size(0), 2, 8, dtype=x.dtype, device=h.device)
            pair[:, 0] = h
            turned, low = h.T, h.min(dim=1, keepdim=True).values
            y = self.norm(self.b(h))
            y = y + Reversal.apply(h) + turned.T * self.weight
            pair[:, 1] = y
            chosen = (x[:, :1] > 0).expand_as(y)  # known on every rank, so that it knows how many items it chooses
            picked = y[chosen]
            if picked.numel() != 8 * int((x[:, 0] > 0).sum()):
                raise ValueError("features and places for them do not match")
            z = self.c(self.expert(y))
            z += low
            last = torch.utils.checkpoint.checkpoint(self.d, z, use_reentrant=False)
            last = last.index_add(0, (x[:, 0] > 0).nonzero().flatten(), picked.view(-1, 8))
            return (last * self.weight + pair.sum(1) + self.a.left["aside"]).square().mean()

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, cuts in [("1f1b", ["b"]), ("1f1b", ["d"]), ("interleaved-1f1b", ["b", "c", "d"])]:
        torch.manual_seed(0)
        plain = Net().double()
        pipeline = DistributedPipeline(copy.deepcopy(plain), cuts=cuts, chunks=4, schedule=name)
        loss = pipeline.step(x, broadcast_loss=True)
        losses = [plain(part) / 4 for part in x.chunk(4)]
        sum(losses).backward()
        torch.testing.assert_close(loss, sum(losses).detach())
        same_gradients(pipeline, plain)
        for key, value in pipeline.state_dict().items():  # the statistics of batch normalisation, too
            torch.testing.assert_close(value, plain.state_dict()[key])
    """
    torchrun(2, body, tmp_path, begin=BEGIN)


def test_replicas(tmp_path):
    """Two replicas of a pipeline with tied weights, each with a part of the batch, train as one model on all of it."""
    body = """
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    source, target = batch(8)
    labels = target.clone()
    labels[:4, 2:] = -100  # only one replica has ignored targets
    torch.manual_seed(rank)  # replicas begin with other weights, and are made equal
    model = EncoderDecoder()
    torch.manual_seed(0)
    pipeline = DistributedPipeline(EncoderDecoder, cuts=["decoder.0"], chunks=2, mesh=mesh)
    everything = [None] * size
    dist.all_gather_object(everything, pipeline.state_dict())
    plain = EncoderDecoder()
    plain.load_state_dict({**everything[0], **everything[2]})
    mine = slice(0, 4) if rank % 2 == 0 else slice(4, 8)
    loss = pipeline.step(source[mine], target[mine], labels=labels[mine], broadcast_loss=True)
    calls = [((s, t), {"labels": l}) for s, t, l in zip(source.chunk(4), target.chunk(4), labels.chunk(4))]
    torch.testing.assert_close(loss, plain_step(plain, calls, [4, 4, 10, 10]))
    same_gradients(pipeline, plain)

    class Sometimes(nn.Module):  # uses a weight of partition 0 in partition 1, if the batch asks for it
        def __init__(self):
            super().__init__()
            self.extra, self.a, self.b = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.b(self.a(x))
            return {"loss": (y * self.extra if bool((x > 2).any()) else y).square().mean()}

    x = torch.linspace(0, 3, 32).view(8, 4)
    torch.manual_seed(0)
    plain = Sometimes()
    pipeline = DistributedPipeline(copy.deepcopy(plain), cuts=["b"], chunks=2, mesh=mesh, timeout=30)
    for _ in range(2):
        pipeline.step(x[mine])
        plain_step(plain, [((part,), {}) for part in x.chunk(4)], [1] * 4)
    same_gradients(pipeline, plain)
    """
    torchrun(4, body, tmp_path, begin=BEGIN)


def test_pretrained(tmp_path):
    """Each rank reads its own part of sharded safetensors files; tied weights are in them once."""
    pytest.importorskip("safetensors")
    body = """
    import json
    from safetensors.torch import save_file
    torch.manual_seed(3)
    plain = EncoderDecoder()
    state = plain.state_dict()
    names = [sorted(state)[::2], sorted(state)[1::2]]
    if rank == 0:
        for k, mine in enumerate(names):
            save_file({name: state[name] for name in mine}, f"{folder}/model-{k}.safetensors")
        table = {name: f"model-{k}.safetensors" for k, mine in enumerate(names) for name in mine}
        with open(f"{folder}/model.safetensors.index.json", "w") as file:
            json.dump({"weight_map": table}, file)
    dist.barrier()
    torch.manual_seed(4)
    import safetensors
    pipeline, read = DistributedPipeline(EncoderDecoder, cuts=["decoder.0"], chunks=2), []

    class Counting:  # as safe_open, it reads nothing but the table of a file until a tensor is asked for
        def __init__(self, path, framework):
            self.file = original(path, framework=framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def get_tensor(self, name):
            read.append(self.file.get_tensor(name))
            return read[-1]

    original, safetensors.safe_open = safetensors.safe_open, Counting
    pipeline.load_pretrained(folder)
    safetensors.safe_open = original
    own = {id(tensor): tensor.nbytes for tensor in pipeline.state_dict().values()}
    assert sum(tensor.nbytes for tensor in read) == sum(own.values()) < 0.8 * sum(t.nbytes for t in state.values())
    loss = pipeline.eval_step(*batch(), broadcast_loss=True)
    with torch.no_grad():
        torch.testing.assert_close(loss, plain(*batch())["loss"])
    larger = DistributedPipeline(lambda: EncoderDecoder(18), cuts=["decoder.0"], chunks=2)
    print(type(error_of(larger.load_pretrained, folder)).__name__)
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert output.split() == ["ValueError"] * 2


def test_what_observers_see(tmp_path):
    """Tasks and layers are seen by the names of the model, and an error names the layer and the micro-batch."""
    body = """
    seen = []

    class Seeing(context.Observer):
        def layer_started(self, where):
            seen.append((where.phase, where.partition, where.layer))

    context.attach(Seeing())
    model = EncoderDecoder()
    pipeline = DistributedPipeline(model, cuts=["decoder.0"], chunks=2, checkpoint="except_last", timeout=30)
    pipeline.step(*batch())
    mine = {0: ["embed", "encoder.0", "encoder.1"], 1: ["decoder.0", "decoder.1"]}[rank]
    assert [name for name, _ in pipeline.partitions[rank].named_children()] == mine
    assert {layer for _, _, layer in seen} >= set(mine)  # the embedding is also called in partition 1
    assert {phase for phase, _, _ in seen} == {"forward", "recompute", "backward"}
    assert {j for _, j, _ in seen} == {rank}
    model.decoder[1].register_forward_hook(lambda *_: 1 / 0)
    error = error_of(pipeline.step, *batch())
    print("in partition 1, layer 'decoder.1', micro-batch 0, forward" in f"{error} {getattr(error, '__notes__', '')}")
    dist.destroy_process_group()
    sys.exit()
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert output.split() == ["True", "True"]


def test_what_models_change_in_place(tmp_path):
    """Lists that blocks append to, samples that are changed in place, blocks that count by values; what is refused."""
    body = """
    import warnings

    class Memory:
        def __init__(self):
            self.seen = []

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        def forward(self, x, seen, memory, mask, write=False, late=False):
            if write:
                mask.mul_(2)
            seen.append(self.layer(x + torch.stack(seen).sum(0)))
            return seen[-1] + mask

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        def forward(self, x, seen, memory, mask, write=False, late=False):
            x = self.layer(x + torch.stack(seen).sum(0)) + mask
            memory.seen.append(x)
            y = torch.zeros_like(x)
            for k in (x.sum(1) > 0).unique().tolist():  # of these values, so that it cannot be known without them
                here = (x.sum(1) > 0) == bool(k)
                y[here] = self.experts[k](x[here])
            if late:
                seen.append(y)
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.blocks = nn.Linear(4, 2), nn.ModuleList([Keeping(), Routed(), Keeping(), Routed()])
        def forward(self, x, mask, count=None, **how):
            mask += 1
            if count is not None:
                count += 1
            seen, memory = [x], Memory()
            for block in self.blocks:
                x = block(x, seen, memory=memory, mask=mask, **how)
            return self.head(torch.stack(seen).sum(0) + x).square().sum()

    torch.manual_seed(0)
    plain = Model().double()
    x, mask = torch.randn(6, 4).double(), torch.zeros(6, 1).double()
    for part, mine in zip(x.chunk(3), mask.clone().chunk(3)):
        plain(part, mine).backward()
    same = dict(chunks=3, loss_weight="sum")
    for schedule, checkpoint, cuts in [
        ("1f1b", "always", [2]), ("zbv-zero-bubble", "except_last", [1, 2, 3])
    ]:
        pipeline = DistributedPipeline(
            copy.deepcopy(plain).requires_grad_(), cuts=[f"blocks.{k}" for k in cuts], schedule=schedule,
            checkpoint=checkpoint, sample=((x, mask), {}), **same
        )
        mine = mask.clone()
        pipeline.step(x, mine)
        assert mine.unique().tolist() == [1]
        for name, parameter in pipeline.named_parameters():
            expected = plain.get_parameter(name).grad
            if parameter.grad is None:
                assert expected is None or not expected.any(), name
            else:
                torch.testing.assert_close(parameter.grad, expected, msg=name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipeline = DistributedPipeline(copy.deepcopy(plain), cuts=["blocks.2"], **same)
        pipeline.step(x, mask.clone())
    assert not told, told[0].message  # of the head alone, which is little
    count = torch.zeros(3)
    for wrong in [dict(count=count), dict(write=True), dict(late=True)]:
        error = error_of(pipeline.step, x, mask.clone(), **wrong)
        if rank == 0:
            print(type(error).__name__, str(error).splitlines()[0], *getattr(error, "__notes__", []))
    assert not count.any()
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    changed, inside, late = output.splitlines()
    assert "RuntimeError the model changes its argument 'count' in place" in changed
    assert "NotImplementedError 'blocks.0' changes a tensor in place that every rank computes" in inside
    assert "asks for the values" in late
    assert "'blocks.1' changes what it is given after it has asked for them" in late


def test_what_losses_are_means_over(tmp_path):
    """A loss is weighed by its targets, a masked mean by the mask, each of several by its own; else it raises."""
    body = """
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, ids, mask=None, labels=None):
            scores = self.head(self.inner(self.embed(ids))).flatten(0, 1)
            if labels is None:  # the mask alone says what counts
                labels = ids.masked_fill(~mask, -100)
            return {"loss": 0.5 * self.criterion(scores, labels.flatten()).double() + 1}

    class Masked(Scored):
        def forward(self, ids, labels):
            scores = self.head(self.inner(self.embed(ids))).flatten(0, 1)
            losses, mask = nn.functional.cross_entropy(scores, ids.flatten(), reduction="none"), labels.flatten() >= 0
            return {"loss": (losses * mask).sum() / (mask.sum() + 1e-5)}

    class Several(Scored):  # the words, less the first of each sample with weights of classes; the last half has none
        def __init__(self):
            super().__init__()
            self.register_buffer("importance", torch.linspace(0.5, 2, 9))

        def forward(self, ids, labels):
            scores = self.head(self.inner(self.embed(ids)))
            words = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
            first = labels[:, 0].masked_fill(labels[:, 1] >= 0, -100)
            return {"loss": words - nn.functional.cross_entropy(scores[:, 0], first, weight=self.importance) / 2}

    torch.manual_seed(0)
    ids, whole = torch.randint(9, (8, 6)), torch.ones(8, 6, dtype=torch.bool)
    part = whole.clone()
    part[:4, 1:] = False
    one = dict(cuts=["inner"], chunks=2, timeout=20)
    for k, mask in enumerate((part, whole, part, whole, whole, part, part, part)):
        if k % 3 == 0:
            plain = (Scored, Masked, Several)[k // 3]()
            pipeline = DistributedPipeline(copy.deepcopy(plain), verify=k == 6, **one)
        labels = ids.masked_fill(~mask, -100)
        plain.zero_grad()
        for parameter in pipeline.parameters():
            parameter.grad = None
        expected = plain(ids, labels=labels)["loss"]
        expected.backward()
        torch.testing.assert_close(pipeline.step(ids, labels=labels, broadcast_loss=True), expected.detach())
        torch.testing.assert_close(pipeline.eval_step(ids, labels=labels, broadcast_loss=True), expected.detach())
        same_gradients(pipeline, plain)
    pipeline = DistributedPipeline(Scored(), **one)
    first = error_of(pipeline.eval_step, ids, part)
    for _ in range(2):
        pipeline.step(ids, whole)
    third = error_of(pipeline.step, ids, part, broadcast_loss=True)
    for error in (first, third):
        assert "count 0.1429, 0.8571 by what they are means" in str(error), error
        assert "but were weighed 0.5, 0.5" in str(error), error
    print("done")
    dist.destroy_process_group()
    sys.exit()
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert output.split() == ["done"] * 2


def test_loss_outside_the_model(tmp_path):
    """With ``loss_fn``, a step takes the target last, as in one process: the loss and gradients of the whole batch.

    So it is where an argument has several rows for each sample, or as many that are the same for all.
    """
    body = """
    import warnings
    from pipesight import Pipeline
    warnings.filterwarnings("ignore", "2 processes train a copy")  # one does, to compare

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        def forward(self, tokens, *, shift=0.0):
            x = first = self.embed(tokens)
            for block in self.blocks:
                x = block(x) + shift
            return self.head(x + first)

    def mean(scores, target):
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    plain = Net().double()
    tokens, target = torch.randint(11, (2, 13, 5))
    target[2, :3] = target[9] = -100
    total = nn.CrossEntropyLoss(reduction="sum")
    moved = (lambda scores, target: total(scores.transpose(1, 2), target))
    moved.reduction = "sum"
    cuts = ["blocks.1", "blocks.2", "blocks.3"]
    for loss_fn, schedule in ((mean, "1f1b"), (moved, "v-half"), (mean, "zbv-zero-bubble")):
        one = dict(cuts=cuts if schedule != "1f1b" else ["blocks.2"], chunks=5, schedule=schedule, loss_fn=loss_fn)
        plain.zero_grad()
        expected = loss_fn(plain(tokens, shift=0.1), target)
        expected.backward()
        pipes = [DistributedPipeline(copy.deepcopy(plain), verify=True, timeout=30, **one)]
        if rank == 0:  # the same words in one process
            pipes.append(Pipeline(copy.deepcopy(plain), devices=["cpu"] * (len(one["cuts"]) + 1), **one))
        for pipeline in pipes:
            loss = pipeline.step(tokens, target, shift=0.1, broadcast_loss=True)
            torch.testing.assert_close(loss, expected.detach())
            same_gradients(pipeline, plain)
        pipeline = pipes[0]
        found = pipeline.eval_step(tokens, shift=0.1, target=target), pipeline.predict(tokens, shift=0.1)
        if pipeline.is_last:
            torch.testing.assert_close(found, (expected.detach(), plain(tokens, shift=0.1).detach()))

    class Queries(nn.Module):  # those of each sample, or of all: the model is asked which
        def __init__(self, each):
            super().__init__()
            self.first, self.second, self.each = nn.Linear(4, 4), nn.Linear(4, 4), each
        def forward(self, x, queries):
            x = self.second(self.first(x))
            return torch.einsum("bd,bqd->bq", x, queries.view(len(x), -1, 4)) if self.each else x @ queries.T

    for each in (True, False):
        plain, target = Queries(each).double(), torch.randn(8).double()
        x, queries = torch.randn(8, 4).double(), torch.randn(24, 4).double()
        loss_fn = (lambda scores, target: (scores.mean(1) - target).square().mean())
        several = dict(cuts=["second"], chunks=2, loss_fn=loss_fn)
        loss_fn(plain(x, queries), target).backward()
        pipes = [DistributedPipeline(copy.deepcopy(plain), timeout=30, **several)]
        if rank == 0:
            pipes.append(Pipeline(copy.deepcopy(plain), devices=["cpu"] * 2, **several))
        for pipeline in pipes:
            pipeline.step(x, queries, target)
            same_gradients(pipeline, plain)

    one |= dict(chunks=2, timeout=30)
    errors = [
        error_of(DistributedPipeline(Net(), **one).step, tokens),
        error_of(DistributedPipeline(Net(), **one).step, tokens, target[0]),
        error_of(DistributedPipeline, Net(), loss=lambda scores: scores, **one),
        error_of(DistributedPipeline, Net(), loss_weight=lambda *_: 1.0, **one),
    ]
    for error in errors if rank == 0 else ():
        print(type(error).__name__, error)
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    parts = [
        "TypeError step needs the arguments of the model and then the target",
        "ValueError the target must have as many samples as the input",
        "TypeError give either loss, which takes the model's output, or loss_fn",
        "TypeError over ranks, how much a loss counts must be known before outputs are",
    ]
    assert len(output.splitlines()) == len(parts)
    for line, part in zip(output.splitlines(), parts, strict=True):
        assert part in line


def test_verify(tmp_path):
    """With `verify`, the first step is compared with the plain model; nothing is left behind; differences are named."""
    body = """
    import random

    class Net(nn.Module):
        def __init__(self, dropout=0.0, noise=False):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.norm, self.drop, self.noise = nn.BatchNorm1d(4), nn.Dropout(dropout), noise
            self.c.weight = self.a.weight  # tied

        def forward(self, x):
            y = self.c(self.drop(self.b(self.norm(self.a(x)))))
            return (y * (random.random() if self.noise else 1)).square().mean()

    x = torch.randn(8, 4)
    random.seed(rank)
    for dropout in (0.0, 0.5):
        found = []
        for verify in (False, True):
            torch.manual_seed(0)
            torch.rand(rank)  # ranks agree on a state all the same
            pipeline = DistributedPipeline(
                lambda: Net(dropout), cuts=["b"], chunks=2, verify=verify, checkpoint="always", timeout=30
            )
            losses = [pipeline.step(x, broadcast_loss=True).item() for _ in range(2)]
            found.append([losses, pipeline.clip_grad_norm_(1.0), pipeline.state_dict(), pipeline._runner.steps])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.manual_seed(0)
    hooked = Net()
    hooked.a.weight.register_hook(lambda gradient: 2 * gradient)
    for model in (hooked, Net(noise=True)):
        pipeline = DistributedPipeline(model, cuts=["b"], chunks=2, verify=True, timeout=30)
        print(str(error_of(pipeline.step, x)).replace(chr(10), " "))
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    lines = output.splitlines()
    assert len(lines) == 4
    assert sum("'a.weight.grad' differs from the plain model's by up to" in line for line in lines) == 2, output
    assert sum("'loss' differs from the plain model's by up to" in line for line in lines) == 2, output


def test_a_model_goes_with_its_pipeline(tmp_path):
    """Without the garbage collector: the next model may not fit beside it."""
    body = """
    import gc, weakref
    source, target = batch()
    gc.collect()
    gc.disable()
    pipeline = DistributedPipeline(EncoderDecoder(), cuts=["decoder.0"], chunks=4, schedule="1f1b")
    for _ in range(2):
        pipeline.step(source, target)
    pipeline.predict(source, target)
    weights, left = [weakref.ref(weight) for weight in pipeline.parameters()], pipeline.module
    del pipeline
    if rank == 0:
        print(len(left.embed(source)))  # what is left of it can be called
    del left
    print([weight() for weight in weights if weight() is not None])
    gc.enable()
    """
    output, _ = torchrun(2, body, tmp_path, begin=BEGIN)
    assert sorted(output.split()) == sorted(["8", "[]", "[]"]), output
