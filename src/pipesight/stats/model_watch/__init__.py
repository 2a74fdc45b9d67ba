"""Watch a model: its layers log their tensors, with no calls in user code."""

from pipesight.stats.model_watch.watcher import TENSORS, Watch, watch

__all__ = ["TENSORS", "Watch", "watch"]
