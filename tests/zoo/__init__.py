"""Real models, as their libraries have them: tiny, each with a padded batch as people write it, and where to cut it.

They have random weights that are the same in every process, and no dropout.
"""

from zoo.entry import BATCH, CHUNKS, Entry
from zoo.text import TEXT
from zoo.vision import VISION

__all__ = ["BATCH", "CHUNKS", "ZOO", "Entry"]

ZOO: list[Entry] = [*TEXT, *VISION]
