"""Writes `asked.txt` and `report.json` into the folders that are named, or into all."""

import sys

from tests.fleet_folders import FOLDERS, ask, asked_text, report_text

for folder in FOLDERS:
    if not sys.argv[1:] or folder.name in sys.argv[1:]:
        found = ask(folder)
        (folder / "asked.txt").write_text(asked_text(found))
        (folder / "report.json").write_text(report_text(found))
