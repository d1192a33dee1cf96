"""What the programs share: a 512x512 matrix, a check of its square that needs no framework, and the result's file."""

import json
import os
import random

SIZE = 512
_BOUND = 1 << 61


def matrix() -> list[list[float]]:
    """Return a matrix of small whole numbers: its square is exact in every format that a device computes in."""
    return [[float((3 * row + 5 * column) % 7 - 3) for column in range(SIZE)] for row in range(SIZE)]


def wrong_rows(product: list[list[float]]) -> int:
    """Return how many rows of the matrix's square are wrong, by Freivalds' check in Python's own whole numbers.

    `product @ x` must be `matrix @ (matrix @ x)`; a wrong row passes for one of 2^61 random vectors x.
    """
    x = [random.SystemRandom().randrange(_BOUND) for _ in range(SIZE)]
    rows = [[int(value) for value in row] for row in matrix()]
    wanted = _times(rows, _times(rows, x))
    found = _times([[int(value) for value in row] for row in product], x)
    odd = [row for row, values in enumerate(product) if any(value != int(value) for value in values)]
    differ = [row for row, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other]
    return len({*odd, *differ})


def _times(rows: list[list[int]], vector: list[int]) -> list[int]:
    return [sum(one * other for one, other in zip(row, vector, strict=True)) for row in rows]


def tell(**found: object) -> None:
    """Write what the job was told and what it found to `result.json`, which is fetched; each rank of a gang its own."""
    names = ("GPULAYER_ACCELERATOR", "GPULAYER_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    told = {name: os.environ.get(name) for name in names}
    rank = os.environ.get("RANK")
    place = {} if rank is None else {"rank": int(rank), "world": int(os.environ["WORLD_SIZE"])}
    name = "result.json" if rank is None else f"result-{rank}.json"
    with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump({"environment": told, **place, **found}, file)
