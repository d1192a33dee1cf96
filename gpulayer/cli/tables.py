"""Tables that can be read without colour and in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpulayer.cli.terminal import escape_line

if TYPE_CHECKING:
    from rich.table import Table


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines; columns named in `numbers` stand to the right. A cell is one escaped line."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        made.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(escape_line(cell)) for cell in row))
    return made


def size(count: int | None) -> str:
    """Return bytes for people, in the largest fitting unit; what is unknown says so and is never 0."""
    if count is None:
        return "unknown"
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


def many(count: int, what: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def folded(names: Sequence[str], most: int = 6) -> str:
    """Return names as one text, long lists with a count: `a, b, c and 97 more`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
