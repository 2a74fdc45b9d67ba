"""What comes after a run: its traces, read."""
