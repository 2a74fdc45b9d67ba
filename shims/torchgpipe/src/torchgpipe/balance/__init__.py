"""``torchgpipe.balance``, for pipesight."""

from pipesight.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
