"""The SSH library, imported without its search for liboqs and libnettle.

asyncssh looks for both through `ctypes.util.find_library`, which on Linux starts ldconfig for each name, and gcc and ld
where these are installed: a quarter of the time that the import takes, in every command. What it can do would also hang
on what lies on this machine. Without them it lacks sntrup761 and umac; ML-KEM, curve25519 and HMAC are there.
"""

from __future__ import annotations

import ctypes.util

_find_library = ctypes.util.find_library
ctypes.util.find_library = lambda name: None  # noqa: ARG005  # the name is part of the signature
try:
    import asyncssh
    from asyncssh.agent import SSHAgentClient
    from asyncssh.known_hosts import SSHKnownHosts
finally:
    ctypes.util.find_library = _find_library

__all__ = ["SSHAgentClient", "SSHKnownHosts", "asyncssh"]
