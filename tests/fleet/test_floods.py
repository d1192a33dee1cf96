"""A host that sends garbage as fast as it can costs the controller little, and ends; the other hosts go on."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from gpulayer.spec.inventory import Host
from tests.fleet.conftest import ROOT
from tests.fleet.flooded import FLOODS
from tests.sshd import Farm, SshdHost

MOST = 50 * 1024  # KiB


def words(host: Host) -> str:
    fields = ("name", "address", "port", "user", "identity_file", "lease_dir")
    return json.dumps({field: getattr(host, field) for field in fields})


async def test_a_flood_costs_little_and_ends_and_the_other_host_answers(
    farm: Farm, hostile: Host, plain_host: SshdHost
) -> None:
    controller = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fleet.flooded", str(farm.known_hosts), words(hostile), words(plain_host.host),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await controller.communicate()
    assert (controller.returncode, err) == (0, b"")
    told: dict[str, dict[str, Any]] = json.loads(out)
    assert len(told) == len(FLOODS)
    assert {flood: of for flood, of in told.items() if of["grown"] > MOST} == {}
    assert {flood: of for flood, of in told.items() if not of["answers"] or of["slowest"] > 5} == {}
    assert {flood: of for flood, of in told.items() if of["seconds"] > 15} == {}  # the limits of start and request
    unlike = {flood: of["error"] for flood, of in told.items() if ": protocol: " not in of["error"]}
    assert {flood.split()[1] for flood in unlike} == {"flood-before", "flood-beside"}  # before there is an agent
    assert {": shell: " in error for error in unlike.values()} == {True}
