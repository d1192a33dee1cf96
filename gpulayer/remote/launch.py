"""The start of a run, in a process of its own that becomes its supervisor: claim, checks, leases, intent, gate."""

from __future__ import annotations

import contextlib
import os
import time

from gpulayer.remote import clock, processes, records, runs
from gpulayer.remote.failpoints import failpoint
from gpulayer.remote.files import Blobs
from gpulayer.remote.garbage import hold
from gpulayer.remote.leases import Leases
from gpulayer.remote.logcap import LIMIT
from gpulayer.remote.occupants import RUN_ID, look, others, words
from gpulayer.remote.runs import Run
from gpulayer.remote.settling import live_state, settled
from gpulayer.remote.supervisor import Supervisor
from gpulayer.remote.wire import RequestError, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulayer.remote.answers import Answer
    from gpulayer.remote.gang import Gang
    from gpulayer.remote.occupants import Sight

_CLAIM_LIMIT = 10.0  # seconds that another launch of the same run may take

# What a spec must hold (docs/protocol.md, "Spec of a run").
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("schema", "run", "project", "job", "key", "host", "accelerator"), (str,)),
    **dict.fromkeys(("devices", "secrets", "outputs"), (list,)),
    **dict.fromkeys(("env", "select_env"), (dict,)),
    **dict.fromkeys(("attempt", "share"), (int,)),
    **dict.fromkeys(("slots", "memory_bytes", "disk_bytes"), (int, type(None))),
    **dict.fromkeys(("python", "tree", "setup"), (str, type(None))),
    "command": (str, list),
    "timeout": (int, float, type(None)),
    "grace": (int, float),
    "gang": (dict, type(None)),
}
_GANG: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run", "backend"), (str,)),
    **dict.fromkeys(("node", "nodes", "processes"), (int,)),
    "silence": (int, float),
    "peers": (list,),
    "address": (str, type(None)),
    "endpoint": (dict, type(None)),
}
_MAX_NODES, _MAX_PROCESSES, _MAX_ADDRESSES = 100, 1024, 32
_LAST_PORT = 65535
_TOKEN = 64  # hex digits


def check(spec: dict[str, Any], payload: object) -> tuple[dict[str, str], str | None]:
    """Return the secrets and the gang's token, if they and the spec are what a launch needs.

    Raises RequestError `request`.
    """
    _check_kinds(spec, _FIELDS, "the spec")
    secrets, token = (payload.get("secrets", {}), payload.get("token")) if isinstance(payload, dict) else (None, None)
    texts = [*spec["devices"], *spec["secrets"], *spec["outputs"], *spec["env"].values(), *spec["select_env"].values()]
    if not all(isinstance(text, str) for text in (*texts, *(spec["command"] or [None]))):
        raise RequestError("request", "launch: a list or map of the spec holds something else than texts")
    if spec["schema"] != runs.SPEC or not isinstance(secrets, dict) or set(secrets) != set(spec["secrets"]):
        raise RequestError("request", "launch: the payload does not hold exactly the spec's secrets")
    if not isinstance(spec.get("log_bytes"), (int, type(None))):
        raise RequestError("request", "launch: 'log_bytes' of the spec is no number of bytes")
    if spec["slots"] is None and not spec["devices"]:
        raise RequestError("request", "launch: the spec asks for neither a device nor a CPU slot")
    if spec["gang"] is not None:
        _check_gang(spec["gang"], spec["host"])
    if not (token is None if spec["gang"] is None else isinstance(token, str) and _is_token(token)):
        raise RequestError("request", "launch: a gang's token, and only a gang's, must be 64 hex digits")
    return secrets, token


def _check_kinds(found: dict[str, Any], wanted: dict[str, tuple[type, ...]], what: str) -> None:
    for name, kinds in wanted.items():
        if not isinstance(found.get(name), kinds):
            raise RequestError("request", f"launch: '{name}' of {what} is {found.get(name)!r}"[:500])


def _check_gang(gang: dict[str, Any], host: str) -> None:
    _check_kinds(gang, _GANG, "the spec's gang")
    node, nodes, endpoint = gang["node"], gang["nodes"], gang["endpoint"]
    addresses = [] if endpoint is None else endpoint.get("addresses")
    ports = [] if endpoint is None else [endpoint.get("port"), endpoint.get("store_port")]
    if not (
        1 <= nodes <= _MAX_NODES
        and 0 <= node < nodes
        and 1 <= gang["processes"] <= _MAX_PROCESSES
        and gang["silence"] > 0
        and len(gang["peers"]) == nodes
        and all(isinstance(peer, str) for peer in gang["peers"])
        and gang["peers"][node] == host
        and (node > 0 or endpoint is None)
        and isinstance(addresses, list)
        and len(addresses) <= _MAX_ADDRESSES
        and all(isinstance(address, str) for address in addresses)
        and all(type(port) is int and 0 < port <= _LAST_PORT for port in ports)
    ):
        raise RequestError("request", f"launch: the spec's gang does not hold together: {gang!r}"[:500])


def _is_token(text: str) -> bool:
    return len(text) == _TOKEN and not set(text) - set("0123456789abcdef")


def launch(
    spec: dict[str, Any],
    secrets: dict[str, str],
    token: str | None,
    *,
    state_folder: str,
    lease_folder: str,
    umask: int,
    answer: Answer,
) -> None:
    """Start the run of a checked spec once, answer with its state or with why it was not started, and supervise it.

    A gang's node is held, with its leases and nothing written, until all nodes of the gang are.
    """
    run = Run(state_folder, spec["run"])
    try:
        lock = _claim(run)
        if lock is None or run.exists():
            if lock is not None:
                os.close(lock)  # before the answer: who has it may come at once with what needs the lock
            _check_key(run, spec)
            answer.end({"ok": True, "new": False, "state": settled(run)})
            return
        failpoint("claimed")
        run.set_aside()
        code = hold(state_folder)
        leases = _admit(run, spec, state_folder, lease_folder)
        sight = _look(spec, leases)
        gang = None if token is None else _assembled(spec, token, answer)
        supervisor = _supervisor(run, spec, lock, sight, gang)
        records.replace(run.spec, spec)
        failpoint("spec-written")
    except (RequestError, OSError) as error:
        if not run.exists():
            run.free_reserve()
        answer.end({"error": (error if isinstance(error, RequestError) else refusal(error)).header()})
        return
    try:
        supervisor.start(spec, secrets, Blobs(state_folder), umask, leases=leases, code=code)
    except OSError as error:
        if not run.exists():
            run.free_reserve()
            answer.end({"error": refusal(error).header()})
            return
        supervisor.fail(f"the host could not start it: {error}")
    except RequestError as error:
        supervisor.fail(error.message)
    answer.end({"ok": True, "new": True, "state": run.final() or supervisor.state})
    if run.final() is None:
        supervisor.watch()


def _claim(run: Run) -> int | None:
    """Return the lock of the run, or None where its supervisor has it or it was removed. Raises RequestError `lock`."""
    give_up = time.monotonic() + _CLAIM_LIMIT
    pause = 0.002
    while True:
        if run.buried:
            return None
        run.create()
        with contextlib.suppress(FileNotFoundError):  # it was removed at this very moment: begin anew
            lock = run.try_lock()
            if lock is not None:
                return lock
        if run.exists() and run.last_known()["leader"] is not None:
            return None
        if time.monotonic() > give_up:
            raise RequestError(
                "lock",
                f"another launch of {run.id} has not come to an end in {_CLAIM_LIMIT:g} s",
                fix="see what its supervisor on the host is doing",
            )
        time.sleep(pause)
        pause = min(0.1, pause * 2)


def _check_key(run: Run, spec: dict[str, Any]) -> None:
    known = (run.final() or live_state(run))["key"]
    if known not in (spec["key"], ""):
        raise RequestError(
            "conflict",
            f"{run.id} on this host belongs to another declaration (key {known[:12]}…)",
            fix="rename the job, or remove the old run from the host",
        )


def _admit(run: Run, spec: dict[str, Any], state_folder: str, lease_folder: str) -> list[int]:
    """Check once more what may have changed since the plan was made, and take the leases."""
    if spec["tree"] is not None:
        Blobs(state_folder).tree(spec["tree"])
    disk = os.statvfs(state_folder)
    _enough("disk", spec["disk_bytes"], disk.f_bavail * disk.f_frsize)
    _enough("memory", spec["memory_bytes"], _memory_available())
    leases = Leases(lease_folder)
    if spec["devices"]:
        return leases.take_devices(spec["devices"], spec["share"], run.id)
    return leases.take_slot(spec["slots"], run.id)


def _look(spec: dict[str, Any], leases: list[int]) -> Sight:
    """Return what is seen on the devices that were leased. Raises RequestError `busy` where somebody else is there."""
    if not spec["devices"]:
        return {}
    sight = look(spec["devices"])
    shared = spec["share"] > 1
    found = others(sight, lambda pid: shared and processes.variable(pid, RUN_ID) is not None)
    if not found:
        return sight
    for lease in leases:
        os.close(lease)
    holder = words(found)
    raise RequestError(
        "busy",
        f"{found[0]['device']} is used by {holder}, which GPUlayer did not start",
        fix="wait until it ends, or end it",
        holder=holder,
    )


def _enough(what: str, needed: int | None, found: int | None) -> None:
    if needed is not None and found is not None and found < needed:
        raise RequestError(
            what,
            f"{needed / 2**30:.1f} GiB of {what} are asked for, {found / 2**30:.1f} GiB are free",
            fix="wait, free some, or ask for less",
            needed=needed,
            found=found,
        )


def _memory_available() -> int | None:
    """Return the bytes that new programs can get (Linux: proc_meminfo(5)); None where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, value, *_ = line.split()
            if name == "MemAvailable:":
                return int(value) * 1024
    return None


def _assembled(spec: dict[str, Any], token: str, answer: Answer) -> Gang:
    from gpulayer.remote.gang import gang_of

    gang = gang_of(spec, token)
    gang.assemble(answer)
    failpoint("gang-assembled")
    return gang


def _supervisor(run: Run, spec: dict[str, Any], lock: int, sight: Sight, gang: Gang | None) -> Supervisor:
    timeout, limit = spec["timeout"], spec.get("log_bytes") or LIMIT
    deadline = None if timeout is None else clock.boot_time() + timeout
    record = runs.new_record(
        runs.first_state(spec), deadline=deadline, grace=spec["grace"], sight=sight, log_limit=limit
    )
    record["supervisor"] = (os.getpid(), processes.start_of(os.getpid()))
    if gang is None:
        return Supervisor(run, record, lock)
    from gpulayer.remote.member import Member

    return Member(run, record, lock, gang)
