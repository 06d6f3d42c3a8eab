"""A switch that keeps every frame for a while: ``python slow_switch.py SECONDS INTERFACE...``.

For kernels without netem; needs only Python. Frames pass as the kernel hands them over, up to
64 KiB long (only an interface would divide them), so 1 Gbit/s takes little work.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import sys
import time

_EVERY_PROTOCOL = 3
# From linux/if_packet.h; Python has no names for them.
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER = 64 << 20
_HEADER = 10  # bytes of struct virtio_net_hdr, before each frame
_MOST_BYTES = _HEADER + 14 + (64 << 10)


def main() -> None:
    """Forward frames until killed."""
    delay = float(sys.argv[1])
    ports = [open_port(name) for name in sys.argv[2:]]
    # The ranks compute on the same cores.
    with contextlib.suppress(PermissionError):  # then it takes a little longer
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    pass_on(ports, delay)


def open_port(interface: str) -> socket.socket:
    """Return a socket that receives and sends whole frames."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def pass_on(ports: list[socket.socket], delay: float) -> None:
    """Send each frame to the interface of its receiver or, if unknown, to all."""
    seen: dict[bytes, socket.socket] = {}
    waiting: collections.deque[tuple[float, bytes, list[socket.socket]]] = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], timeout)[0]:
            try:
                frame = port.recv(_MOST_BYTES)
            except OSError:  # its link has gone down
                continue
            receiver, sender = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
            seen[sender] = port
            others = [other for other in ports if other is not port]
            to = [seen[receiver]] if receiver in seen else others
            waiting.append((time.monotonic() + delay, frame, to))
        while waiting and waiting[0][0] <= time.monotonic():
            _, frame, to = waiting.popleft()
            for other in to:
                with contextlib.suppress(OSError):  # its link is down, or its queue full
                    other.send(frame)


if __name__ == "__main__":
    main()
