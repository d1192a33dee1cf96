"""How long `gpulayer --help` takes, against `python -c "import argparse"` and `python -c pass`, in one run.

The goal: at most twice the import of argparse plus 60 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

WAYS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import argparse'": ["-c", "import argparse"],
    "gpulayer --version": ["-m", "gpulayer", "--version"],
    "gpulayer --help": ["-m", "gpulayer", "--help"],
    "gpulayer plan --help": ["-m", "gpulayer", "plan", "--help"],
}
ROUNDS = 15


def main() -> None:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, arguments in WAYS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            times[way].append((time.perf_counter() - began) * 1000)
    medians = {way: statistics.median(values) for way, values in times.items()}
    for way, median in medians.items():
        print(f"{way:30} {median:6.1f} ms  (best {min(times[way]):.1f})")
    limit = 2 * medians["python -c 'import argparse'"] + 60
    print(f"--help: {medians['gpulayer --help']:.1f} ms of at most {limit:.1f} ms")


if __name__ == "__main__":
    main()
