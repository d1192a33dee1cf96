"""The agent of a host that lies: ours, except that what it says is changed on its way out.

sshd starts it in the place of the login shell. `python` of the inventory says which lie it tells of the host; what it
tells of a run is said by the name of its job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gpulayer.remote import agent, operations, wire
from gpulayer.remote.agent import main
from tests.fleet.hostile import Peer

Header = dict[str, Any]
Answer = tuple[Header, bytes]

ENDS: dict[str, Header] = {
    "other-run": {"run": "other-0123456789ab-a1"},
    "other-job": {"job": "good"},
    "no-end": {"status": "running", "code": None},
    "left": {"left": {"tree": "gone", "devices": {}, "processes": []}},
    "left-device": {"left": {"tree": "empty", "devices": {"cpu:0": "gone"}, "processes": []}},
    "time": {"started_at": "yesterday"},
    "time-of-nowhere": {"ended_at": "2026-01-01T00:00:00"},
    "half-a-pair": {"reason": "\ud800"},
}
"""What is changed in the final state that a follower is told of a job's run, by the job's name."""


def ends(header: Header, payload: bytes) -> Answer:
    state = header.get("state")
    if payload and header.get("off") == 0 and b"far-hole" in payload:
        return {"id": header["id"], "off": 0, "hole": 2**53}, b""
    if "new" not in header and isinstance(state, dict) and state["status"] == "exited":
        header = {**header, "state": state | ENDS.get(state["job"], {})}
    return header, payload


def report(change: Callable[[str], str]) -> Callable[[Header, bytes], Answer]:
    """Change the text of the probe's report."""
    return lambda header, payload: (header, change(payload.decode()).encode() if payload[:1] == b"{" else payload)


def nameless(header: Header, payload: bytes) -> Answer:
    return {name: value for name, value in header.items() if name != "host_id"}, payload


def endless(header: Header, payload: bytes) -> Answer:
    """Tell of ever more runs, each page behind the one before."""
    if "slots_held" not in header:
        return header, payload
    state = {"job": "other", "key": "0123456789ab", "attempt": 1, "status": "exited", "code": 0}
    first = header["id"] * 1000
    runs = [state | {"run": f"other-{number:012}-a1"} for number in range(first, first + 1000)]
    return {**header, "runs": runs, "more": True}, payload


def wide_gang(header: Header, payload: bytes) -> Answer:
    """Tell of one node of a gang that has more nodes than there are machines."""
    if "slots_held" not in header:
        return header, payload
    state = {"job": "other", "key": "0123456789ab", "attempt": 1, "status": "exited", "code": 0, "ranks": []}
    run = state | {"run": "other-0123456789ab-a1-n0", "gang": {"node": 0, "nodes": 2**50}}
    return {**header, "runs": [run]}, payload


LIES: dict[str, Callable[[Header, bytes], Answer]] = {
    "nameless": nameless,
    "endless": endless,
    "wide-gang": wide_gang,
    "ends": ends,
    "report-not-finite": report(lambda text: text[:-1] + ', "x": NaN}'),
    "report-too-big-a-number": report(lambda text: text[:-1] + ', "x": 1e999}'),
    "report-twice": report(lambda text: text[:-1] + ', "schema": "gpulayer.probe/1"}'),
    "report-deep": report(lambda text: text[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}"),
    "report-long": report(lambda text: text[:-1] + ', "x": "' + "x" * 2**20 + '"}'),
    "report-utf-16": lambda header, payload: (
        (header, json.dumps(json.loads(payload)).encode("utf-16")) if payload[:1] == b"{" else (header, payload)
    ),
}  # fmt: skip


if __name__ == "__main__":
    peer = Peer()
    tell = LIES[peer.mode]

    def encode(nonce: str, header: Header, payload: bytes = b"") -> bytes:
        return wire.encode(nonce, *tell(header, bytes(payload)))

    def pass_on(nonce: str, header: Header, payload: bytes = b"") -> bytes:
        """A report has been changed by the child that made it."""
        return (wire.encode if payload[:1] == b"{" else encode)(nonce, header, payload)

    operations.encode = encode  # type: ignore[attr-defined, assignment]
    agent.encode = pass_on  # type: ignore[attr-defined, assignment]
    main(peer.nonce)
