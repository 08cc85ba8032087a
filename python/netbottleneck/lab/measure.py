"""What a lab really carries: TCP flows from host 0 to the last host, counted per flow by the receiver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.lab.network import burst_bytes
from netbottleneck.lab.spaces import LabError
from netbottleneck.lab.spec import LinkSpec

if TYPE_CHECKING:
    from netbottleneck.lab.lab import Lab

TOLERANCE = 0.15
WARMUP_S = 0.3
LIMIT_S = 15.0
SCRIPT = str(Path(__file__).with_name("_flows.py"))


def measure(lab: Lab, seconds: float) -> dict[str, Any]:
    """Return `one_flow`, `many_flows` and `ok`; rates are bits per second of payload, over `seconds` after a start-up.

    Both are of the first link; where hosts have more, `more_links` are those, with as many flows as fill each. Raises
    LabError naming what failed."""
    runs = [_run(lab, flows, seconds, 0) for flows in (1, lab.spec.saturating_flows())]
    more = [_run(lab, spec.saturating_flows(), seconds, 1 + index) for index, spec in enumerate(lab.spec.links[1:])]
    found = {"one_flow": runs[0], "many_flows": runs[1], "ok": all(run["ok"] for run in [*runs, *more])}
    return found | ({"more_links": more} if more else {})


def _run(lab: Lab, flows: int, seconds: float, link: int) -> dict[str, Any]:
    limit = LIMIT_S + seconds
    command = [sys.executable, "-I", "-S", SCRIPT]
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    last = lab.size - 1
    target = lab.address(lab.hosts - 1, link)
    receiver = lab.popen(
        last, [*command, "receive", target, str(flows), str(WARMUP_S), str(seconds), str(limit)], **pipes
    )
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    sender = lab.popen(0, [*command, "send", target, port or "0", str(flows), str(limit)], **pipes)
    errors = ""
    texts = []
    for process in (receiver, sender):
        try:
            text, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            text, error = process.communicate()
            error = f"no end after {limit:.0f} s; {error}"
        texts.append(text)
        errors += error
    if not texts[0]:
        raise LabError(f"the lab's {flows} flows from {lab.rank0_address} to {target} did not run: {errors.strip()}")
    return _judge(lab, flows, json.loads(texts[0]), link)


def _judge(lab: Lab, flows: int, counted: dict[str, Any], link: int) -> dict[str, Any]:
    spec = lab.spec.links[link]
    if lab.way == "loopback":  # caps per flow hold there, a link does not exist
        spec = LinkSpec(None, spec.flow_bps)
    if lab.hosts == 1:  # nothing leaves the host
        spec = LinkSpec()
    found = judged(spec, flows, counted)
    return found if lab.flow_cap == "htb" else found | {"burst_bytes": None}


def judged(spec: LinkSpec, flows: int, counted: dict[str, Any]) -> dict[str, Any]:
    """Return what the receiver of some flows counted beside what a link is made for; `ok`: they are near each other.

    burst_bytes, link_burst_bytes: what a flow and the link may send at once by HTB's caps, beyond their rate, when they
    were idle; None where there is no cap."""
    rates: list[float] = counted["flow_bps"]
    configured = spec.expected_bps(flows)
    ok = configured is None or abs(sum(rates) / configured - 1) <= TOLERANCE
    if spec.flow_bps:  # a link that is asked for more than it carries leaves a flow less than its cap, never more
        caps = [spec.flow_rate(index) for index in range(flows)]
        least = 1 - TOLERANCE if sum(caps) == configured else 0.0
        ok = ok and all(cap * least <= rate <= cap * (1 + TOLERANCE) for rate, cap in zip(rates, caps, strict=True))
    return {
        "flows": flows,
        "configured_bps": configured,
        "measured_bps": sum(rates),
        "measured_flow_bps": rates,
        "seconds": counted["seconds"],
        "burst_bytes": burst_bytes(min(spec.flow_bps)) if spec.flow_bps else None,
        "link_burst_bytes": burst_bytes(spec.link_bps) if spec.link_bps else None,
        "ok": ok,
    }
