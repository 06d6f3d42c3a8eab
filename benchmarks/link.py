"""What a link between hosts takes at least."""

from __future__ import annotations

# Of a frame of Ethernet, 1514 bytes as the interface counts them, TCP with time stamps
# leaves 1448.
_PAYLOAD = 1448 / 1514


def link_seconds(n_bytes: float, ranks: int, bits_per_second: float = 1e9) -> float:
    """Return how long the all-reduce of ``n_bytes`` takes a link with one rank on each host.

    Each rank has to send and to receive 2 (N - 1) / N times the bytes, of which the sum is
    made elsewhere one half (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
    """
    return wire_bytes(n_bytes, ranks) / (bits_per_second / 8 * _PAYLOAD)


def wire_bytes(n_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank has to send."""
    return 2 * (ranks - 1) / ranks * n_bytes
