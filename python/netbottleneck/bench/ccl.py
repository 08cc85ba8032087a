"""What mpi.py needs to know of oneCCL, which takes MPI_Allreduce's place in the same program: where it is, how it runs.

tools/peers.sh puts PyPI's wheels into the checkout's build folder.
"""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3]
_SOURCE = _CHECKOUT / "benchmarks" / "ccl_peer.cpp"
_LIBRARIES = _CHECKOUT / "build" / "peers" / "oneccl" / "lib"
SOURCES = (_SOURCE, _SOURCE.with_suffix(".h"))


def absent() -> str:
    """Return why there is no oneCCL; "" where there is."""
    return "" if (_LIBRARIES / "libccl.so").exists() else "oneCCL's wheels are not installed (tools/peers.sh)"


def environment(interface: str) -> dict[str, str]:
    """Return the variables that make it use libfabric over an IP network, and no memory shared by ranks of a host."""
    return {
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_ATL_SHM": "0",
        "FI_PROVIDER": "tcp",
        "CCL_KVS_IFACE": interface,
    }


def command(compiler: str, source: Path) -> list[str]:
    """Return what compiles MPI's program, `source`, with oneCCL's all-reduce in it, less where the program goes to."""
    parts = ["-x", "c", str(source), "-x", "c++", str(_SOURCE), "-x", "none"]
    flags = ["-O2", "-DWITH_CCL", f"-isystem{_LIBRARIES.parent}/include"]
    return [compiler, *flags, *parts, f"-L{_LIBRARIES}", "-lccl", f"-Wl,-rpath,{_LIBRARIES}"]


def version() -> str:
    """Return what the wheel calls itself."""
    found = next(_LIBRARIES.glob("python*/site-packages/oneccl_cpu-*.dist-info"), None)
    number = found.name.removesuffix(".dist-info").partition("-")[2] if found else ""
    return f"oneCCL {number} (ofi: tcp)".replace("  ", " ")
