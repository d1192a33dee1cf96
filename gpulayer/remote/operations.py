"""What an agent can be asked: one function an operation of the protocol (docs/protocol.md).

What only some operations need is imported by them, so that an agent starts soon, and before a child is forked: the next
child then finds it, and the next connection finds it compiled.
"""

from __future__ import annotations

import json
import os
import signal

from gpulayer.remote import processes
from gpulayer.remote.host import Stream, Task
from gpulayer.remote.leases import Leases
from gpulayer.remote.runs import Run, removed
from gpulayer.remote.settling import settled
from gpulayer.remote.states import FINAL
from gpulayer.remote.wire import MAX_HEADER, RequestError, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from gpulayer.remote.host import Host, Request

_MAX_RUNS = 1000


def probe(host: Host, request: Request) -> Task:
    """Observe this host in a child, so that the connection stays alive meanwhile."""
    python, frameworks = request.text_or_none("python"), request.texts("frameworks")
    fresh, deep = request.flag("fresh"), request.flag("deep")
    from gpulayer.gpu import discovery

    def observe() -> tuple[dict[str, Any], bytes]:
        report = discovery.probe(python, frameworks, fresh=fresh, deep=deep, state_root=host.folder)
        return {}, json.dumps(report).encode("ascii")

    return _in_child(host, request, observe)


def _in_child(host: Host, request: Request, work: Callable[[], tuple[dict[str, Any], bytes]]) -> Task:
    """Do `work` in a child of its own process group, and answer with the fields and the payload that it returns."""
    pipe, end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(end)
        return Task(request, pid, pipe, bound=True, otherwise=lambda: _died(request))
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):  # the connection is the agent's alone
            os.dup2(null, standard)
        processes.shed({0, 1, 2, end})  # and so is what it reads of others: who writes must see that it has closed it
        try:
            fields, payload = work()
            frame = encode(host.nonce, {"id": request.id, "ok": True, **fields}, payload)
        except RequestError as error:
            frame = encode(host.nonce, {"id": request.id, "error": error.header()})
        except Exception as error:  # noqa: BLE001  # whatever it was, the controller is told
            refusal = RequestError(request.op, f"{request.op} failed: {type(error).__name__}: {error}")
            frame = encode(host.nonce, {"id": request.id, "error": refusal.header()})
        with open(end, "wb") as file:
            file.write(frame)
    finally:
        os._exit(0)


def _died(request: Request) -> NoReturn:
    raise RequestError("died", f"the process that did '{request.op}' on the host died", fix="try again")


def survey(host: Host, request: Request) -> Task:
    """Say who holds what, and which runs of a project are known: the ids after `after`, as many as fit.

    In a child: a GPU's driver is asked, which may hang.
    """
    project, after = request.text("project"), request.text_or_none("after") or ""
    from gpulayer.remote import occupants  # noqa: F401  # the child's own import finds it here

    return _in_child(host, request, lambda: (_survey(host, project, after), b""))


def _survey(host: Host, project: str, after: str) -> dict[str, Any]:
    from gpulayer.remote import occupants

    leased, slots = Leases(host.lease_folder).holders()
    holders = {
        device: occupants.words(foreign)
        for device, seen in occupants.look().items()
        if (foreign := occupants.others({device: seen}))
    }
    holders.update(leased)
    found: list[dict[str, Any]] = []
    more = False
    size = 0
    for name in sorted(host.run_ids()):
        if name <= after:
            continue
        state = settled(Run(host.folder, name))
        if state is None or state["project"] != project:
            continue
        size += len(json.dumps(state))
        if len(found) == _MAX_RUNS or size > MAX_HEADER // 2:
            more = True
            break
        found.append(state)
    return {"holders": holders, "slots_held": slots, "runs": found, "more": more}


def have(host: Host, request: Request) -> dict[str, Any]:
    """Say which blobs are missing."""
    return {"missing": host.blobs.missing(request.texts("blobs"))}


def put(host: Host, request: Request) -> dict[str, Any]:
    """Store blobs."""
    return {"stored": host.blobs.put(request.sized("blobs"), request.payload)}


def put_part(host: Host, request: Request) -> dict[str, Any]:
    """Store a part of a big blob."""
    size, offset = request.integer("size"), request.integer("offset")
    return {"stored": host.blobs.put_part(request.text("blob"), size, offset, request.payload)}


def start(host: Host, request: Request) -> Task:
    """Launch a run in a process of its own, which becomes its supervisor."""
    from gpulayer.remote.answers import Answer
    from gpulayer.remote.launch import check, launch

    spec = request.header.get("spec")
    if not isinstance(spec, dict):
        raise RequestError("request", "launch: 'spec' must be an object")
    try:
        secrets, token = check(spec, json.loads(request.payload or b"{}"))
    except ValueError:
        raise RequestError("request", "launch: the payload is no JSON") from None
    if token is not None:
        from gpulayer.remote import gang, member  # noqa: F401  # the child's own import finds them here
    run = Run(host.folder, spec["run"])
    run.create()
    pipe, end = os.pipe()

    answer = Answer(end, lambda header: encode(host.nonce, {"id": request.id, **header}))

    def begin() -> None:
        folders = {"state_folder": host.folder, "lease_folder": host.lease_folder}
        launch(spec, secrets, token, **folders, umask=host.umask, answer=answer)

    processes.detach(begin, {end}, run.diary)
    os.close(end)

    def otherwise() -> dict[str, Any]:
        state = settled(run)
        return _died(request) if state is None else {"new": False, "state": state}

    return Task(request, 0, pipe, bound=False, otherwise=otherwise)


def status(host: Host, request: Request) -> dict[str, Any]:
    """Return the states of runs."""
    return {"states": {run: settled(Run(host.folder, run)) for run in request.texts("runs")}}


def follow_run(host: Host, request: Request) -> Stream:
    """Stream a run's log and states."""
    from gpulayer.remote.follow import follow

    run = Run(host.folder, request.text("run"))
    offset, tail = request.integer("offset"), request.tail()
    rank = None if request.header.get("rank") is None else request.integer("rank")
    watch = host.watch(run.folder)
    return Stream(request, follow(run, offset, tail, rank, watch), watch)


def cancel(host: Host, request: Request) -> dict[str, Any]:
    """Leave the marker of a cancel and wake the supervisor up; the end is seen by `follow` or `status`."""
    run = Run(host.folder, request.text("run"))
    grace, by = request.number_or_none("grace"), request.text("by")
    state = settled(run)
    if state is None:
        raise RequestError("unknown_run", f"this host knows no run {run.id}")
    if state["status"] not in FINAL:
        run.request_cancel(grace, by)
        supervisor = run.last_known()["supervisor"]
        if supervisor is not None:
            processes.send(supervisor[0], supervisor[1], signal.SIGUSR1)
    return {"state": state}


def fetch_outputs(host: Host, request: Request) -> Stream:
    """Stream the files of a run that match."""
    from gpulayer.remote.outputs import fetch

    run = Run(host.folder, request.text("run"))
    if not run.exists():
        raise RequestError("unknown_run", f"this host knows no run {run.id}")
    if run.buried:
        raise removed(run)
    return Stream(request, fetch(run.work, request.texts("patterns")))


def gc(host: Host, request: Request) -> Task:
    """Remove what old runs have left, or tell what that would be."""
    older_than, dry = request.integer("older_than"), request.flag("dry")

    def collect() -> tuple[dict[str, Any], bytes]:
        from gpulayer.remote import garbage

        return garbage.collect(host.folder, older_than, dry=dry), b""

    return _in_child(host, request, collect)


OPERATIONS: dict[str, Callable[[Host, Request], dict[str, Any] | Task | Stream]] = {
    "probe": probe,
    "survey": survey,
    "have": have,
    "put": put,
    "put_part": put_part,
    "launch": start,
    "status": status,
    "follow": follow_run,
    "cancel": cancel,
    "fetch": fetch_outputs,
    "gc": gc,
}
