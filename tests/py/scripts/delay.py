"""A delay between two simulated hosts: a TUN device here, whose packets go to the other host by UDP, and wait before.

delay.py OWN_ADDRESS PEER_ADDRESS TUN_ADDRESS SECONDS LOST: runs on each of the two hosts; prints "ready". Every
LOST-th full packet is dropped; 0: none.
"""

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
PORT = 5555
MTU = 1400


def main(own: str, peer: str, address: str, delay_s: float, lost: int) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"tun0", TUN_WITHOUT_HEADER))
    for words in (f"addr add {address}/24 dev tun0", f"link set tun0 mtu {MTU} txqueuelen 5000 up"):
        subprocess.run(["ip", *words.split()], check=True)
    with contextlib.suppress(PermissionError):  # a busy machine adds no queue to the path
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    wire.bind((own, PORT))
    print("ready", flush=True)
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    full = 0
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for one in select.select([tun, wire], [], [], wait)[0]:
            if one is wire:
                os.write(tun, wire.recv(2 * MTU))
            else:
                packet = os.read(tun, 2 * MTU)
                full += len(packet) == MTU
                if not (lost and len(packet) == MTU and full % lost == 0):
                    waiting.append((time.monotonic() + delay_s, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the other end is not ready
                wire.sendto(waiting.popleft()[1], (peer, PORT))


if __name__ == "__main__":
    main(*sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5]))
