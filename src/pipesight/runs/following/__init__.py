"""A run that is still being recorded, read as its files grow."""
