"""What ends a gang, and how the nodes tell each other."""

from __future__ import annotations

import math

from gpulayer.remote import states
from gpulayer.remote.network import LinkLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_MAX_REASON = 2000  # characters, as of any reason
_LONGEST_NAME = 63  # of a host, as the inventory has it
_MOST_RANKS = 100 * 1024


class Fate:
    """What ends a gang before all have succeeded: where it began, and what it is to all other nodes."""

    __slots__ = ("first_failure", "grace", "node", "reason", "status")

    def __init__(
        self,
        node: int,
        status: str,
        reason: str | None,
        *,
        grace: float | None = None,
        first_failure: dict[str, Any] | None = None,
    ) -> None:
        """`status` is `cancelled` or `timed_out`; `grace` is in seconds, None where each run's own holds."""
        self.node = node
        self.status = status
        self.reason = reason and reason[:_MAX_REASON]
        self.grace = grace
        self.first_failure = first_failure

    def message(self) -> dict[str, Any]:
        """Return what travels."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def read(cls, message: object, nodes: int) -> Fate:
        """Return the fate that a message tells. Raises LinkLostError where it is none."""
        if (
            isinstance(message, dict)
            and set(message) == set(cls.__slots__)
            and type(message["node"]) is int
            and 0 <= message["node"] < nodes
            and message["status"] in (states.CANCELLED, states.TIMED_OUT)
            and is_text(message["reason"])
            and (message["grace"] is None or _is_grace(message["grace"]))
            and (message["first_failure"] is None or _is_failure(message["first_failure"]))
        ):
            return cls(
                message["node"],
                message["status"],
                message["reason"],
                grace=message["grace"],
                first_failure=message["first_failure"],
            )
        raise LinkLostError("it told a fate that is none")


def _is_grace(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_failure(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"rank", "host", "code", "signal"}
        and isinstance(value["host"], str)
        and len(value["host"]) <= _LONGEST_NAME
        and (value["rank"] is None or (type(value["rank"]) is int and 0 <= value["rank"] < _MOST_RANKS))
        and (value["code"] is None or is_code(value["code"]))
        and (value["signal"] is None or is_signal(value["signal"]))
    )


def is_code(value: object) -> bool:
    """Say whether this is how a process may exit."""
    return type(value) is int and 0 <= value <= 255  # noqa: PLR2004  # what wait(2) has room for


def is_signal(value: object) -> bool:
    """Say whether this may have ended a process."""
    return type(value) is int and 1 <= value <= 127  # noqa: PLR2004  # what wait(2) has room for


def is_text(value: object) -> bool:
    """Say whether this is text that every reader of a record can take, or none."""
    return value is None or (isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value))
