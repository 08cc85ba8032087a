"""Simulated hosts on one machine: network namespaces, a cap on each link and, if requested, on each flow."""

from netbottleneck.lab.lab import Lab, LabError
from netbottleneck.lab.network import LinkSpec, format_rate, parse_lab, parse_rate

__all__ = ["Lab", "LabError", "LinkSpec", "format_rate", "parse_lab", "parse_rate"]
