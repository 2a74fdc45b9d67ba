"""Random generators of the user's: what the library does to them is the same on every rank."""

from support.torchrun import torchrun


def test_shuffled_alike(tmp_path):
    """Ranks that seed alike and shuffle see the same samples in every epoch, whatever layers and losses draw."""
    torchrun(
        2,
        """
        import random
        from torch.utils.data import DataLoader, TensorDataset
        mse = nn.functional.mse_loss

        class Noise(torch.autograd.Function):
            @staticmethod
            def forward(ctx, input):
                return input.clone()

            @staticmethod
            def backward(ctx, gradient):
                drawn.append(torch.rand(()).item())
                return gradient

        class Noisy(nn.Module):
            def forward(self, input):
                return Noise.apply(input)

        def noisy_loss(output, target):
            drawn.append(torch.rand(()).item())
            return mse(output, target)

        drawn = []
        x = torch.arange(32.0).unsqueeze(1)
        for extra, loss_fn, moves in (
            (nn.Dropout(0.5), mse, True), (Noisy(), mse, False), (nn.Identity(), noisy_loss, False)
        ):
            torch.manual_seed(0)
            random.seed(0)
            layers = [nn.Identity(), nn.Identity(), nn.Linear(1, 1), extra]
            if moves or loss_fn is noisy_loss:  # on the first rank, so that the sums below are of what it fed
                layers = [nn.Sequential(nn.Linear(1, 1), extra), nn.Identity(), nn.Identity(), nn.Identity()]
            pipeline = DistributedPipeline(nn.Sequential(*layers), [2, 2], chunks=2, loss_fn=loss_fn)
            loader = DataLoader(TensorDataset(x, 3 * x), batch_size=8, shuffle=True)
            seen, python = [], random.getstate()
            state = torch.get_rng_state()
            drawn.clear()
            pipeline.step(x, 3 * x)
            assert torch.equal(torch.get_rng_state(), state) != moves
            for epoch in range(3):
                for a, b in loader:
                    assert torch.equal(3 * a, b)
                    pipeline.step(a, b)
                    pipeline.eval_step(a, b)
                    pipeline.predict(a)
                    seen.append(a.flatten().tolist())
            gathered = [None, None]
            dist.all_gather_object(gathered, (seen, torch.get_rng_state().tolist()))
            assert gathered[0] == gathered[1]
            assert random.getstate() == python
            assert len(set(drawn)) == len(drawn)  # no step draws the numbers of another

        # The weights of the one pairing that is right are learnt: 3 times the input.
        torch.manual_seed(0)
        pipeline = DistributedPipeline(
            nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.0), nn.Identity()), [2, 1], chunks=2, loss_fn=mse
        )
        optimizer = torch.optim.Adam(pipeline.parameters(), 0.3) if pipeline.is_first else None
        loader = DataLoader(TensorDataset(x / 32, 3 * x / 32), batch_size=8, shuffle=True)
        for epoch in range(40):
            for a, b in loader:
                pipeline.module.zero_grad()
                loss = pipeline.step(a if pipeline.is_first else None, b if pipeline.is_last else None)
                if optimizer is not None:
                    optimizer.step()
        assert loss is None or loss < 1e-2, loss
        """,
        tmp_path,
    )


def test_seeded_again(tmp_path):
    """A seed decides what layers draw: the same seed on the first rank, the same numbers, also after a restart."""
    torchrun(
        2,
        """
        pipeline = DistributedPipeline(
            nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss
        )
        x = torch.ones(8, 16)
        outputs = []
        for seed in (0, 0, 1, None):
            if seed is not None:
                torch.manual_seed(seed)
            outputs.append(pipeline.predict(x))
        if pipeline.is_last:
            assert torch.equal(outputs[0], outputs[1])
            assert not torch.equal(outputs[0], outputs[2])
            assert not torch.equal(outputs[2], outputs[3])
        """,
        tmp_path,
    )
