"""Start Python processes that take warnings for errors."""

import sys

# Before torch 2.10, its compiler, once imported, leaves a folder to Python to remove at exit. Torch 2.6 warns of every
# mesh of CPUs, and newer ones of the first Python 3.13.
IGNORED = (
    "Implicitly cleaning up:ResourceWarning",
    "DTensor random operators may not have complete:UserWarning",
    "Guards may run slower on Python 3.13.0:RuntimeWarning",
)
STRICT_PYTHON = [sys.executable, "-W", "error", *(word for text in IGNORED for word in ("-W", f"ignore:{text}"))]
