"""Choose the balance of a model: by the time its layers take, by the memory they keep, or by costs you know.

Example::

    from pipesight import GPipe
    from pipesight.balance import balance_by_time

    sample = torch.rand(128, 3, 224, 224)
    balance = balance_by_time(model, sample, partitions=4)

    model = GPipe(model, balance, chunks=8)
"""

from pipesight.pipeline.balance import balance_by_size, balance_by_time
from pipesight.schedule.balancing import balance_cost

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]


def __dir__() -> list[str]:
    return __all__
