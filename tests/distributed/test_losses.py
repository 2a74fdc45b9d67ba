"""Losses that are no mean over samples: the gradients are those of the plain model on the whole batch, or an error."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pipesight.distributed.loss_check import Evidence, LossCheck
from pipesight.distributed.loss_weights import LossWeights
from pipesight.pipeline.microbatch import lone
from support.torchrun import RANK, torchrun

LOSSES = (
    RANK
    + """
from functools import partial
from torch.distributed.device_mesh import init_device_mesh
F = nn.functional
WEIGHT = torch.tensor([0.1, 2.0, 0.7, 1.3, 0.4], dtype=torch.float64)


def make(classes=5):
    torch.manual_seed(0)
    layers = [nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, classes)]
    return nn.Sequential(*layers).double()


def tokens(count, length=4, *, padding=-100, generator=torch.Generator().manual_seed(1)):
    '''Return sequences and what follows, padded after other lengths; the first three are all padding.'''
    x = torch.randint(7, (count, length), generator=generator)
    y = torch.randint(5, (count, length), generator=generator)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    lengths[:3] = 0
    return x, y.masked_fill(torch.arange(length) >= lengths, padding)


class Swapped(nn.Module):
    '''Puts classes where torch wants them.'''

    def forward(self, input):
        return input.transpose(1, 2)


def compare(pipeline, plain, loss_fn, batch, part=slice(None), message=""):
    plain.zero_grad()
    pipeline.module.zero_grad()
    x, y = batch
    expected = loss_fn(plain(x), y)
    expected.backward()
    mine = y[part] if isinstance(y, torch.Tensor) else tuple(t[part] for t in y)
    for call in (pipeline.step, pipeline.eval_step):
        loss = call(x[part], mine, broadcast_loss=True)
        torch.testing.assert_close(loss, expected.detach(), msg=lambda text: f"{message}: {text}")
    gradients = dict(plain.named_parameters())
    for name, parameter in pipeline.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter, "to_local") else parameter.grad
        torch.testing.assert_close(gradient, gradients[name].grad, msg=lambda text: f"{message}, {name}: {text}")
"""
)


def test_losses_of_torch(tmp_path):
    """Padding and class weights are exact for torch's own losses, as functions, modules and partials."""
    torchrun(
        2,
        """
        def swapped():
            return nn.Sequential(*make(), Swapped())

        def probabilities():
            return nn.Sequential(*make(), Swapped(), nn.Softmax(1))

        def logs():
            return nn.Sequential(*make(), Swapped(), nn.LogSoftmax(1))

        x, y = tokens(11)
        zeros = y.masked_fill(y < 0, 0)
        soft = torch.rand(11, 5, 4).double().softmax(1)
        own = nn.CrossEntropyLoss(ignore_index=0)
        losses = [
            (swapped, F.cross_entropy, y),
            (swapped, nn.CrossEntropyLoss(), y),
            (swapped, own, zeros),
            (swapped, partial(F.cross_entropy, ignore_index=0), zeros),
            (swapped, partial(partial(F.cross_entropy, weight=WEIGHT), label_smoothing=0.3), y),
            (swapped, nn.CrossEntropyLoss(weight=WEIGHT), y),
            (swapped, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, ignore_index=3), zeros),
            (swapped, nn.CrossEntropyLoss(weight=WEIGHT), soft),
            (swapped, nn.CrossEntropyLoss(reduction="sum"), y),
            (swapped, partial(F.cross_entropy, reduction="sum", weight=WEIGHT), y),
            (logs, F.nll_loss, y),
            (logs, nn.NLLLoss(WEIGHT, ignore_index=2), zeros),
            (logs, nn.KLDivLoss(reduction="batchmean"), soft),
            (swapped, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([[2.0], [1], [3], [1], [9]]).double()), soft),
            (probabilities, nn.BCELoss(), soft),
            (probabilities, F.mse_loss, soft),
            (probabilities, nn.HuberLoss(), soft),
        ]
        schedules = schedule_names()
        for k, (model, loss_fn, target) in enumerate(losses):
            plain, name = model(), schedules[k % len(schedules)]
            n = 2 if name in ("gpipe", "1f1b", "zero-bubble") else 4
            balance = [2, len(plain) - 2] if n == 2 else [1, 1, 1, len(plain) - 3]
            pipeline = DistributedPipeline(model(), balance, chunks=4, schedule=name, loss_fn=loss_fn)
            for _ in range(2):
                compare(pipeline, plain, loss_fn, (x, target), message=f"{loss_fn} {name}")
            if loss_fn is own:  # what it is told counts when it is called
                own.ignore_index = 1
                compare(pipeline, plain, loss_fn, (x, target), message="ignore_index was changed")
        # A batch of nothing but padding: the loss is that of the plain model, which is NaN, and nothing is learnt.
        plain = swapped()
        pipeline = DistributedPipeline(swapped(), [2, 3], chunks=4, loss_fn=F.cross_entropy)
        assert pipeline.step(x, torch.full_like(y, -100), broadcast_loss=True).isnan()
        assert not any(p.grad.any() for p in pipeline.parameters())
        compare(pipeline, plain, F.cross_entropy, (x, y))
        """,
        tmp_path,
        begin=LOSSES,
    )


def test_losses_of_users(tmp_path):
    """Any other loss is exact with the right loss_weight; without, an error on every rank says what to give."""
    torchrun(
        2,
        """
        import warnings
        def flat(output, target):
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        def sums(output, target):
            return F.mse_loss(output, target, reduction="sum")
        def first(output, target):
            return flat(output, target[0])
        def fails(call, *words):
            error = error_of(call, x, targets)
            text = "".join([str(error), *getattr(error, "__notes__", [])])
            assert type(error) is ValueError and all(word in text for word in words), repr(error)
        def piped(loss_fn, loss_weight=None, **settings):
            settings = {"balance": [2, 2], "chunks": 4, **settings}
            return DistributedPipeline(make(), loss_fn=loss_fn, loss_weight=loss_weight, **settings)

        plain = make()
        batch = x, y = tokens(11)
        real = x, torch.rand(11, 4, 5).double()
        count = lambda output, target: (target != -100).sum()
        compare(piped(flat, count), plain, flat, batch)
        compare(piped(first, lambda output, target: count(output, target[0])), plain, first, (x, (y, y)))
        compare(piped(sums, "sum", chunks=5, balance=[2, 2]), plain, sums, real)
        compare(piped(flat), plain, flat, tokens(11, padding=1))  # every token counts
        masked = lambda output, target: (output.sum(-1) * target).sum() / target.sum()
        mask = (y >= 0).double()
        compare(piped(masked, lambda output, target: target.sum()), plain, masked, (x, mask))

        whole = f"{flat(plain(x), y).item():.6g}"
        targets = y
        for pipeline in (piped(flat), piped(flat, lambda output, target: output.size(0))):
            fails(pipeline.step, f"micro-batches together is {whole}", "nan", "loss_weight=lambda output, target")
            fails(pipeline.eval_step, whole, "nan", "loss_weight='samples'")
        targets = y.clone()
        targets[:, 0] = 1
        pipeline = piped(flat)
        fails(pipeline.step, "the gradients differ by", "%")
        fails(pipeline.step, "the gradients differ by", "%")  # as long as it is wrong
        targets = mask + 0.1
        fails(piped(masked).step, "the gradients differ by")
        targets = real[1]
        fails(piped(sums).step, "it is a sum over samples", "loss_weight='sum'")
        targets = y
        pipeline = piped(flat, "samples")
        assert pipeline.is_first or pipeline.is_last
        pipeline.step(x, y)

        # Padding that comes later is found, too.
        pipeline = piped(flat)
        outcomes = []
        for k in range(8):
            outcomes.append(error_of(pipeline.step, x, targets if k > 2 else targets.clamp(min=0)))
        assert [k for k, error in enumerate(outcomes) if error] == [3, 4, 5, 6, 7], outcomes

        # What loss_weight must not do.
        for weight, words in {
            (lambda output, target: output.sum()): "no values",
            (lambda output, target: output.sum() * target.sum()): "no values",
            (lambda output, target: -1): "non-negative",
            (lambda output, target: "x"): "in loss_weight",
        }.items():
            error = error_of(piped(flat, weight).step, x, y)
            assert words in "".join([str(error), *getattr(error, "__notes__", [])]), repr(error)
        # It runs on the last rank alone, once the ranks have agreed on the step: no rank is a step behind if it fails.
        refused = [True]
        def picky(output, target):
            assert rank == 1
            if refused:
                raise ValueError(f"not yet {refused.pop()}")
            return count(output, target)
        pipeline = piped(flat, picky)
        error = error_of(pipeline.step, x, y)
        assert "not yet True" in str(error), repr(error)
        assert "in loss_weight" in "".join([str(error), *getattr(error, "__notes__", [])]), repr(error)
        compare(pipeline, plain, flat, batch)
        told = str(error_of(piped, flat, [None, count][rank]))
        assert "loss_weight: None on rank 0, a function on rank 1" in told, told
        assert "'samples', 'sum' or a function" in str(error_of(piped, flat, "tokens"))

        # A loss that draws is not taken for one that is wrong.
        def drawn(output, target):
            return F.mse_loss(F.dropout(output, 0.5), target)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline = piped(drawn)
            pipeline.step(*real)
            pipeline.step(*real)
            piped(drawn, "samples").step(*real)
        told = [str(warning.message) for warning in caught if "a different number each time" in str(warning.message)]
        assert len(told) == pipeline.is_last
        """,
        tmp_path,
        begin=LOSSES,
    )


def test_weights_span_replicas(tmp_path):
    """Under data parallelism a token counts the same in every replica; errors reach all ranks."""
    torchrun(
        4,
        """
        import warnings
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # a Linear on sequences returns a view
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        part = [slice(0, 5), slice(5, None)][mesh.get_local_rank("dp")]
        def flat(output, target):
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        def piped(loss_fn, loss_weight=None, schedule="1f1b", **settings):
            n = 2 if schedule in ("1f1b", "gpipe", "zero-bubble") else 4
            layers = [*make(), Swapped()] if loss_fn is F.cross_entropy else [*make(), nn.Identity()]
            settings = {"chunks": 4, "balance": [2, 3] if n == 2 else [1, 1, 1, 2], **settings}
            return DistributedPipeline(
                nn.Sequential(*layers), schedule=schedule, loss_fn=loss_fn, loss_weight=loss_weight, mesh=mesh,
                **settings,
            )
        plain, swapped = nn.Sequential(*make(), nn.Identity()), nn.Sequential(*make(), Swapped())
        batch, count = tokens(12), lambda output, target: (target != -100).sum()
        empty = batch[0], batch[1].clone()
        empty[1][:5] = -100  # one replica has padding only
        for kind, schedule in (("ddp", "1f1b"), ("ddp", "dualpipev"), ("fsdp", "interleaved-zero-bubble")):
            settings = {"schedule": schedule, "data_parallel": kind}
            for tried in (batch, empty):
                compare(piped(F.cross_entropy, **settings), swapped, F.cross_entropy, tried, part, str(settings))
                compare(piped(flat, count, **settings), plain, flat, tried, part, str(settings))
        for settings in ({}, {"schedule": "gpipe", "chunks": 1}):
            for targets in (batch[1], batch[1].clamp(min=0)):
                pipeline = piped(flat, **settings)
                error = error_of(pipeline.step, batch[0][part], targets[part])
                assert ("loss_weight" in str(error)) == (targets is batch[1]), repr(error)
        """,
        tmp_path,
        begin=LOSSES,
    )


def test_padded_language_model_of_the_documents(tmp_path):
    """The example of the documents gives the loss and the gradients of the plain model."""
    document = (Path(__file__).parents[2] / "docs" / "how-to" / "weigh-losses.md").read_text()
    program = re.search(r"```python\n# train.py\n(.*?)```", document, re.S)[1]
    shown = re.search(r"^\d+ tokens, loss .*$", document, re.M)[0]
    plain = """
    plain = make_model()
    parts = [None] * 2
    torch.distributed.all_gather_object(parts, pipeline.state_dict())
    plain.load_state_dict({key: value for part in parts for key, value in part.items()})
    expected = next_token_loss(plain(text[:, :-1]), target)
    torch.testing.assert_close(loss, expected.detach())
    expected.backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)
    torch.distributed.destroy_process_group()
    """
    body = program.replace("torch.distributed.destroy_process_group()\n", "")
    output, _ = torchrun(2, plain, tmp_path, begin=body, end="")
    assert output.strip() == shown


def token_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_rounding_is_no_difference(dtype, spread):
    """Weights that fit pass the check in any precision; those that do not fail, also where all losses are equal."""
    generator = torch.Generator().manual_seed(0)
    counts = [1, 5, 3, 7]
    outputs = [(spread * torch.randn(2, 7, 50, generator=generator)).to(dtype) for _ in counts]
    targets = [torch.randint(50, (2, 7), generator=generator) for _ in counts]
    for target, count in zip(targets, counts, strict=True):
        target[:, count:] = -100
    for weights, fit in (([2.0 * count for count in counts], True), ([2.0] * 4, False)):
        evidence, factor = Evidence(4), 1 / sum(weights)
        for i, weight in enumerate(weights):
            leaf = outputs[i].clone().requires_grad_()
            evidence.outputs[i], evidence.losses[i] = (lone, [outputs[i]]), token_loss(leaf, targets[i]).detach()
            (token_loss(leaf, targets[i]) * (weight * factor)).backward()
            evidence.gradients[i] = [leaf.grad]
        check = LossCheck(LossWeights(token_loss, None), 1)
        if fit:
            assert check.verify(evidence, targets, weights, factor)
        else:
            with pytest.raises(ValueError, match="the gradients differ by"):
                check.verify(evidence, targets, weights, factor)
