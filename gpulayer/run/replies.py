"""Readers of what a host says about runs. A host may be broken or hostile: nothing is believed unchecked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final

from gpulayer.errors import HostError, Stage, told
from gpulayer.placement.gangs import together
from gpulayer.placement.plan import FirstFailure, KnownRun, RankEnd
from gpulayer.remote import states
from gpulayer.run.paths import RUN_ID
from gpulayer.spec.identity import node_run

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
KEY: Final = re.compile(r"[0-9a-f]{8,64}")
HOST_WORDS: Final = frozenset(states.MOVES) - {states.QUEUED, states.UNKNOWN}
TREES: Final = frozenset({"empty", "best_effort", "alive"})
DEVICES: Final = frozenset({"free", "held", "unknown"})
PROCESSES: Final = 1000  # of others that are told of one run
NODES: Final = 4096  # of a gang; which of them are missing is counted
RANKS: Final = 1024  # of one node: each has a log that is followed
MOST: Final = 2**53  # the largest whole number that JSON carries exactly everywhere


class BadReplyError(HostError):
    """A host answers, but not as the protocol says: asking it again changes nothing."""

    def __init__(self, host: str, what: str, *, fix: str | None = None) -> None:
        """Say `what` of the answer does not hold."""
        look = "look at the host: another program may answer in the agent's place, or its state folder may be damaged"
        super().__init__(host, Stage.PROTOCOL, what, fix=fix or look)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run as its host tells it; `log_size` is bytes so far, None where the host does not know.

    `foreign` are the processes of others that were seen on its devices, None where that cannot be told, as
    docs/protocol.md says. `rank_logs` are the sizes of the logs of a node's ranks, by rank; a gang as a whole has its
    nodes' states as `members`.
    """

    run: KnownRun
    accelerator: str | None
    log_size: int | None
    outputs: tuple[str, ...]
    foreign: tuple[Process, ...] | None = None
    rank_logs: Mapping[int, int] = field(default_factory=dict)
    members: tuple[RunState, ...] = ()

    @property
    def parts(self) -> tuple[RunState, ...]:
        """The states that hosts told: those of a gang's nodes, else this one."""
        return self.members or (self,)

    def size_of(self, rank: int | None) -> int:
        """Return the bytes of a log so far: of the run's own, or of one rank's."""
        return (self.log_size or 0) if rank is None else self.rank_logs.get(rank, 0)

    @property
    def detail(self) -> dict[str, object]:
        """What a status event tells besides the run."""
        if self.members:
            return {"accelerator": self.accelerator}
        return {
            "accelerator": self.accelerator,
            "foreign_process": self.run.foreign_process,
            "left": self.run.left,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on a host. `device` is the one that it is on, None where it is on none; what is None is not known."""

    pid: int
    device: str | None
    name: str | None
    user: str | None
    memory_bytes: int | None


def listed(processes: Iterable[Process]) -> list[dict[str, object]]:
    """Return processes as JSON has them."""
    return [asdict(process) for process in processes]


def _process(host: str, entry: object) -> Process:
    reader = Reader(host, entry)
    return Process(
        pid=reader.number("pid"),
        device=reader.optional_text("device"),
        name=reader.optional_text("name"),
        user=reader.optional_text("user"),
        memory_bytes=reader.optional_number("memory_bytes"),
    )


def _processes(host: str, reader: Reader, key: str) -> tuple[Process, ...]:
    entries = reader.items(key)
    if len(entries) > PROCESSES:
        raise reader.bad(key)
    return tuple(_process(host, entry) for entry in entries)


def _left(host: str, value: object) -> dict[str, object]:
    reader = Reader(host, value)
    devices = reader.table("devices")
    if not DEVICES.issuperset(devices.values()):
        raise reader.bad("devices")
    processes = listed(_processes(host, reader, "processes"))
    return {"tree": reader.word("tree", TREES), "devices": devices, "processes": processes}


def gang_state(states: Sequence[RunState]) -> RunState:
    """Return the state of a gang whose nodes, at least one of them, have these states."""
    (run,) = together(state.run for state in states)
    first = states[0]
    return RunState(
        run=run, accelerator=first.accelerator, log_size=None, outputs=first.outputs, members=tuple(states)
    )  # fmt: skip


def _rank(host: str, entry: object) -> tuple[RankEnd, int]:
    """Read how a rank stands, and the size of its log."""
    reader = Reader(host, entry)
    end = RankEnd(
        rank=reader.number("rank"),
        status=reader.word("status", HOST_WORDS),
        code=reader.optional_number("code"),
        signal=reader.optional_number("signal"),
        reason=reader.optional_text("reason"),
    )
    return end, reader.optional_number("log_size") or 0


def _first_failure(host: str, value: object) -> FirstFailure:
    reader = Reader(host, value)
    return FirstFailure(
        rank=reader.optional_number("rank"),
        host=reader.matching("host", NAME),
        code=reader.optional_number("code"),
        signal=reader.optional_number("signal"),
    )


def run_state(host: str, state: object, run: KnownRun | None = None) -> RunState:
    """Read one state of docs/protocol.md; BadReplyError names the field that does not hold.

    `run` is the one that was asked for: what a host says of another one is no answer.
    """
    reader = Reader(host, state)
    name = reader.matching("run", RUN_ID)
    if run is not None and (name, reader.get("job"), reader.get("key")) != (run.run, run.job, run.key):
        raise reader.bad("run")
    node, nodes = None, None
    if reader.get("gang") is not None:
        gang = Reader(host, reader.get("gang"))
        node, nodes = gang.number("node"), gang.number("nodes")
        if not node < nodes <= NODES:
            raise reader.bad("gang")
        if not name.endswith(node_run("", node)):
            raise reader.bad("run")
    entries = reader.items("ranks") if node is not None else []
    ranks = [_rank(host, entry) for entry in entries]
    if len({end.rank for end, _ in ranks}) != len(ranks) or len(ranks) > RANKS:
        raise reader.bad("ranks")
    foreign = None if reader.get("foreign_process") is None else _processes(host, reader, "foreign_process")
    failure = reader.get("first_failure")
    return RunState(
        run=KnownRun(
            run=name,
            job=reader.matching("job", NAME),
            key=reader.matching("key", KEY),
            attempt=reader.number("attempt"),
            host=host,
            status=reader.word("status", HOST_WORDS),
            devices=reader.words("devices"),
            code=reader.optional_number("code"),
            signal=reader.optional_number("signal"),
            reason=reader.optional_text("reason"),
            started_at=reader.optional_time("started_at"),
            ended_at=reader.optional_time("ended_at"),
            node=node,
            nodes=nodes,
            ranks=tuple(end for end, _ in ranks),
            first_failure=None if failure is None else _first_failure(host, failure),
            foreign_process=None if foreign is None else listed(foreign),
            left=None if reader.get("left") is None else _left(host, reader.get("left")),
        ),
        accelerator=reader.optional_text("accelerator"),
        log_size=reader.optional_number("log_size"),
        outputs=reader.words("outputs"),
        foreign=foreign,
        rank_logs={end.rank: size for end, size in ranks},
    )


class Reader:
    """Typed getters over one object of a reply; each names its key where the value does not hold."""

    def __init__(self, host: str, document: object, what: str = "the agent's answer") -> None:
        """`document` is what came, and `what` it is called; only an object is taken."""
        self._host = host
        self._what = what
        if not isinstance(document, Mapping):
            raise BadReplyError(host, f"{what} is not an object")
        self._document: Mapping[str, Any] = document

    def bad(self, key: str) -> BadReplyError:
        """Return the error for a key whose value does not hold."""
        return BadReplyError(self._host, f"{self._what} has no usable {key!r}")

    def get(self, key: str) -> Any:  # noqa: ANN401  # what a host says has any type
        """Return the raw value, None where it is missing."""
        return self._document.get(key)

    def text(self, key: str) -> str:
        """Return a string, as it may stand in messages and records."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.bad(key)
        return told(value)

    def optional_time(self, key: str) -> str | None:
        """Return a time with its zone (RFC 3339), or None."""
        value = self.optional_text(key)
        try:
            if value is not None and datetime.fromisoformat(value).tzinfo is None:
                raise self.bad(key)
        except ValueError:
            raise self.bad(key) from None
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a string or None."""
        return None if self.get(key) is None else self.text(key)

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        """Return a string that the whole pattern matches."""
        value = self.text(key)
        if not pattern.fullmatch(value):
            raise self.bad(key)
        return value

    def word(self, key: str, words: Collection[str]) -> str:
        """Return one of `words`."""
        value = self.text(key)
        if value not in words:
            raise self.bad(key)
        return value

    def number(self, key: str) -> int:
        """Return a whole number; negative ones are exit codes of no system and sizes of nothing."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise self.bad(key)
        return value

    def optional_number(self, key: str) -> int | None:
        """Return a whole number or None."""
        return None if self.get(key) is None else self.number(key)

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; a missing one is empty."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.bad(key)
        return tuple(value)

    def table(self, key: str) -> dict[str, str]:
        """Return an object whose values are strings."""
        value = self.get(key)
        if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
            raise self.bad(key)
        return {told(name): told(word) for name, word in value.items()}

    def items(self, key: str) -> list[Any]:
        """Return a list of whatever."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self.bad(key)
        return value
