"""An agent that misbehaves. sshd starts it in the place of the login shell; `python` of the inventory says how it does.

It reads what the real command would read, so that it knows the connection's nonce, as a host that was taken over would.
"""

from __future__ import annotations

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


def damaged(peer: Peer) -> None:
    frame = encode(peer.nonce, {"id": 1, "ok": True})
    peer.write(frame.replace(b"true", b"null"))


def other_nonce(peer: Peer) -> None:
    peer.write(encode("f" * 32, {"id": 1, "ok": True}))


def drip(peer: Peer) -> None:
    for byte in encode(peer.nonce, {"id": 1, "ok": True, "pad": "x" * 1000}):
        peer.write(bytes([byte]))
        time.sleep(0.05)


def flood(peer: Peer) -> None:
    peer.greet()
    number = peer.receive()[0]["id"]
    while True:
        peer.send({"id": number, "off": 0}, bytes(1 << 20))


def flood_small(peer: Peer) -> None:
    peer.greet()
    number = peer.receive()[0]["id"]
    while True:
        peer.write(encode(peer.nonce, {"id": number}) * 1000)


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
    "flood": flood,
    "flood-small": flood_small,
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
