"""Output that a host dropped before it came here: said, never made up, and the rest stays at its offset."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpulayer.run import api, executor
from gpulayer.run.events import Event
from gpulayer.run.launch import spec_of
from tests.run.project import Project, summary

COMMAND = "for i in 1 2 3 4 5 6; do head -c 500000 /dev/zero | tr '\\0' $i; sleep 0.3; done"
WHOLE = b"".join(b"%d" % number * 500_000 for number in range(1, 7))


def pieces(events: list[Event]) -> tuple[list[tuple[int, bytes]], list[tuple[int, int]]]:
    """The output by offset, and what was dropped; together they are the whole log."""
    data, holes, end = [], [], 0
    for event in events:
        if event.event == "output":
            assert event.detail["offset"] == end
            data.append((end, event.data))
            end += len(event.data)
        elif event.event == "log_dropped":
            assert event.detail["offset"] == end
            holes.append((end, event.detail["bytes"]))
            end += event.detail["bytes"]
    assert end == len(WHOLE)
    return data, holes


async def test_what_was_dropped_is_told_by_apply_and_by_logs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(executor, "spec_of", lambda *args, **fields: {**spec_of(*args, **fields), "log_bytes": 1 << 20})
    project.write({"long": {"command": COMMAND}})
    assert summary(await project.apply(detach=True)) == (0, {"running": 1})
    await _until_ended(project)
    events = await project.attach(None)
    assert summary(events)[0] == 0
    data, holes = pieces(events)
    assert len(holes) == 1
    assert all(WHOLE[offset : offset + len(piece)] == piece for offset, piece in data)
    (run,) = project.runs()
    local = project.local_log(run)
    assert len(local) == len(WHOLE)
    assert all(local[offset : offset + len(piece)] == piece for offset, piece in data)
    again = [event async for event in api.logs(project.folder, project.inventory, "long", fleet=project.fleet)]
    replayed, told = pieces(again)
    assert told == holes
    assert b"".join(piece for _, piece in replayed) == b"".join(piece for _, piece in data)


async def _until_ended(project: Project) -> None:
    async with asyncio.timeout(60):
        while True:
            runs: list[Any] = await api.status(
                project.folder, project.inventory, project=project.name, fleet=project.fleet
            )
            if runs[0].status == "exited":
                return
            await asyncio.sleep(0.05)
