"""A controller as a process of its own, for tests that kill it: `controller.py FOLDER KNOWN_HOSTS apply|attach|gc`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from gpulayer.fleet.transport import ConnectOptions
from gpulayer.run import api
from gpulayer.spec.inventory import load_inventory
from gpulayer.spec.jobs import load_jobs


async def main(folder: Path, known_hosts: Path, word: str) -> None:
    jobs, inventory = load_jobs(folder / "jobs.yaml"), load_inventory(folder / "inventory.yaml")
    options = ConnectOptions(
        known_hosts=(known_hosts,), ssh_config=folder / "no-config", agent_socket=None, local_python=None
    )
    if word == "gc":
        await api.gc(inventory, older_than=0, dry=False, options=options)
        return
    plan = await api.plan(jobs, inventory, options=options)
    events = (
        api.apply(plan, jobs, inventory, options=options)
        if word == "apply"
        else api.attach(jobs, inventory, plan, options=options)
    )
    async for event in events:
        sys.stdout.write(json.dumps(event.to_json()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
