"""`python -m gpulayer` is the `gpulayer` command."""

import sys

from gpulayer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
