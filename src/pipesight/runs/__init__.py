"""The run directory: its layout and format, and reading it, whole or while it grows. Nothing here needs torch."""
