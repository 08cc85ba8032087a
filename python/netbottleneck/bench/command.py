"""Command line of `bench`: parses the arguments and runs the benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from netbottleneck import config
from netbottleneck.bench import measure, pair, start
from netbottleneck.bench.paths import COMPARISONS, load_peers
from netbottleneck.bench.values import DTYPES, REDUCTIONS, SIZES, Request, Results, parse_lanes, parse_sizes
from netbottleneck.lab import parse_lab
from netbottleneck.launch import connect
from netbottleneck.trace.files import check_file
from netbottleneck.trace.transports import BENCHED, NATIVE


def say(text: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        prog="netbottleneck bench",
        description="All-reduce over the stock path and over our own lanes, in turn, on the same memory and clock.",
    )
    made.add_argument("--ranks", type=int, metavar="N", help="ranks to start here (2); under a launcher: its ranks")
    made.add_argument("--ranks-per-host", type=int, metavar="K", help="ranks on each host of the lab (1)")
    made.add_argument(
        "--lab",
        metavar="LINK[+LINK…][/FLOW[,FLOW…]]",
        help="such as 2gbit/500mbit, none/400mbit,100mbit or 1gbit+250mbit",
    )
    made.add_argument(
        "--transports",
        metavar="LIST",
        help=f"of {', '.join(BENCHED)} (default: those available); to compare: {', '.join(COMPARISONS)}",
    )
    made.add_argument(
        "--peers",
        nargs="?",
        const="",
        metavar="PATH",
        help="Python file or package of other libraries' all-reduce, such as benchmarks/peers of a checkout: "
        "measure its paths and those to compare, as far as they are available",
    )
    made.add_argument("--streams", metavar="LIST", help="auto, or numbers such as 1,2,4,8 (auto)")
    made.add_argument("--sizes", metavar="LIST", help="such as 1M,16M,64Mi; M is 10^6, Mi is 2^20 (1M,16M,64M)")
    made.add_argument(
        "--shm", metavar="LIST", help="memory shared by ranks of one host: auto, 0, 1 or several (NETBOTTLENECK_SHM)"
    )
    made.add_argument("--dtype", choices=list(DTYPES), help="type of the elements (float32)")
    made.add_argument("--op", choices=list(REDUCTIONS), help="reduction (sum)")
    made.add_argument("--iters", type=int, metavar="N", help="iterations of each size (20 to 5, by size)")
    made.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    hosts = made.add_argument_group("two hosts of your own, without torch or a launcher")
    both = hosts.add_mutually_exclusive_group()
    both.add_argument("--listen", action="store_true", help="on the first host: prints the command for the second")
    both.add_argument("--connect", metavar="HOST[:PORT]", help="on the second host; of IPv6: [ADDRESS]:PORT")
    hosts.add_argument("--port", type=int, metavar="P", help=f"port to listen on ({pair.PORT}); 0: the system chooses")
    hosts.add_argument("--ifname", metavar="IF", help="interface to listen on (NETBOTTLENECK_IFNAME)")
    hosts.add_argument("--secret", metavar="S", help="the secret that --listen printed (NETBOTTLENECK_SECRET)")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; returns 1 if a result was wrong. Raises what the benchmark raises."""
    made = parser()
    args = made.parse_args(argv)
    try:
        request = _request(args)
        if args.lab is not None:
            parse_lab(args.lab)
        _check(args)
        settings = config.settings({"secret": args.secret, "ifname": args.ifname})
        measure_pair = _pair(args, request, settings) if args.listen or args.connect else None
    except ValueError as error:
        made.error(str(error))
    if measure_pair is not None:
        measure_pair()
        return 0
    place = connect.detect(settings)
    _check_places(made, args, place)
    if place.rank == 0:
        _check_target(made, args.json)
    results = measure(request, settings, place, say) if place.size > 1 else _here(args, request)
    if place.rank != 0:
        return 0
    if args.json:
        results.write(args.json)
    if results.wrong:
        sys.stderr.write(f"netbottleneck: {results.wrong} elements were wrong\n")
    return 1 if results.wrong else 0


def _check_places(made: argparse.ArgumentParser, args: argparse.Namespace, place: connect.Place) -> None:
    """End with a usage error if an option would place ranks that a launcher has started, or on hosts that are none."""
    if place.size == 1:
        if (args.ranks_per_host or 1) > 1 and args.lab is None:
            made.error(f"--ranks-per-host {args.ranks_per_host}: needs simulated hosts: add --lab, such as --lab 2gbit")
        return
    if args.lab is not None or args.ranks_per_host is not None or args.ranks not in (None, place.size):
        made.error(
            f"{place.launcher} started {place.size} ranks: --lab, --ranks and --ranks-per-host, which start their own, "
            "cannot be used"
        )


def _check_target(made: argparse.ArgumentParser, target: str | None) -> None:
    """End with a usage error, before any work, if the rows cannot be written there."""
    if target:
        try:
            check_file("--json", target)
        except ValueError as error:
            made.error(str(error))


def _here(args: argparse.Namespace, request: Request) -> Results:
    """Start the ranks on this machine and return their results."""
    ranks = args.ranks or 2
    where = f"lab {args.lab}" if args.lab else "loopback: no network"
    say(f"# all-reduce {request.dtype} {request.op}, {ranks} ranks, {where}")
    return start(request, ranks, args.lab, args.ranks_per_host or 1, say)


def _request(args: argparse.Namespace) -> Request:
    named = tuple(args.transports.split(",")) if args.transports else BENCHED
    others = () if args.peers is None else (*load_peers(args.peers), *COMPARISONS)
    return Request(
        (*named, *(name for name in others if name not in named)),
        parse_lanes(args.streams or "auto"),
        parse_sizes(args.sizes) if args.sizes else SIZES,
        args.dtype or "float32",
        args.op or "sum",
        args.iters or 0,
        args.transports is not None,
        shm=tuple(args.shm.split(",")) if args.shm else (),
        peers=args.peers or "",
    )


def _check(args: argparse.Namespace) -> None:
    _check_pair(args)
    if args.port is not None and not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: must be from 0 to 65535")
    if args.ranks is not None and not 1 <= args.ranks <= 200:
        raise ValueError(f"--ranks {args.ranks}: must be from 1 to 200")
    on_each = 1 if args.ranks_per_host is None else args.ranks_per_host
    if on_each < 1 or (args.ranks or 2) % on_each:
        raise ValueError(f"--ranks-per-host {on_each}: --ranks must be a multiple of it")


# Options of a benchmark whose ranks are started here or by a launcher.
ALONE = ("lab", "ranks", "ranks_per_host", "peers", "shm", "dtype", "op", "iters", "json")


def _check_pair(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that has no effect between two hosts, or only there."""
    given = [name for name, value in vars(args).items() if value is not None]
    paired = args.listen or args.connect
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if name in ("port", "secret", "ifname") and not paired:
            raise ValueError(f"{option} needs --listen or --connect")
        if name in ("port", "ifname") and args.connect:
            raise ValueError(f"{option} cannot be used with --connect: it is for the listening side")
        if name in ALONE and paired:
            raise ValueError(f"{option} cannot be used with --listen or --connect")
    if paired and args.sizes and len(parse_sizes(args.sizes)) > 1:
        raise ValueError(f"--sizes {args.sizes}: between two hosts, one size is measured")


def _pair(args: argparse.Namespace, request: Request, settings: config.Settings) -> Callable[[], Any]:
    """Return what measures this side of two hosts. Raises ValueError for options that these do not have."""
    options: dict[str, Any] = {
        "transports": request.transports if args.transports else NATIVE,
        "streams": request.streams if args.streams else pair.STREAMS,
        "bytes": request.sizes[-1] if args.sizes else pair.BYTES,
    }
    if not set(options["transports"]) <= set(NATIVE) or 0 in options["streams"] or options["bytes"] < 4:
        raise ValueError(
            "between two hosts, only tcp and ofi are measured, with fixed numbers of streams and at least 4 bytes"
        )
    settings = settings.with_secret()
    if args.listen:
        return partial(pair.listen, settings, args.port, say, **options)
    return partial(pair.connect, settings, pair.target(settings, args.connect), say, **options)
