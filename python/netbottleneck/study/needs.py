"""What a study needs of this machine: packages, and the transports that there are."""

from __future__ import annotations

import importlib.util

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.study.spec import StudySpec
from netbottleneck.study.tables import DIGITS, REPLAY

PACKAGES = {"torch": "torch", "sklearn": "scikit-learn"}


def missing(spec: StudySpec) -> str:
    """Say what is not installed that the cells need; "" where nothing is missing."""
    wanted = set()
    for cell in spec.cells:
        if cell.job != REPLAY or not cell.model.file or "stock" in cell.arms:
            wanted.add("torch")
        if cell.job == DIGITS or (cell.job != REPLAY and cell.model.name == "thin_resnet"):
            wanted.add("sklearn")
    absent = [PACKAGES[module] for module in sorted(wanted, reverse=True) if importlib.util.find_spec(module) is None]
    return f"{' and '.join(absent)} not installed: pip install 'netbottleneck[study]'" if absent else ""


def transports(provider: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arms where nobody named any, and a note: tcp stands in where there is no libfabric."""
    why = _no_ofi(provider)
    return (("stock", "tcp"), (f"tcp in ofi's place: {why}",)) if why else (("stock", "ofi"), ())


def _no_ofi(provider: str | None) -> str:
    core = connect.core()
    if not core.HAVE_OFI:
        return "ofi was left out of this build (install libfabric-dev)"
    try:
        core.libfabric(config.settings({"provider": provider}).library)
    except OSError as error:
        return str(error)
    return ""
