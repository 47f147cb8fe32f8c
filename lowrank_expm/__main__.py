"""``python -m lowrank_expm`` is the command ``lowrank-expm``."""

import sys

from lowrank_expm.cli import main

if __name__ == "__main__":
    sys.exit(main())
