"""`python -m pipesight` is the `pipesight` command."""

import sys

from pipesight.cli import main

if __name__ == "__main__":
    sys.exit(main())
