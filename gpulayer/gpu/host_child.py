"""What the probed interpreter says of itself, and of the names and addresses of its host. SHIPPED.

Runs as `python -c SOURCE FD` and writes one JSON line for each fact: resolving a name can take for ever, and what was
written before stays.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import sys

_GET_ADDRESS = {"linux": 0x8915, "darwin": 0xC0206921}  # SIOCGIFADDR of <linux/sockios.h> and <sys/sockio.h>


def _search_path() -> list[tuple[str, int]]:
    """Every folder that modules come from, with the time of its last change (ns)."""
    return [(folder, os.stat(folder).st_mtime_ns) for folder in sys.path[1:] if os.path.isdir(folder)]


def _interfaces() -> list[dict[str, object]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS[sys.platform], name.encode().ljust(40, b"\0"))
                addresses = [socket.inet_ntoa(answer[20:24])]
            except (OSError, KeyError):
                addresses = []  # an interface without an IPv4 address
            loopback = name.startswith("lo") and all(address.startswith("127.") for address in addresses)
            found.append({"name": name, "addresses": addresses, "loopback": loopback})
    return found


def _hostname_addresses() -> list[str]:
    """Return the addresses that this host's own name resolves to; none where it does not."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return []
    return sorted({str(answer[4][0]) for answer in answers})


def main(descriptor: int) -> None:
    """Write the facts to `descriptor`."""

    def say(key: str, value: object) -> None:
        os.write(descriptor, json.dumps([key, value]).encode() + b"\n")

    say("executable", sys.executable)
    say("real_path", os.path.realpath(sys.executable))
    say("version", platform.python_version())
    say("implementation", sys.implementation.name)
    say("arch", platform.machine())
    say("search_path", _search_path())
    say("interfaces", _interfaces())
    say("hostname_addresses", _hostname_addresses())
    say("done", True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
