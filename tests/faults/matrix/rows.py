"""All rows of the matrix."""

from __future__ import annotations

from matrix import network, outsiders, processes, resources

ROWS = [*processes.ROWS, *network.ROWS, *outsiders.ROWS, *resources.ROWS]
