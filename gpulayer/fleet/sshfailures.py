"""What asyncssh's exceptions mean: at which stage a login failed, in one sentence, and what to do."""

from __future__ import annotations

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.hostkeys import Trust, changed_key, revoked_key, unknown_key
from gpulayer.fleet.sshconfig import Target
from gpulayer.fleet.sshlibrary import asyncssh
from gpulayer.fleet.sshstreams import Client, Dial
from gpulayer.fleet.transport import DroppedError


def failure(  # one way out a kind of failure
    target: Target, trust: Trust, client: Client, dial: Dial, error: Exception
) -> HostError:
    """Say what asyncssh's exception means, at which stage, and what to do."""
    text = str(error) or type(error).__name__
    if isinstance(error, HostError):
        return error
    if isinstance(error, asyncssh.ChannelOpenError):
        return HostError(
            target.host,
            Stage.CONNECT,
            f"its jump host cannot reach {target.address} port {target.port} ({text})",
            fix="try it from the jump host; AllowTcpForwarding must be on there",
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _host_key_failure(target, trust, client, text)
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return HostError(
            target.host,
            Stage.HOST_KEY,
            f"no safe algorithm in common: {text[:300]}",
            fix="update the host's SSH server, or use `transport: openssh`",
        )
    if isinstance(error, asyncssh.PermissionDenied):
        said = f"; it says: {client.banner.strip()!r}" if client.banner.strip() else ""
        offered = "too many keys were offered" if "many" in text.lower() else "none of the keys is accepted"
        return HostError(
            target.host,
            Stage.AUTHENTICATE,
            f"{target.user}@{target.address} refuses the login: {offered} ({text}){said}",
            fix="add your public key to ~/.ssh/authorized_keys there, or correct `user` and `identity_file`",
        )
    return _handshake_failure(target, dial, error, text)


def _host_key_failure(target: Target, trust: Trust, client: Client, text: str) -> HostError:
    if "revoked" in text.lower():
        return revoked_key(target.host, trust, client.shown)
    if client.shown is None:
        return HostError(
            target.host,
            Stage.HOST_KEY,
            f"the certificate of {trust.pattern} does not hold ({text})",
            fix="have the host's certificate renewed, or correct the @cert-authority line of known_hosts",
        )
    make = changed_key if trust.keys or trust.pin else unknown_key
    return make(target.host, trust, client.shown)


def _handshake_failure(target: Target, dial: Dial, error: Exception, text: str) -> HostError:
    """Say what a lost, silent or foreign connection means."""
    where = f"{target.address} port {target.port}"
    greeting = dial.greeting
    # Of a connection that is lost asyncssh says why; what a server says when it hangs up is another kind of error.
    timed_out = isinstance(error, TimeoutError) or (isinstance(error, asyncssh.ConnectionLost) and "timeout" in text)
    if b"Not allowed at this time" in greeting:
        return HostError(
            target.host,
            Stage.CONNECT,
            f"{where} refuses this machine for a while, after failed logins",
            fix="wait ten minutes (PerSourcePenalties), and correct what failed before",
        )
    full = greeting.startswith(b"Exceeded MaxStartups")
    if dial.wire is not None and (full or (not greeting and isinstance(error, (OSError, asyncssh.ConnectionLost)))):
        if timed_out:
            return HostError(
                target.host,
                Stage.CONNECT,
                f"{where} accepts the connection and then says nothing",
                fix="is this an SSH server, and is the machine healthy? A boot that waits for a password looks so",
            )
        return DroppedError(
            target.host,
            Stage.CONNECT,
            f"{where} hung up before it said what it is",
            fix="too many logins at once (MaxStartups), a full machine, or a firewall; try again",
        )
    if greeting and not greeting.startswith(b"SSH-2") and not greeting.startswith(b"SSH-1.99"):
        return HostError(
            target.host,
            Stage.CONNECT,
            f"{where} is no SSH server of version 2: it says {greeting[:60]!r}",
            fix="correct `address` and `port`",
        )
    if timed_out:
        return HostError(
            target.host,
            Stage.AUTHENTICATE,
            f"the login at {where} did not end in time",
            fix="the machine may be overloaded, or its login may wait for a network service",
        )
    return HostError(
        target.host,
        Stage.CONNECT,
        f"the connection to {where} broke during the login ({text})",
        fix=f"try `ssh -v {target.address}`, and look at the log of the SSH server there",
    )
