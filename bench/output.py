"""Job output: lines per second through the terminal's sink, against `sed -u` prefixing the same bytes, in one run."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time

from gpulayer.cli.masks import Masks
from gpulayer.cli.terminal import JobOutput

CHUNK = 256 * 1024
KINDS = {
    "ascii, 80 bytes": (b"x" * 79 + b"\n", 400_000),
    "utf-8, 80 bytes": ("é".encode() * 39 + b"x\n", 400_000),
    "colours, 80 bytes": (b"\x1b[32m" + b"x" * 70 + b"\x1b[0m\n", 100_000),
    "progress bar": (b"10%|#    | 1/9 [00:01]\r20%|##   | 2/9 [00:02]\r30%|###  | 3/9 [00:03]\n", 50_000),
}


def ours(data: bytes) -> float:
    output = JobOutput("job | ", Masks())
    with open(os.devnull, "wb") as sink:
        began = time.perf_counter()
        for at in range(0, len(data), CHUNK):
            sink.write(output.feed(data[at : at + CHUNK]))
        sink.write(output.end())
        return time.perf_counter() - began


def sed(path: str, *options: str) -> float:
    began = time.perf_counter()
    with open(path, "rb") as source:
        subprocess.run(["sed", *options, "s/^/job | /"], stdin=source, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    for kind, (line, count) in KINDS.items():
        data = line * count
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            runs = [(ours(data), sed(file.name, "-u"), sed(file.name)) for _ in range(3)]
        mine, unbuffered, buffered = (statistics.median(times) for times in zip(*runs, strict=True))
        print(
            f"{kind:20} ours {count / mine / 1e3:8,.0f} k lines/s   sed -u {count / unbuffered / 1e3:8,.0f}"
            f"   sed {count / buffered / 1e3:8,.0f}   time ours / sed -u {mine / unbuffered:.2f}, / sed {mine / buffered:.2f}"
        )


if __name__ == "__main__":
    main()
