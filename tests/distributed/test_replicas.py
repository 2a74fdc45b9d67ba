"""Pipelines side by side, each with a part of the batch: pp x dp = 2 x 2 real processes."""

from support.torchrun import torchrun


def test_gradients_of_the_whole_batch(tmp_path):
    """With DDP and FSDP, gradients, norms and losses are those of the plain model on the whole batch."""
    torchrun(
        4,
        """
        from torch.distributed.device_mesh import init_device_mesh
        mse = nn.functional.mse_loss
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        replica = mesh.get_local_rank("dp")
        for kind in ("ddp", "fsdp"):
            for name in schedule_names():
                n = 2 if name in ("gpipe", "1f1b", "zero-bubble") else 4
                plain, own = tanhs(n), tanhs(n)
                if replica:
                    with torch.no_grad():
                        own[0][0].weight.zero_()  # replicas start as the first one
                pipeline = DistributedPipeline(
                    own, [1] * n, chunks=n, schedule=name, loss_fn=mse, mesh=mesh, data_parallel=kind,
                    checkpoint="except_last" if name == "1f1b" else "never",
                )
                optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (plain, pipeline)]
                for x, y in batches([16, 14, 8, 16]):
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    expected = mse(plain(x), y)
                    expected.backward()
                    part = slice(0, 8) if replica == 0 else slice(8, None)  # not always of equal size, and once of none
                    loss = pipeline.step(x[part], y[part], broadcast_loss=True)
                    torch.testing.assert_close(loss, expected.detach())
                    gradients = dict(plain.named_parameters())
                    for key, parameter in pipeline.named_parameters():
                        gradient = parameter.grad
                        if kind == "fsdp":
                            assert parameter.to_local().numel() < parameter.numel()
                            gradient = gradient.full_tensor()
                        torch.testing.assert_close(gradient, gradients[key].grad, msg=lambda t: f"{kind} {name} {t}")
                    norms = [pipeline.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
                    torch.testing.assert_close(*norms)
                    for optimizer in optimizers:
                        optimizer.step()
                loss = pipeline.eval_step(x[part], y[part])
                if pipeline.is_last:
                    torch.testing.assert_close(loss, mse(plain(x), y).detach())
        (x, y), summed = next(batches([6])), nn.MSELoss(reduction="sum")
        part = slice(0, 0) if replica == 0 else slice(None)  # the first step of all, and a replica without samples
        pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=summed, mesh=mesh)
        loss = pipeline.step(x[part], y[part], broadcast_loss=True)
        torch.testing.assert_close(loss, summed(tanhs(2)(x), y).detach())

        def make(**settings):
            return DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=mse, **settings)
        assert "'ddp' or 'fsdp'" in str(error_of(make, mesh=mesh, data_parallel="zero"))
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        assert "named 'pp' and 'dp'" in str(error_of(make, mesh=other))
        """,
        tmp_path,
    )
