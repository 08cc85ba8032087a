"""Horovod's elastic launcher in a thread of the test: assigns ranks, serves keys, and sends host changes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import pickle
import socket
import struct
import sys
import threading
import types
from enum import IntFlag
from typing import Any
from unittest import mock

from conftest import RANKS_LIMIT_S

LIMIT_S = RANKS_LIMIT_S


class HostUpdateResult(IntFlag):
    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsUpdatedRequest:
    def __init__(self, timestamp: float, res: HostUpdateResult) -> None:
        self.timestamp = timestamp
        self.res = res


class PingRequest:
    pass


class PingResponse:
    service_name: str
    source_address: str


class AckResponse:
    pass


NETWORK = "horovod.runner.common.util.network"
WORKER = "horovod.runner.elastic.worker"


def as_horovods() -> dict[str, types.ModuleType]:
    """Return modules with Horovod's names and these classes, so that they are pickled like Horovod's."""
    made = {}
    for name, kinds in {
        NETWORK: (PingRequest, PingResponse, AckResponse),
        WORKER: (HostsUpdatedRequest, HostUpdateResult),
    }.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            made.setdefault(parent, types.ModuleType(parent))
        for kind in kinds:
            kind.__module__ = name
            setattr(made[name], kind.__name__, kind)
    return made


def ask(address: tuple[str, int], key: bytes, request: Any, *, signed_with: bytes | None = None) -> Any:
    """Send a message to a worker's service, and return its answer, or None."""
    with mock.patch.dict(sys.modules, as_horovods()):
        body = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    digest = hmac.new(signed_with or key, body, hashlib.sha256).digest()
    with socket.create_connection(address, timeout=LIMIT_S) as line:
        line.sendall(digest + struct.pack("i", len(body)) + body)
        stream = line.makefile("rb")
        head = stream.read(36)
        if not head:
            return None
        answer = stream.read(struct.unpack("i", head[32:])[0])
    assert hmac.compare_digest(head[:32], hmac.new(key, answer, hashlib.sha256).digest())
    with mock.patch.dict(sys.modules, as_horovods()):
        return pickle.loads(answer)


class Driver:
    """The key-value server of an elastic job on one host, whose workers are named by their local ranks.

    GET /rank_and_size/HOST:LOCAL is answered once `expected` workers have called it. Those that called, and `joining`,
    are then ranks 0 and up in the order of their names, and all keys are dropped.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.keys: dict[str, bytes] = {}
        self.expected = 0
        self.joining: list[int] = []
        self.leaving: list[int] = []
        self.requests: set[int] = set()
        self.ranks: dict[int, int] = {}
        self.round = 0
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def environment(self, rank: int, size: int, local: int) -> dict[str, str]:
        """Return the variables of a worker with this rank; torchrun's are removed."""
        none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
        place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        where = {
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": self.port,
            "HOSTNAME": "here",
            "ELASTIC": 1,
        }
        return {**none, **{f"HOROVOD_{name}": str(value) for name, value in {**place, **where}.items()}}

    def service(self, local: int) -> tuple[tuple[str, int], bytes]:
        """Wait for a worker's notification service; return its address and key."""
        with self.changed:
            found = self.changed.wait_for(lambda: f"/worker_addresses/here:{local}" in self.keys, LIMIT_S)
            assert found
            addresses, key = pickle.loads(base64.b64decode(self.keys[f"/worker_addresses/here:{local}"]))
        return next(iter(addresses.values()))[0], key

    def dealt(self) -> None:
        """Wait until ranks have been assigned again."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.round > 0, LIMIT_S)

    def _place(self, local: int) -> bytes:
        with self.changed:
            now = self.round
            self.requests.add(local)
            if len(self.requests) == self.expected:
                stay = sorted({*self.requests, *self.joining} - set(self.leaving))
                self.ranks = {name: rank for rank, name in enumerate(stay)}
                self.requests.clear()
                self.keys.clear()
                self.round += 1
                self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.round > now, LIMIT_S)
            rank, size = self.ranks.get(local, -1), len(self.ranks)
        return b"-1,-1,-1,-1,-1,-1" if rank < 0 else f"{rank},{size},{local},{size},0,1".encode()

    def _handler(driver) -> type[http.server.BaseHTTPRequestHandler]:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                if self.path.startswith("/rank_and_size/"):
                    value: bytes | None = driver._place(int(self.path.rpartition(":")[2]))
                else:
                    with driver.changed:
                        value = driver.keys.get(self.path)
                self.send_response(404 if value is None else 200)
                self.send_header("Content-Length", str(len(value or b"")))
                self.end_headers()
                self.wfile.write(value or b"")

            def do_PUT(self) -> None:
                value = self.rfile.read(int(self.headers["Content-Length"]))
                with driver.changed:
                    driver.keys[self.path] = value
                    driver.changed.notify_all()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        return Handler
