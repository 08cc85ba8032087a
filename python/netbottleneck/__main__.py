"""Command line: `python -m netbottleneck`."""

import sys

from netbottleneck.cli import main

if __name__ == "__main__":
    sys.exit(main())
