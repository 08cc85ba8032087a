"""What Horovod's elastic launcher calls in a worker: a TCP service that it is told of through its key-value server.

A message is the SHA-256 HMAC of its body, the body's length as a native 4-byte integer, and the body: a pickle of one
of Horovod's own classes. They are read into classes of our own, and no others are: see _READ.
"""

import base64
import hashlib
import hmac
import io
import operator
import pickle
import secrets
import socket
import socketserver
import struct
import threading
from typing import Any

from netbottleneck.launch.stores import Http
from netbottleneck.torch.elastic.notices import HostUpdateResult, Tell

NAME = "worker notification service"
MODULE = "horovod.runner.common.util.network"
DIGEST_BYTES = 32
BODY_BYTES_MAX = 1 << 16
LIMIT_S = 10.0  # for a caller to send its message and to take the answer


class _Ping:
    """The launcher asks which service this is."""


class _HostsUpdated:
    """Hosts have changed."""

    timestamp: float
    res: HostUpdateResult


def _member(kind: type[HostUpdateResult], name: str) -> HostUpdateResult:
    return HostUpdateResult[name] if kind is HostUpdateResult else HostUpdateResult.no_update


_READ: dict[tuple[str, str], Any] = {
    (MODULE, "PingRequest"): _Ping,
    ("horovod.runner.elastic.worker", "HostsUpdatedRequest"): _HostsUpdated,
    ("horovod.runner.elastic.worker", "HostUpdateResult"): HostUpdateResult,
    # Some versions of Python pickle a flag by its name, or as several joined.
    ("builtins", "getattr"): _member,
    ("_operator", "or_"): operator.or_,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _READ[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no message of Horovod's launcher") from None


def _written(name: str, **state: str) -> bytes:
    """Return the pickle of an object of one of Horovod's classes, which need not be there to be named."""
    body = b"\x80\x02c" + f"{MODULE}\n{name}\n".encode() + b")\x81"
    if state:
        body += pickle.dumps(state, 2)[2:-1] + b"b"
    return body + b"."


def _read(key: bytes, stream: io.BufferedIOBase) -> Any:
    """Return the message; ValueError for one that is cut short, too long, or not by the launcher."""
    digest = stream.read(DIGEST_BYTES)
    head = stream.read(4)
    if len(digest) < DIGEST_BYTES or len(head) < 4:
        raise ValueError("the message ends early")
    length = struct.unpack("i", head)[0]
    if not 0 <= length <= BODY_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes")
    body = stream.read(length)
    if len(body) < length or not hmac.compare_digest(digest, _digest(key, body)):
        raise ValueError("the message is not by the launcher")
    return _Reader(io.BytesIO(body)).load()


def _digest(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    key = b""
    tell: Tell

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that says nothing sensible gets no answer."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = LIMIT_S

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        request = _read(server.key, self.rfile)
        if isinstance(request, _Ping):
            answer = _written("PingResponse", service_name=NAME, source_address=self.client_address[0])
        elif isinstance(request, _HostsUpdated):
            server.tell(float(request.timestamp), HostUpdateResult(request.res))
            answer = _written("AckResponse")
        else:
            raise ValueError("no request")
        self.wfile.write(_digest(server.key, answer) + struct.pack("i", len(answer)) + answer)


class Service:
    """The service of one worker, open from here to `close`, at the address by which it reaches the launcher.

    launcher: (host, port) of its key-value server; name: the worker's, HOST:LOCAL_RANK. Raises ConnectionError where
    the launcher does not answer.
    """

    def __init__(self, launcher: tuple[str, int], name: str, tell: Tell) -> None:
        self._server = _Server((_own_address(*launcher), 0), _Handler)
        self._server.key = secrets.token_bytes(32)
        self._server.tell = tell
        self._thread = threading.Thread(target=self._server.serve_forever, name="netbottleneck-hosts", daemon=True)
        self._thread.start()
        try:
            known = ({"netbottleneck": [self._server.server_address]}, self._server.key)
            Http(*launcher).put(f"worker_addresses/{name}", base64.b64encode(pickle.dumps(known, 4)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _own_address(host: str, port: int) -> str:
    """Return the address of the interface by which a host is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConnectionError(f"the launcher's rendezvous at {host}:{port} cannot be reached: {error}") from error
        return str(probe.getsockname()[0])
