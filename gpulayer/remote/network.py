"""Connections between the nodes of a gang: lines of JSON, bounded, both ends proven by a token that never travels."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import hmac
import json
import os
import select
import socket
import sys
import time

from gpulayer.remote.wire import strict_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LINE = 64 * 1024  # bytes of one message
_READ = 64 * 1024
_UP, _LOOPBACK = 0x1, 0x8  # IFF_UP, IFF_LOOPBACK (net/if.h, Linux and macOS)

# How a failure to connect is told; anything else in the operating system's own words.
_WORDS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}


class LinkLostError(Exception):
    """The other end is gone, or says what no node of this version would say."""


class Link:
    """One connection. It never blocks; what cannot be sent at once is kept, up to one message's length."""

    def __init__(self, connection: socket.socket) -> None:
        """Take a socket that is connected, or about to be."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = bytearray()
        self._waiting = bytearray()
        self._ended = False
        self.heard = time.monotonic()
        """When the other end was last heard."""

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """The address of this end."""
        return plain(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """The address of the other end."""
        return plain(self._socket.getpeername()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises LinkLostError where the other end has taken nothing for long, or is gone."""
        self._waiting += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
        self.flush()
        if len(self._waiting) > _LINE:
            raise LinkLostError("it takes nothing any more")

    def flush(self) -> None:
        """Send what is still kept. Raises LinkLostError."""
        try:
            while self._waiting:
                del self._waiting[: self._socket.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLostError(str(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; LinkLostError, after the last of them, where no more will."""
        try:
            while len(self._received) <= _LINE and not self._ended:
                data = self._socket.recv(_READ)
                self._received += data
                self._ended = not data
        except BlockingIOError:
            pass
        except OSError:  # reset by the other end: what came before it counts
            self._ended = True
        *lines, rest = self._received.split(b"\n")
        if not lines and (self._ended or len(rest) > _LINE):
            raise LinkLostError("it ended the connection" if self._ended else "a message of it is too long")
        self._received = rest
        if lines:
            self.heard = time.monotonic()
        return [_message(bytes(line)) for line in lines]

    def close(self) -> None:
        """Close this end, once all is read: what is unread resets the link, and what we sent last may be lost."""
        with contextlib.suppress(OSError):
            while self._socket.recv(_READ):
                pass
        self._socket.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = strict_json(line)
    except ValueError:
        raise LinkLostError("it sent what is no message") from None
    if not isinstance(message, dict):
        raise LinkLostError("it sent what is no message")
    return message


class Proof:
    """The mutual proof that both ends know the gang's token: an HMAC over the nonces of both, the gang and the node."""

    def __init__(self, token: str, gang: str) -> None:
        """`token` is 64 hex digits."""
        self._token = bytes.fromhex(token)
        self._gang = gang

    def mac(self, side: str, node: int, theirs: str, ours: str) -> str:
        """Return what proves `side`, "hub" or "node", of a node's link; the nonces are the hub's and the node's."""
        text = json.dumps([side, self._gang, node, theirs, ours])
        return hmac.new(self._token, text.encode("ascii"), hashlib.sha256).hexdigest()

    def holds(self, mac: object, side: str, node: int, theirs: str, ours: str) -> bool:
        """Say whether `mac` is that proof."""
        return isinstance(mac, str) and hmac.compare_digest(
            mac.encode("utf-8", "replace"), self.mac(side, node, theirs, ours).encode()
        )


def nonce() -> str:
    """Return 32 fresh hex digits."""
    return os.urandom(16).hex()


class UnreachableError(Exception):
    """No address answered; the text has each with what was wrong."""


def reach(addresses: list[str], port: int, proof: Proof, node: int, limit: float) -> tuple[Link, str]:
    """Connect to the hub at all `addresses` at once; return the first link that proves to be the gang's, its address.

    Raises UnreachableError after `limit` seconds, or once none is left.
    """
    give_up = time.monotonic() + limit
    attempts: dict[int, _Attempt] = {}
    failures: list[str] = []
    try:
        for address in addresses:
            try:
                attempt = _Attempt(address, port, proof, node)
                attempts[attempt.link.fileno()] = attempt
            except OSError as error:
                failures.append(f"{endpoint(address, port)} ({words(error)})")
        while attempts and time.monotonic() < give_up:
            poll = select.poll()
            for descriptor, attempt in attempts.items():
                poll.register(descriptor, select.POLLIN if attempt.connected else select.POLLOUT)
            for descriptor, _ in poll.poll(max(0.0, give_up - time.monotonic()) * 1000):
                attempt = attempts[descriptor]
                try:
                    if attempt.step():
                        del attempts[descriptor]
                        return attempt.link, attempt.address
                except (OSError, LinkLostError) as error:
                    failures.append(f"{endpoint(attempt.address, port)} ({words(error)})")
                    attempts.pop(descriptor).link.close()
    finally:
        for attempt in attempts.values():
            attempt.link.close()
    failures += [f"{endpoint(attempt.address, port)} (timed out)" for attempt in attempts.values()]
    raise UnreachableError(", ".join(failures))


class _Attempt:
    """One address that is tried: connecting, then proving."""

    def __init__(self, address: str, port: int, proof: Proof, node: int) -> None:
        family, kind, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self._socket = socket.socket(family, kind)
        self.address = address
        self.link = Link(self._socket)
        self.connected = False
        self._proof = proof
        self._node = node
        self._theirs = ""
        self._ours = nonce()
        status = self._socket.connect_ex(where)
        if status not in (0, errno.EINPROGRESS):
            self.link.close()
            raise OSError(status, os.strerror(status))

    def step(self) -> bool:
        """Go on; say whether both ends are proven. Raises OSError or LinkLostError."""
        if not self.connected:
            status = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                raise OSError(status, os.strerror(status))
            self.connected = True
            return False
        for message in self.link.receive():
            if not self._theirs:
                self._theirs = str(message.get("nonce"))
                mac = self._proof.mac("node", self._node, self._theirs, self._ours)
                self.link.send({"node": self._node, "nonce": self._ours, "mac": mac})
            elif self._proof.holds(message.get("mac"), "hub", self._node, self._theirs, self._ours):
                return True
            else:
                raise LinkLostError("somebody else answers there")
        return False


class Claim:
    """The hub's side of a proof: what one who has connected must show."""

    def __init__(self, link: Link, proof: Proof, nodes: int) -> None:
        """Send the challenge. Raises LinkLostError."""
        self.link = link
        self.since = time.monotonic()
        self._proof = proof
        self._nodes = nodes
        self._ours = nonce()
        self._theirs = ""
        self._node = 0
        link.send({"nonce": self._ours})

    def step(self) -> int | None:
        """Return the node that has proven itself, None while nothing has come. Raises LinkLostError."""
        for message in self.link.receive():
            node, theirs = message.get("node"), str(message.get("nonce"))
            if type(node) is not int or not 0 < node < self._nodes:
                raise LinkLostError("it is no node of this gang")
            if not self._proof.holds(message.get("mac"), "node", node, self._ours, theirs):
                raise LinkLostError("it does not know the gang's token")
            self._node, self._theirs = node, theirs
            return node
        return None

    def take(self) -> Link:
        """Prove ourselves in turn, by which the node knows this link, of all that it tries, as the one that counts.

        Raises LinkLostError.
        """
        self.link.send({"mac": self._proof.mac("hub", self._node, self._ours, self._theirs)})
        return self.link


def check_port(address: str, port: int, limit: float) -> None:
    """Connect to a port and hang up. Raises UnreachableError."""
    try:
        socket.create_connection((address, port), timeout=limit).close()
    except OSError as error:
        raise UnreachableError(f"{endpoint(address, port)} ({words(error)})") from None


class Ports:
    """The two ports of a hub: one for the links, and one that is kept for torch's store."""

    def __init__(self, nodes: int) -> None:
        """Listen on both: whoever joins proves first that it reaches them. Raises OSError."""
        self.control = _bound(0)
        self.port: int = self.control.getsockname()[1]
        """The port of the links."""
        self._keeper = _bound(0)
        self.store_port: int = self._keeper.getsockname()[1]
        """The port of torch's store."""
        self._store = _bound(self.store_port)
        for listener in (self.control, self._store):
            listener.setblocking(False)
            listener.listen(nodes + 16)

    def shut(self) -> None:
        """Stop to listen: all have joined, and torch is about to listen on its port.

        Until then, and for as long as this process lives, the port stays bound, so that the kernel gives it to nobody
        who asks for any port. Torch sets SO_REUSEADDR (libuv and its own backend do), which on Linux lets it listen
        there all the same; on other systems it does not, and the port is given free.
        """
        self.control.close()
        self._store.close()
        if not sys.platform.startswith("linux"):
            self._keeper.close()

    def taken(self) -> bool:
        """Say whether somebody listens on the store's port, after torch has ended. The port is given back."""
        self.close()
        try:
            with contextlib.closing(_bound(self.store_port)) as probe:
                probe.listen()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False

    def close(self) -> None:
        """Give both ports back."""
        for listener in (self.control, self._store, self._keeper):
            listener.close()


def _bound(port: int) -> socket.socket:
    """Return a socket bound to a port of every address of this host, of both families where it has both."""
    try:
        return _bound_to(socket.AF_INET6, "::", port)
    except OSError:
        return _bound_to(socket.AF_INET, "0.0.0.0", port)  # noqa: S104  # which address the others reach is to be seen


def _bound_to(family: int, address: str, port: int) -> socket.socket:
    made = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


def plain(address: str) -> str:
    """Return an address without a scope, and an IPv4 address that came through an IPv6 socket as IPv4."""
    address = address.partition("%")[0]
    return address[len("::ffff:") :] if address.startswith("::ffff:") and "." in address else address


def endpoint(address: str, port: int) -> str:
    """Return address and port as they are written in one word."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def words(error: Exception) -> str:
    """Return in a word or two why a connection failed."""
    if isinstance(error, TimeoutError):
        return "timed out"
    number = error.errno if isinstance(error, OSError) else None
    return _WORDS.get(number or 0) or (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Interface(ctypes.Structure):
    """`struct ifaddrs` as far as Linux and macOS agree on it."""


_Interface._fields_ = [  # a structure that points to itself is completed after it was named
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> dict[str, str]:
    """Return the interface of each address of this host, those of the loopback last (getifaddrs(3)).

    Link-local IPv6 addresses are left out: torch takes no address with a scope.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[tuple[bool, str, str]] = []
    try:
        at = first
        while at:
            one = at.contents
            address = _address(one.address) if one.address and one.flags & _UP else None
            if address is not None and not address.lower().startswith("fe80:"):
                found.append((bool(one.flags & _LOOPBACK), address, os.fsdecode(one.name)))
            at = one.next
    finally:
        libc.freeifaddrs(first)
    return {address: name for _, address, name in sorted(found, key=lambda entry: entry[0])}


def _address(where: int) -> str | None:
    """Return the address in a `struct sockaddr`, None where it is of another family."""
    head = ctypes.string_at(where, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    with contextlib.suppress(ValueError):
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, ctypes.string_at(where + 4, 4))
        if family == socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(where + 8, 16))
    return None
