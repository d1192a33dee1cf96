"""What holds for any bytes that arrive from a host, however they are cut."""

from __future__ import annotations

import hashlib
from typing import Any

from gpulayer.remote.wire import MAX_DEPTH, MAX_HEADER, MAX_NOISE, MAX_PAYLOAD, FrameReader, ProtocolError, encode

NONCE = "00112233445566778899aabbccddeeff"
MARKER = f"@@GL1 {NONCE} ".encode()
# The longest frame, one read of the channel more, and the noise before it.
_MOST = MAX_HEADER + MAX_PAYLOAD + MAX_NOISE + 200

Frames = list[tuple[dict[str, Any], bytes]]


def check(data: bytes) -> None:
    """Read `data` after its first byte: as it is, behind a good frame, as a frame's lengths, and as a header.

    The first byte says into how large pieces it is cut.
    """
    size, body = (data[0] % 37 + 1, data[1:]) if data else (1, b"")
    for stream in (
        body,
        encode(NONCE, {"id": 1}) + body,
        MARKER + body,
        _frame(body),
        encode(NONCE, {}) + _frame(b'{"id":' + body + b"}", body),
    ):
        whole, failed = _read([stream])
        pieces, failed_in_pieces = _read([stream[at : at + size] for at in range(0, len(stream), size)])
        assert failed == failed_in_pieces, data
        assert failed or whole == pieces, data
        for header, payload in pieces:
            assert _depth(header) <= MAX_DEPTH
            assert FrameReader(NONCE).feed(encode(NONCE, header, payload)) == [(header, payload)]


def _read(pieces: list[bytes]) -> tuple[Frames, bool]:
    """The frames, and whether the reader gave up; those of the piece in which it does are lost with it."""
    reader = FrameReader(NONCE)
    frames: Frames = []
    for piece in pieces:
        try:
            frames += reader.feed(piece)
        except ProtocolError:
            return frames, True
        assert len(reader._buffer) <= _MOST
    return frames, False


def _frame(header: bytes, payload: bytes = b"") -> bytes:
    digest = hashlib.sha256(header + payload).hexdigest()[:16]
    return MARKER + f"{len(header)} {len(payload)} {digest}\n".encode() + header + payload


def _depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0
