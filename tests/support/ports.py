"""Ports for the rendezvous of the ranks of a job."""

import random
import socket

__all__ = ["free_port"]

_FIRST, _LAST = 10_000, 32_000
"""Below the ports that Linux gives to outgoing connections (32,768 to 60,999)."""


def free_port() -> int:
    """Return a port of this machine at which nobody listens.

    A port that the system chooses may become an outgoing connection's port before the job listens at it.
    """
    choices = random.SystemRandom()  # other processes draw too, and must not draw the same ports
    while True:
        port = choices.randint(_FIRST, _LAST)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
