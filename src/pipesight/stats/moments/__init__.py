"""From a tensor to a few numbers that merge: moments, what a cast to float8 does, and the statistics that follow."""

from pipesight.stats.moments.moments import FIELDS, Moments, merge_rows

__all__ = ["FIELDS", "Moments", "merge_rows"]
