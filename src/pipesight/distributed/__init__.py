"""Pipelines over many processes: the same model under ``torchrun``."""

from pipesight.distributed.agreement import DisagreementError
from pipesight.distributed.failures import RankFailedError
from pipesight.distributed.grad_scaler import GradScaler
from pipesight.distributed.join_job import init_process_group
from pipesight.distributed.pipeline import DistributedPipeline
from pipesight.distributed.schedules import names as schedule_names

__all__ = [
    "DisagreementError",
    "DistributedPipeline",
    "GradScaler",
    "RankFailedError",
    "init_process_group",
    "schedule_names",
]


def __dir__() -> list[str]:
    return __all__
