"""Squares the matrix in Python alone, on the CPU: no framework."""

import platform

from product import SIZE, matrix, tell, wrong_rows

PERIOD = 7  # the matrix's rows repeat, and so do its square's

rows = matrix()
columns = list(zip(*rows, strict=True))
square = [
    [sum(one * other for one, other in zip(row, column, strict=True)) for column in columns] for row in rows[:PERIOD]
]
tell(
    wrong_rows=wrong_rows([square[row % PERIOD] for row in range(SIZE)]),
    version=platform.python_version(),
    device="cpu",
    name=platform.machine(),
    visible=None,
    size=SIZE,
)
