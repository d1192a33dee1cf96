"""Words for what a run has left behind on its host, and for the processes of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulayer.cli.tables import size
from gpulayer.run.events import LOG_DROPPED, Event


def host_words(event: Event) -> list[str]:
    """Return what a host did, or saw, beside a run: a sentence each."""
    if event.event == LOG_DROPPED:
        dropped = size(event.detail["bytes"])
        return [f"{event.job}: {dropped} of its output were dropped on {event.host}, whose disk it would have filled"]
    return [
        f"{event.job}: {process_words(process)} uses {process['device']} beside it; GPUlayer did not start it"
        for process in event.detail["processes"]
    ]


def process_words(process: Mapping[str, Any]) -> str:
    """Return a process in words: `process 4242 (ollama, user bob, 5.2 GiB)`."""
    memory = process["memory_bytes"]
    about = [process["name"], process["user"] and f"user {process['user']}", memory and size(memory)]
    known = ", ".join(word for word in about if word)
    return f"process {process['pid']}" + (f" ({known})" if known else "")


def is_clean(left: Mapping[str, Any]) -> bool:
    """Whether nothing of a run is known to be left."""
    return left["tree"] != "alive" and "held" not in left["devices"].values()


def left_words(left: Mapping[str, Any]) -> str:
    """Return what a run has left behind, in one sentence."""
    trees = {
        "empty": "no process of it is left",
        "best_effort": "no process of it was found, though not all can be seen here",
        "alive": "processes of it do not die",
    }
    devices = {
        "free": "has its memory back",
        "held": "does not have its memory back",
        "unknown": "cannot be asked for its memory",
    }
    parts = [trees[left["tree"]], *(f"{device} {devices[word]}" for device, word in left["devices"].items())]
    holding = [
        f"{process_words(process)} is on {process['device']}" if process["device"] else process_words(process)
        for process in left["processes"]
    ]
    return "; ".join((*parts, *holding))
