"""Over ranks, too, a change in place is one for all who hold the tensor, or is refused; never for some of them."""

from support.torchrun import RANK, torchrun

LAYERS = (
    RANK
    + """
from pipesight.skip import pop, skippable, stash
mse = nn.functional.mse_loss
torch.manual_seed(0)


class InPlace(nn.Module):
    def forward(self, x):
        return (x[0].mul_(1.5), *x[1:]) if isinstance(x, tuple) else x.mul_(1.5)


class Fn(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip * 3


def step(layers, balance, checkpoint, given=lambda x: x):
    plain = copy.deepcopy(nn.Sequential(*layers).double())
    schedule = "1f1b" if len(balance) == size else "interleaved-zero-bubble"
    pipeline = DistributedPipeline(
        copy.deepcopy(plain), balance, chunks=2, schedule=schedule, loss_fn=mse, checkpoint=checkpoint
    )
    x, y = next(batches([4]))
    mse(plain(given(x.clone())), y).backward()  # the plain model takes it
    return plain, pipeline, lambda: pipeline.step(given(x.clone()), y)


linear = lambda: nn.Linear(6, 6)
add = lambda: Fn(lambda x: x[0] + 2 * x[1])
"""
)


def test_shared_between_ranks(tmp_path):
    """What goes to another rank twice, in a tuple or as a skip, and is changed in place there is refused by all."""
    torchrun(
        2,
        """
        for layers, balance in (
            ([linear(), Fn(lambda x: (x, x)), InPlace(), add(), linear()], [2, 3]),
            ([linear(), Fn(lambda x: (x, x[:, 1:2])), InPlace(), add(), linear()], [2, 3]),
            ([linear(), Stash(), nn.ReLU(inplace=True), Pop(), linear()], [2, 3]),
            ([linear(), Stash(), nn.Identity(), InPlace(), Pop(), linear()], [2, 1, 1, 2]),
        ):
            for checkpoint in ("never", "always"):
                _, pipeline, run = step(layers, balance, checkpoint)
                error = error_of(run)
                assert isinstance(error, RuntimeError) and "use inplace=False, clone()" in str(error), repr(error)
                error = error_of(pipeline.predict, next(batches([4]))[0])
                assert isinstance(error, RuntimeError) and "use inplace=False, clone()" in str(error), repr(error)
        """,
        tmp_path,
        begin=LAYERS,
    )


def test_shared_by_the_caller(tmp_path):
    """A tensor that comes into the first partition twice and is changed in place there is refused."""
    torchrun(
        2,
        """
        _, _, run = step([InPlace(), add(), linear(), linear()], [3, 1], "never", lambda x: (x, x))
        error = error_of(run)
        assert "changed a tensor in place that it received twice" in str(error), repr(error)
        """,
        tmp_path,
        begin=LAYERS,
        end="",
    )


def test_shared_with_nobody(tmp_path):
    """Whatever layer changes the input of its partition in place, saying so or not: gradients are the plain model's."""
    torchrun(
        2,
        """
        for layers, balance in (
            ([nn.Flatten(), nn.SiLU(inplace=True), linear(), linear()], [3, 1]),
            ([InPlace(), linear(), linear()], [2, 1]),
            ([linear(), nn.Flatten(), nn.SiLU(inplace=True), linear()], [1, 3]),
            ([linear(), InPlace(), linear()], [1, 2]),
            ([linear(), Stash(), InPlace(), Pop(), linear()], [1, 4]),
            ([linear(), Stash(), linear(), Pop(), linear()], [2, 1, 1, 1]),
            ([linear(), Fn(lambda x: (x[:, :3], x[:, 3:])), InPlace(), Fn(lambda x: torch.cat(x, 1))], [2, 2]),
        ):
            for checkpoint in ("never", "always"):
                plain, pipeline, run = step(layers, balance, checkpoint)
                run()
                assert_same_gradients(pipeline, plain)
        with torch.inference_mode():
            x = next(batches([4]))[0]
            assert (output := pipeline.predict(x)) is None or torch.equal(output, plain(x))
        """,
        tmp_path,
        begin=LAYERS,
    )


def test_changed_by_a_hook(tmp_path):
    """A hook that changes the input of a checkpointed partition is refused: there would be another to recompute."""
    torchrun(
        2,
        """
        _, pipeline, run = step([linear(), linear()], [1, 1], "always")
        if rank == 0:
            pipeline.module[0].register_forward_pre_hook(lambda _, args: args[0].mul_(2))
        error = error_of(run)
        assert "was changed in place by a hook" in str(error), repr(error)
        """,
        tmp_path,
        begin=LAYERS,
        end="",
    )
