"""A stand-in for nvidia-smi: replays `query.csv` (with its header) and `list.txt`, which lie beside the script.

`apps.csv`, if it is there, holds the compute processes: UUID, pid, MiB.

Standard library only. Made into an executable by `tests.machines`, which puts the interpreter's line before it.
"""

import csv
import pathlib
import sys


def main(words: "list[str]") -> int:
    folder = pathlib.Path(sys.argv[0]).resolve().parent
    if words == ["-L"]:
        sys.stdout.write((folder / "list.txt").read_text())
        return 0
    options = dict(word.partition("=")[::2] for word in words)
    apps = folder / "apps.csv"
    if "--query-compute-apps" in options:
        sys.stdout.write(apps.read_text() if apps.exists() else "")
        return 0
    with (folder / "query.csv").open() as file:
        header, *rows = csv.reader(file, skipinitialspace=True)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
