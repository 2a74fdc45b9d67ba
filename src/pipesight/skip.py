"""Skip connections between layers of a sequential model: ``skippable``, ``stash``, ``pop``, ``Namespace``."""

from pipesight.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]


def __dir__() -> list[str]:
    return __all__
