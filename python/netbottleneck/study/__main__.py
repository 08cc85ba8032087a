"""`python -m netbottleneck.study`."""

import sys

from netbottleneck.study import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
