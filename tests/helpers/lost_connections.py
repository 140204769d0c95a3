"""Loss of all connections of a process, on a signal: what a network does that is cut off for a moment."""

import contextlib
import os
import signal
import socket
import threading

DROP = signal.SIGRTMIN


def listen() -> None:
    """Let this process lose its connections each time that it gets `DROP`. Called before other threads are started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {DROP})
    threading.Thread(target=_lose_connections, daemon=True).start()


def _lose_connections() -> None:
    while signal.sigwait({DROP}):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                end = socket.socket(fileno=os.dup(int(name)))
                if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                    end.getpeername()
                    end.shutdown(socket.SHUT_RDWR)
