"""What the probed interpreter says of itself, and of the names and addresses of its host. SHIPPED.

Runs in the frame of `discovery_child.py`, one line for each fact: resolving a name can take for ever, and what was
written before stays.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys

TYPE_CHECKING = False  # typing is slow to import, and every probe pays for it
if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report

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


def main(report: Report) -> None:
    """Write the facts to `report`."""
    report.say("executable", sys.executable)
    report.say("real_path", os.path.realpath(sys.executable))
    report.say("version", sys.version.split()[0])
    report.say("implementation", sys.implementation.name)
    report.say("arch", os.uname().machine)
    report.say("search_path", _search_path())
    report.say("interfaces", _interfaces())
    report.say("hostname_addresses", _hostname_addresses())
