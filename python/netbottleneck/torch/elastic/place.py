"""Which rank this process has after a reset, where Horovod's elastic launcher deals ranks anew."""

import errno
import http.client
import os
from collections.abc import Mapping, MutableMapping

from netbottleneck.errors import Error
from netbottleneck.launch import connect

LIMIT_S = 600.0  # for all other ranks to come back, and hosts to be found; HOROVOD_ELASTIC_TIMEOUT
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where Horovod's elastic launcher listens; None under any other launcher."""
    host, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    elastic = environ.get("HOROVOD_ELASTIC", "")
    if not host or not port.isdecimal() or not (elastic.isdecimal() and int(elastic) > 0):
        return None
    return host, int(port)


def own_name(environ: Mapping[str, str]) -> str:
    """Return this process's name at the launcher: HOST:LOCAL_RANK."""
    return f"{environ.get('HOROVOD_HOSTNAME', 'localhost')}:{environ.get('HOROVOD_LOCAL_RANK', '0')}"


def renew(environ: MutableMapping[str, str] = os.environ) -> None:
    """Ask Horovod's elastic launcher for this process's new place, and write it where init() reads it.

    The launcher answers once all ranks that are left have asked. Does nothing under other launchers: torchrun starts
    all processes anew. Raises Error where this process has no place any more, or the launcher does not answer in
    HOROVOD_ELASTIC_TIMEOUT seconds.
    """
    where = rendezvous(environ)
    if where is None:
        return
    name = own_name(environ)
    values = [value.strip() for value in _ask(where, name, _limit_s(environ)).split(",")]
    if values[0].startswith("-"):
        raise Error(errno.ESHUTDOWN, f"{name} has been removed from the elastic job")
    if len(values) < len(NAMES) or not all(value.isdecimal() for value in values[: len(NAMES)]):
        raise Error(errno.EPROTO, f"the launcher at {where[0]}:{where[1]} says {','.join(values)} of {name}")
    environ.update({f"HOROVOD_{key}": value for key, value in zip(NAMES, values, strict=False)})
    connect.meet_as_new()


def _limit_s(environ: Mapping[str, str]) -> float:
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "")
    return float(text) if text.isdecimal() and int(text) > 0 else LIMIT_S


def _ask(where: tuple[str, int], name: str, limit_s: float) -> str:
    # One request: the launcher counts who asks.
    connection = http.client.HTTPConnection(*where, timeout=limit_s)
    try:
        connection.request("GET", f"/rank_and_size/{name}")
        answer = connection.getresponse()
        text = answer.read().decode("ascii", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Error(
            errno.ECONNABORTED, f"the launcher at {where[0]}:{where[1]} gives {name} no rank: {error}"
        ) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Error(errno.EPROTO, f"the launcher at {where[0]}:{where[1]} answers {answer.status} for {name}")
    return text
