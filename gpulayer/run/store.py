"""The local history: an append-only list of events and the current view of the runs, in SQLite.

Truth about a run lives on its host; this is the history and the cache. One thing is decided here: a run is launched
only after the intent (run id, host, spec) is durable in this database, so that a controller that dies between intent
and launch knows later which host to ask. Several processes may use one database at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from gpulayer.errors import StateError
from gpulayer.placement.plan import FirstFailure, KnownRun, RankEnd
from gpulayer.remote import states
from gpulayer.run.events import LOG_DROPPED, Event
from gpulayer.run.paths import Paths, put_aside

APPLICATION: Final = 0x47504C59  # "GPLY": tells our database from any other SQLite file
VERSION: Final = 3
HEADER: Final = 100  # bytes of an SQLite file's header
LOCK_WAIT: Final = 30.0  # seconds

TABLES: Final = f"""
PRAGMA journal_mode = WAL;
PRAGMA application_id = {APPLICATION};
CREATE TABLE runs (
    run TEXT PRIMARY KEY, project TEXT NOT NULL, job TEXT NOT NULL, key TEXT NOT NULL, attempt INTEGER NOT NULL,
    host TEXT, devices TEXT NOT NULL, status TEXT NOT NULL, code INTEGER, signal INTEGER, reason TEXT,
    started_at TEXT, ended_at TEXT,
    spec TEXT,                             -- what was launched, without the values of secrets
    collected INTEGER NOT NULL DEFAULT 0,  -- 1: the whole log and the outputs are here
    turn INTEGER NOT NULL,                 -- rises whenever a command takes the run in hand: the latest is a job's own
    gang TEXT,                             -- of a node's run: the run of its gang
    node INTEGER, nodes INTEGER,           -- of a gang: how many it has; of a node's run: its number, too
    ranks TEXT NOT NULL, first_failure TEXT
);
CREATE TABLE cancels (run TEXT PRIMARY KEY, grace REAL, by TEXT NOT NULL);  -- that a host could not be told of
CREATE INDEX runs_by_job ON runs (project, job, turn);
CREATE INDEX runs_by_gang ON runs (gang, node) WHERE gang IS NOT NULL;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at TEXT NOT NULL, event TEXT NOT NULL, job TEXT, run TEXT, host TEXT, detail TEXT NOT NULL
);
PRAGMA user_version = {VERSION};
"""

IDENTITY: Final = ("run", "job", "key", "attempt", "node", "nodes")
STANDING: Final = (
    *("host", "status", "devices", "code", "signal", "reason", "started_at", "ended_at", "ranks", "first_failure"),
)
COLUMNS: Final = ", ".join(IDENTITY + STANDING)
INSERT: Final = (
    f"INSERT INTO runs (project, turn, gang, spec, {COLUMNS}) VALUES (?, ?, ?, ?, "  # noqa: S608
    f"{', '.join('?' * len(IDENTITY + STANDING))}) ON CONFLICT (run) DO UPDATE SET turn = excluded.turn, "
    + ", ".join(f"{name} = excluded.{name}" for name in STANDING)
)
COMPACT: Final = json.JSONEncoder(separators=(",", ":")).encode  # one encoder: json.dumps makes one a call
FORGET: Final = "DELETE FROM cancels WHERE run = ? OR run GLOB ? || '-n[0-9]*'"  # of a gang those of its nodes too
FINAL: Final = ", ".join(f"'{word}'" for word in sorted(states.FINAL))


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A launch that is about to be sent: the run as it is then, and its parts' specs, which docs/protocol.md has."""

    run: KnownRun
    specs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCancel:
    """A cancel that its host could not be told of. `grace` is seconds, None the job's; `by` says who cancelled."""

    run: KnownRun
    grace: float | None
    by: str


class Store:
    """One project's database; use it as a context manager."""

    def __init__(self, paths: Paths, connection: sqlite3.Connection) -> None:
        """Use `Store.open`."""
        self.paths = paths
        self._connection = connection
        self._path = paths.database
        self._version = self._data_version()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open `folder`/.gpulayer/state.db, and make it where there is none.

        A file that is truncated, not ours or newer than this program is a StateError and stays as it is.
        """
        paths = Paths(folder)
        paths.create()
        if not os.path.lexists(paths.database):
            _create(paths)
        with _reported(paths.database):
            _check_size(paths.database)
            connection = sqlite3.connect(paths.database, timeout=LOCK_WAIT, isolation_level=None)
            try:
                _check(paths.database, connection)
                connection.execute("PRAGMA synchronous = NORMAL")
                return cls(paths, connection)
            except BaseException:
                connection.close()
                raise

    def close(self) -> None:
        """Close the database; nothing is lost without it."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close it."""
        self.close()

    def take(self, project: str, runs: Iterable[KnownRun]) -> None:
        """Take runs in hand, as they are now: each becomes its job's own run, the one that `logs JOB` means."""
        with self._writing() as connection:
            (turn,) = connection.execute("SELECT coalesce(max(turn), 0) FROM runs").fetchone()
            runs = list(runs)
            for run in runs:
                _leave_members(connection, run)
            connection.executemany(
                INSERT,
                (
                    (project, turn + number, gang, None, *_row(one))
                    for number, run in enumerate(runs, start=1)
                    for gang, one in ((None, run), *((run.run, member) for member in run.members))
                ),
            )

    def intend(self, intents: Sequence[Intent]) -> set[str]:
        """Record durably that these queued runs will be launched, and return the run ids for which that holds.

        A run that is no longer queued, because somebody dropped it or launches it already, is not among them; nor is
        one whose cancel is kept.
        """
        self._connection.execute("PRAGMA synchronous = FULL")
        try:
            with self._writing() as connection:
                return {intent.run.run for intent in intents if _intend(connection, intent)}
        finally:
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def drop(self, runs: Iterable[str]) -> list[KnownRun]:
        """Cancel runs that are still queued, and return those that were."""
        with self._writing() as connection:
            dropped = [
                run
                for run in runs
                if connection.execute(
                    "UPDATE runs SET status = ? WHERE run = ? AND status = ?",
                    (states.CANCELLED, run, states.QUEUED),
                ).rowcount
            ]
        return [found for run in dropped if (found := self.run(run)) is not None]

    def keep_cancel(self, run: str, *, grace: float | None, by: str) -> None:
        """Keep a cancel until the run's host takes it; the first one counts."""
        with self._writing() as connection:
            connection.execute("INSERT OR IGNORE INTO cancels (run, grace, by) VALUES (?, ?, ?)", (run, grace, by))

    def kept_cancels(self, host: str | None = None) -> list[KeptCancel]:
        """Return the cancels that are kept for a host, None: for all."""
        with _reported(self._path):
            rows = self._connection.execute(
                f"SELECT {COLUMNS}, grace, by FROM cancels JOIN runs USING (run)"  # noqa: S608
                " WHERE host = coalesce(?, host) AND (nodes IS NULL OR node IS NOT NULL)",  # hosts know a gang's nodes
                (host,),
            ).fetchall()
        return [KeptCancel(run=_run(row), grace=grace, by=by) for *row, grace, by in rows]

    def is_unwanted(self, run: str) -> bool:
        """Tell whether a cancel is kept for a run."""
        with _reported(self._path):
            found = self._connection.execute("SELECT 1 FROM cancels WHERE run = ?", (run,)).fetchone()
        return found is not None

    def forget_cancels(self, runs: Iterable[str]) -> None:
        """Keep no cancel of these runs any more: their hosts have taken it, or the runs are wanted again."""
        with self._writing() as connection:
            connection.executemany(FORGET, ((run, run) for run in runs))

    def record(self, entries: Sequence[tuple[Event, KnownRun | None]]) -> None:
        """Append events, and bring the view of their runs up to date: what is final is replaced by final words only."""
        with self._writing() as connection:
            connection.executemany(
                "INSERT INTO events (at, event, job, run, host, detail) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (event.at, event.event, event.job, event.run, event.host, COMPACT(event.detail))
                    for event, _ in entries
                ),
            )
            for run in (run for _, run in entries if run is not None):
                allowed = "" if run.status in states.FINAL else f" AND status NOT IN ({FINAL})"
                now = ", ".join(f"{name} = ?" for name in STANDING)
                connection.execute(  # words of the table alone go into the text
                    f"UPDATE runs SET {now} WHERE run = ?{allowed}",  # noqa: S608
                    (*_row(run)[len(IDENTITY) :], run.run),
                )
                _leave_members(connection, run)
                if run.status in states.FINAL:
                    connection.execute(FORGET, (run.run, run.run))

    def collect(self, run: str) -> None:
        """Note that a run's whole log and its outputs are here."""
        with self._writing() as connection:
            connection.execute("UPDATE runs SET collected = 1 WHERE run = ?", (run,))

    def run(self, run: str) -> KnownRun | None:
        """Return one run; a gang's nodes come with it."""
        with _reported(self._path):
            rows = self._connection.execute(
                f"SELECT {COLUMNS} FROM runs WHERE run = ? OR gang = ? ORDER BY node",  # noqa: S608
                (run, run),
            ).fetchall()
        found = [_run(row) for row in rows]
        return replace(found[0], members=tuple(found[1:])) if found else None

    def runs(self, project: str | None = None, job: str | None = None) -> list[KnownRun]:
        """Return the runs in the order in which they were taken in hand: a job's last one is its own.

        A gang's nodes come with it.
        """
        with _reported(self._path):
            rows = self._connection.execute(
                f"SELECT {COLUMNS}, gang FROM runs WHERE project = coalesce(?, project) AND job = coalesce(?, job)"  # noqa: S608
                " ORDER BY turn, node",
                (project, job),
            ).fetchall()
        return _gathered(rows)

    def spec(self, run: str) -> dict[str, Any] | None:
        """Return what was launched as `run`; None where nothing was."""
        with _reported(self._path):
            row = self._connection.execute("SELECT spec FROM runs WHERE run = ?", (run,)).fetchone()
        return None if row is None or row[0] is None else dict(json.loads(row[0]))

    def collected(self) -> set[str]:
        """Return the runs whose whole log and outputs are here."""
        with _reported(self._path):
            return {run for (run,) in self._connection.execute("SELECT run FROM runs WHERE collected")}

    def events(self) -> list[dict[str, Any]]:
        """Return the whole history, oldest first."""
        with _reported(self._path):
            rows = self._connection.execute(
                "SELECT at, event, job, run, host, detail FROM events ORDER BY seq"
            ).fetchall()
        return [
            {"at": at, "event": event, "job": job, "run": run, "host": host, **json.loads(detail)}
            for at, event, job, run, host, detail in rows
        ]

    def dropped(self, run: str, rank: int | None = None) -> list[tuple[int, int]]:
        """Return what hosts dropped of a run's (or rank's) log before it came here, as (offset, bytes), by offset."""
        with _reported(self._path):
            rows = self._connection.execute(
                "SELECT detail FROM events WHERE run = ? AND event = ?", (run, LOG_DROPPED)
            ).fetchall()
        details = [json.loads(detail) for (detail,) in rows]
        return sorted({(detail["offset"], detail["bytes"]) for detail in details if detail.get("rank") == rank})

    def told(self) -> dict[str, dict[str, Any]]:
        """Return what hosts told with the ends of their runs, by run id; of an end that is told twice, the first."""
        with _reported(self._path):
            rows = self._connection.execute(
                f"SELECT run, detail FROM events WHERE event IN ({FINAL}) ORDER BY seq DESC"  # noqa: S608
            ).fetchall()
        return {run: told for run, detail in rows if "left" in (told := json.loads(detail))}

    def changed(self) -> bool:
        """Tell whether another process has written since the last call; cheap."""
        before, self._version = self._version, self._data_version()
        return before != self._version

    def _data_version(self) -> int:
        with _reported(self._path):
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with _reported(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _create(paths: Paths) -> None:
    """Build the database beside its place and link it there: nobody ever sees a half-made one, and nobody's is lost.

    A write-ahead log that a database left behind when it was moved away goes first: SQLite would play it into ours.
    """
    path = paths.database
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with _alone(path.with_name(f"{path.name}.lock")):  # no project is named like this
            if os.path.lexists(path):
                return
            for left in (partial, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
                left.unlink(missing_ok=True)
            os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            connection = sqlite3.connect(partial, isolation_level=None)
            try:
                connection.executescript(TABLES)
            finally:
                connection.close()
            partial.rename(path)
    except (OSError, sqlite3.Error) as error:
        raise StateError(f"{path} cannot be made: {error}", fix="free space or make its folder writable") from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`: whoever comes second finds what the first has made."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_size(path: Path) -> None:
    """Refuse what SQLite would take for an empty database, and overwrite: a file shorter than its header."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size < HEADER:
        raise _broken(path, "it is no file, or too short for a database")


def _check(path: Path, connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise _broken(path, "it is another program's database")
    if version != VERSION:
        raise StateError(
            f"{path} was written by another version of gpulayer (schema {version}, this one knows {VERSION})",
            fix=f"use that version, or put the history aside: {put_aside(path, '.old')} && gpulayer attach",
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _broken(path, str(verdict).replace("\n", " "))


def _broken(path: Path, why: str) -> StateError:
    return StateError(
        f"{path} is damaged: {why}",
        fix=f"put it aside and ask the hosts, which know their runs: {put_aside(path, '.broken')} && gpulayer attach",
    )


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours. A busy or full disk is no damage: the advice differs."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StateError(
            f"{path} cannot be used: {error}", fix="end other gpulayer processes, free space or make it writable"
        ) from error
    except sqlite3.DatabaseError as error:
        raise _broken(path, str(error)) from error


def _intend(connection: sqlite3.Connection, intent: Intent) -> bool:
    """Record one intent, where its run still waits and is wanted."""
    run = intent.run
    spec = None if run.members else COMPACT(intent.specs[0])
    waits = "WHERE run = ? AND status = ? AND run NOT IN (SELECT run FROM cancels)"
    given = connection.execute(
        f"UPDATE runs SET status = ?, host = ?, devices = ?, spec = ?, collected = 0 {waits}",  # noqa: S608
        (run.status, run.host, COMPACT(run.devices), spec, run.run, states.QUEUED),
    ).rowcount
    if given and run.members:
        project, turn = connection.execute("SELECT project, turn FROM runs WHERE run = ?", (run.run,)).fetchone()
        connection.executemany(
            INSERT,
            (
                (project, turn, run.run, COMPACT(spec), *_row(member))
                for member, spec in zip(run.members, intent.specs, strict=True)
            ),
        )
    return bool(given)


def _leave_members(connection: sqlite3.Connection, run: KnownRun) -> None:
    """Forget the nodes' runs that a gang no longer has: they never began, or are to begin anew."""
    if run.nodes is not None and run.node is None:
        connection.execute(
            "DELETE FROM runs WHERE gang = ? AND run NOT IN (SELECT value FROM json_each(?))",
            (run.run, COMPACT([member.run for member in run.members])),
        )


def _row(run: KnownRun) -> tuple[object, ...]:
    failure = run.first_failure
    return (
        run.run, run.job, run.key, run.attempt, run.node, run.nodes, run.host or None, run.status, COMPACT(run.devices),
        run.code, run.signal, run.reason, run.started_at, run.ended_at,
        COMPACT([asdict(rank) for rank in run.ranks]), None if failure is None else COMPACT(asdict(failure)),
    )  # fmt: skip


def _gathered(rows: Iterable[Sequence[Any]]) -> list[KnownRun]:
    """Return the runs of rows whose last column is their gang, in their order, each gang with its nodes' runs."""
    members: dict[str, list[KnownRun]] = {}
    found: list[KnownRun] = []
    for *row, gang in rows:
        (found if gang is None else members.setdefault(gang, [])).append(_run(row))
    return [replace(run, members=tuple(members[run.run])) if run.run in members else run for run in found]


def _run(row: Sequence[Any]) -> KnownRun:
    values = dict(zip(IDENTITY + STANDING, row, strict=True))
    failure = values.pop("first_failure")
    return KnownRun(
        **values | {
            "host": values["host"] or "",
            "devices": tuple(json.loads(values["devices"])),
            "ranks": tuple(RankEnd(**rank) for rank in json.loads(values["ranks"])),
            "first_failure": FirstFailure(**json.loads(failure)) if failure else None,
        }
    )  # fmt: skip
