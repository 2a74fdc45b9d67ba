"""GradScaler over ranks: all of them skip the same steps, and scale alike."""

from support.torchrun import torchrun

BODY = """
import warnings
from torch.distributed.device_mesh import init_device_mesh
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
mse = nn.functional.mse_loss


def train(make_optimizer, **settings):
    replicas = size // 2
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    plain = tanhs(2).float()
    pipeline = DistributedPipeline(copy.deepcopy(plain), [1, 1], chunks=2, loss_fn=mse, mesh=mesh, **settings)
    optimizers = [make_optimizer(model.parameters()) for model in (plain, pipeline)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2), GradScaler(pipeline, 1024, 2, 0.5, 2)]
    part = slice(mesh.get_local_rank("dp"), None, replicas)
    for k, (x, y) in enumerate(batches([8] * 6)):
        x, y = x.float(), y.float()
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = mse(plain(x), y)
        scalers[0].scale(expected).backward()
        loss = pipeline.step(x[part], y[part], broadcast_loss=True, scaler=scalers[1])
        torch.testing.assert_close(loss, expected.detach())
        if k in (1, 4):  # an overflow in one stage
            name = f"{k % 2}.0.weight"
            dict(plain.named_parameters())[name].grad[0, 0] = float("inf")
            for mine, parameter in pipeline.named_parameters():
                if mine == name:
                    getattr(parameter.grad, "to_local", lambda: parameter.grad)()[0, 0] = float("inf")
        if k % 2:
            for scaler, optimizer in zip(scalers, optimizers):
                scaler.unscale_(optimizer)
            norms = [nn.utils.clip_grad_norm_(plain.parameters(), 0.1), pipeline.clip_grad_norm_(0.1)]
            torch.testing.assert_close(*norms)
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), k
        expected = dict(plain.named_parameters())
        for name, parameter in pipeline.named_parameters():
            value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            torch.testing.assert_close(value, expected[name])
    assert scalers[0].get_scale() != 1024
    return pipeline, optimizers[1]
"""


def test_an_overflow_of_one_is_one_of_all(tmp_path):
    """Infinities in one stage: weights and scales are those of the plain model; torch's own scaler is refused."""
    torchrun(
        2,
        BODY
        + """
for fused in (False, True):
    pipeline, optimizer = train(lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=fused))
own = torch.amp.GradScaler("cpu")
own.scale(torch.zeros(()))
x, y = (t.float() for t in next(batches([8])))
error = error_of(own.step, optimizer)
assert type(error) is RuntimeError and "pipesight.distributed.GradScaler(pipeline)" in str(error), repr(error)
error = error_of(pipeline.step, x, y, scaler=own)
assert type(error) is TypeError and "only the overflows of this rank" in str(error), repr(error)
torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
other = nn.Linear(1, 1)  # of no pipeline
other.weight.grad, theirs = torch.ones(1, 1), torch.optim.SGD(other.parameters(), 0.1)
own.step(theirs)
scaler = GradScaler(pipeline)
assert "scale: 65536.0 on rank 0, None on rank 1" in str(error_of(pipeline.step, x, y, scaler=[scaler, None][rank]))

class Nothing(nn.Module):
    def forward(self, input):
        return input * 1.0

pipeline = DistributedPipeline(nn.Sequential(nn.Linear(6, 6), Nothing()), [1, 1], chunks=2, loss_fn=mse)
optimizer = torch.optim.SGD(pipeline.parameters(), 0.1) if pipeline.is_first else None
scaler = GradScaler(pipeline)
for overflows in (True, False):
    pipeline.module.zero_grad()
    pipeline.step(x, y, scaler=scaler)
    if overflows and pipeline.is_first:
        pipeline.module[0].bias.grad.fill_(float("nan"))
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_scale() == 2.0**15
""",
        tmp_path,
    )


def test_sharded(tmp_path):
    """The same where replicas shard gradients."""
    torchrun(
        4,
        BODY + "train(lambda parameters: torch.optim.AdamW(parameters, 0.01), data_parallel='fsdp')\n",
        tmp_path,
    )
