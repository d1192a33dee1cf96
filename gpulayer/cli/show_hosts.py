"""What the fleet is, for people: devices with their memory and its kind, capabilities, notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulayer.cli.screen import Screen
from gpulayer.cli.tables import folded, size, table
from gpulayer.gpu.facts import Device, HostFacts
from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import HostView, why_unreached
from gpulayer.placement.rules import site_of, unexpected

KIND_UNKNOWN = "of unknown kind"
SEVERITIES = {"error": "bad", "warning": "warn", "info": "faint"}


def show_hosts(screen: Screen, views: Sequence[HostView]) -> None:
    """Print what `probe` found: a table of devices, then capabilities, notes and what was not reached."""
    known = [(view.host.name, view.facts) for view in views if view.facts is not None]
    rows = [row for name, facts in known for row in _devices(name, facts)]
    if rows:
        screen.show(table(("HOST", "DEVICE", "MEMORY", "USABLE", "FREE"), rows, numbers=("USABLE", "FREE")))
    if known:
        screen.say()
        capabilities = ((name, ", ".join(sorted(facts.capabilities)) or "none seen working") for name, facts in known)
        screen.show(table(("HOST", "CAPABILITIES"), capabilities))
    if tried := [row for name, facts in known for row in _tried(name, facts)]:
        screen.say()
        screen.show(table(("HOST", "TRIED", "WORKED", "DID NOT"), tried))
    _show_shared(screen, views)
    for severity, text in _notes(known):
        screen.say(screen.wrapped(text, "  "), SEVERITIES[severity])
    for view in views:
        if (site := site_of(view)) and (refusal := unexpected(site)):
            screen.say(screen.wrapped(f"{view.host.name}: {sentence(refusal)}", "  "), "bad")
            screen.say(screen.wrapped(f"  fix: {refusal.fix}", "    "))
    for view in views:
        if not view.reached:
            show_unreached(screen, view.host.name, why_unreached(view), view.fix)


def show_unreached(screen: Screen, host: str, why: str | None, fix: str | None, *, style: str = "bad") -> None:
    """Print why a host was not reached, and what to do about it."""
    screen.say(screen.wrapped(f"not reached: {host}: {why}", "  "), style)
    if fix:
        screen.say(screen.wrapped(f"  fix: {fix}", "    "))


def show_holders(screen: Screen, views: Sequence[HostView]) -> None:
    """Print what holds each device and CPU slot of every host, of whatever project."""
    rows = [
        (
            view.host.name,
            _device(device),
            view.holders.get(device.id, "free")
            if device.accelerator != "cpu"
            else f"{view.slots_held} of {view.slots} slots taken",
        )
        for view in views
        if view.facts is not None
        for device in view.facts.devices
    ]
    rows += [(view.host.name, "-", f"not reached: {why_unreached(view)}") for view in views if not view.reached]
    screen.show(table(("HOST", "DEVICE", "HELD BY"), rows))
    _show_shared(screen, views)


def _show_shared(screen: Screen, views: Sequence[HostView]) -> None:
    """Say which names are one machine: a job that runs under one of them takes room from the others."""
    machines: dict[tuple[str, str], list[str]] = {}
    for view in views:
        if view.domain is not None:
            machines.setdefault(view.domain, []).append(view.host.name)
    for names in machines.values():
        if len(names) > 1:
            text = f"info: {folded(names)}: These are names of one machine, which share its devices and slots."
            screen.say(screen.wrapped(text, "  "), "faint")


def _devices(name: str, facts: HostFacts) -> Iterator[tuple[str, ...]]:
    for device in facts.devices:
        kind = "" if device.accelerator == "cpu" else f" {device.memory_kind or KIND_UNKNOWN}"
        yield (
            name,
            _device(device),
            f"{size(device.memory_bytes)}{kind}",
            size(device.usable_bytes),
            size(device.free_bytes),
        )


def _tried(name: str, facts: HostFacts) -> Iterator[tuple[str, ...]]:
    """Yield a row for each framework whose operators and dtypes were tried, now or before."""
    devices = {device.id: f"{device.accelerator}:{device.index}" for device in facts.devices}
    for fact in facts.frameworks.values():
        if fact.ops:
            where = devices.get(fact.ops_device or "", fact.ops_device or "an unknown device")
            worked = ", ".join(key for key, result in fact.ops.items() if result == "ok")
            failed = ", ".join(f"{key} ({result})" for key, result in fact.ops.items() if result != "ok")
            yield name, f"{fact.name} on {where}", worked or "nothing", failed or "-"


def _device(device: Device) -> str:
    health = "" if device.health == "ok" else f" (health: {device.health})"
    return f"{device.accelerator}:{device.index} {device.name or 'without a name'}{health}"


def _notes(known: Iterable[tuple[str, HostFacts]]) -> Iterator[tuple[str, str]]:
    """Yield (severity, sentence), the grave ones first; what several hosts say alike is one sentence."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for name, facts in known:
        if not facts.complete:
            said.setdefault(("warning", "probe", "a part of the probe was cut off"), []).append(name)
        for note in facts.notes:
            detail = f" ({note.detail})" if note.detail else ""
            said.setdefault((note.severity, note.code, note.message + detail), []).append(name)
    for (severity, code, message), hosts in sorted(said.items(), key=lambda entry: list(SEVERITIES).index(entry[0][0])):
        yield severity, f"{severity}: {folded(hosts)}: {message} [{code}]"
