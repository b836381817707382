"""`python -m trueshard`, the same as the `trueshard` command."""

import sys

from trueshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
