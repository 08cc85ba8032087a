"""Bandwidth probe of the lab: N TCP flows in one direction, payload counted per flow by the receiver; a script.

receive ADDRESS FLOWS WARMUP_S WINDOW_S DEADLINE_S    prints its port, then {"flow_bps": […], "seconds": …} as JSON
send ADDRESS PORT FLOWS DEADLINE_S                    sends until the receiver closes the connections"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

BLOCK = 1 << 18


def receive(address: str, flows: int, warmup: float, window: float, deadline: float) -> None:
    """Accept the flows, let them run for `warmup` s, then count for about `window` s."""
    end = time.monotonic() + deadline
    with socket.create_server((address, 0), backlog=flows) as server:
        server.settimeout(deadline)
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        accepted = [server.accept()[0] for _ in range(flows)]
    selector = selectors.DefaultSelector()
    for connection in accepted:
        connection.settimeout(max(0.1, end - time.monotonic()))
        index = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, index)
    # From read to read: where this process has to wait for a processor, bytes come that nobody has read yet.
    start = count(selector, time.monotonic() + warmup, [0] * flows)
    counted = [0] * flows
    seconds = count(selector, time.monotonic() + window, counted) - start
    sys.stdout.write(json.dumps({"flow_bps": [8 * n / seconds for n in counted], "seconds": seconds}) + "\n")


def ready(selector: selectors.BaseSelector, seconds: float) -> list[tuple[socket.socket, int]]:
    """Return the flows that become ready within `seconds`, with their numbers."""
    found = []
    for key, _ in selector.select(seconds):
        assert isinstance(key.fileobj, socket.socket)
        found.append((key.fileobj, key.data))
    return found


def count(selector: selectors.BaseSelector, until: float, counted: list[int]) -> float:
    """Read from all flows until the given time; add the bytes of each flow to `counted`.

    Returns the time of the last read, or of the end without one.
    """
    buffer, last = bytearray(BLOCK), 0.0
    while (left := until - time.monotonic()) > 0:
        for connection, index in ready(selector, left):
            got = connection.recv_into(buffer)
            if got == 0:
                raise ConnectionError("a sender closed its connection")
            counted[index] += got
            last = time.monotonic()
    return last or time.monotonic()


def send(address: str, port: int, flows: int, deadline: float) -> None:
    """Keep every flow full until the receiver closes the connections."""
    end = time.monotonic() + deadline
    selector = selectors.DefaultSelector()
    for index in range(flows):
        connection = socket.create_connection((address, port), timeout=deadline)
        connection.sendall(index.to_bytes(4, "little"))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_WRITE, index)
    block = bytes(BLOCK)
    while (left := end - time.monotonic()) > 0:
        for connection, _ in ready(selector, left):
            try:
                connection.send(block)
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return


def main(args: list[str]) -> int:
    """Run the receiver or the sender; returns the exit code."""
    try:
        if args[0] == "receive":
            receive(args[1], int(args[2]), float(args[3]), float(args[4]), float(args[5]))
        else:
            send(args[1], int(args[2]), int(args[3]), float(args[4]))
    except OSError as error:
        sys.stderr.write(f"{args[0]} flows at {args[1]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
