"""An agent that misbehaves. sshd starts it in the place of the login shell; `python` of the inventory says how it does.

It reads what the real command would read, so that it knows the connection's nonce, as a host that was taken over would.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable
from typing import Any

from gpulayer.remote.wire import FrameReader, encode

Frame = tuple[dict[str, Any], bytes]


class Peer:
    def __init__(self) -> None:
        source = io.BufferedReader(io.FileIO(0, closefd=False), 1)  # reads nothing ahead
        source.readline()
        self.mode = source.readline().decode().strip()
        size, _, nonce = source.readline().split()
        source.read(int(size))
        self.nonce = nonce.decode()
        self._reader = FrameReader(self.nonce)
        self._frames: list[Frame] = []

    def receive(self) -> Frame:
        while not self._frames:
            data = os.read(0, 1 << 20)
            if not data:
                raise SystemExit
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self.write(encode(self.nonce, header, payload))

    def line(self, text: str) -> None:
        self.write(f"@@GL1 {self.nonce} {text}\n".encode() + b"{}")

    def greet(self) -> None:
        self.send({"id": self.receive()[0]["id"], "ok": True})


def noise_after(peer: Peer) -> None:
    peer.send({"id": 1, "now": 0})
    peer.write(b"hello\n")


def doubled(nonce: str) -> bytes:
    """A frame in which a name stands twice, with the right hash."""
    head = b'{"id":1,"ok":true,"ok":false}'
    return f"@@GL1 {nonce} {len(head)} 0 {hashlib.sha256(head).hexdigest()[:16]}\n".encode() + head


def damaged(peer: Peer) -> None:
    frame = encode(peer.nonce, {"id": 1, "ok": True})
    peer.write(frame.replace(b"true", b"null"))


def other_nonce(peer: Peer) -> None:
    peer.write(encode("f" * 32, {"id": 1, "ok": True}))


def drip(peer: Peer) -> None:
    for byte in encode(peer.nonce, {"id": 1, "ok": True, "pad": "x" * 1000}):
        peer.write(bytes([byte]))
        time.sleep(0.05)


def flood(made: bytes, to: int = 1) -> None:
    """Write the same bytes as fast as the link takes them, to standard output or to another descriptor."""
    while made:
        os.write(to, made)


def flood_frames(header: dict[str, Any], payload: bytes = b"") -> Callable[[Peer], None]:
    """Greet, and answer the first request by such frames without end."""

    def run(peer: Peer) -> None:
        peer.greet()
        number = peer.receive()[0]["id"]
        frame = encode(peer.nonce, {"id": number, **header}, payload)
        flood(frame * (1 + (1 << 18) // len(frame)))

    return run


def flood_before(_peer: Peer) -> None:
    flood(b"x" * (1 << 18))


def flood_beside(_peer: Peer) -> None:
    flood(b"x" * (1 << 18), to=2)


def flood_after(peer: Peer) -> None:
    peer.greet()
    flood(b"x" * (1 << 18))


def flood_in_a_frame(peer: Peer) -> None:
    """Begin a frame of the largest size, and go on with what is no part of it."""
    peer.greet()
    peer.line(f"{1 << 20} {2 << 20} 0123456789abcdef")
    flood(b"x" * (1 << 18))


def flood_of_answers(peer: Peer) -> None:
    """Answer the first request again and again."""
    first = peer.receive()[0]["id"]
    flood(encode(peer.nonce, {"id": first, "ok": True}) * 2000)


def flood_of_pongs(peer: Peer) -> None:
    """Answer pings that were never sent."""
    peer.greet()
    for number in range(2, 1 << 30):
        peer.write(b"".join(encode(peer.nonce, {"id": number + part, "ok": True}) for part in range(2000)))


def bomb(peer: Peer) -> None:
    """Answer by a header that is as large as may be and takes thirty times that in memory, again and again."""
    peer.greet()
    for _ in range(1 << 30):
        number = peer.receive()[0]["id"]
        head = b'{"id":%d,"ok":[%s{}]}' % (number, b"{}," * ((1 << 20) // 3 - 20))
        digest = hashlib.sha256(head).hexdigest()[:16]
        peer.write(f"@@GL1 {peer.nonce} {len(head)} 0 {digest}\n".encode() + head)


def error_without_words(peer: Peer) -> None:
    peer.greet()
    peer.send({"id": peer.receive()[0]["id"], "error": 5})


def answer_by_stream(peer: Peer) -> None:
    peer.greet()
    peer.send({"id": peer.receive()[0]["id"], "maybe": True})


def mute(peer: Peer) -> None:
    peer.greet()
    while True:
        peer.receive()


def leave(peer: Peer) -> None:
    peer.greet()
    peer.receive()


def late(peer: Peer) -> None:
    """Answer the first request only after the second has come."""
    peer.greet()
    first, second = peer.receive()[0]["id"], peer.receive()[0]["id"]
    peer.send({"id": first, "ok": True})
    peer.send({"id": second, "ok": True})
    peer.receive()


def records(peer: Peer) -> None:
    """Answer `fetch` by the records that stand in its patterns, and `have` by what cannot be."""
    peer.greet()
    while True:
        header, _ = peer.receive()
        if header["op"] == "fetch":
            for frame, text in json.loads(header["patterns"][0]):
                peer.send({"id": header["id"], **frame}, text.encode())
        elif header["op"] == "have":
            peer.send({"id": header["id"], "ok": True, "missing": 5})


MODES: dict[str, Callable[[Peer], None]] = {
    "huge": lambda peer: peer.line("2 10000000000 0123456789abcdef"),
    "negative": lambda peer: peer.line("-1 0 0123456789abcdef"),
    "exponent": lambda peer: peer.line("1e9 0 0123456789abcdef"),
    "no-digits": lambda peer: peer.line("2 0"),
    "deep": lambda peer: peer.send({"id": 1, "ok": json.loads("[" * 100 + "]" * 100)}),
    "stranger": lambda peer: peer.send({"id": 99, "ok": True}),
    "number": lambda peer: peer.send({"id": "1", "ok": True}),
    "noise-after": noise_after,
    "damaged": damaged,
    "other-nonce": other_nonce,
    "drip": drip,
    "flood-before": flood_before,
    "flood-beside": flood_beside,
    "flood-after": flood_after,
    "flood-in-a-frame": flood_in_a_frame,
    "flood-of-answers": flood_of_answers,
    "flood-of-pongs": flood_of_pongs,
    "flood-stream": flood_frames({"off": 0}, bytes(1 << 20)),
    "flood-stream-of-nothing": flood_frames({}),
    "flood-stream-of-headers": flood_frames({"x": [{}] * 50_000}),
    "bomb": bomb,
    "twice": lambda peer: peer.write(doubled(peer.nonce)),
    "error-without-words": error_without_words,
    "answer-by-stream": answer_by_stream,
    "mute": mute,
    "leave": leave,
    "late": late,
    "records": records,
}


if __name__ == "__main__":
    one = Peer()
    MODES[one.mode](one)
