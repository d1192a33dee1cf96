"""A stand-in for nvidia-smi: replays `query.csv` (with its header) and `list.txt`, which lie beside the script.

`apps.csv`, if it is there, holds the compute processes: UUID, pid, MiB.

Standard library only, and of that nothing slow: it is started by the hundred. Made into an executable by
`tests.machines`, which puts the interpreter's line before it.
"""

import os
import sys
from _csv import reader  # `csv` has it from there, and is slow to import


def main(words: "list[str]") -> int:
    if words == ["-L"]:
        sys.stdout.write(_read("list.txt"))
        return 0
    options = dict(word.partition("=")[::2] for word in words)
    if "--query-compute-apps" in options:
        sys.stdout.write(_read("apps.csv"))
        return 0
    header, *rows = reader(_read("query.csv").splitlines(), skipinitialspace=True)
    names = [column.partition(" ")[0] for column in header]
    asked = options["--query-gpu"].split(",")
    for field in asked:
        if field not in names:
            sys.stdout.write(f'Field "{field}" is not a valid field to query.\n\n')
            return 2
    for row in rows:
        cells = [row[names.index(field)] for field in asked]
        sys.stdout.write(", ".join(cell.removesuffix(" MiB").removesuffix(" %") for cell in cells) + "\n")
    return 0


def _read(name: str) -> str:
    """Return the text of a file beside this script; nothing where there is none."""
    path = os.path.join(os.path.dirname(os.path.realpath(sys.argv[0])), name)
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
