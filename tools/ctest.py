"""Builds and runs the C tests: each tests/c/test_*.c is a program that exits with 0, 1 or 77 (skipped)."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cbuild
import skips

TESTS = cbuild.ROOT / "tests" / "c"
BUILD = cbuild.ROOT / "build" / "ctest"
FAKE_CUDA = cbuild.ROOT / "tests" / "cuda"  # a libcuda.so.1 beside the programs, which those of CUDA name by its path
SUPPRESSIONS = cbuild.ROOT / "tools" / "sanitizers"
LIMIT_S = 180  # what only a hang reaches, on a busy machine too
SEEDS_LIMIT_S = 1200  # the same, with --seeds
# Programs that run once for each of these arguments, so that each run has a test's time limit.
APART = {
    **{
        name: ("shm", "tcp", "ofi")
        for name in (
            *("test_arena_mapping", "test_cancel", "test_control", "test_engine", "test_groups", "test_join"),
            *("test_progress_owner", "test_shapes", "test_types", "test_cuda_engine", "test_cuda_faults"),
        )
    },
    "test_connection_loss": ("tcp", "ofi"),
    "test_fork": ("alone", "shm", "tcp", "ofi"),
    "test_nccl": ("tcp", "ofi"),
    "test_nccl_early": ("tcp", "ofi"),
    "test_nccl_links": ("tcp", "ofi"),
    "test_nccl_open": ("tcp", "ofi"),
    "test_no_memory_open": ("tcp", "shm", "hosts", "ofi"),
    "test_steady_state": ("tcp", "shm", "hosts", "ofi"),
    "test_transport": ("mem", "mem-rma", "tcp", "ofi", "tcp6", "ofi6", "double", "double8"),
    "test_twolevel_faults": ("kill", "stop", "reset", "ofi"),
    "test_twolevel": ("aabb", "aab", "abab", "aabbcc", "aaab", "aabbb", "rest", "ofi"),
}
# Functions of the core that a program replaces: its __wrap_<name> is called instead.
WRAPPED = {
    "test_arena": ("posix_fallocate",),
    **{name: ("nb_ofi_lib_open",) for name in ("test_transport", "test_ofi_double", "test_ofi_registration")},
    "test_clock": ("clock_gettime",),
    "test_lane_rate": ("clock_gettime",),
    "test_control": ("epoll_wait", "close", "nb_control_init", "nb_shared_sleep", "nb_shared_wake"),
    "test_cuda_cancel": ("nb_work_start", "nb_work_finish", "nb_watchdog_tick"),
    "test_cuda_clock": ("clock_gettime",),
    "test_cuda_engine": ("nb_device_progress",),
    "test_connection_loss": ("nb_watchdog_lane_lost",),
    "test_faults": ("nb_lanes_peer_open", "nb_sock_accept", "nb_sock_connect"),
    "test_groups": ("pthread_mutex_init", "pthread_mutex_unlock"),
    "test_join": ("nb_work_make", "nb_negotiation_flush", "nb_coordinator_collect"),
    "test_many": ("nb_negotiation_flush",),
    "test_no_memory": ("calloc", "nb_autotune_guess"),
    "test_no_memory_open": ("malloc", "calloc", "realloc", "aligned_alloc", "nb_job_open"),
    "test_start_order": (
        "nb_negotiation_flush",
        "nb_coordinator_collect",
    ),
    "test_steady_state": (
        *("malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign", "free", "pthread_mutex_lock"),
        *("nb_thread_main", "nb_progress_pass", "nb_work_finish", "nb_progress_sleep", "nb_progress_hand_over"),
    ),
    "test_nccl_links": (
        *("nb_lanes_open", "nb_lanes_arm", "nb_lanes_map", "nb_links_leaving"),
        *("nb_loop_wait", "nanosleep"),
    ),
    "test_nccl_open": ("nb_lanes_open", "nb_lanes_peer_missing", "nb_sock_interfaces"),
    "test_nccl_profiler": ("clock_gettime", "malloc", "calloc", "free", "pthread_mutex_lock"),
    "test_leave": (
        *("nb_shared_progress", "nb_shared_arm", "nb_shared_tick", "nb_fold_reduce"),
        *("nb_fold_direct", "nb_control_broadcast", "nb_watchdog_tick"),
    ),
    "test_cancel": ("nb_work_start", "nb_lanes_add"),
    "test_stall": ("nb_stall_over", "nb_stall_tick"),
    "test_interface_down": ("clock_gettime", "nb_sock_interface_down"),
    "test_handshake": ("send",),
    "test_clean_shutdown": ("nb_lanes_settle", "nb_lanes_announce_leave"),
    "test_unauthenticated": ("clock_gettime", "poll"),
    "test_stopped_rank": (
        *(
            "nb_shm_offer",
            "nb_fdpass_receive",
            "nb_shm_find",
            "nb_shm_memory",
            "nb_shm_write_begin",
            "nb_shm_write_end",
        ),
        *("nb_shm_wake", "nb_shm_pipe_write", "nb_shm_pipe_read", "nb_fold_direct", "nb_pair_kernel"),
        *("nb_fold_fill", "nb_fold_reduce", "nb_fold_empty", "nb_fold_sum", "nb_fold_spread"),
    ),
    "test_shm": ("nb_fold_direct", "nb_shm_rendezvous", "nb_fdpass_receive"),
    "test_sock": ("getifaddrs", "freeifaddrs"),
    "test_twolevel_faults": ("nb_fold_sum", "nb_fold_spread", "nb_buffer_reduce"),
}
SKIPPED = 77
# Programs that also run over another libfabric, and of these the ones that also run over another provider, with both.
OVER_BOTH = ("test_fork", "test_ofi", "test_ofi_attacker", "test_transport")
OVER_LIBFABRIC = (*OVER_BOTH, "test_nccl", "test_nccl_early", "test_nccl_links", "test_nccl_open")
# The arguments there. ofi_rxm connects so slowly on a busy machine that the NCCL plugin's time limits end other cases.
OVER_PROVIDER = {**{name: ["ofi"] for name in OVER_BOTH}, "test_nccl": ["ofi", "deregister", "12"]}
NEWER = Path(sys.prefix, "lib", "mpich", "libfabric.so.1")
# A provider that is never selected if libfabric has another one for IP networks.
LAYERED = {"NETBOTTLENECK_PROVIDER": "tcp;ofi_rxm"}
RUNNING: set[int] = set()
# Sanitizers of gcc 12 cannot place their shadow memory where the kernel randomises more bits than this.
RANDOM_BITS_MAX = 28
# Warnings are errors only at -O2: in instrumented code, gcc's flow analysis gives false positives.
FLAVOURS = {
    "plain": ["-O2", "-g", *cbuild.WARNINGS],
    "asan": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-g", "-fsanitize=thread", "-fno-omit-frame-pointer"],
    "aarch64": ["-O2", "-g", *cbuild.WARNINGS],
}
# The same programs under valgrind, which unlike the sanitizers finds uses of memory that was never written. Leaks are
# LeakSanitizer's.
FLAVOURS["valgrind"] = FLAVOURS["plain"]
VALGRIND = ("valgrind", "-q", "--trace-children=yes", "--fair-sched=yes", "--leak-check=no", "--error-exitcode=99")
# What runs there: programs, with the arguments of each run.
UNDER_VALGRIND: dict[str, tuple[tuple[str, ...], ...]] = {
    "test_nccl": tuple(("tcp", case, "12") for case in ("sizes", "in_flight", "deregister", "lost_lane")),
    "test_nccl_early": tuple(("tcp", case, "12") for case in ("lone", "runs", "landing")),
    "test_nccl_links": tuple(("tcp", case, "12") for case in ("refusals", "not_registered")),
    "test_nccl_profiler": ((),),
}
# Flavours for another CPU: the GNU name of its system, which names the folder of its libraries, and its emulator.
CROSS = {"aarch64": ("aarch64-linux-gnu", ("qemu-aarch64", "qemu-aarch64-static"))}
# Quoted, because a path in it may contain a space.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "LSAN_OPTIONS": f"print_suppressions=0:suppressions='{SUPPRESSIONS}/lsan.supp'",
    "TSAN_OPTIONS": f"second_deadlock_stack=1:ignore_noninstrumented_modules=1:suppressions='{SUPPRESSIONS}/tsan.supp'",
}


@dataclass(frozen=True)
class Result:
    """Result of one program: PASS, FAIL or SKIP, with the reason and its output."""

    name: str
    verdict: str
    reason: str
    output: str
    seconds: float


def may_skip(name: str, message: str) -> bool:
    """Return True if tests/skips.txt allows this program to skip for this reason here."""
    return skips.may_skip(f"c/{name}", message, ["CI"] if os.environ.get("CI") else [])


def launcher(flavour: str) -> list[str]:
    """Return a program's command prefix: valgrind, an emulator, or a tool that fixes the addresses for sanitizers."""
    if flavour == "valgrind":
        return list(VALGRIND)
    if flavour in CROSS:
        system, emulators = CROSS[flavour]
        found = [path for path in map(shutil.which, emulators) if path is not None]
        return [*(found[:1] or emulators[:1]), "-L", f"/usr/{system}"]
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    try:
        too_many = int(bits.read_text(encoding="ascii")) > RANDOM_BITS_MAX
    except (OSError, ValueError):
        too_many = False
    if flavour == "plain" or not too_many or shutil.which("setarch") is None:
        return []
    return ["setarch", os.uname().machine, "-R"]


def build(flavour: str, programs: list[Path], jobs: int) -> dict[Path, Path | str]:
    """Compile core and tests; return each program's binary, or the output of its failed compile or link."""
    folder = BUILD / ("plain" if flavour == "valgrind" else flavour)
    cross = f"{CROSS[flavour][0]}-" if flavour in CROSS else ""
    command = [f"{cross}gcc"] if cross else cbuild.c_compiler()
    compiler = [*command, *cbuild.base_flags(cross=bool(cross)), f"-I{TESTS}", *FLAVOURS[flavour]]
    sources = [*cbuild.core_sources(tests=True), cbuild.cuda_image(), *sorted(TESTS.glob("mem/*.c"))]
    objects = cbuild.compile_all(sources, folder, compiler, jobs=jobs)
    archive = folder / "libcore.a"
    archive.unlink(missing_ok=True)
    if objects:
        cbuild.run_compiler([f"{cross}ar", "rcs", str(archive), *map(str, objects)])

    sanitize = [flag for flag in FLAVOURS[flavour] if flag.startswith("-fsanitize")]
    if any("cuda" in program.stem for program in programs):
        fake = cbuild.compile_all(sorted(FAKE_CUDA.glob("*.c")), folder, [*compiler, "-fPIC"], jobs=1)
        shared = ["-shared", "-Wl,-soname,libcuda.so.1", *sanitize, *map(str, fake), "-o", str(folder / "libcuda.so.1")]
        cbuild.run_compiler([*command, *shared, *cbuild.LIBRARIES])

    def one(program: Path) -> Path | str:
        target = folder / program.stem
        try:
            (made,) = cbuild.compile_all([program], folder, compiler, jobs=1)
            wrapped = [f"-Wl,--wrap={name}" for name in WRAPPED.get(program.stem, ())]
            parts = [*sanitize, *wrapped, str(made), str(archive)]
            cbuild.run_compiler([*command, *parts, "-o", str(target), *cbuild.LIBRARIES])
        except RuntimeError as error:
            return str(error)
        return target

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(programs, pool.map(one, programs), strict=True))


def end_all(signum: int, _frame: object) -> None:
    """Kill all programs when this script is terminated."""
    for leader in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    os._exit(128 + signum)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill the remaining processes of a program's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    RUNNING.discard(process.pid)
    process.wait()


def run(
    name: str, binary: Path, flavour: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Result:
    """Run one program in its own process group, with a time limit, and return its result."""
    began = time.monotonic()
    limit_s = SEEDS_LIMIT_S if "TEST_SEEDS" in os.environ else LIMIT_S
    argv = [*launcher(flavour), str(binary), *arguments]
    # Output goes to a file: with a pipe, a grandchild that holds it open could block this process.
    log = binary.with_name(f"{name}.log")
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ, **(env or {})},
        )
        RUNNING.add(process.pid)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    seconds = time.monotonic() - began
    message = output.strip().splitlines()[-1] if output.strip() else "no reason given"
    if code is None:
        return Result(name, "FAIL", f"not done after {limit_s} s", output, seconds)
    if code == SKIPPED and may_skip(name, message):
        return Result(name, "SKIP", message, output, seconds)
    if code == SKIPPED:
        return Result(name, "FAIL", f"skip is not listed in tests/skips.txt: {message}", output, seconds)
    if code < 0:
        return Result(name, "FAIL", f"signal {signal.Signals(-code).name}", output, seconds)
    return Result(name, "PASS" if code == 0 else "FAIL", "" if code == 0 else f"exit {code}", output, seconds)


def run_newer(binary: Path, flavour: str, suffix: str, env: Mapping[str, str]) -> Result:
    """Run a program again over libfabric 2.x from the mpich wheel."""
    name = f"{binary.name}_{suffix}"
    message = "mpich is not installed"
    if NEWER.exists():
        return run(name, binary, flavour, ["ofi"], {"NETBOTTLENECK_LIBFABRIC": str(NEWER), **env})
    return Result(name, "SKIP" if may_skip(name, message) else "FAIL", message, "", 0.0)


def over_libfabric(binary: Path, flavour: str) -> Iterator[Callable[[], Result]]:
    """Yield a program's runs over another libfabric and another provider, which differs in libfabric's own code."""
    yield partial(run_newer, binary, flavour, "libfabric2", {})
    if flavour == "plain" and binary.name in OVER_PROVIDER:
        yield partial(run, f"{binary.name}_rxm", binary, flavour, OVER_PROVIDER[binary.name], LAYERED)
    if flavour == "plain" and binary.name in OVER_BOTH:
        yield partial(run_newer, binary, flavour, "rxm_libfabric2", LAYERED)


def report(result: Result) -> None:
    """Print one line for a program, and its output if it failed."""
    reason = f" ({result.reason})" if result.reason else ""
    print(f"{result.verdict} {result.name} {result.seconds:.1f} s{reason}", flush=True)
    if result.verdict == "FAIL" and result.output:
        print("".join(f"    {line}\n" for line in result.output.splitlines()[-200:]), end="", flush=True)


def main() -> int:
    """Build, run, report. Returns 0 if nothing failed and at least one program ran."""
    parser = argparse.ArgumentParser(description="Build and run the C tests.")
    parser.add_argument("--flavour", choices=sorted(FLAVOURS), default="plain")
    parser.add_argument("--filter", nargs="+", default=["*"], help="globs over program names, as in 'test_lanes*'")
    parser.add_argument("--jobs", type=int, default=2, help="of the compiler; one program more runs at a time")
    parser.add_argument("--seeds", type=int, help="seeds of the tests with random delays; default: a few")
    options = parser.parse_args()
    if options.seeds is not None:
        os.environ["TEST_SEEDS"] = str(options.seeds)
    signal.signal(signal.SIGTERM, end_all)
    found = sorted(TESTS.glob("test_*.c"))
    if options.flavour == "valgrind":
        found = [path for path in found if path.stem in UNDER_VALGRIND]
        if shutil.which(VALGRIND[0]) is None:
            print("valgrind is not installed", file=sys.stderr)
            return SKIPPED
    programs = [path for path in found if any(fnmatch.fnmatchcase(path.stem, glob) for glob in options.filter)]
    if not programs:
        print(f"no C test matches {' '.join(options.filter)}", file=sys.stderr)
        return 1
    try:
        binaries = build(options.flavour, programs, options.jobs)
    except RuntimeError as error:
        print(f"the core does not build ({options.flavour}): {error}", file=sys.stderr)
        return 1

    def runs(program: Path) -> Iterator[Callable[[], Result]]:
        binary, flavour = binaries[program], options.flavour
        if isinstance(binary, str):
            failed = Result(program.stem, "FAIL", "does not build", binary, 0.0)
            yield lambda: failed
            return
        if flavour == "valgrind":
            for arguments in UNDER_VALGRIND[program.stem]:
                name = "_".join((program.stem, "valgrind", *arguments[1:2]))
                yield partial(run, name, binary, flavour, arguments)
            return
        for case in APART.get(program.stem, ()):
            yield partial(run, f"{program.stem}_{case}", binary, flavour, [case])
        if program.stem not in APART:
            yield partial(run, program.stem, binary, flavour)
        if program.stem in OVER_LIBFABRIC and cbuild.libfabric_include() is not None:
            yield from over_libfabric(binary, flavour)

    def one(start: Callable[[], Result]) -> str:
        result = start()
        report(result)
        return result.verdict

    with ThreadPoolExecutor(options.jobs + 1) as pool:  # some of them wait most of the time
        verdicts = list(pool.map(one, [start for program in programs for start in runs(program)]))
    print(f"C tests, {options.flavour}, one program each:")
    passed, failed, skipped = (verdicts.count(verdict) for verdict in ("PASS", "FAIL", "SKIP"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
