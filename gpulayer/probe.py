"""`python -m gpulayer.probe`: this machine's report as JSON on stdout. SHIPPED; needs nothing installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from gpulayer.gpu.discovery import FRAMEWORKS, probe


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return 0; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m gpulayer.probe", description="Print what this machine is, as JSON."
    )
    parser.add_argument("--python", metavar="PATH", help="the jobs' interpreter, whose frameworks are asked")
    parser.add_argument(
        "--frameworks",
        default=",".join(FRAMEWORKS),
        metavar="NAME,…",
        help="which frameworks to ask, separated by commas; empty for none (default: %(default)s)",
    )
    parser.add_argument("--deep", action="store_true", help="try operators and dtypes on each framework's first device")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.frameworks.split(",") if name.strip()]
    if unknown := [name for name in names if name not in FRAMEWORKS]:
        parser.error(f"--frameworks: {unknown[0]!r} is not one of {', '.join(FRAMEWORKS)}")
    report = json.dumps(probe(options.python, names, deep=options.deep), indent=2)
    try:
        sys.stdout.write(report + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # a reader that has gone (`| head`) is no fault, and must not become one at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
