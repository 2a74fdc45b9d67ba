"""The run directory: its format (`format`), writing it, reading it (`reading`), and following it while it grows
(`following`). Nothing here needs torch."""
