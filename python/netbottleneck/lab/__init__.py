"""Simulated hosts on one machine: network namespaces, a cap on each link and, where asked for, on each flow."""

from netbottleneck.lab.lab import Lab
from netbottleneck.lab.spaces import LabError
from netbottleneck.lab.spec import LinkSpec, format_rate, parse_lab, parse_rate

__all__ = ["Lab", "LabError", "LinkSpec", "format_rate", "parse_lab", "parse_rate"]
