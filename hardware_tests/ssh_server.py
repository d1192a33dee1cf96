"""An SSH server for machines without sshd: `python -m hardware_tests.ssh_server FOLDER` serves its own user.

The folder holds `host_key` and `identity.pub`. The port that it listens on is printed; it ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncssh


async def _run(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Do what sshd does with a command: have a shell run it at home."""
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        process.command or "",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path.home(),
        start_new_session=True,
    )
    await process.redirect(shell.stdin, shell.stdout, shell.stderr)
    process.exit(await shell.wait())


async def serve(folder: Path) -> None:
    """Serve until the end of our own input."""
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[str(folder / "host_key")],
        authorized_client_keys=str(folder / "identity.pub"),
        process_factory=_run,
        encoding=None,
        config=None,
    )
    async with server:
        print(server.get_port(), flush=True)  # noqa: T201  # for whoever started it
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
