"""What the page draws: columns of whole numbers, as small as they can be."""

from pipesight.view.payload.run_payload import page_payload
from pipesight.view.payload.size_limits import LIMITS, Limits

__all__ = ["LIMITS", "Limits", "page_payload"]
