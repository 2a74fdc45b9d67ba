"""``torchgpipe.skip.skippable``, for pipesight."""

from abc import ABC

from pipesight.skip import pop, skippable, stash, verify_skippables

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]


class Skippable(ABC):  # noqa: B024 (only asked about: it has no methods to implement)
    """What ``isinstance`` and ``issubclass`` find in every class that ``skippable`` decorated."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "stashable_names") and hasattr(other, "poppable_names")
