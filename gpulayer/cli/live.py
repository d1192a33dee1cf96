"""What happens while jobs run: each event as a line, the output of jobs between them, and how it all ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

from gpulayer.cli.endings import event_words
from gpulayer.cli.leftovers import host_words, is_clean, left_words
from gpulayer.cli.masks import MaskedStream
from gpulayer.cli.screen import Screen
from gpulayer.cli.tables import many, size, table
from gpulayer.cli.terminal import JobOutput, escape_line
from gpulayer.errors import ExitCode
from gpulayer.remote import states
from gpulayer.run import events
from gpulayer.run.events import Event
from gpulayer.run.work import Outcome

STOPPED = frozenset({states.CANCELLED, states.TIMED_OUT})  # the ends after which people ask what is left
UNDER_WAY = frozenset({Outcome.RUNNING.value, Outcome.QUEUED.value})
LOOK = 2.0  # seconds between two looks at the progress bars of running jobs
HINTS = """\
what has started goes on
  follow one job:                        gpulayer logs JOB -f
  follow all, go on with the queue:      gpulayer attach
  cancel all:                            gpulayer cancel --all"""


class Live:
    """Shows the events of one command. With --json each event is one line of JSON instead."""

    def __init__(self, screen: Screen, *, raw: bool = False, cancelling: bool = False) -> None:
        """`raw` passes output as it is. `cancelling` says that jobs were to be cancelled: that end is the good one."""
        self.exit_code = ExitCode.OK
        self._screen = screen
        self._raw = raw
        self._cancelling = cancelling
        self._outputs: dict[tuple[str, int | None], JobOutput] = {}
        self._streams: dict[tuple[str, int | None], tuple[MaskedStream, Event]] = {}
        self._ends: dict[str, Event] = {}
        self._places: dict[str, str] = {}
        self._launched: set[str] = set()

    def show(self, event: Event) -> None:
        """Show one event."""
        if event.event == events.SUMMARY:
            self.exit_code = self._judged(ExitCode(event.detail["exit_code"]))
            event = replace(event, detail={**event.detail, "exit_code": int(self.exit_code)})
        if self._screen.machine:
            self._data(event)
        elif event.event == events.OUTPUT:
            self._screen.lines(event.data if self._raw else self._output(event).feed(event.data))
        elif event.event in events.STATUSES:
            self._status(event)
        elif event.event == events.SUMMARY:
            self._summary(event)
        elif event.event == events.LAUNCHED:
            self._launched.add(event.run or "")
            verb = "started" if event.detail["new"] else "was started before"
            self._screen.note(f"{event.job}: {verb} on {self._places.get(event.run or '', event.host or '')}")
        elif event.event in {events.SYNCING, events.FETCHING}:
            total = f" of {size(event.detail['total'])}" if event.detail["total"] else ""
            what = "sending code" if event.event == events.SYNCING else f"fetching outputs of {event.job}"
            self._screen.passing(f"{event.host}: {what}: {size(event.detail['bytes'])}{total}")
        else:
            if event.event == events.LOG_REPLACED:
                self._outputs.pop((event.run or "", event.detail.get("rank")), None)
            for text, style in _sentences(event):
                self._screen.note(text, style)

    def _data(self, event: Event) -> None:
        """Print an event as JSON, without secrets: of output what may be a part of one waits for the rest."""
        if event.event != events.OUTPUT or not self._screen.masks:
            self._flush(event.run)
            self._screen.data(event.to_json())
            return
        log = event.run or "", event.detail.get("rank")
        stream, _ = self._streams.get(log, (self._screen.masks.stream(), event))
        offset = event.detail["offset"] - len(stream.held)
        if shown := stream.feed(event.data):
            self._screen.data(replace(event, data=shown, detail={**event.detail, "offset": offset}).to_json())
        rest = {**event.detail, "offset": offset + len(shown)}
        self._streams[log] = stream, replace(event, data=b"", detail=rest)

    def _flush(self, run: str | None = None) -> None:
        """Print what waits of a run's output, None: of all."""
        for log in [log for log in self._streams if run in {None, log[0]}]:
            stream, rest = self._streams.pop(log)
            if stream.held:
                self._screen.data(replace(rest, data=stream.end()).to_json())

    def end(self) -> None:
        """Show last lines that have no newline, of jobs whose end was not seen."""
        self._flush()
        while self._outputs:
            self._screen.lines(self._outputs.popitem()[1].end())

    def look(self) -> None:
        """Show the progress bars that have moved since the last look."""
        for output in self._outputs.values():
            self._screen.lines(output.latest())

    def _output(self, event: Event) -> JobOutput:
        log = event.run or "", event.detail.get("rank")
        if log not in self._outputs:
            self._outputs[log] = JobOutput(self._screen.paint(f"{_whose(event)} |", "name") + " ", self._screen.masks)
        return self._outputs[log]

    def _status(self, event: Event) -> None:
        run, job = event.run or "", event.job or ""
        over = event.event in states.FINAL or event.event == states.UNKNOWN
        if over:
            for log in [log for log in self._outputs if log[0] == run]:
                self._screen.lines(self._outputs.pop(log).end())
        if event.detail.get("node") is not None:  # the gang's own status says how its nodes stand
            if over:
                self._left(event, f"{job} on {event.host}", asked=self._cancelling)
            return
        devices = ", ".join(event.detail.get("devices") or ())
        hosts = " + ".join(event.detail.get("hosts") or ()) or event.host or ""
        self._places[run] = f"{hosts} ({devices})" if devices and "hosts" not in event.detail else hosts
        if over:
            self._ends[job] = event
            if not event.detail.get("up_to_date"):
                self._screen.note(f"{job}: {event_words(event)}{_fix(event)}", self._style(event))
                self._left(event, job, asked=event.event in STOPPED)
        elif event.event == states.RUNNING:
            if run not in self._launched:
                self._screen.note(f"{job}: running on {self._places[run]}")
        elif words := _on_the_way(event):
            self._screen.note(f"{job}: {words}", self._style(event))

    def _left(self, event: Event, whose: str, *, asked: bool) -> None:
        left = event.detail.get("left")
        if left and (asked or not is_clean(left)):
            self._screen.note(f"{whose}: {left_words(left)}", "faint" if is_clean(left) else "warn")

    def _summary(self, event: Event) -> None:
        bad = [end for end in self._ends.values() if self._style(end) == "bad"]
        if bad:
            self._screen.say()
            self._screen.show(
                table(("JOB", "HOST", "END"), ((end.job or "", _hosts(end), event_words(end)) for end in bad))
            )
        for end in bad:  # among the words of all ranks those of the one that failed are far above
            rank = (end.detail.get("first_failure") or {}).get("rank")
            if rank is not None and end.event != states.FAILED_TO_START:
                self._screen.say(f"what rank {rank} said: gpulayer logs {end.job} --rank {rank}")
        counts = ", ".join(
            f"{count} {outcome.replace('_', ' ')}" for outcome, count in event.detail["counts"].items() if count
        )
        over = "ended" if UNDER_WAY.isdisjoint(event.detail["counts"]) else "so far"  # --detach
        self._screen.say(f"{'done' if self.exit_code == ExitCode.OK else over}: {counts or 'nothing runs or waits'}")

    def _judged(self, code: ExitCode) -> ExitCode:
        return ExitCode.OK if self._cancelling and code == ExitCode.JOB_FAILED else code

    def _style(self, event: Event) -> str:
        if event.event == states.EXITED:
            return "good" if event.detail.get("code") == 0 else "bad"
        if event.event == states.CANCELLED and self._cancelling:
            return "good"
        return "bad" if event.event in states.FINAL or event.event == states.UNKNOWN else "warn"


def _sentences(event: Event) -> Iterator[tuple[str, str | None]]:
    """Yield what people read of an event, with a style."""
    detail = event.detail
    match event.event:
        case events.LOG_REPLACED:
            yield f"{event.job}: its log on {event.host} is not the one that was followed; it begins anew", "warn"
        case events.FOREIGN_PROCESS | events.LOG_DROPPED:
            yield from ((words, "warn") for words in host_words(event))
        case events.LINK_LOST:
            yield f"{detail['error']}\n  the jobs there go on; trying again", "warn"
        case events.LINK_BACK:
            yield f"{event.host}: is back", "good"
        case events.SYNCED:
            whole = f"{many(detail['files'], 'file')}, {size(detail['bytes'])}"
            sent = f"{many(detail['sent_files'], 'file')}, {size(detail['sent_bytes'])}"
            yield f"{event.host}: code is there: {whole}; sent: {sent}", "faint"
        case events.FETCHED:
            what = f"{many(detail['files'], 'file')}, {size(detail['bytes'])}"
            yield f"{event.job}: fetched {what}, into {detail['path']}", "faint"
            for path, why in detail["skipped"]:
                yield f"{event.job}: not fetched: {escape_line(path)}: {escape_line(why)}", "warn"
        case events.WARNING:
            about = event.job or event.host
            yield f"{f'{about}: ' if about else ''}{detail['message']}{_fix(event)}", "warn"


def _on_the_way(event: Event) -> str:
    """Return what is said of a status that is neither `running` nor an end; nothing where it is no news."""
    detail = event.detail
    if event.event == states.QUEUED and detail.get("last_attempt"):
        return f"is tried again ({detail['attempt']} of {detail['last_attempt']})"
    expected = event.event == states.LAUNCHING or (event.event == states.QUEUED and not detail.get("reason"))
    return "" if expected else event_words(event)


def _fix(event: Event) -> str:
    """Return what to do about it, on a line of its own."""
    return f"\n  fix: {event.detail['fix']}" if event.detail.get("fix") else ""


def _hosts(event: Event) -> str:
    return " + ".join(event.detail.get("hosts") or ()) or event.host or "-"


def _whose(event: Event) -> str:
    """Return whose output that is: a job's, in a gang a rank's, or torchrun's on a host."""
    if "rank" not in event.detail:
        return event.job or ""
    rank = event.detail["rank"]
    return f"{event.job}/{event.host if rank is None else rank}"


async def follow(stream: AsyncGenerator[Event, None], live: Live, screen: Screen, *, jobs: bool = True) -> int:
    """Show a stream of events to its end and return the exit code; an interruption detaches (130).

    Without `jobs` it is none that could be followed on: an interruption ends it, and a reader who leaves has it all.
    """
    loop = asyncio.get_running_loop()
    shown = asyncio.ensure_future(_show(stream, live, screen))

    def detach(by: signal.Signals) -> None:
        if by == signal.SIGINT and screen.terminal:
            screen.note("")  # the terminal has written ^C
        shown.cancel()
        for number in SIGNALS:  # the second one ends the program at once
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in SIGNALS:
        loop.add_signal_handler(number, detach, number)
    try:
        await shown
    except asyncio.CancelledError:
        if screen.closed and not jobs:
            return ExitCode.OK
        screen.note(f"detached: {HINTS}" if jobs else "interrupted")
        return ExitCode.INTERRUPTED
    finally:
        live.end()
    return live.exit_code


# A closed terminal (SIGHUP) and a service manager's stop (SIGTERM) detach as Ctrl-C does.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def _show(stream: AsyncGenerator[Event, None], live: Live, screen: Screen) -> None:
    looking = asyncio.ensure_future(_look(live)) if screen.terminal and not screen.machine else None
    try:
        async with contextlib.aclosing(stream):
            async for event in stream:
                live.show(event)
                if screen.closed:  # nobody reads on: detach
                    raise asyncio.CancelledError
    finally:
        if looking:
            looking.cancel()


async def _look(live: Live) -> None:
    while True:
        await asyncio.sleep(LOOK)
        live.look()
