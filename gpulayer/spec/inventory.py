"""The inventory: which hosts there are and how each is reached."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer.spec import support
from gpulayer.spec.documents import Document, load
from gpulayer.spec.entries import Fault, located, merged, refuse
from gpulayer.spec.schemas import sound, validate


class TransportKind(enum.StrEnum):
    """How the agent is started: asyncssh, the system's ssh, or this machine itself."""

    SSH = "ssh"
    OPENSSH = "openssh"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the probe must find on a host; where it does not hold the host is refused with code `expect`."""

    accelerator: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of the inventory. Paths may start with `~`, which is the remote user's home (identity_file: ours)."""

    name: str
    transport: TransportKind = TransportKind.SSH
    address: str | None = None
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    jump: str | None = None
    host_key: str | None = None
    python: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    expect: Expectation | None = None
    private_address: str | None = None
    max_jobs: int | None = None
    drain: bool = False
    state_dir: str | None = None
    lease_dir: str | None = None

    @property
    def target(self) -> str:
        """The address that is connected to: the host's own name where none is given."""
        return self.address or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The hosts by name, in the order of the file. `path` is None where this machine alone is the inventory."""

    hosts: Mapping[str, Host]
    path: Path | None = None


# What only a connection uses: a default of these does not reach a local host, and its own is a mistake.
_CONNECTION = ("address", "port", "user", "identity_file", "jump", "host_key")


def local_inventory() -> Inventory:
    """Return the inventory of someone who has none: this machine alone, as host `local`."""
    return Inventory(hosts={"local": Host(name="local", transport=TransportKind.LOCAL)})


def load_inventory(path: Path) -> Inventory:
    """Return the inventory in the file at `path`. Raises InvalidDocumentError with all of its problems."""
    return parse_inventory(load(path))


def parse_inventory(document: Document) -> Inventory:
    """Return the inventory that `document` declares, defaults merged. Raises InvalidDocumentError.

    A default reaches every host that says nothing else; `~` takes it away.
    """
    problems = validate(document, "inventory", advice=support.ADVICE)
    entries = sound(document, "inventory") if problems else document.value["hosts"]
    written = {name: own or {} for name, own in entries.items()}
    hosts = {name: _host(name, own, document.value.get("defaults") or {}) for name, own in written.items()}
    for name, host in hosts.items():
        problems += located(document, "hosts", name, (*_faults(host, written[name]), *_jump_faults(host, hosts)))
    if problems:
        raise refuse(problems)
    return Inventory(hosts=hosts, path=Path(document.path))


def _host(name: str, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
    values = merged(defaults, own)
    transport = TransportKind(values.pop("transport", TransportKind.SSH))
    values.pop("jobs_per_device", None)  # the schema allows only 1
    if transport is TransportKind.LOCAL:
        values = {key: value for key, value in values.items() if key not in _CONNECTION}
    if "expect" in values:
        values["expect"] = Expectation(**values["expect"])
    return Host(name=name, transport=transport, **values)


def _faults(host: Host, own: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with one host by itself."""
    if host.transport is TransportKind.LOCAL:
        for key in _CONNECTION:
            if own.get(key) is not None:
                yield Fault((key,), "a local host is this machine: nothing is connected to; take this key out")
    elif host.transport is TransportKind.OPENSSH and host.host_key:
        message = "the system's ssh cannot be given a pin; use `transport: ssh`, or put the key into known_hosts"
        yield Fault(("host_key",), message)


def _jump_faults(host: Host, hosts: Mapping[str, Host]) -> Iterator[Fault]:
    """Yield what is wrong on the way to a host: it leads through hosts of this file and then an alias, if any."""
    way = [host.name]
    at = host
    while at.jump is not None and at.jump in hosts:
        at = hosts[at.jump]
        way.append(at.name)
        if at.transport is TransportKind.LOCAL:
            yield Fault(("jump",), f"{at.name!r} is this machine (transport: local); nothing is reached through it")
        if at.name in way[:-1]:
            if at is host:
                yield Fault(("jump",), f"the way leads in a circle: {' -> '.join(way)}; reach one of them directly")
            return
