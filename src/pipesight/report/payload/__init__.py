"""What the page draws: columns of whole numbers, as small as they can be."""

from pipesight.report.payload.limits import LIMITS, Limits
from pipesight.report.payload.whole import page_payload

__all__ = ["LIMITS", "Limits", "page_payload"]
