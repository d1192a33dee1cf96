"""The command that writes a first inventory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpulayer.cli.screen import Screen
from gpulayer.cli.tables import many
from gpulayer.errors import ExitCode, UsageError
from gpulayer.fleet.sshconfig import aliases, is_address
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.jobs import slug

INVENTORY = Path("inventory.yaml")
HEAD = """\
# Written by `gpulayer init`. Take out what is no machine for jobs; README and inventory.example.yaml have all keys.
version: 1
hosts:
"""


def init(_args: argparse.Namespace, screen: Screen) -> int:
    """Write inventory.yaml from the concrete hosts of ~/.ssh/config and this machine; what is there stays."""
    config = ConnectOptions().ssh_config
    found = aliases(config)
    hosts = {"here": "transport: local"}
    for alias in found:
        if not is_address(alias):
            screen.note(f"{config}: {alias!r} is no name that a host can have: left out", "warn")
            continue
        name = _free(slug(alias), hosts)
        hosts[name] = "" if name == alias else f"address: {json.dumps(alias)}"
    text = HEAD + "".join(f"  {name}: {{{keys}}}\n" for name, keys in hosts.items())
    try:
        with INVENTORY.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{INVENTORY} is there already, and stays as it is", fix="edit it, or move it away") from error
    except OSError as error:
        raise UsageError(f"cannot write {INVENTORY} ({error.strerror})", fix="go to a folder of yours") from error
    if screen.machine:
        screen.data({"schema": "gpulayer.init/1", "path": str(INVENTORY), "hosts": list(hosts)})
    screen.say(f"{INVENTORY}: {many(len(hosts), 'host')}: {', '.join(hosts)}", "good")
    screen.note("next: gpulayer probe", "faint")
    return ExitCode.OK


def _free(name: str, taken: dict[str, str]) -> str:
    """Return a host's name that is not taken yet: `a.b` beside `a-b` is `a-b-2`."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name[:58]}-{number}"
    return free
