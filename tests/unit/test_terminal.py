"""What others print can neither move the terminal, nor hide, nor pass for our own lines."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpulayer.cli import terminal
from gpulayer.cli.masks import Masks
from gpulayer.cli.terminal import LINE_LIMIT, JobOutput, escape, escape_line

HOSTILE = [
    b"\x1b]0;pwn\x07title",
    b"\x1b]52;c;cHduZWQ=\x07",
    b"\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    b"\x1b]777;notify;a;b\x07",
    b'\x1bP$q"p\x1b\\',
    b"\x1b_apc\x1b\\ \x1b^pm\x1b\\ \x1bc \x1b[6n",
    b"\x9b31mred \xc2\x9b31mred",
    b"FAILED\rPASSED",
    b"abc\x08\x08\x08xyz \x07\x07\x07 \x7f",
    "\u202eevil\u202c zero\u200bwidth \ufeff \U000e0041\U000e0042".encode(),
    b"@@GL1 0123 2 0 abc",
    b"::set-env name=X::1",
    b"  ::add-mask::x",
    b"##vso[task.setvariable variable=x]1 ##[command]x ##teamcity[x]",
    b"\xff\xfe\x00 bad utf-8 \xe2\x80",
    "naïve 日本語 ✅ ⚠️".encode(),
    b"50%|#####     | 5/10 [00:01<00:01, 5.0it/s]\r100%|##########| 10/10 [00:02<?, ?it/s]",
]
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
SAFE_LINE = re.compile(r"job \| [^\r\n]*\n")


def display(*chunks: bytes, secrets: tuple[str, ...] = ()) -> str:
    output = JobOutput("job | ", Masks(secrets))
    return (b"".join(output.feed(chunk) for chunk in chunks) + output.end()).decode()


def kept(output: JobOutput) -> int:
    """How many bytes of the line that has not ended are in memory."""
    long = output._long
    return len(output._rest) + (len(long._begun) + len(long._last[0] if long._last else b"") if long else 0)


@pytest.mark.parametrize("line", HOSTILE)
def test_no_hostile_line_reaches_the_terminal_at_any_split(line: bytes) -> None:
    stream = b"before\n" + line + b"\nafter\n"
    whole = display(stream)
    assert not FORBIDDEN.search(whole)
    assert not re.search(r"##[a-z]*\[", whole)
    assert all(shown.startswith("job | ") for shown in whole.splitlines())
    assert whole.startswith("job | before\n")
    assert whole.endswith("job | after\n")
    for cut in range(len(stream) + 1):
        assert display(stream[:cut], stream[cut:]) == whole
    assert display(*(stream[at : at + 1] for at in range(len(stream)))) == whole


@given(st.lists(st.binary(max_size=60)), st.text(max_size=20))
@example([b"##", b"[group]\n"], "")
@example([b"a\r", b"\nb"], "")
def test_any_bytes_in_any_pieces_give_safe_whole_lines(chunks: list[bytes], text: str) -> None:
    stream = [*chunks, text.encode(errors="surrogatepass")]
    shown = display(*stream)
    assert shown == display(b"".join(stream))
    assert not FORBIDDEN.search(shown)
    assert SAFE_LINE.sub("", shown) == ""


PIECES = [
    b"a",
    b"b1",
    b"10%",
    b"20%",
    b"\r",
    b"\n",
    b"\r\n",
    b"\xc3\xa9",
    b"\xe2\x82\xac",
    b"\x1b[31m",
    b"##",
    b"[x]",
    b"::",
    b" ",
]
PIECES += [b"s3cr", b"et", b"line-one", b"line-two", b"x" * 16, b"\xff", b"\t", b"7" * 20]


@given(st.lists(st.sampled_from(PIECES), max_size=20), st.data())
@settings(max_examples=400)
def test_what_is_shown_does_not_depend_on_the_pieces_however_long_a_line_is(
    parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    secrets = ("s3cret", "line-one\nline-two")
    with mock.patch.object(terminal, "LINE_LIMIT", 16):
        whole = display(stream, secrets=secrets)
        assert display(*pieces, secrets=secrets) == whole
    assert SAFE_LINE.sub("", whole) == ""


def test_failed_then_passed_shows_both_and_the_carriage_return() -> None:
    assert display(b"FAILED\rPASSED\n") == "job | FAILED\\r\njob | PASSED\n"


def test_progress_bar_is_folded_to_its_latest_state() -> None:
    bar = b"\r".join(
        b"train: %3d%%|%-10s| %d/100 [00:0%d<%s, %s]"
        % (n, b"#" * (n // 10), n, n // 10 % 10, b"00:09" if n else b"?", b"9.8it/s" if n else b"?it/s")
        for n in range(0, 101, 10)
    )
    assert display(bar + b"\n").count("\n") == 1
    assert "100/100" in display(bar + b"\n")
    assert display(b"|\r/\r-\r\\\rdone\n") == "job | \\\\r\njob | done\n"


def test_windows_line_ends_are_line_ends() -> None:
    assert display(b"a\r\nb\r", b"\nc\r\n") == "job | a\njob | b\njob | c\n"


def test_an_endless_progress_bar_stays_small_and_its_latest_state_can_be_seen() -> None:
    output = JobOutput("job | ", Masks())
    for n in range(20_000):
        assert output.feed(b"%d%% of the way\r" % (n // 200)) == b"", n
        assert kept(output) <= LINE_LIMIT + 64
    assert output.latest() == b"job | 99% of the way\n"
    assert output.latest() == b""
    assert output.feed(b"100% of the way\n") == b"job | 100% of the way\n"


def test_endless_line_is_cut_counted_and_kept_small() -> None:
    output = JobOutput("job | ", Masks())
    for _ in range(100):
        assert output.feed(b"x" * 10_000) == b""
        assert kept(output) <= LINE_LIMIT + 1
    shown = output.feed(b"\nnext\n").decode()
    assert shown == f"job | {'x' * LINE_LIMIT} [{1_000_000 - LINE_LIMIT} bytes more, in the log]\njob | next\n"


@pytest.mark.parametrize("before", [0, 1, 5000, LINE_LIMIT // 2 - 1, LINE_LIMIT // 2])
@pytest.mark.parametrize("length", [LINE_LIMIT - 1, LINE_LIMIT, LINE_LIMIT + 1, 3 * LINE_LIMIT])
def test_long_line_is_cut_wherever_it_stands_in_a_chunk(before: int, length: int) -> None:
    shown = display(b"a" * before + b"\n" + b"x" * length + b"\nb\n")
    note = f" [{length - LINE_LIMIT} bytes more, in the log]" if length > LINE_LIMIT else ""
    assert shown == f"job | {'a' * before}\njob | {'x' * min(length, LINE_LIMIT)}{note}\njob | b\n"


def test_a_cut_never_splits_a_character() -> None:
    assert "\\x" not in display(b"x" + "é".encode() * LINE_LIMIT + b"\n")
    assert "\\x" not in display(b"x" + "é".encode() * LINE_LIMIT)


def test_secrets_are_masked_and_short_ones_do_not_garble() -> None:
    shown = display(b"key s3cr3t-and-more, s3cr", b"3t 1\nline-two\n", secrets=("s3cr3t", "1", "line-one\nline-two"))
    assert shown == "job | key ***-and-more, *** 1\njob | ***\n"
    assert display(b"abcdefgh\n", secrets=("abcd", "abcdefgh")) == "job | ***\n"


def test_plain_text_passes_unchanged() -> None:
    text = "naïve 日本語 ✅ ⚠️ a::b # ## [x] C:\\path\ttab\n\nlast"
    assert escape(text) == text
    assert display(text.encode()) == "".join(f"job | {line}\n" for line in text.split("\n"))


def test_names_stay_on_one_line_and_undecodable_bytes_are_seen() -> None:
    assert escape_line("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\xff"
    assert escape("ok\n::error::x\n  ::notice") == "ok\n\\::error::x\n\\  ::notice"
