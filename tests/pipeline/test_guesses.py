"""Which arguments are samples is guessed; where that is doubtful, a warning or an error names them and what to do."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline
from pipesight.pipeline.batch_dims import BatchDims
from pipesight.pipeline.calls import split_call
from support.against_plain import rand


class Scorer(nn.Module):
    """Adds a table of positions and two patches of each sample, weighs samples by a list, and counts in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, table=None, weights=None, count=None, patches=None) -> Tensor:
        x = self.first(x)
        if patches is not None:
            x = x + patches.view(len(x), 2, 4).sum(1, keepdim=True)
        if table is not None:
            x = x + table
        if count is not None:
            count += 1
        x = self.second(x)
        return x if weights is None else x * torch.tensor(weights).view(-1, 1, 1)


def piped(chunks=4, **options):
    torch.manual_seed(0)
    return Pipeline(Scorer(), ["second"], devices=["cpu", "cpu"], chunks=chunks, **options)


def split(*args, batch_dim=None, chunks=2, **kwargs):
    dims = BatchDims(batch_dim, inspect.signature(lambda x, table=None, names=None, mask=None: None))
    return split_call(args, kwargs, chunks, dims)


class Attending(nn.Module):
    """Uses a second argument in one of several ways; a table of 8 rows meets a batch of 8 by accident."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "attends":
            x = (x @ other.T).softmax(-1) @ other
        elif self.way == "adds rows":
            x = x + other[: x.size(1)]
        elif self.way == "adds samples":
            x = x + other.view(len(x), *[1] * (x.dim() - 2), 4)
        return self.second(x)


@pytest.mark.parametrize(
    ("way", "x", "warns"),
    [
        ("attends", rand(8, 4), True),
        ("adds rows", rand(8, 3, 4), False),
        ("adds samples", rand(8, 3, 4), False),
        ("adds samples", rand(8, 4), False),
        ("ignores", rand(8, 4), False),
    ],
)
def test_the_model_is_asked_whether_it_takes_all_of_a_table(way, x, warns):
    """What it only takes whole is given whole, without a word; what it takes both ways is cut, with a warning."""
    other = rand(8, 4)
    pipe = Pipeline(Attending(way).double(), ["second"], devices=["cpu", "cpu"], chunks=4)
    pipe.first.register_forward_pre_hook(lambda module, args: pytest.fail("seen") if args[0].is_meta else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [pipe(x, other) for _ in range(2)]
    assert [("takes all of it" in str(warning.message)) for warning in caught] == [True] * warns
    if not warns:
        torch.testing.assert_close(found, [pipe.module(x, other)] * 2)


class Positions(nn.Module):
    """Attends from samples to tokens, whose positions stand in one table, as those of pictures and words do."""

    def __init__(self) -> None:
        super().__init__()
        self.zeroth, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, words: Tensor, of_x: Tensor, of_words: Tensor) -> Tensor:
        places = torch.cat([of_words, of_x])
        return self.second(torch.cat([self.zeroth(words), self.first(x)], 1) * places)


@pytest.mark.parametrize("cuts", [{"cuts": ["second"]}, {"partitions": 2}])
@pytest.mark.filterwarnings("error")
def test_the_model_is_asked_about_several_tables(cuts):
    """One is as long as the batch, the other several times: what it says of one without the other is asked again."""
    call = rand(4, 8, 4), rand(4, 4, 4), rand(8, 4), rand(4, 4)
    model = Positions().double()
    if "partitions" in cuts:
        cuts = {**cuts, "sample": (call, {})}
    pipe = Pipeline(model, devices=["cpu", "cpu"], chunks=2, **cuts)
    torch.testing.assert_close(pipe(*call), model(*call))


def test_one_tensor_under_two_names_is_asked_about_once():
    """As with ``labels=input_ids``: whether it is cut holds for both names."""

    class Both(Attending):
        def forward(self, x: Tensor, other: Tensor, again: Tensor) -> Tensor:
            return super().forward(x, other) * again.mean()

    both, other = Both("adds rows").double(), rand(8, 4)
    pipe = Pipeline(both, ["second"], devices=["cpu", "cpu"], chunks=4)
    x = rand(8, 3, 4)
    torch.testing.assert_close(pipe(x, other, other), both(x, other, other))


def test_a_wrong_call_does_not_change_what_right_ones_are():
    """What failed is forgotten; labels that were too few for a batch are cut again when there are enough."""
    x, labels = rand(8, 4), torch.randint(4, (8,))
    model = Labelled().double()
    for wrong in (3, 4):  # of 4, each micro-batch gets all, as it has 4 samples
        for pipe in (Pipeline(model, ["second"], devices=["cpu", "cpu"], chunks=2) for _ in range(2)):
            with contextlib.suppress(ValueError, RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pipe(x, labels[:wrong])
            torch.testing.assert_close(pipe(x, labels), model(x, labels))


class Labelled(Attending):
    """Has a loss of labels."""

    def __init__(self):
        super().__init__("ignores")

    def forward(self, x, labels):
        return nn.functional.cross_entropy(super().forward(x, x), labels)


@pytest.mark.parametrize(
    ("source", "kwargs", "words"),
    [
        (rand(8, 8, 4), {"table": rand(8, 4)}, ["'table'", "8 rows", "the samples and the steps of each in 'x'"]),
        (torch.zeros(8, 8).long(), {"mask": torch.ones(8, 8).bool()}, ["'mask'", "batch_dim={'mask': None}"]),
        (torch.zeros(8, 8).long(), {"table": torch.arange(8)}, ["'table'", "batch_dim={'table': 0}"]),
        (rand(8, 3), {"table": nn.Parameter(rand(8, 5))}, ["'table' is a parameter with as many rows"]),
        (rand(8, 3), {"names": list("abcdefgh")}, ["'names'", "as many items", "batch_dim={'names': 'items'}"]),
        (rand(8, 3), {"names": numpy.zeros(8)}, ["'names'", "each micro-batch gets all of it"]),
        (rand(8, 3), {"table": torch.arange(4)}, ["'table'", "a micro-batch has samples, 4", "batch has 8"]),
    ],
)
def test_doubtful_guesses_are_told_once(source, kwargs, words):
    dims = BatchDims(None, inspect.signature(lambda x, table=None, names=None, mask=None: None))
    with pytest.warns(RuntimeWarning, match=r"say which it is") as told:
        split_call((source,), kwargs, 2, dims)
    assert len(told) == 1
    assert all(word in str(told[0].message) for word in words), told[0].message
    split_call((source,), kwargs, 2, dims)
    split_call((source,), kwargs, 1)  # one micro-batch gets all of everything


@pytest.mark.parametrize(
    ("source", "kwargs"),
    [
        (torch.zeros(8, 8).long(), {"mask": torch.ones(8, 8).long(), "names": None}),
        (torch.zeros(8, 8).long(), {"mask": torch.zeros(8, 1, 8, 8), "table": rand(1, 8)}),
        (rand(8, 3, 8, 8), {"table": torch.arange(8), "mask": rand(8, 8)}),  # pictures as large as the batch
        (rand(8, 5, 4), {"table": rand(8, 3), "names": ["a"], "mask": rand(5, 5)}),
        (torch.zeros(8, 4).long(), {"mask": torch.ones(4, 4), "table": rand(4, 7)}),  # of as many steps
        (rand(8, 5), {"names": [rand(8, 2) for _ in range(8)]}),  # of tensors with samples themselves
    ],
)
def test_what_is_hardly_doubtful_is_not_told(source, kwargs):
    split(source, **kwargs)


def test_sequence_first():
    split(rand(9, 6, 4), mask=torch.ones(6, 9).bool(), batch_dim={"x": 1, "output": 1})
    with pytest.warns(RuntimeWarning, match=r"'mask' has 6 rows"):
        split(rand(6, 6, 4), mask=torch.ones(6, 6).bool(), batch_dim={"x": 1, "output": 1})


def test_what_the_user_says_is_not_doubted():
    for rule in (0, None):
        split(rand(8, 8, 4), table=rand(8, 4), batch_dim={"table": rule})
    for rule in ("items", None):
        split(rand(8, 4), names=list("abcdefgh"), batch_dim={"names": rule})


def test_several_rows_for_each_sample():
    """An argument that is named may have as many rows for each sample, such as the patches of a picture."""
    patches = rand(12, 5, grad=True)
    call = split(rand(4), table=patches, batch_dim={"table": 0})
    assert [named["table"].shape for _, named in call.calls] == [(6, 5), (6, 5)]
    assert torch.equal(call.join_gradients(0, [rand(6, 5), None]), torch.cat([rand(6, 5), torch.zeros(6, 5)]))
    with pytest.raises(ValueError, match=r"4 samples in dimension 0, or so many rows for each"):
        split(rand(4), table=rand(6, 5), batch_dim={"table": 0})


class Queries(nn.Module):
    """Scores samples by queries, those of each sample or those of all; a mask belongs to the queries."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor, queries: Tensor, mask: Tensor) -> Tensor:
        q, x = queries * mask, self.second(self.first(x))
        if self.way == "of each":
            return torch.einsum("bd,bqd->bq", x, q.view(len(x), -1, 4))
        scores = x @ q.T
        return scores if self.way == "of all" else scores.square().mean()


@pytest.mark.parametrize("way", ["of each", "of all", "mean"])
def test_rows_of_each_sample_are_told_from_tables(way):
    """By the shapes of what the model returns; where these say nothing, a warning does."""
    torch.manual_seed(0)
    model = Queries(way)
    pipe = Pipeline(model, ["second"], devices=["cpu", "cpu"], chunks=2)
    for size in (3, 4, 8, 5):
        call = torch.randn(size, 4), torch.randn(3 * size if way == "of each" else 12, 4)
        mask = torch.rand(len(call[1]), 1)
        doubts = way == "mean" and size == 3
        with pytest.warns(RuntimeWarning, match="several rows") if doubts else contextlib.nullcontext():
            found = pipe(*call, mask)
        torch.testing.assert_close(found, model(*call, mask))


def test_rows_are_doubted_where_shapes_cannot_be_computed():
    """Tokens of several texts for each sample, or patches of pictures, are named; a square mask of steps is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.words = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4)

        def forward(self, x: Tensor, tokens: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
            scale = x.detach().abs().max().item()  # what has no values cannot run this
            return (self.second(self.first(x)) @ self.words(tokens).mean(1).T) * scale + mask.sum() + patches.mean()

    pipe = Pipeline(Model(), ["second"], devices=["cpu", "cpu"], chunks=2)
    tokens, mask = torch.ones(12, 5, dtype=torch.int64), torch.ones(8, 8, dtype=torch.int64)
    with pytest.warns(RuntimeWarning) as caught:
        pipe(torch.ones(4, 4), tokens, torch.ones(16, 6), mask)
    assert [str(one.message).partition(" has")[0] for one in caught] == ["'tokens'", "'patches'"]


@pytest.mark.parametrize("name", ["T", "mT", "H", "mH", "real", "imag"])
def test_attributes_that_compute_are_operations(name):
    """A tensor of an earlier partition is one there, too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            early = self.first(x).view(-1, 2, 2)
            late = self.second(x)
            one = torch.complex(early, early) if name in ("real", "imag") else early
            return late + torch.stack([getattr(matrix, name).reshape(-1) for matrix in one])

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 4)
    pipe = Pipeline(model, ["second"], devices=["cpu", "cpu"], chunks=2)
    found = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_errors_of_the_model_tell_what_micro_batches_got():
    """An error of the plain model's own, with a note that names the argument and what to do."""
    with pytest.raises(RuntimeError, match=r"size of tensor a \(5\) must match the size of tensor b \(2\)") as error:
        piped()(rand(8, 5, 4).float(), table=rand(8, 4).float())
    assert any("got of 'table' ([8, 4]) its samples" in note for note in error.value.__notes__)
    assert any("batch_dim={'table': None} gives each all of it" in note for note in error.value.__notes__)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2") as error:
        piped()(rand(8, 5).float())
    assert not any("micro-batches got" in note for note in error.value.__notes__)


class Returning(nn.Module):
    """Returns what it computes for its samples in another shape."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = self.first(x) * mask if mask.all() else self.first(x)  # masks have values, activations none
        z = self.second(y)
        ways = {"layers": torch.stack([y, z]), "packed": z.view(1, -1, 4), "scores": z @ z.T}
        return {"y": ways[self.way]}


@pytest.mark.parametrize("way", ["layers", "packed"])
@pytest.mark.parametrize("sizes", [(6, 5), (5, 6)])
@pytest.mark.filterwarnings("error")
def test_where_the_batch_is_in_an_output_is_told_by_shapes(way, sizes):
    """Micro-batches of two samples from a model with two layers are told apart, also in batches of another size."""
    pipe = Pipeline(Returning(way).double(), ["second"], chunks=3)
    for size in sizes:
        call = rand(size, 4), torch.ones(size, 1).bool()
        torch.testing.assert_close(pipe(*call), pipe.module(*call))


@pytest.mark.parametrize("hidden", [False, True])
def test_scores_of_samples_are_doubted(hidden):
    """Of one output, too: the whole batch has more columns, or that cannot be known."""
    model = Returning("scores").double()
    if hidden:
        model.first.forward = lambda x: x * float(x.detach().abs().max() > 0)
    with pytest.warns(RuntimeWarning, match="as many columns as" if hidden else "'output.y' scores the samples"):
        Pipeline(model, ["second"], chunks=3)(rand(6, 4), torch.ones(6, 1).bool())


class Captioner(nn.Module):
    """Looks tokens up by samples, beside a picture; a mask of all samples would be taken without an error."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, picture: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(len(picture))
        x = self.words(ids[places]) * mask[places].unsqueeze(-1) + picture.mean((1, 2, 3)).view(-1, 1, 1)
        return self.last(x) * labels.unsqueeze(-1)


class Floats(nn.Module):
    """Takes what may be a table twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 4)

    def forward(self, picture: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return self.last(self.first(picture.mean((1, 2))) * one + other)


@pytest.mark.filterwarnings("error")
def test_tokens_beside_a_picture_are_samples():
    """Nobody asks about tokens and a mask of their shape; and tokens that are labels, too, are one tensor."""
    ids = torch.arange(30).view(6, 5) % 9
    call, model = (rand(6, 3, 2, 2).float(), ids, ids > 2, ids), Captioner()
    torch.testing.assert_close(Pipeline(model, ["last"], chunks=3)(*call), model(*call))
    call, model = (call[0], ids.float(), ids.float()), Floats()
    torch.testing.assert_close(Pipeline(model, ["last"], chunks=3)(call[0], call[1], call[1]), model(*call))


class Codebooks(nn.Module):
    """Adds what the codes of a sample mean: as many rows for each as there are codebooks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, codes: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.words(codes.view(-1, 3, codes.size(1))).sum(1) * mask.unsqueeze(-1))


def test_the_first_argument_has_several_rows_for_each_sample():
    """The error says which rows belong to a sample; with that, the batch is as large as the shorter argument."""
    call, model = (torch.arange(60).view(12, 5) % 9, rand(4, 5).float()), Codebooks()
    with pytest.raises(RuntimeError, match="must match the size") as error:
        Pipeline(model, ["last"], chunks=2)(*call)
    assert "batch_dim={'codes': 0, 'mask': 0} cuts both, in a batch of 4 samples" in error.value.__notes__[-1]
    pipe = Pipeline(model, ["last"], chunks=3, batch_dim={"codes": 0, "mask": 0})
    torch.testing.assert_close(pipe(*call), model(*call))


def test_a_whole_argument_that_is_changed_in_place_is_refused():
    """Each micro-batch would change it once more, silently."""
    with pytest.raises(RuntimeError, match=r"changes its argument 'count' in place.*count.clone\(\)"):
        piped()(rand(8, 5, 4).float(), count=torch.zeros(3))
    count = torch.zeros(3)
    piped(chunks=1)(rand(8, 5, 4).float(), count=count)
    assert count.tolist() == [1] * 3
    samples = torch.zeros(8, dtype=torch.int64)
    piped()(rand(8, 5, 4).float(), count=samples)
    assert samples.tolist() == [1] * 8


@pytest.mark.filterwarnings("ignore:.*say which it is")
@pytest.mark.parametrize(
    ("chunks", "kwargs", "words"),
    [
        (8, {"table": rand(8, 4).float()}, r"batch_dim=\{'table': None\}"),  # broadcast: silent otherwise
        (4, {"table": rand(8, 4).float()}, r"\(it fails\).*batch_dim=\{'table': None\}"),
        (8, {"weights": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}, r"batch_dim=\{'weights': 'items'\}"),
    ],
)
@pytest.mark.parametrize("steps", [False, True])
def test_verify_finds_the_argument_that_is_cut_wrongly(chunks, kwargs, words, steps):
    pipe = piped(chunks, verify=True, loss_fn=nn.MSELoss())
    x = rand(8, 8, 4).float()
    with pytest.raises(ValueError, match=words):
        pipe.step(x, **kwargs, target=x) if steps else pipe(x, **kwargs)


def test_verify_warns_where_samples_see_each_other():
    class Centred(Scorer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.second(self.first(x - x.mean(0)))

    pipe = Pipeline(Centred(), ["second"], devices=["cpu", "cpu"], chunks=2, verify=True)
    with pytest.warns(RuntimeWarning, match=r"its samples see each other, or an argument is cut"):
        pipe(rand(8, 5, 4).float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(verify=True)(rand(8, 5, 4).float(), table=rand(5, 4).float())
