"""The SSH library, imported without what we have no use for: its search for liboqs and libnettle, and X.509.

asyncssh looks for both libraries through `ctypes.util.find_library`, which on Linux starts ldconfig for each name, and
gcc and ld where these are installed: a quarter of the time that the import takes, in every command. What it can do
would also hang on what lies on this machine. Without them it lacks sntrup761 and umac; ML-KEM, curve25519 and HMAC are
there. X.509 certificates, which OpenSSH does not know and `ssh.py` does not offer, take a quarter of what is left.
"""

from __future__ import annotations

import ctypes.util
import sys
from typing import NoReturn

_X509 = "asyncssh.crypto.x509"

_find_library, _x509 = ctypes.util.find_library, sys.modules.get(_X509)
ctypes.util.find_library = lambda name: None  # noqa: ARG005  # the name is part of the signature
sys.modules[_X509] = None  # type: ignore[assignment]  # which makes its import fail; asyncssh then does without
try:
    import asyncssh
    from asyncssh.agent import SSHAgentClient
    from asyncssh.known_hosts import SSHKnownHosts
finally:
    ctypes.util.find_library = _find_library
    del sys.modules[_X509]
    if _x509 is not None:  # somebody else's asyncssh was here first
        sys.modules[_X509] = _x509


def _refuse(_: bytes) -> NoReturn:
    """Refuse an X.509 certificate: asyncssh meets one with a NameError where it does without."""
    raise ValueError("it is an X.509 certificate, which SSH servers do not take")


vars(asyncssh.public_key).setdefault("import_x509_certificate", _refuse)

__all__ = ["SSHAgentClient", "SSHKnownHosts", "asyncssh"]
