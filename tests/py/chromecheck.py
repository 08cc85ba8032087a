"""Checks a Chrome trace for errors that Perfetto would report."""

from collections import defaultdict
from itertools import pairwise


def overlaps(document):
    """Pairs of complete events that overlap on one lane."""
    lanes = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            lanes[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000), event["name"]))
    found = []
    for lane, spans in lanes.items():
        spans.sort()
        found += [(lane, a, b) for a, b in pairwise(spans) if b[0] < a[1]]
    return found
