"""Transports: the package's list and the core's table name the same networks, and a new row is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from netbottleneck import _core
from netbottleneck.trace.transports import ALL, NATIVE

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "netbottleneck"
ROW = '    Transport("new", native=True, benched=True, colour="#123456"),\n'

# Runs with a list that has one row more.
USES = """
from netbottleneck.bench.request import Request
from netbottleneck.config import settings
from netbottleneck.report import plots
from netbottleneck.trace.transports import Arm

chosen = settings({}, {"NETBOTTLENECK_TRANSPORT": "stock,new"})
assert chosen.transports == ("stock", "new"), chosen.transports
assert chosen.transports[1].native and chosen.transports[1].real and not chosen.transports[1].own_path
assert "new" in Request().transports and Request(("new",)).transports == ("new",)
assert plots.TRANSPORT_COLOURS["new"] == "#123456"
assert Arm.parse("new").native
"""


def test_the_native_rows_are_the_cores_table_in_its_order() -> None:
    assert list(NATIVE) == _core.transports()
    assert len({row.name for row in ALL}) == len(ALL)


def test_a_new_row_is_enough_for_the_environment_the_bench_and_the_reports(tmp_path: Path) -> None:
    copy = tmp_path / "netbottleneck"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "trace" / "transports.py"
    before, end, after = source.read_text(encoding="utf-8").partition('    Transport("null"')
    source.write_text(before + ROW + end + after, encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NETBOTTLENECK_")}
    done = subprocess.run(
        [sys.executable, "-c", USES],
        env={**environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_list_needs_neither_the_extension_nor_torch() -> None:
    """Analysis of a saved trace imports the list on a machine that has neither."""
    code = (
        "import sys; sys.modules['netbottleneck._core'] = sys.modules['torch'] = None; "
        "from netbottleneck.trace.transports import NATIVE; print(*NATIVE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == list(NATIVE), done.stderr
