from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.remote.wire import (
    MAX_DEPTH,
    MAX_HEADER,
    MAX_NOISE,
    MAX_PAYLOAD,
    MAX_STRING,
    MAX_WHOLE,
    FrameReader,
    ProtocolError,
    encode,
    parse,
)
from tests.fuzz import frames as fuzz

NONCE = "00112233445566778899aabbccddeeff"
OTHER = "ff" * 16

text = st.text(max_size=20)
whole = st.integers(-MAX_WHOLE, MAX_WHOLE)
json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_WHOLE, MAX_WHOLE)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(text, json_value, max_size=4)
frames = st.lists(st.tuples(headers, st.binary(max_size=300)), max_size=4)


def raw(header: bytes, payload: bytes = b"", nonce: str = NONCE) -> bytes:
    """A frame whose header need not be what `encode` would write."""
    digest = hashlib.sha256(header + payload).hexdigest()[:16]
    return f"@@GL1 {nonce} {len(header)} {len(payload)} {digest}\n".encode() + header + payload


def read(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    return FrameReader(NONCE).feed(data)


@given(frames, st.binary(max_size=200).filter(lambda noise: b"@@GL1" not in noise), st.data())
def test_frames_arrive_whole_however_the_stream_is_cut(
    sent: list[tuple[dict[str, Any], bytes]], noise: bytes, data: st.DataObject
) -> None:
    stream = noise + b"".join(encode(NONCE, *frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader(NONCE)
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == sent
    assert reader.noise == (noise if sent else b"")


def test_frames_arrive_whole_when_every_byte_comes_alone() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"id": 1, "text": "äöü 😀 \udcff"}, b"@@GL1 \n" * 3),
        ({}, b""),
        ({"id": 2}, bytes(range(256))),
    ]
    reader = FrameReader(NONCE)
    stream = b"noise" + b"".join(encode(NONCE, *frame) for frame in sent)
    assert [frame for byte in stream for frame in reader.feed(bytes([byte]))] == sent


@given(st.binary(min_size=1, max_size=400))
def test_garbage_after_a_frame_never_passes_for_one(garbage: bytes) -> None:
    reader = FrameReader(NONCE)
    assert reader.feed(encode(NONCE, {"id": 1})) == [({"id": 1}, b"")]
    try:
        assert reader.feed(garbage) == []
    except ProtocolError:
        return
    # Only the beginning of a frame is waited for.
    assert encode(NONCE, {}).startswith(garbage) or garbage.startswith(f"@@GL1 {NONCE} ".encode())


@given(st.binary(max_size=80) | json_value.map(lambda value: b"\x05" + json.dumps(value).encode()))
def test_any_bytes_are_frames_or_an_end_however_they_are_cut(data: bytes) -> None:
    fuzz.check(data)


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_found(payload: bytes, place: int, change: int) -> None:
    reader = FrameReader(NONCE)
    reader.feed(encode(NONCE, {}))
    frame = bytearray(encode(NONCE, {"id": 7, "off": 12}, payload))
    frame[place % len(frame)] ^= change
    try:
        assert reader.feed(bytes(frame) + encode(NONCE, {}) * 60) == []
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "lengths",
    ["10000000000 0", "-1 0", "1e9 0", " 0", "0", "01 0", f"{MAX_HEADER + 1} 0", f"2 {MAX_PAYLOAD + 1}", "2 x", "+2 0"],
)
def test_a_length_that_no_frame_may_have_is_refused_at_once(lengths: str) -> None:
    with pytest.raises(ProtocolError):
        read(f"@@GL1 {NONCE} {lengths} 0123456789abcdef\n".encode())


def test_a_frame_with_another_nonce_is_no_frame() -> None:
    reader = FrameReader(NONCE)
    reader.feed(encode(NONCE, {}))
    with pytest.raises(ProtocolError, match="expected a frame"):
        reader.feed(encode(OTHER, {"id": 1}))
    assert read(encode(OTHER, {"id": 1})) == []  # before the first frame it is noise


def test_noise_is_skipped_up_to_its_limit() -> None:
    reader = FrameReader(NONCE)
    assert reader.feed(b"x" * MAX_NOISE) == []
    assert reader.feed(encode(NONCE, {"id": 1})) == [({"id": 1}, b"")]
    assert len(reader.noise) == MAX_NOISE
    with pytest.raises(ProtocolError, match="no frame within"):
        read(b"x" * (MAX_NOISE + 1) + encode(NONCE, {}))
    with pytest.raises(ProtocolError, match="no frame within"):
        read(b"x" * (MAX_NOISE + 200))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"1",
        b'"text"',
        b"{",
        b"",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": [1e999]}',
        b'{"a": {"b": -1e999}}',
        b'{"a": 9223372036854775808}',
        b'{"a": -9223372036854775808}',
        b'{"a": ' + b"9" * 1_000_000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        json.dumps({"a": "x" * (MAX_STRING + 1)}).encode(),
        json.dumps({"x" * (MAX_STRING + 1): 1}).encode(),
    ],
    ids=lambda header: header[:24].decode("latin-1"),
)
def test_a_header_outside_the_limits_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(raw(header))


def test_a_document_in_a_payload_has_the_limits_of_a_header() -> None:
    assert parse(b'{"a": [1e9, null]}') == {"a": [1e9, None]}
    for data in (b'{"a": 1, "a": 1}', b'{"x": "' + b"x" * MAX_HEADER + b'"}', '{"a": 1}'.encode("utf-16")):
        with pytest.raises(ProtocolError):
            parse(data)


def test_a_header_at_the_limits_is_taken() -> None:
    numbers = {"a": [MAX_WHOLE, -MAX_WHOLE, 1.7976931348623157e308, 5e-324]}
    assert read(encode(NONCE, numbers)) == [(numbers, b"")]
    nest: Any = "x" * MAX_STRING
    for _ in range(MAX_DEPTH - 1):
        nest = [nest]
    assert read(encode(NONCE, {"a": nest})) == [({"a": nest}, b"")]
    payload = bytes(MAX_PAYLOAD)
    assert read(encode(NONCE, {}, payload)) == [({}, payload)]


@pytest.mark.parametrize("frame", [({"a": "x" * MAX_HEADER}, b""), ({}, bytes(MAX_PAYLOAD + 1))])
def test_what_does_not_fit_is_not_encoded(frame: tuple[dict[str, Any], bytes]) -> None:
    with pytest.raises(ProtocolError, match="larger than the protocol allows"):
        encode(NONCE, *frame)
