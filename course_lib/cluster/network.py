"""Can ranks meet: a port on the loopback, and a name of this host that leads back to it?"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from course_lib.cluster.finding import Finding, note, ok, problem

DEFAULT_PORT = 29500  # where torchrun's rendezvous listens unless told otherwise


def port(connect: Callable[..., socket.socket] = socket.create_connection) -> Finding:
    """Open a port that the system chooses, and reach it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, connect(server.getsockname(), timeout=5):
            number = server.getsockname()[1]
    except OSError as error:
        text = f"no connection to a port of 127.0.0.1 ({error})."
        cure = "look for a firewall rule on the loopback, a sandbox, or a limit on open files (ulimit -n)."
        return problem("port", text, cure)
    return ok("port", f"ranks can meet on 127.0.0.1 (tried port {number}).")


def default_port(number: int = DEFAULT_PORT) -> Finding:
    """A second job on the machine usually holds the default port."""
    try:
        with socket.create_server(("", number)):
            return ok("default port", f"{number} is free.")
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        text = f"{number} is taken by another program" if taken else f"{number} cannot be opened ({error})"
        return note("default port", f"{text}.", "start torchrun with --standalone, or choose another --master-port.")


def host_name(
    name: str | None = None, resolve: Callable[..., list[Any]] = socket.getaddrinfo, limit: float = 5
) -> Finding:
    """Does this host's name lead to an address of this host, and quickly? gloo and torchrun ask for it."""
    name = name or socket.gethostname()
    began = time.monotonic()
    answer = _within(limit, resolve, name)
    took = time.monotonic() - began
    cure = f"add the line '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to the right interface."
    if answer is None:
        text = f"the address of {name!r} was not found within {limit:g} s: each start of ranks will wait for it."
        return problem("host name", text, cure)
    if isinstance(answer, OSError):
        return problem("host name", f"{name!r} has no address ({answer.strerror or answer}).", cure)
    address = answer[0][4][0]
    if not _is_ours(answer[0]):
        text = f"{name!r} leads to {address}, not an address of this machine: ranks cannot listen there."
        return problem("host name", text, cure)
    if took > 1:
        return note("host name", f"{name!r} is {address}, but the answer took {took:.1f} s.", cure)
    return ok("host name", f"{name!r} is {address}.")


def _within(limit: float, resolve: Callable[..., list[Any]], name: str) -> list[Any] | OSError | None:
    """The answer, the error, or None after `limit` seconds. The resolver itself cannot be interrupted."""
    box: list[list[Any] | OSError] = []

    def work() -> None:
        try:
            box.append(resolve(name, None, type=socket.SOCK_STREAM))
        except OSError as error:
            box.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    return box[0] if box else None


def _is_ours(entry: tuple) -> bool:
    """Only an address of this machine can be bound to."""
    family, kind, _, _, address = entry
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
