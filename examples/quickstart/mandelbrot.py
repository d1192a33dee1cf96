"""Draws one band of the Mandelbrot set with characters: `mandelbrot.py BAND OF` writes band-BAND.txt."""

import os
import sys
from pathlib import Path

COLUMNS, ROWS, LIMIT = 100, 42, 5000
SHADES = " .:-=+*#%@"


def steps(c: complex) -> int:
    """How many steps it takes z*z + c to leave the circle of radius 2; LIMIT where it stays."""
    z = 0j
    for step in range(LIMIT):
        if abs(z) > 2:
            return step
        z = z * z + c
    return LIMIT


def line(row: int) -> str:
    y = 1.2 - 2.4 * row / (ROWS - 1)
    counts = (steps(complex(-2.2 + 3.2 * column / (COLUMNS - 1), y)) for column in range(COLUMNS))
    return "".join(SHADES[-1] if count == LIMIT else SHADES[min(count // 3, len(SHADES) - 2)] for count in counts)


band, bands = int(sys.argv[1]), int(sys.argv[2])
rows = range((band - 1) * ROWS // bands, band * ROWS // bands)
picture = [line(row) for row in rows]
Path(f"band-{band}.txt").write_text("\n".join(picture) + "\n")
inside = sum(text.count(SHADES[-1]) for text in picture)
print(f"rows {rows.start} to {rows.stop - 1} on {os.environ['GPULAYER_HOST']}: {inside} points of the set")
