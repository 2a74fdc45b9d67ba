"""The logger ``torchgpipe.pipeline``, as the parent of pipesight's: its levels and handlers apply to our lines."""

import logging

from pipesight import register_layer_logging_hooks

__all__ = ["register_layer_logging_hooks"]

logging.getLogger("pipesight").parent = logging.getLogger("torchgpipe.pipeline")
logging.getLogger("pipesight").setLevel(logging.getLogger("pipesight").level)  # forget what was on under the old parent
