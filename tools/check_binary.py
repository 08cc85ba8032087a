"""Fails if _core is not plain C with CPython's limited API: checks its sources, build, symbols and libraries.

It also fails if the sources need libfabric's headers in a build without libfabric."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import cbuild

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "python" / "netbottleneck" / "_core.abi3.so"
BANNED = re.compile(r"pybind11|\bcffi\b|\bcython\b|torch/extension\.h|cpp_extension", re.IGNORECASE)
LIBRARIES_BANNED = re.compile(r"libstdc\+\+|libc\+\+|libtorch|libc10|libpython")


def source_findings() -> Iterator[str]:
    """Yield findings in csrc and the build requirements: files that are not C, and disallowed tools."""
    files = [ROOT / "setup.py", ROOT / "requirements" / "build.txt"]
    files += [path for path in sorted((ROOT / "csrc").glob("**/*")) if path.is_file()]
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = BANNED.search(line)
            if match is not None:
                yield f"{path.relative_to(ROOT)}:{number}: {match[0]}"
    for path in files:
        if path.suffix in {".cc", ".cpp", ".cxx", ".pyx", ".hpp"}:
            yield f"{path.relative_to(ROOT)}: not C"
    with (ROOT / "pyproject.toml").open("rb") as source:
        requires = tomllib.load(source)["build-system"]["requires"]
    yield from (f"pyproject.toml: build-system requires {name}" for name in requires if BANNED.search(name))


def output_of(*argv: str) -> str:
    """Return the output of a tool. Raises CalledProcessError if it fails."""
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def binary_findings() -> Iterator[str]:
    """Yield findings in the built module."""
    if not BINARY.is_file():
        yield f"{BINARY.relative_to(ROOT)} is not built: make build"
        return
    for options in ((), ("-D",)):
        for line in output_of("nm", *options, str(BINARY)).splitlines():
            symbol = line.split()[-1]
            if symbol.startswith("_Z"):
                yield f"C++ symbol {symbol}"
    for line in output_of("readelf", "-d", str(BINARY)).splitlines():
        if "(NEEDED)" in line and LIBRARIES_BANNED.search(line):
            yield f"needs {line.split('[')[-1].rstrip(']')}"
    exported = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", str(BINARY)).splitlines()]
    yield from (f"exports {name}" for name in exported if name not in {"PyInit__core", "_init", "_fini"})


def without_headers_findings() -> Iterator[str]:
    """Yield each C file that does not compile, or includes libfabric's headers, in a build without them."""
    sources = [p for p in cbuild.core_sources() if "NB_HAVE_OFI" in p.read_text(encoding="utf-8") or "ofi" in p.stem]
    flags = [*cbuild.LANGUAGE, *cbuild.WARNINGS, "-D_GNU_SOURCE=1", f'-DNB_VERSION="{cbuild.version()}"']
    flags += [f"-I{cbuild.CSRC}", f"-isystem{sysconfig.get_path('include')}", "-fsyntax-only", "-H"]
    for path in sources:
        argv = [*cbuild.c_compiler(), *flags, str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        name = path.relative_to(ROOT)
        if done.returncode != 0:
            wrong = [line for line in done.stderr.splitlines() if "error" in line]
            yield f"without libfabric's headers: {wrong[0] if wrong else name}"
        elif "/rdma/" in done.stderr:
            yield f"{name}: includes libfabric's headers without NB_HAVE_OFI"


def abi_finding() -> str | None:
    """Return abi3audit's findings. Without abi3audit the check is left out, but in CI that is a finding."""
    beside = Path(sys.executable).parent / "abi3audit"
    tool = str(beside) if beside.is_file() else shutil.which("abi3audit")
    if tool is None and os.environ.get("CI"):
        return "abi3audit is not installed"
    if tool is None:
        print("abi3audit is not installed: its check is left out")
        return None
    if not BINARY.is_file():
        return None
    argv = [tool, "--strict", "--assume-minimum-abi3", "3.11", str(BINARY)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"abi3audit: {done.stdout}{done.stderr}"


def main() -> int:
    """Print every finding. Returns 1 if there are findings."""
    findings = [*source_findings(), *binary_findings(), *without_headers_findings()]
    abi = abi_finding()
    if abi is not None:
        findings.append(abi)
    print("".join(f"{finding}\n" for finding in findings), end="")
    print(f"binary: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
