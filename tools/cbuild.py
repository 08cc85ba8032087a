"""C build shared by setup.py, tools/ctest.py and tools/lint.sh: sources, flags, headers, parallel compilation."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wvla",
    "-Wconversion",
    "-Wno-sign-conversion",
]
LANGUAGE = ["-std=gnu11", "-fvisibility=hidden", "-pthread"]
LIBRARIES = ["-pthread", "-ldl", "-lm"]
LIMITED_API = "0x030b0000"
# The libraries that NCCL loads, and the rooms below csrc/nccl that each needs. The profiler's files are profiler*.c.
NET_PLUGIN, PROFILER_PLUGIN = "libnccl-net-netbottleneck.so", "libnccl-profiler-netbottleneck.so"
PLUGINS = {NET_PLUGIN: {"base", "trace", "bootstrap", "transport"}, PROFILER_PLUGIN: {"base", "trace"}}
OFI_LEFT_OUT = "ofi left out: install libfabric-dev"
CUDA_LEFT_OUT = "device code for GPUs left out: no nvcc"
GPUS = ("75", "80", "90", "100")  # compute capabilities with machine code of their own; later ones get PTX of the first


def core_sources(*, tests: bool = False) -> list[Path]:
    """Return the C files of _core; tests: those that C tests link, without csrc/py."""
    rooms_out = {"lab", "py"} if tests else {"lab", "nccl"}
    return [path for path in sorted(CSRC.glob("**/*.c")) if path.relative_to(CSRC).parts[0] not in rooms_out]


def plugin_sources(name: str) -> list[Path]:
    """Return the C files of a library that NCCL loads: its own, and those of the rooms below."""
    below = [path for path in sorted(CSRC.glob("**/*.c")) if path.relative_to(CSRC).parts[0] in PLUGINS[name]]
    profiler = name == PROFILER_PLUGIN
    return [*below, *(p for p in sorted((CSRC / "nccl").glob("*.c")) if p.name.startswith("profiler") == profiler)]


def plugin_link(name: str) -> list[str]:
    """Return the linker's flags of a library that NCCL loads.

    NCCL unloads it with its last communicator, but the handlers of a fork stay; only NCCL's tables are exported.
    """
    exports = CSRC / "nccl" / "exports.map"
    return ["-shared", "-Wl,-z,nodelete", "-Wl,-z,defs", f"-Wl,-soname,{name}", f"-Wl,--version-script={exports}"]


def c_compiler(default: str = "gcc") -> list[str]:
    """Return the words of the C compiler's command: CC, such as "ccache gcc", else the default."""
    return shlex.split(os.environ.get("CC") or default)


def version() -> str:
    """Return the package's version, read without an import."""
    namespace: dict[str, str] = {}
    exec((ROOT / "python" / "netbottleneck" / "_version.py").read_text(encoding="utf-8"), namespace)
    return namespace["__version__"]


def _pkg_config_includes() -> list[Path]:
    try:
        done = subprocess.run(
            ["pkg-config", "--variable=includedir", "libfabric"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Path(done.stdout.strip())] if done.returncode == 0 and done.stdout.strip() else []


def libfabric_include() -> Path | None:
    """Return the folder of rdma/fabric.h, or None. If NETBOTTLENECK_LIBFABRIC_INCLUDE is set, only that is tried."""
    chosen = os.environ.get("NETBOTTLENECK_LIBFABRIC_INCLUDE")
    places = [Path(chosen)] if chosen is not None else [*_pkg_config_includes(), Path("/usr/include")]
    if chosen is None:
        places += [Path("/usr/local/include"), ROOT / "build" / "libfabric" / "usr" / "include"]
    return next((place for place in places if (place / "rdma" / "fabric.h").is_file()), None)


def defines() -> list[tuple[str, str]]:
    """Return the macros of every build as (name, value)."""
    macros = [("_GNU_SOURCE", "1"), ("NB_VERSION", f'"{version()}"')]
    if libfabric_include() is not None:
        macros.append(("NB_HAVE_OFI", "1"))
    return macros


def include_flags(*, cross: bool = False) -> list[str]:
    """Return -I for csrc and, if they are not on the compiler's own path, for libfabric's headers.

    A cross compiler has its own system headers, so libfabric's folder is searched last.
    """
    flags = [f"-I{CSRC}"]
    fabric = libfabric_include()
    if fabric is not None and (cross or fabric != Path("/usr/include")):
        flags.append(f"-idirafter{fabric}" if cross else f"-isystem{fabric}")
    return flags


def base_flags(*, cross: bool = False) -> list[str]:
    """Return the flags of every C file, without warnings."""
    return [*LANGUAGE, *(f"-D{name}={value}" for name, value in defines()), *include_flags(cross=cross)]


def _is_fresh(target: Path, command: str) -> bool:
    """Return True if target was made by this command and is newer than all files that its dependency file names."""
    recipe, listing = target.with_suffix(".cmd"), target.with_suffix(".d")
    try:
        if recipe.read_text(encoding="utf-8") != command:
            return False
        made = target.stat().st_mtime_ns
        listed = listing.read_text(encoding="utf-8").replace("\\\n", " ").split(": ", 1)[1].strip()
        names = [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", listed)]
        return all(Path(name).stat().st_mtime_ns <= made for name in names)
    except (OSError, IndexError):
        return False


def run_compiler(argv: Sequence[str]) -> None:
    """Run one compiler command; its output goes to stderr. Raises RuntimeError naming the target on failure."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.stdout:
        sys.stderr.write(done.stdout)
    if done.returncode != 0:
        target = argv[argv.index("-o") + 1] if "-o" in argv else shlex.join(argv)
        raise RuntimeError(f"{argv[0]} could not make {target}")


def compile_one(source: Path, target: Path, argv: Sequence[str], phase: str = "-c") -> bool:
    """Compile source to target unless target is fresh; return whether the compiler ran."""
    full = [*argv, "-MMD", "-MF", str(target.with_suffix(".d")), phase, str(source), "-o", str(target)]
    command = shlex.join(full)
    if _is_fresh(target, command):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".cmd").unlink(missing_ok=True)
    run_compiler(full)
    target.with_suffix(".cmd").write_text(command, encoding="utf-8")
    return True


def compile_all(sources: Iterable[Path], folder: Path, argv: Sequence[str], *, jobs: int | None = None) -> list[Path]:
    """Compile sources in parallel into folder, each under its path below the root; return the objects in order.

    argv is the compiler with its flags. Raises RuntimeError after all have been tried if one did not compile.
    """
    listed = list(sources)
    targets = [folder / source.relative_to(ROOT).with_suffix(".o") for source in listed]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        pending = [pool.submit(compile_one, *pair, argv) for pair in zip(listed, targets, strict=True)]
    failures = [str(error) for error in (task.exception() for task in pending) if error is not None]
    if failures:
        raise RuntimeError("\n".join(failures))
    return targets


def nvcc() -> str | None:
    """Return CUDA's compiler, or None. NVCC alone decides where set; empty: none."""
    requested = os.environ.get("NVCC")
    return shutil.which("nvcc" if requested is None else requested) or (
        shutil.which("/usr/local/cuda/bin/nvcc") if requested is None else None
    )


def cuda_image(folder: Path = ROOT / "build" / "cuda") -> Path:
    """Return a C file below folder that holds the image of kernels.cu, an empty one without nvcc.

    nvcc runs where a file that kernels.cu includes has changed. Where it fails, the image is empty; in our own builds
    that raises RuntimeError.
    """
    fatbin, made = folder / "kernels.fatbin", folder / "image.c"
    code = b""
    compiler = nvcc()
    if compiler is not None:
        listed = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True, check=False)
        gpus = [gpu for gpu in GPUS if f"sm_{gpu}" in listed.stdout.split()]
        flags = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
        flags += [f"-gencode=arch=compute_{gpu},code=compute_{gpu}" for gpu in gpus[:1]]
        # The results are those of the same C without fused multiplication and addition.
        argv = [compiler, "--fmad=false", f"-I{CSRC}", *flags]
        try:
            compile_one(CSRC / "cuda" / "kernels.cu", fatbin, argv, "-fatbin")
            code = fatbin.read_bytes()
        except RuntimeError:
            if os.environ.get("NETBOTTLENECK_WERROR") == "1":
                raise
    rows = [",".join(map(str, code[at : at + 32])) for at in range(0, len(code), 32)]
    body = ",\n".join(rows) or "0"
    text = f"""#include "cuda/image.h"
_Alignas(16) const unsigned char nb_cuda_image_data[] = {{
{body}
}};
const size_t nb_cuda_image_bytes = {len(code)};
"""
    folder.mkdir(parents=True, exist_ok=True)
    if not made.is_file() or made.read_text(encoding="ascii") != text:
        made.write_text(text, encoding="ascii")
    return made


def main() -> int:
    """Print one fact for the shell scripts: flags, the sources that C tests link, or ofi."""
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    if what == "flags":
        print("\n".join([*base_flags(), *WARNINGS]))
    elif what == "cross-flags":
        python = f"-idirafter{sysconfig.get_path('include')}"
        print("\n".join([*base_flags(cross=True), *WARNINGS, f"-DPy_LIMITED_API={LIMITED_API}", python]))
    elif what == "sources":
        listed = [*core_sources(tests=True), cuda_image()]
        print("\n".join(str(path.relative_to(ROOT)) for path in listed))
    elif what == "ofi":
        print(libfabric_include() or OFI_LEFT_OUT)
    else:
        print("usage: cbuild.py flags|cross-flags|sources|ofi", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
