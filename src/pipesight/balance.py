"""Choose the balance of a model: by the time its layers take, by the memory they keep, or by costs you know.

`cuts_by_time` and `cuts_by_size` do so for any model in a `pipesight.Pipeline`. `pack` balances micro-batches: it finds
an order of samples in which all have about the same work.

Example::

    from pipesight import GPipe
    from pipesight.balance import balance_by_time

    microbatch = torch.rand(16, 3, 96, 96)
    balance = balance_by_time(layers, microbatch, partitions=2)  # [5, 3], say
    pipe = GPipe(layers, balance, chunks=4)
"""

from pipesight.pipeline.balance import balance_by_size, balance_by_time
from pipesight.pipeline.choosing_cuts import cuts_by_size, cuts_by_time
from pipesight.schedule.balancing import balance_cost
from pipesight.schedule.packing import pack

__all__ = ["balance_by_size", "balance_by_time", "balance_cost", "cuts_by_size", "cuts_by_time", "pack"]


def __dir__() -> list[str]:
    return __all__
