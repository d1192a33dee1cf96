"""What travels to a host to start the agent: one constant command, a short preamble and the payload of shipped modules.

The command holds no user data, so that no login shell has anything to misread; everything else goes through standard
input, as `docs/protocol.md` says under "Start".
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import re
import zlib
from importlib.util import find_spec

# The whole of `gpulayer.remote`, the discovery modules and the probe are shipped: tests hold them to the standard
# library and to Python 3.9.
_SHIPPED = re.compile(r"gpulayer\.(remote\.\w+|gpu\.(discovery\w*|\w+_child)|probe)")

# Reads nothing ahead: what follows the payload belongs to the agent. Holds no quote, dollar, backslash or exclamation
# mark, since it stands in double quotes within the single quotes of any login shell.
_LOADER = (
    "import sys;sys.version_info<(3,9) and sys.exit(98);"
    "import hashlib,io,zlib;"
    "f=io.BufferedReader(io.FileIO(0,closefd=False),1);"
    "n,d,k=f.readline(199).split();b=f.read(int(n));"
    "hashlib.sha256(b).hexdigest()==d.decode() or sys.exit(99);"
    "t=zlib.decompress(b).decode().split(chr(0));"
    "exec(t.pop(0),dict(texts=t,nonce=k.decode(),build=d.decode()))"
)

# Each candidate is tried until one is new enough. 98 comes from the loader, 2 from interpreters that do not know -I,
# 126 and 127 from what cannot be executed (a version manager's shim without a version): none has read any input. On
# macOS /usr/bin/python3 opens an installer's window unless the command line tools are there, so that is asked first.
_SCRIPT = (
    "read -r g; read -r q; o=; s=; "
    'case $q in "~/"*) q=$HOME/${q#??};; esac; '
    'for p in "$q" python3 /opt/homebrew/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do '
    'p=$(command -v "$p" 2>/dev/null) || continue; '
    'if test "$p" = /usr/bin/python3 && test -x /usr/bin/xcode-select; then '
    "/usr/bin/xcode-select -p >/dev/null 2>&1 || { s=stub; continue; }; fi; "
    f'"$p" -I -S -X utf8 -c "{_LOADER}"; r=$?; '
    'case $r in 2|98) o="$o $p";; 126|127) ;; *) exit $r;; esac; done; '
    'echo "@@GL nopython $s$o"; exit 127'
)

_LEVEL = 4  # the highest takes five times as long, while hosts wait, for 6 % fewer bytes

REMOTE_COMMAND = f"exec /bin/sh -c '{_SCRIPT}'"
"""What sshd hands to the login shell: one physical line, the same in bash, zsh, fish, tcsh and dash."""

NO_PYTHON = b"@@GL nopython"
"""The line that says that no interpreter was found, followed by `stub` and by the interpreters that are too old."""

FIRST_LINE = b"exit 97\n"
"""Ends a shell that a start file put in our place, with a status that nothing else gives."""


def shipped() -> list[str]:
    """Return the full names of the modules that run on hosts."""
    names = []
    for package in ("gpulayer", "gpulayer.remote", "gpulayer.gpu"):
        spec = find_spec(package)
        locations = (spec and spec.submodule_search_locations) or []
        names += [module.name for module in pkgutil.iter_modules(locations, f"{package}.") if not module.ispkg]
    return sorted(name for name in names if _SHIPPED.fullmatch(name))


@functools.cache
def payload() -> bytes:
    """Return texts, compressed, with NUL between them: the program that the loader runs, then names and sources.

    The program is the importer and the call of the agent's `main`. The sources come through the import system's
    loaders, so that an installation inside a zip file works too.
    """
    sources = {name: _source(name) for name in shipped()}
    program = (
        f"{sources['gpulayer.remote.importer']}\n"
        "importer = install(dict(zip(texts[::2], texts[1::2])), build)\n"
        "from gpulayer.remote.agent import main\n"
        "main(nonce, importer)\n"
    )
    texts = [program, *(text for pair in sources.items() for text in pair)]
    return zlib.compress("\0".join(texts).encode(), _LEVEL)


def preamble(python: str | None, nonce: str) -> bytes:
    """Return what is written to the command's standard input before the first frame.

    `python` is the interpreter that is tried first (None: none); `nonce` is 32 hex digits, new for each connection.
    """
    body = payload()
    header = f"{len(body)} {hashlib.sha256(body).hexdigest()} {nonce}\n"
    return b"".join((FIRST_LINE, (python or "").encode(), b"\n", header.encode(), body))


def _source(name: str) -> str:
    spec = find_spec(name)
    get_source = getattr(spec and spec.loader, "get_source", None)
    source: str | None = get_source(name) if get_source else None
    if source is None:
        raise ImportError(f"the source of {name} is needed, since it is sent to hosts, but it is not there")
    return source
