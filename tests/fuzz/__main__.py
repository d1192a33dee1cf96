"""Fuzz a reader of what others wrote, guided by its coverage: `python -m tests.fuzz documents -max_total_time=60`.

The options are libFuzzer's. What was interesting is kept in `.fuzz/`, and so is an input that breaks a promise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".fuzz"

with atheris.instrument_imports(include=["gpulayer", "json.decoder", "json.scanner"]):
    from tests.fuzz import documents, frames

TARGETS = {"documents": documents.check, "frames": frames.check}
# What a mutation would take long to find out.
WORDS = {
    "documents": [
        *("version: 1", "jobs:", "hosts:", "defaults:", "command: x", "transport: local", "&a ", "*a", "<<: *a", "? "),
        *("!!str ", "!x ", "|\n", ">-\n", "---\n", "...\n", "%YAML 1.1\n", "0755", ".nan", "1e999", "~", "null"),
        *("\u2028", "\x85", "\ufeff", "\U000e0041", "\0", "\r", "\t", "'", '"', "{", "}", "[", "]", ", ", ": ", "- "),
    ],
    "frames": ["@@GL1 ", frames.NONCE, " 2 0 ", '{"a":1}', "NaN", "Infinity", "\\ud800", "1e999", "[[[[[[[[[[", "\n"],
}
# Where it starts from: the folders of documents, and headers and lengths that are good.
SEEDS = {
    "documents": [path.read_bytes() for path in sorted((ROOT / "tests" / "documents").rglob("*.yaml"))],
    "frames": [
        b'\x05{"id":1,"op":"follow","run":"a-0123456789ab-a1","offset":0,"tail":null}',
        b'\x01{"ok":true,"list":[1.5,-2e3,{"deep":[[[]]]}],"text":"\\u00e9\\ud83d\\ude00","one":1}',
        b"\x2412 3 0123456789abcdef\n{}",
        b"\x00" + frames.MARKER + b"2 0 44136fa355b3678a\n{}" + frames.MARKER,
        b"",
    ],
}


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def main() -> None:
    """Fuzz the target that is named first until libFuzzer's limits."""
    target = sys.argv[1]
    corpus = KEPT / target
    corpus.mkdir(parents=True, exist_ok=True)
    words = KEPT / f"{target}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS[target]))
    for number, seed in enumerate(SEEDS[target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-dict={words}", f"-artifact_prefix={KEPT}/", "-timeout=10", "-rss_limit_mb=1024", *sys.argv[2:]]
    atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[target])
    atheris.Fuzz()


main()
