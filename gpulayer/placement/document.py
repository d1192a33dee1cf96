"""The JSON form of a plan, `gpulayer.plan/1`, both ways. What is written and read back is the same plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar

from gpulayer.errors import StateError
from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import (
    Action,
    Code,
    Doubt,
    GroupedRefusal,
    Kind,
    Placement,
    Plan,
    PlannedHost,
    PlannedJob,
    Refusal,
    ShapeVerdict,
)
from gpulayer.spec.identity import run_id
from gpulayer.spec.support import Accelerator, MemoryKind

SCHEMA: Final = "gpulayer.plan/1"

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON data, as `schemas/plan.schema.json` holds it."""
    return {
        "schema": SCHEMA,
        "created_at": plan.created_at,
        "project": plan.project,
        "applicable": plan.applicable,
        "documents": [{"path": path, "sha256": sha256} for path, sha256 in plan.documents],
        "hosts": [_host(host) for host in plan.hosts],
        "jobs": [_job(job) for job in plan.jobs],
        "shapes": {
            shape: {"fits": list(verdict.fits), "refusals": [_refusal(entry) for entry in verdict.refusals]}
            for shape, verdict in plan.shapes.items()
        },
        "summary": plan.summary,
    }


def from_json(document: object) -> Plan:
    """Return the plan of a JSON document. Raises StateError, with advice, where the document does not hold."""
    plan = _Node(document, "plan")
    if plan["schema"].value != SCHEMA:
        plan["schema"].refuse(f"is not {SCHEMA!r}: another version of GPUlayer wrote it")
    read = Plan(
        created_at=plan["created_at"].text(),
        project=plan["project"].text(),
        applicable=plan["applicable"].flag(),
        documents=tuple((item["path"].text(), item["sha256"].text()) for item in plan["documents"].items()),
        hosts=tuple(map(_read_host, plan["hosts"].items())),
        jobs=tuple(map(_read_job, plan["jobs"].items())),
        shapes={shape: _read_verdict(verdict) for shape, verdict in plan["shapes"].entries()},
    )
    _check(read, plan)
    return read


def _host(host: PlannedHost) -> dict[str, Any]:
    return {
        "name": host.name,
        "reached": host.reached,
        "error": host.error,
        "fix": host.fix,
        "fingerprint": None if host.fingerprint is None else dict(host.fingerprint),
        "probed_at": host.probed_at,
        "doubts": [{"device": doubt.device, "health": doubt.health} for doubt in host.doubts],
    }


def _job(job: PlannedJob) -> dict[str, Any]:
    places = [{"host": place.host, "devices": list(place.devices)} for place in job.placements]
    return {
        "job": job.job,
        "key": job.key,
        "shape": job.shape,
        "action": job.action.value,
        "accelerator": job.accelerator,
        "placement": None if not places else places[0] if job.nodes is None else places,
        "nodes": job.nodes,
        "position": job.position,
        "run": job.run,
        "attempt": job.attempt,
        "tree": job.tree,
        "changed": job.changed,
        "still_running": list(job.still_running),
    }


def _refusal(entry: GroupedRefusal) -> dict[str, Any]:
    refusal = entry.refusal
    return {
        "hosts": list(entry.hosts),
        "code": refusal.code.value,
        "kind": refusal.kind.name.lower(),
        "accelerator": refusal.accelerator,
        "device": refusal.device,
        "needed": refusal.needed,
        "found": refusal.found,
        "memory_kind": refusal.memory_kind,
        "about": None if refusal.about is None else refusal.about.value,
        "message": sentence(refusal),
        "fix": refusal.fix,
    }


class _Node:
    """A value of the document that knows its place; every getter raises StateError where the value is another."""

    __slots__ = ("path", "value")

    def __init__(self, value: object, path: str) -> None:
        self.value = value
        self.path = path

    def __getitem__(self, key: str) -> _Node:
        if not isinstance(self.value, dict):
            self.refuse("is not an object")
        if key not in self.value:
            self.refuse(f"has no {key!r}")
        return _Node(self.value[key], f"{self.path}.{key}")

    def refuse(self, why: str) -> NoReturn:
        raise StateError(f"{self.path} {why}", fix="the plan cannot be used; make it again with `gpulayer plan`")

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("is not a text")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse("is neither true nor false")
        return self.value

    def count(self) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 1:
            self.refuse("is not a number from 1")
        return self.value

    def word(self, kind: type[E]) -> E:
        found = next((member for member in kind if self.value == member.value), None)
        if found is None:
            self.refuse(f"is none of {', '.join(str(member.value) for member in kind)}")
        return found

    def maybe(self, read: Callable[[_Node], T]) -> T | None:
        return None if self.value is None else read(self)

    def items(self) -> list[_Node]:
        if not isinstance(self.value, list):
            self.refuse("is not a list")
        return [_Node(item, f"{self.path}[{index}]") for index, item in enumerate(self.value)]

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def entries(self) -> Iterable[tuple[str, _Node]]:
        if not isinstance(self.value, dict):
            self.refuse("is not an object")
        return [(str(key), _Node(item, f"{self.path}.{key}")) for key, item in self.value.items()]


def _read_host(host: _Node) -> PlannedHost:
    return PlannedHost(
        name=host["name"].text(),
        reached=host["reached"].flag(),
        error=host["error"].maybe(_Node.text),
        fix=host["fix"].maybe(_Node.text),
        fingerprint=host["fingerprint"].maybe(_read_fingerprint),
        probed_at=host["probed_at"].maybe(_Node.text),
        doubts=tuple(
            Doubt(device=doubt["device"].text(), health=doubt["health"].text()) for doubt in host["doubts"].items()
        ),
    )


def _read_fingerprint(fingerprint: _Node) -> Mapping[str, Any]:
    fingerprint["devices"].texts()
    for interpreter in (fingerprint, *(its for _, its in fingerprint["pythons"].entries())):
        for _, version in interpreter["frameworks"].entries():
            version.maybe(_Node.text)
    return {key: node.value for key, node in fingerprint.entries()}


def _read_job(job: _Node) -> PlannedJob:
    action = job["action"].word(Action)
    accelerator = job["accelerator"].maybe(lambda node: node.word(Accelerator))
    return PlannedJob(
        job=job["job"].text(),
        key=job["key"].text(),
        shape=job["shape"].text(),
        action=action,
        accelerator=accelerator.value if accelerator else None,
        placements=job["placement"].maybe(_read_placements) or (),
        nodes=job["nodes"].maybe(_Node.count),
        position=job["position"].maybe(_Node.count),
        run=job["run"].maybe(_Node.text),
        attempt=job["attempt"].maybe(_Node.count),
        tree=job["tree"].maybe(_Node.text),
        changed=job["changed"].flag(),
        still_running=job["still_running"].texts(),
    )


def _read_placements(place: _Node) -> tuple[Placement, ...]:
    each = place.items() if isinstance(place.value, list) else [place]
    return tuple(Placement(host=one["host"].text(), devices=one["devices"].texts()) for one in each)


def _read_verdict(verdict: _Node) -> ShapeVerdict:
    return ShapeVerdict(fits=verdict["fits"].texts(), refusals=tuple(map(_read_refusal, verdict["refusals"].items())))


def _read_refusal(entry: _Node) -> GroupedRefusal:
    kinds = {kind.name.lower(): kind for kind in Kind}
    kind = entry["kind"].text()
    if kind not in kinds:
        entry["kind"].refuse(f"is none of {', '.join(kinds)}")
    memory_kind = entry["memory_kind"].maybe(lambda node: node.word(MemoryKind))
    refusal = Refusal(
        code=entry["code"].word(Code),
        kind=kinds[kind],
        accelerator=entry["accelerator"].maybe(_Node.text),
        device=entry["device"].maybe(_Node.text),
        needed=entry["needed"].value,
        found=entry["found"].value,
        memory_kind=memory_kind.value if memory_kind else None,
        about=entry["about"].maybe(lambda node: node.word(Code)),
        fix=entry["fix"].maybe(_Node.text),
    )
    try:
        sentence(refusal)
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        # Each code has its own kinds of values, and its sentence is what they are for.
        entry.refuse(f"has a 'needed' and a 'found' that do not go with the code {refusal.code.value!r}")
    return GroupedRefusal(hosts=entry["hosts"].texts(), refusal=refusal)


STARTED: Final = frozenset({Action.RUN, Action.RETRY})
PLACED: Final = STARTED | {Action.FOLLOW}


def _check(plan: Plan, node: _Node) -> None:
    """Hold what a plan says in one place against the others: hosts, shapes, places and positions."""
    hosts = {host.name: host for host in plan.hosts}
    for job, entry in zip(plan.jobs, node["jobs"].items(), strict=True):
        _check_job(job, plan, entry)
        for place in job.placements if job.action in STARTED else ():
            if place.host not in hosts:
                entry["placement"].refuse("names a host that is not in this plan")
            _check_place(job, place, hosts[place.host], plan.shapes[job.shape], entry)
    if len({job.job for job in plan.jobs}) != len(plan.jobs):
        node["jobs"].refuse("holds a job twice")


def _check_job(job: PlannedJob, plan: Plan, entry: _Node) -> None:
    if job.shape not in plan.shapes:
        entry["shape"].refuse("is no shape of this plan")
    if (job.action in PLACED) != bool(job.placements):
        entry["placement"].refuse(f"does not go with the action {job.action.value!r}")
    if job.placements and isinstance(entry["placement"].value, list) != (job.nodes is not None):
        entry["placement"].refuse("is a list where the job is no gang, or none where it is one")
    if job.action in STARTED and len({place.host for place in job.placements}) != (job.nodes or 1):
        entry["placement"].refuse(f"does not name {job.nodes or 1} hosts, each once")
    if (job.action is Action.QUEUE) != (job.position is not None):
        entry["position"].refuse(f"does not go with the action {job.action.value!r}")
    if (job.action is Action.REFUSE) != (job.run is None):
        entry["run"].refuse(f"does not go with the action {job.action.value!r}")
    if job.run is not None and (job.attempt is None or job.run != run_id(job.job, job.key, job.attempt)):
        entry["run"].refuse("is not the run that the job, its key and the attempt name")


def _check_place(job: PlannedJob, place: Placement, host: PlannedHost, verdict: ShapeVerdict, entry: _Node) -> None:
    """Let nothing start where the plan itself says that it does not fit, whoever wrote that into it."""
    if place.host not in verdict.fits:
        entry["placement"].refuse("names a host on which the job does not fit")
    if job.accelerator is None or (job.accelerator == Accelerator.CPU.value) != (not place.devices):
        entry["placement"].refuse(f"has devices that do not go with the accelerator {job.accelerator!r}")
    known = host.fingerprint["devices"] if host.fingerprint else ()
    if not set(place.devices).issubset(known):
        entry["placement"].refuse(f"names devices that the fingerprint of {host.name} lacks")
