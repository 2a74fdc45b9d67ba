"""What bare torch.distributed.pipelining trips over: each works here, on real processes."""

from support.torchrun import RANK, torchrun

MODELS = (
    RANK
    + '''
from pipesight import GPipe, current_microbatch, is_recomputing
from pipesight.skip import pop, skippable, stash
mse = nn.functional.mse_loss


def named(tensors):
    """Return tensors of a GPipe by the names that they have in the plain model."""
    return {name.split(".", 2)[2]: t for name, t in tensors}


@skippable(stash=["far", "none"])
class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, input):
        yield stash("far", self.linear(input))
        yield stash("none", None)
        return input * 2


@skippable(pop=["far", "none"])
class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, input):
        far = yield pop("far")
        assert (yield pop("none")) is None
        return self.linear(input) + far


class Apart(nn.Module):
    """Floats, integers, a float that is not contiguous, and booleans."""

    def forward(self, input):
        return input[:, :3], input.argmax(-1), input[:, 3:].t().contiguous().t(), input > 0


class Together(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 6)

    def forward(self, input):
        left, index, right, mask = input
        return torch.cat([left, right], -1) * mask + self.embedding(index)


class Views(nn.Module):
    def forward(self, input):
        return input.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6).view(-1, 6)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(())


class Noisy(nn.Module):
    """Draws a random number in its backward."""

    def forward(self, input):
        return Noise.apply(input)


class Counter(nn.Module):
    """Counts its forwards, and has a buffer that every forward changes."""

    def __init__(self):
        super().__init__()
        self.first = self.again = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, input):
        self.total += 1
        if is_recomputing():
            self.again += 1
        else:
            self.first += 1
        return input * self.total.sin()


def partitions(name):
    return size if name in ("gpipe", "1f1b", "zero-bubble") else 2 * size
'''
)


def test_what_goes_between_ranks(tmp_path):
    """Skips beyond neighbours, tuples, integers, booleans, views and in-place layers, checkpointed or not."""
    torchrun(
        4,
        """
        def make():
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Linear(6, 6), Down(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
                nn.Sequential(nn.LayerNorm(6), Apart()), nn.Identity(), Together(), Views(), Up(), nn.Identity(),
                nn.Linear(6, 6),
            ).double()

        for name in schedule_names():
            n = partitions(name)
            balance = [3, 2, 2, 3] if n == 4 else [1, 1, 1, 1, 1, 1, 1, 3]
            for checkpoint in ("never", "always") if name == "1f1b" else ("except_last",):
                plain = make()
                pipeline = DistributedPipeline(
                    make(), balance, chunks=2 * n, schedule=name, loss_fn=mse, checkpoint=checkpoint
                )
                for x, y in batches([4 * n, 4 * n - 1, 3]):
                    mse(plain(x), y).backward()
                    pipeline.step(x, y)  # gradients add up over steps, too
                    assert_same_gradients(pipeline, plain)
        """,
        tmp_path,
        begin=MODELS,
    )


def test_as_gpipe(tmp_path):
    """Random numbers, batch norm, buffers and recomputations are those of GPipe, which has the same tasks."""
    torchrun(
        2,
        """
        def make(n):
            torch.manual_seed(0)
            parts = [
                nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Noisy(), Counter(), nn.Tanh())
                for _ in range(n)
            ]
            return nn.Sequential(*parts).double()

        for number, name in enumerate(schedule_names()):
            n = partitions(name)
            settings = {
                "chunks": 2 * n, "checkpoint": ["never", "except_last"][number % 2],
                "deferred_batch_norm": number % 4 > 1,
            }
            gpipe = GPipe(make(n), [1] * n, devices=["cpu"] * n, **settings)
            pipeline = DistributedPipeline(make(n), [1] * n, schedule=name, loss_fn=mse, **settings)
            called = []
            for layer in pipeline.module:
                layer.register_forward_hook(lambda *_: called.append(1))
            for k, (x, y) in enumerate(batches([4 * n, 4 * n - 2, 4 * n])):
                torch.manual_seed(k)
                expected = mse(gpipe(x), y)
                expected.backward()
                state = torch.get_rng_state()
                torch.manual_seed(k if rank == 0 else 100 + k)  # the first rank's counts
                loss = pipeline.step(x, y, broadcast_loss=True)
                torch.testing.assert_close(loss, expected.detach())
                assert rank or torch.equal(torch.get_rng_state(), state)
                expected_gradients = named(gpipe.named_parameters())
                for key, parameter in pipeline.named_parameters():
                    torch.testing.assert_close(parameter.grad, expected_gradients[key].grad)
                expected_buffers = named(gpipe.named_buffers())
                for key, buffer in pipeline.module.named_buffers():
                    torch.testing.assert_close(buffer, expected_buffers[key])
            counters = {key: m for key, m in gpipe.named_modules() if isinstance(m, Counter)}
            counters = {key.split(".", 2)[2]: m for key, m in counters.items()}
            ours = {key: m for key, m in pipeline.module.named_modules() if isinstance(m, Counter)}
            for key, counter in ours.items():
                assert (counter.first, counter.again) == (counters[key].first, counters[key].again)
            # No forward that nobody asked for: one a micro-batch, and those that were run again.
            assert len(called) == sum(c.first + c.again for c in ours.values())
        """,
        tmp_path,
        begin=MODELS,
    )


def test_odds_and_ends(tmp_path):
    """Sums as losses, tuples as targets, empty batches, other lengths, autocast, frozen layers, current_microbatch."""
    torchrun(
        2,
        """
        def run(plain, x, y, loss_fn=mse, *, steps=1, **settings):
            pipeline = DistributedPipeline(
                copy.deepcopy(plain), [len(plain) // 2] * 2, chunks=4, loss_fn=loss_fn, **settings
            )
            for _ in range(steps):
                loss_fn(plain(x), y).backward()
                pipeline.step(x, y)
            assert_same_gradients(pipeline, plain)
            return pipeline

        (x, y), (x7, y7) = batches([8, 7])
        run(tanhs(2), x7, y7, nn.MSELoss(reduction="sum"), steps=2)
        from functools import partial
        run(tanhs(2), x7, y7, partial(mse, reduction="sum"))
        run(tanhs(2), x7, (y7, y7), lambda output, target: mse(output, target[0]) + mse(output, target[1]))

        pipeline = run(tanhs(2), x, y)
        loss = pipeline.step(x[:0], y[:0], broadcast_loss=True)
        assert loss.isnan()  # as the plain model's

        lengths = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
        pipeline = DistributedPipeline(copy.deepcopy(lengths), [1, 1], chunks=2, loss_fn=mse)
        for length in (3, 5, 3):
            z = torch.full((4, length, 6), 0.1).double()
            assert (output := pipeline.predict(z)) is None or torch.equal(output, lengths(z))

        frozen = tanhs(4)
        frozen[0].requires_grad_(False)
        frozen[3].requires_grad_(False)
        run(frozen, x, y)

        floats = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        pipeline = DistributedPipeline(copy.deepcopy(floats), [1, 1], chunks=1, loss_fn=mse, schedule="gpipe")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output, expected = pipeline.predict(x.float()), floats(x.float())
            assert output is None or (output.dtype == torch.bfloat16 and torch.equal(output, expected))
            output = pipeline.predict(x.float())
            assert output is None or torch.equal(output, floats(x.float()))

        class Keep(nn.Module):
            def forward(self, input):
                kept[current_microbatch()] = input
                return input.sin()

        class Add(nn.Module):
            def forward(self, input):
                return input + kept.pop(current_microbatch())

        kept = {}
        plain = nn.Sequential(Keep(), nn.Linear(6, 6), Add(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh()).double()
        for checkpoint in ("never", "always"):
            plain.zero_grad()
            run(plain, x, y, checkpoint=checkpoint)
        """,
        tmp_path,
        begin=MODELS,
    )


def test_recomputed_once(tmp_path):
    """A layer that torch.utils.checkpoint runs again runs twice a micro-batch, also where backwards are split."""
    torchrun(
        2,
        """
        import warnings
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(nn.Module):
            def __init__(self, reentrant):
                super().__init__()
                self.inner, self.reentrant, self.calls = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), reentrant, 0
                self.inner.register_forward_pre_hook(self.count)

            def count(self, *_):
                self.calls += 1

            def forward(self, input):
                return checkpoint(self.inner, input, use_reentrant=self.reentrant)

        x, y = next(batches([8]))
        for name in ("interleaved-zero-bubble", "zbv-zero-bubble"):
            for reentrant in (False, True):
                torch.manual_seed(0)
                plain = nn.Sequential(nn.Linear(6, 6), *[Checkpointed(reentrant) for _ in range(3)]).double()
                pipeline = DistributedPipeline(copy.deepcopy(plain), [1] * 4, chunks=4, schedule=name, loss_fn=mse)
                counted = [layer for layer in pipeline.module if isinstance(layer, Checkpointed)]
                for layer in counted:
                    layer.inner._forward_pre_hooks.clear()
                    layer.inner.register_forward_pre_hook(layer.count)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for step in range(3):
                        for layer in counted:
                            layer.calls = 0
                        mse(plain(x), y).backward()
                        pipeline.step(x, y)
                assert_same_gradients(pipeline, plain)
                told = [str(w.message) for w in caught if "recomputes in its backward" in str(w.message)]
                assert len(told) == (0 if reentrant else len(counted)), told
                assert all(layer.calls == 8 for layer in counted), [layer.calls for layer in counted]
        """,
        tmp_path,
        begin=MODELS,
    )
