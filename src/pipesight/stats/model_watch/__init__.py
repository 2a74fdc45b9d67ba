"""`watch`: log the tensors of a model's layers without changes to the training loop."""

from pipesight.stats.model_watch.watcher import TENSORS, Watch, watch

__all__ = ["TENSORS", "Watch", "watch"]
