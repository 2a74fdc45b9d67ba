"""Start Python processes that take warnings for errors."""

import sys

# Before torch 2.10, its compiler, once imported, leaves a folder to Python to remove at exit.
STRICT_PYTHON = [sys.executable, "-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning"]
