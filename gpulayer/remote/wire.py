r"""Frames between controller and agent: the only place that reads or writes them, on both sides. No I/O.

    @@GL1 <nonce> <header length> <payload length> <16 hex digits>\n<header><payload>

The digits begin the SHA-256 of header and payload. The nonce is new for each connection, so neither old text nor what
a job prints can pass for a frame. The sender of bytes is not trusted: every length is bounded before anything is kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PROTOCOL = 1
MAX_NOISE = 64 * 1024
MAX_HEADER = 1024 * 1024
MAX_PAYLOAD = 2 * 1024 * 1024
MAX_DEPTH = 16
MAX_STRING = 64 * 1024
MAX_WHOLE = 2**63 - 1
"""Whole numbers of a header, either sign: what a database and other languages can take too."""
WINDOW = 4 * 1024 * 1024
"""Payload bytes of one stream that may be under way without an acknowledgement."""

_LENGTHS = re.compile(rb"(0|[1-9][0-9]{0,6}) (0|[1-9][0-9]{0,6}) ([0-9a-f]{16})\n")
_LENGTHS_MAX = 7 + 1 + 7 + 1 + 16 + 1
_LONGEST_WHOLE = 32  # digits: more than any that is allowed


class ProtocolError(Exception):
    """The peer does not keep to the protocol; the connection is of no further use."""


class RequestError(Exception):
    """A request that is answered with an error: a stable word, a sentence, the way out, and further fields."""

    def __init__(self, code: str, message: str, *, fix: str | None = None, **fields: object) -> None:
        """`fields` travel beside the three, as `holder` does with `busy`."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix
        self.fields = fields

    def header(self) -> dict[str, Any]:
        """Return what the answer carries under `error`."""
        return {"code": self.code, "message": self.message, "fix": self.fix, **self.fields}


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the operating system says where a disk or a quota is full."""


def refusal(error: OSError) -> RequestError:
    """Return the answer for what the host's operating system refused: `disk` where it is full, else `system`."""
    if error.errno in FULL:
        return RequestError("disk", f"the host's disk is full: {error}", fix="free some space there")
    return RequestError("system", f"the host refuses: {error}")


def encode(nonce: str, header: dict[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """Return one frame. Raises ProtocolError where header or payload are larger than a frame may be."""
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(head) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise ProtocolError(f"a frame of {len(head)} + {len(payload)} bytes is larger than the protocol allows")
    digest = hashlib.sha256(head)
    digest.update(payload)
    line = f"@@GL1 {nonce} {len(head)} {len(payload)} {digest.hexdigest()[:16]}\n"
    return b"".join((line.encode("ascii"), head, payload))


class FrameReader:
    """Cuts a stream of bytes into frames, whatever the chunks are. After a ProtocolError it is of no further use."""

    def __init__(self, nonce: str) -> None:
        """`nonce` is this connection's, 32 hex digits."""
        self._marker = b"@@GL1 " + nonce.encode("ascii") + b" "
        self._buffer = bytearray()
        self._started = False
        self._searched = 0
        self._need = 0
        self.noise = b""
        """What came before the first frame (an rc file's output), for diagnosis."""

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames that `data` completes. Raises ProtocolError."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= self._need:
            frame = self._next()
            if frame is None:
                break
            frames.append(frame)
        return frames

    @property
    def pending(self) -> bytes:
        """The first bytes that are not yet part of a frame, at most 2 KiB, for diagnosis."""
        return bytes(self._buffer[:2048])

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        """Take one frame off the buffer, or say through `_need` how much must be there before it is worth looking."""
        buffer = self._buffer
        if not self._started and not self._skip_noise():
            return None
        start = len(self._marker)
        if not self._marker.startswith(buffer[:start]):
            raise ProtocolError(f"expected a frame, found {bytes(buffer[:80])!r}")
        line = _LENGTHS.match(buffer, start)
        if line is None:
            if len(buffer) >= start + _LENGTHS_MAX or b"\n" in buffer:
                raise ProtocolError(f"malformed frame: {bytes(buffer[:120])!r}")
            return None
        header_size, payload_size = int(line[1]), int(line[2])
        if header_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
            raise ProtocolError(f"a frame of {header_size} + {payload_size} bytes is larger than the protocol allows")
        middle = line.end() + header_size
        end = middle + payload_size
        if len(buffer) < end:
            self._need = end
            return None
        with memoryview(buffer) as view:
            if hashlib.sha256(view[line.end() : end]).hexdigest()[:16].encode("ascii") != line[3]:
                raise ProtocolError("a frame arrived damaged: its hash does not match")
            head, payload = bytes(view[line.end() : middle]), bytes(view[middle:end])
        del line  # it exports the buffer, which could then not shrink
        del buffer[:end]
        self._need = 0
        return parse(head), payload

    def _skip_noise(self) -> bool:
        found = self._buffer.find(self._marker, self._searched)
        if found < 0:
            if len(self._buffer) > MAX_NOISE + len(self._marker):
                raise ProtocolError(f"no frame within the first {MAX_NOISE} bytes")
            self._searched = max(0, len(self._buffer) - len(self._marker))
            return False
        if found > MAX_NOISE:
            raise ProtocolError(f"no frame within the first {MAX_NOISE} bytes")
        self.noise = bytes(self._buffer[:found])
        del self._buffer[:found]
        self._started = True
        return True


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object that a peer sent: a header, or a document that a payload is.

    Raises ProtocolError for what is none, or is beyond the limits: 1 MiB, 16 levels, 64 Ki characters a string. A name
    that stands twice, and a number that is not finite, make it invalid: no two readers agree on them.
    """
    if len(data) > MAX_HEADER:
        raise ProtocolError(f"a JSON text of {len(data)} bytes is larger than the protocol allows")
    try:
        document = strict_json(data)
    except ValueError as error:
        raise ProtocolError(f"no valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ProtocolError("no JSON object")
    # Most headers are too small to break a limit, and are looked at no further.
    if len(data) > MAX_STRING or data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _check(document, MAX_DEPTH)
    return document


def strict_json(data: bytes) -> object:
    """Return what JSON text says, and what all its readers take it for: no name twice, numbers that are finite.

    Whole numbers fit in 64 bits. Raises ValueError.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return made


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word[:80]} is not a finite number of 64 bits")


def _finite(word: str) -> float:
    number = float(word)
    return number if abs(number) != math.inf else _no_number(word)


def _whole(word: str) -> int:
    # The length first: before Python 3.11 a number of a million digits costs seconds.
    return int(word) if len(word) < _LONGEST_WHOLE and abs(int(word)) <= MAX_WHOLE else _no_number(word)


def _check(value: object, depth: int) -> None:
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            raise ProtocolError(f"a string is longer than {MAX_STRING} characters")
    elif isinstance(value, (dict, list)):
        if depth == 0:
            raise ProtocolError(f"it is nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict):
            for name, item in value.items():
                _check(name, depth)
                _check(item, depth - 1)
        else:
            for item in value:
                _check(item, depth - 1)
