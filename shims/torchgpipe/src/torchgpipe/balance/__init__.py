"""``torchgpipe.balance``, for pipesight."""

from pipesight.balance import balance_by_size, balance_by_time
from torchgpipe.balance.profile import profile_sizes, profile_times

__all__ = ["balance_by_size", "balance_by_time", "profile_sizes", "profile_times"]
