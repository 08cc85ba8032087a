"""What a lab's network is asked to be: a cap per link and caps per flow, as text and as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", re.IGNORECASE)


@dataclass(frozen=True)
class LinkSpec:
    """A cap on each host's link, per direction, and on each flow, in bits per second as they are on the wire.

    `link_bps` None: no cap. `flow_bps` empty: no cap; one value: every flow; several: dealt to flows in turn.
    `more_bps`: each host has further interfaces, with these caps."""

    link_bps: int | None = None
    flow_bps: tuple[int, ...] = ()
    more_bps: tuple[int, ...] = ()

    def __str__(self) -> str:
        first = "none" if self.link_bps is None else format_rate(self.link_bps)
        link = "+".join([first, *map(format_rate, self.more_bps)])
        return link + ("/" + ",".join(map(format_rate, self.flow_bps)) if self.flow_bps else "")

    @property
    def capped(self) -> bool:
        """Whether anything is capped at all."""
        return self.link_bps is not None or bool(self.flow_bps)

    @property
    def links(self) -> tuple[LinkSpec, ...]:
        """Each interface of a host as a link of its own."""
        return tuple(LinkSpec(bps, self.flow_bps) for bps in (self.link_bps, *self.more_bps))

    def expected_bps(self, flows: int) -> float | None:
        """Return what `flows` flows in one direction can carry on the first link, or None where nothing caps them."""
        total = float(sum(self.flow_rate(index) for index in range(flows))) if self.flow_bps else None
        if self.link_bps is None:
            return total
        return float(self.link_bps) if total is None else min(total, float(self.link_bps))

    def flow_rate(self, index: int) -> int:
        """Return the cap of the flow dealt as number `index`. Raises ValueError where flows have none."""
        if not self.flow_bps:
            raise ValueError("flows have no cap of their own here")
        return self.flow_bps[index % len(self.flow_bps)]

    def saturating_flows(self, most: int = 16) -> int:
        """Return how many flows it takes to fill the link (4 where that has no answer), at most `most`."""
        if not self.flow_bps:
            return 4
        if len(self.flow_bps) > 1:
            return min(len(self.flow_bps), most)
        return 4 if self.link_bps is None else max(1, min(most, -(-self.link_bps // self.flow_bps[0])))


def parse_rate(text: str, whole: str | None = None) -> int | None:
    """Return bits per second of "500mbit", "2gbit", "1.5gbit"; None for "none". Raises ValueError naming the text."""
    text = text.strip()
    where = f" in {whole!r}" if whole not in (None, text) else ""
    if text.lower() == "none":
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r}{where} is no rate: write "2gbit", "500mbit", "64kbit" or "none"')
    rate = round(float(match[1]) * UNITS[(match[2] or "").lower() + "bit"])
    if not 1000 <= rate <= 10**12:
        raise ValueError(f"{text!r}{where} is not between 1kbit and 1000gbit")
    return rate


def parse_lab(text: str) -> LinkSpec:
    """Parse "LINK[+LINK…][/FLOW[,FLOW…]]", such as "2gbit/500mbit", "none/400mbit,100mbit" or "1gbit+250mbit".

    Links joined by + are interfaces of every host. Raises ValueError."""
    link, slash, flows = text.partition("/")
    if slash and not flows.strip():
        raise ValueError(f"{text!r}: no rate after '/'")
    rates = [parse_rate(flow, text) for flow in flows.split(",")] if slash else []
    if rates == [None]:
        rates = []
    if None in rates:
        raise ValueError(f"{text!r}: 'none' cannot stand in a list of flow rates")
    first, *more = (parse_rate(part, text) for part in link.split("+"))
    if None in more or (more and first is None):
        raise ValueError(f"{text!r}: of several links each needs a rate")
    flow_bps = tuple(rate for rate in rates if rate is not None)
    return LinkSpec(first, flow_bps, tuple(rate for rate in more if rate is not None))


def format_rate(bps: int) -> str:
    """Return the shortest exact text of a rate, such as "500mbit"."""
    for unit in ("gbit", "mbit", "kbit"):
        if bps % UNITS[unit] == 0:
            return f"{bps // UNITS[unit]}{unit}"
    return f"{bps}bit"
