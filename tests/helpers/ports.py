"""Ports that stay free until they are used."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def hold_port() -> Iterator[int]:
    """Hold a port that the system chooses, for a program that is told its number and listens on it within this context.

    The socket is bound, and does not listen: programs that set SO_REUSEADDR, as torch's stores and Rust's listeners do, may
    bind its port beside it, and the system gives it to nobody who asks for any port, nor to an outgoing connection.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
