"""What the page draws: columns of whole numbers, as small as they can be."""

from pipesight.view.payload.limits import LIMITS, Limits
from pipesight.view.payload.whole import page_payload

__all__ = ["LIMITS", "Limits", "page_payload"]
