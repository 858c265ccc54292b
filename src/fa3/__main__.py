"""``python -m fa3`` is the command ``fa3``."""

import sys

from fa3.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
