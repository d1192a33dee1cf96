"""The supervisor of one node of a gang: it watches the ranks, and ends what runs here when the gang's fate is told."""

from __future__ import annotations

import os

from gpulayer.remote import states
from gpulayer.remote.fate import Fate, is_code, is_signal, is_text
from gpulayer.remote.rank import FIFO
from gpulayer.remote.supervisor import Supervisor
from gpulayer.remote.wire import strict_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulayer.remote.gang import Gang
    from gpulayer.remote.runs import Run

_READ = 64 * 1024
_MOST_TOLD = 512  # bytes of what a rank's parent tells, which it writes at once (PIPE_BUF on macOS)


class Member(Supervisor):
    """Watches one node's run. What ends it is told to the gang first, and the gang's fate is what is obeyed."""

    def __init__(self, run: Run, record: dict[str, Any], lock: int, gang: Gang) -> None:
        """`gang` has been assembled: all nodes have joined."""
        super().__init__(run, record, lock)
        self._gang: Gang = gang
        self._fifo = -1
        self._heard = b""
        self._own: tuple[str, dict[str, Any]] | None = None
        self._ranks: dict[int, dict[str, Any]] = {entry["rank"]: entry for entry in self.state["ranks"]}
        self._open_fifo(os.path.join(run.folder, FIFO))

    def _open_fifo(self, path: str) -> None:
        if not os.path.lexists(path):
            os.mkfifo(path, 0o600)
        # For writing too: otherwise it would be at its end, and wake us up for ever, whenever no rank has it open.
        self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _sources(self) -> list[Any]:
        return [*super()._sources(), self._fifo, *self._gang.sources]

    def _sleep(self, seconds: float) -> None:
        super()._sleep(seconds)
        self._gang.step()
        self._hear()

    def _hear(self) -> None:
        """Take in what the ranks' parents tell. Any process of the job can write it: it is checked."""
        try:
            self._heard += os.read(self._fifo, _READ)
        except BlockingIOError:
            return
        *lines, rest = self._heard.split(b"\n")
        self._heard = rest[-_READ:]
        told = [self._told(line) for line in lines]
        if any(told):
            self._note(self.state["status"])

    def _told(self, line: bytes) -> bool:
        """Take what a line tells; False where no parent of a rank of ours would say so."""
        if len(line) > _MOST_TOLD:
            return False
        try:
            message: Any = strict_json(line)
            entry = self._ranks[message["rank"]]
            if entry["status"] not in states.LIVE:
                return False
            if "pid" not in message and not _is_end(message["code"], message["signal"], message["reason"]):
                return False
        except (ValueError, KeyError, TypeError):
            return False
        self._take(entry, message)
        return True

    def _take(self, entry: dict[str, Any], message: dict[str, Any]) -> None:
        if "pid" in message:
            entry["status"] = states.RUNNING
            return
        code, number, reason = message["code"], message["signal"], message["reason"]
        fate = self._gang.fate
        if code == 0 or fate is None:
            status = states.SIGNALED if code is None else states.FAILED_TO_START if reason else states.EXITED
            entry.update(status=status, code=code, signal=number, reason=reason)
        if code != 0 and fate is None:
            self._fail(entry["status"], code, number, reason, rank=entry["rank"])

    def _fail(
        self, status: str, code: int | None, number: int | None, reason: str | None, *, rank: int | None = None
    ) -> None:
        """Propose the end of the gang, because of a rank, or of all that this node was to run."""
        if self._own is not None:
            return
        host = self._gang.host
        self._own = status, {"code": code, "signal": number, "reason": reason}
        if status == states.FAILED_TO_START:
            self._own = status, {"reason": reason}
        what = f"rank {rank} on {host} failed" if rank is not None else f"{host} failed"
        if status == states.FAILED_TO_START:
            what = f"{host} did not start: {reason}"
        failure = {"rank": rank, "host": host, "code": code, "signal": number}
        fate = Fate(self._gang.node, states.CANCELLED, f"stopped because {what}", first_failure=failure)
        self._gang.propose(fate)

    def fail(self, reason: str) -> None:
        """Record that this node did not start; the others are told, unless the gang never came together."""
        if self._gang.sources:
            self._fail(states.FAILED_TO_START, None, None, reason)
        else:
            self._own = states.FAILED_TO_START, {"reason": reason}
        super().fail(reason)

    def _cause_to_stop(self) -> tuple[str, float, str | None] | None:
        if self._gang.fate is None and (self._own is None or self._succeeded):
            cause = super()._cause_to_stop()
            if cause is not None:
                self._end_all(*cause)
        fate = self._gang.fate
        if fate is None:
            return None
        return fate.status, self._record["grace"] if fate.grace is None else fate.grace, fate.reason

    def _end_all(self, status: str, grace: float, reason: str | None) -> None:
        """Propose to all what ends this node."""
        self._own = status, {"reason": reason}
        if status in (states.CANCELLED, states.TIMED_OUT):
            self._gang.propose(Fate(self._gang.node, status, reason, grace=grace))
        else:
            self._gang.propose(
                Fate(self._gang.node, states.CANCELLED, f"stopped because of {self._gang.host}: {reason}")
            )

    def _leader_ended(self) -> bool:
        """Say whether torchrun has ended well and the gang needs this node no more.

        Where it has failed there may be ranks of it left, and what the gang's fate is ends them as any stop does.
        """
        if not super()._leader_ended():
            return False
        self._hear()  # each rank's parent told of its end before torchrun could see it
        if self._own is None:
            status, outcome = super()._outcome()
            if (status, outcome.get("code")) == (states.EXITED, 0):
                self._own = status, outcome
            elif self._gang.fate is None:
                self._fail(*self._why(status, outcome))
        return self._succeeded and self._gang.may_end()

    @property
    def _succeeded(self) -> bool:
        """Whether all that this node had to run has run well, whatever becomes of the others."""
        return self._own is not None and self._own[1].get("code") == 0

    def _why(self, status: str, outcome: dict[str, Any]) -> tuple[str, int | None, int | None, str | None]:
        """Return how a node has failed of which no rank did."""
        code, number, reason = outcome.get("code"), outcome.get("signal"), outcome.get("reason")
        if status != states.FAILED_TO_START and all(
            entry["status"] == states.LAUNCHING for entry in self._ranks.values()
        ):
            how = f"signal {number}" if code is None else f"code {code}"
            reason = f"torch.distributed.run ended with {how} before any rank began; what it said is in its log"
            if self._gang.port_taken:
                reason = f"port {self._gang.store_port} of {self._gang.host} was taken by another program meanwhile"
            status = states.FAILED_TO_START
        return status, code, number, reason

    def _outcome(self) -> tuple[str, dict[str, Any]]:
        fate = self._gang.fate
        if self._own is not None and (fate is None or fate.node == self._gang.node or self._succeeded):
            return self._own
        if fate is None:
            return super()._outcome()
        return fate.status, {"reason": fate.reason}

    def _finish(self, status: str, unkillable: set[int], **outcome: object) -> None:
        self._hear()
        fate = self._gang.fate
        if fate is not None or self._own is not None:
            status, outcome = self._outcome()
        if fate is not None:
            self._label(fate)
        super()._finish(status, unkillable, **outcome)
        self._gang.close()

    def _label(self, fate: Fate) -> None:
        """Say in the state, and of each rank that did not succeed, what ended it."""
        self.state["first_failure"] = first = fate.first_failure
        for entry in self._ranks.values():
            if entry["status"] in states.LIVE:
                entry.update(status=fate.status, reason=fate.reason)
            elif entry["code"] != 0 and (first is None or entry["rank"] != first["rank"]):
                entry["reason"] = fate.reason


def _is_end(code: object, number: object, reason: object) -> bool:
    """Say whether these tell how a process ends: by a code or by a signal."""
    one = is_signal(number) if code is None else number is None and is_code(code)
    return one and is_text(reason)
