"""Ports for the servers and the process worlds of tests."""

import random
import socket

PORTS = range(12_000, 32_000)
"""Ports below those of outgoing connections (Linux: from 32,768), which could take a port between
its choice and its use.
"""
_random = random.SystemRandom()


def free_port() -> int:
    """Return a random free port. Test files run side by side, so they should not all try the same
    port.
    """
    while True:
        port = _random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
