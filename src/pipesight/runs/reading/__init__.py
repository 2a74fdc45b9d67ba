"""Runs, and traces of other tools, as tables: whatever state their files are in, and however many there are."""
