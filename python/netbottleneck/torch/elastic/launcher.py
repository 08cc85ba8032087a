"""Worker side of Horovod's elastic launcher: notices of changed hosts, and the new rank after a reset."""

import base64
import errno
import hashlib
import hmac
import http.client
import io
import operator
import os
import pickle
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from enum import IntFlag
from typing import Any, Protocol

from netbottleneck.errors import Error
from netbottleneck.launch import connect
from netbottleneck.launch.rendezvous import Http

# New rank of this process after a reset, assigned by Horovod's elastic launcher.

LIMIT_S = 600.0  # for all other ranks to return and hosts to be found; HOROVOD_ELASTIC_TIMEOUT
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address of Horovod's elastic launcher; None under any other launcher."""
    host, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    elastic = environ.get("HOROVOD_ELASTIC", "")
    if not host or not port.isdecimal() or not (elastic.isdecimal() and int(elastic) > 0):
        return None
    return host, int(port)


def own_name(environ: Mapping[str, str]) -> str:
    """Return this process's name in the launcher: HOST:LOCAL_RANK."""
    return f"{environ.get('HOROVOD_HOSTNAME', 'localhost')}:{environ.get('HOROVOD_LOCAL_RANK', '0')}"


def renew_place(environ: MutableMapping[str, str] = os.environ) -> None:
    """Request this process's new place from Horovod's elastic launcher, and write it to `environ` for init().

    The launcher answers once all remaining ranks have sent a request. Does nothing under other launchers: torchrun
    restarts all processes. Raises Error if this process has no place any more, or if the launcher does not answer in
    HOROVOD_ELASTIC_TIMEOUT seconds.
    """
    where = rendezvous(environ)
    if where is None:
        return
    name = own_name(environ)
    values = [value.strip() for value in _request_place(where, name, _limit_s(environ)).split(",")]
    if values[0].startswith("-"):
        raise Error(errno.ESHUTDOWN, f"{name} has been removed from the elastic job")
    if len(values) < len(NAMES) or not all(value.isdecimal() for value in values[: len(NAMES)]):
        raise Error(errno.EPROTO, f"the launcher at {where[0]}:{where[1]} answers {','.join(values)} for {name}")
    environ.update({f"HOROVOD_{key}": value for key, value in zip(NAMES, values, strict=False)})
    connect.reset_rendezvous_count()


def _limit_s(environ: Mapping[str, str]) -> float:
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "")
    return float(text) if text.isdecimal() and int(text) > 0 else LIMIT_S


def _request_place(where: tuple[str, int], name: str, limit_s: float) -> str:
    # A single request, because the launcher counts requests.
    connection = http.client.HTTPConnection(*where, timeout=limit_s)
    try:
        connection.request("GET", f"/rank_and_size/{name}")
        answer = connection.getresponse()
        text = answer.read().decode("ascii", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Error(
            errno.ECONNABORTED, f"the launcher at {where[0]}:{where[1]} assigns no rank to {name}: {error}"
        ) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Error(errno.EPROTO, f"the launcher at {where[0]}:{where[1]} answers {answer.status} for {name}")
    return text


# Notices of added and removed hosts, from Horovod's elastic launcher.
#
# torchrun restarts all processes instead: under it, and without a launcher, there are no notices.


class HostUpdateResult(IntFlag):
    """Kind of change of a job's hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


Listener = Callable[[float, HostUpdateResult], None]


class Source(Protocol):
    """Source of host notices."""

    def close(self) -> None:
        """Stop the notices."""


def source(listener: Listener, environ: Mapping[str, str]) -> Source | None:
    """Return a source that calls `listener` from its own thread when hosts change; None if there is none."""
    where = rendezvous(environ)
    return None if where is None else Service(where, own_name(environ), listener)


class Notices:
    """Listeners for host changes in this process. The source is open while there is a listener."""

    def __init__(self, opens: Callable[[Listener, Mapping[str, str]], Source | None] = source) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._source: Source | None = None

    @contextmanager
    def listening(self, listener: Listener, environ: Mapping[str, str] = os.environ) -> Generator[None, None, None]:
        """Within the context, call a listener with the time and kind of each change, from another thread."""
        with self._lock:
            if not self._listeners:
                self._source = self._opens(self._notify, environ)
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
                ended, self._source = (self._source, None) if not self._listeners else (None, self._source)
            if ended is not None:
                ended.close()

    def _notify(self, timestamp: float, change: HostUpdateResult) -> None:
        for listener in tuple(self._listeners):
            listener(timestamp, change)


notices = Notices()


# TCP service of a worker, called by Horovod's elastic launcher, which finds it through its key-value server.
#
# A message is the SHA-256 HMAC of its body, the body's length as a native 4-byte integer, and the body: a pickle of one
# of Horovod's own classes. They are unpickled into classes of our own; no other class is allowed: see _READ.

NAME = "worker notification service"
MODULE = "horovod.runner.common.util.network"
DIGEST_BYTES = 32
BODY_BYTES_MAX = 1 << 16
SERVICE_LIMIT_S = 10.0  # for a caller to send its message and read the answer


class _Ping:
    """Request for the identity of the service."""


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
            raise pickle.UnpicklingError(f"{module}.{name} is not a message of Horovod's launcher") from None


def _written(name: str, **state: str) -> bytes:
    """Return the pickle of an object of a Horovod class, which need not be installed."""
    body = b"\x80\x02c" + f"{MODULE}\n{name}\n".encode() + b")\x81"
    if state:
        body += pickle.dumps(state, 2)[2:-1] + b"b"
    return body + b"."


def _read(key: bytes, stream: io.BufferedIOBase) -> Any:
    """Return the message; ValueError if it is truncated, too long, or not from the launcher."""
    digest = stream.read(DIGEST_BYTES)
    head = stream.read(4)
    if len(digest) < DIGEST_BYTES or len(head) < 4:
        raise ValueError("the message is truncated")
    length = struct.unpack("i", head)[0]
    if not 0 <= length <= BODY_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes is not allowed")
    body = stream.read(length)
    if len(body) < length or not hmac.compare_digest(digest, _digest(key, body)):
        raise ValueError("the message is not from the launcher")
    return _Reader(io.BytesIO(body)).load()


def _digest(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    key = b""
    listener: Listener

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an invalid request: it gets no answer."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = SERVICE_LIMIT_S

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        request = _read(server.key, self.rfile)
        if isinstance(request, _Ping):
            answer = _written("PingResponse", service_name=NAME, source_address=self.client_address[0])
        elif isinstance(request, _HostsUpdated):
            server.listener(float(request.timestamp), HostUpdateResult(request.res))
            answer = _written("AckResponse")
        else:
            raise ValueError("the message is not a request")
        self.wfile.write(_digest(server.key, answer) + struct.pack("i", len(answer)) + answer)


class Service:
    """TCP service of one worker, open until `close`, at the address that reaches the launcher.

    launcher: (host, port) of its key-value server; name: the worker's, HOST:LOCAL_RANK. Raises ConnectionError if the
    launcher does not answer.
    """

    def __init__(self, launcher: tuple[str, int], name: str, listener: Listener) -> None:
        self._server = _Server((_own_address(*launcher), 0), _Handler)
        self._server.key = secrets.token_bytes(32)
        self._server.listener = listener
        self._thread = threading.Thread(target=self._server.serve_forever, name="netbottleneck-hosts", daemon=True)
        self._thread.start()
        try:
            known = ({"netbottleneck": [self._server.server_address]}, self._server.key)
            Http(*launcher).put(f"worker_addresses/{name}", base64.b64encode(pickle.dumps(known, 4)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _own_address(host: str, port: int) -> str:
    """Return the address of the interface that reaches a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConnectionError(f"the launcher's rendezvous at {host}:{port} cannot be reached: {error}") from error
        return str(probe.getsockname()[0])
