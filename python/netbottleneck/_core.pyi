"""Types of the C module. Every buffer is in place and belongs to the engine until its Work is done."""

from collections.abc import Callable, Sequence
from typing import Any, Never, Self, TypeAlias, final, type_check_only

# dtypes
UINT8: int
INT8: int
INT32: int
INT64: int
FLOAT16: int
BFLOAT16: int
FLOAT32: int
FLOAT64: int
# reductions
SUM: int
MIN: int
MAX: int
PRODUCT: int
# kinds of operation
ALLREDUCE: int
ALLGATHER: int
REDUCESCATTER: int
BROADCAST: int
BARRIER: int
JOIN: int
ALLTOALL: int

MISSING_MAX: int  # ranks that Comm.missing returns at most

VERSION: str
HAVE_OFI: bool  # built with libfabric's headers
HAVE_DEVICE_CODE: bool  # built where nvcc is, so the kernels for a GPU are there
EVENTS: dict[str, int]  # name of each event kind, as in csrc/trace/event.h without NB_EV_

# An object with the buffer protocol (writable, contiguous), or (address, bytes) of memory the caller keeps alive
# by the `keep` argument.
_Memory: TypeAlias = Any

def now_ns() -> int:
    """CLOCK_MONOTONIC in ns: the clock of every record."""

def dtype_size(dtype: int, /) -> int: ...
def transports() -> list[str]:
    """The names of the transports in this build."""

def spawn_apart(arguments: list[bytes], input: int, /) -> int:
    """Start a process that is no child of this one, and return its number. input: descriptor of its standard input.

    arguments: 1 to 15; the first is its path. It has a session of its own. Raises ValueError, or Error where this
    process adopts orphans (process 1, or PR_SET_CHILD_SUBREAPER), or where the process cannot be started.
    """

def providers(library: str | None = None) -> list[tuple[str, str]]:
    """(provider, version) of each libfabric provider a lane could use. Raises Error without libfabric."""

def cuda(library: str | None = None) -> tuple[str, int, list[tuple[str, str, str]]]:
    """(path, version, devices) of the CUDA driver: 12040 is CUDA 12.4. Opens each device's primary context.

    A device is (name, pinning, kernels): why it cannot pin memory and why it cannot load the kernels, "" if it can.
    One that cannot be opened has no name, and that reason for both. Raises Error without a driver.
    """

def libfabric(library: str | None = None) -> tuple[str, str]:
    """(path, version) of the libfabric that would be used. Raises Error naming the paths that were tried."""

def interfaces(spec: str | None = None) -> list[tuple[str, str]]:
    """(name, address) of the interfaces that `spec` (NCCL_SOCKET_IFNAME's syntax) names."""

def isa() -> str:
    """The reduction kernels in use: "generic" or "avx2"."""

def reduce(destination: _Memory, source: _Memory, dtype: int, op: int, isa: str | None = None) -> None:
    """destination = destination op source, by the kernel of `isa`. For tests and measurements."""

def reduce_pair(one: _Memory, other: _Memory, dtype: int, op: int) -> None:
    """one = other = one op other in one pass, as ranks that share memory do. For tests and measurements.

    Raises ValueError if there is no such kernel. SUM has one for every dtype."""

def simulate(
    program: tuple[_Memory, _Memory, _Memory, _Memory, _Memory, int],
    plan: tuple[int, int, int, _Memory, int, int],
    cost: tuple[int, int, int, int, int, _Memory, _Memory, _Memory],
    result: tuple[_Memory, _Memory, _Memory, _Memory, _Memory],
    /,
) -> int:
    """Fill the arrays of `result`, GIL released, and return the number of operations: csrc/sim/sim.h.

    program: starts, work_ns (int64), codes (int32), bytes (int64), kinds (int32), steps. plan: rule, in_flight,
    buckets, bucket_of (int32), fusion_bytes, cycle_ns. cost: algorithm, size, ranks_per_host, contention, flags (1:
    pipelined, 2: sums of uncompressed bytes, 4: the table is clamped), numbers (float64: alpha_ns, host_alpha_ns,
    byte_ns, host_byte_ns, add_byte_ns, copy_byte_ns, launch_ns, ratio, encode_byte_ns, decode_byte_ns, fixed_ns), the
    table's bytes and ns (float64). result: reached_ns, passed_ns (int64), ops (int64, 8 each), op_of (int32), submit_ns
    (int64).

    Raises ValueError for invalid input, and for times that are too long."""

def collective_shape(algorithm: int, size: int, ranks_per_host: int, /) -> tuple[float, float, float, float]:
    """(steps between hosts, bytes out of a host for a byte, steps inside a host, bytes inside it): csrc/sim/shape.h.

    algorithm: 0 ring, 1 two levels, 2 tree, 3 halving and doubling, 4 direct."""

def reduce_times(
    destination: _Memory, source: _Memory, nbytes: int, dtype: int, samples: int = 1, least_ns: int = 0
) -> list[tuple[int, int]]:
    """(calls, ns) of each sample of destination += source, nbytes a call, by the best kernel; GIL released.

    Calls go through both memories piece by piece, and begin anew at their end: memories of nbytes stay in the caches
    that hold them, larger ones do not. A sample lasts least_ns or one call. ValueError for what cannot be."""

def copy_times(
    destination: _Memory, source: _Memory, nbytes: int, samples: int = 1, least_ns: int = 0
) -> list[tuple[int, int]]:
    """As reduce_times, for memcpy."""

def kernel_times(
    kernel: str,
    device: int,
    destination: int,
    source: int,
    count: int,
    samples: int = 1,
    calls: int = 1,
    library: str | None = None,
) -> list[float]:
    """Mean ns of a call of each sample of `calls` calls, by a GPU's events; GIL released. After one call for warmth.

    kernel: a name of csrc/cuda/kernels.h, which says what it does with the addresses in device memory; device: the
    number of the GPU that has them; count: elements, or pieces. It runs on a stream of its own: wait for the memory's
    other work before. ValueError for what cannot be, Error without a driver, or from a build without kernels."""

def staging_times(
    way: str, device: int, address: int, nbytes: int, samples: int = 1, library: str | None = None
) -> list[float]:
    """Ns of each sample until the memory at an address of a GPU has gone its way; GIL released. One before for warmth.

    way: "out" to pinned memory, "back" from there, so that the memory has garbage, or "both", one after the other in
    each chunk, both at once over all. Chunks, streams and order are those of the engine's collectives, without any
    work on a chunk between. Wait for the memory's other work before. ValueError for what cannot be, Error without a
    driver, or if the memory cannot be pinned."""

def name_key(name: str, /) -> int:
    """Return the key of an operation's name: 64-bit FNV-1a of its UTF-8."""

def stamp_at(recorder: Recorder, kind: int, times_ns: Sequence[int], keys: Sequence[int], spin: bool = False) -> None:
    """Records an event `kind` for each key at its time (of now_ns()), in the given order; returns after the last.

    GIL released; asleep until then, or busy with `spin`. Runs signal handlers. ValueError for lengths that differ."""

@final
class Arena:
    """Page-aligned, zeroed memory (memfd where the kernel allows), with the writable buffer protocol.

    _Memory is freed when the last buffer and the object are gone."""

    def __new__(cls, nbytes: int) -> Self: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fd(self) -> int: ...

@final
class Listener:
    """Rank 0's listener, to which the other ranks connect.

    Raises Error (EADDRINUSE, ENODEV) naming the port or the interface."""

    def __new__(
        cls, address: str | None = None, ifname: str | None = None, ports: tuple[int, int] = (0, 0)
    ) -> Self: ...
    @property
    def address(self) -> str:
        """ "host:port", the address for the other ranks."""

    def close(self) -> None: ...

@final
class Recorder:
    """A ring file of events. Any thread may record events; recording never blocks.

    timeline: also records the events that only a timeline uses.
    """

    def __new__(cls, path: str, capacity: int, rank: int, *, timeline: bool = False) -> Self: ...
    def put(
        self,
        kind: int,
        key: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        e: int = 0,
        *,
        host: bool = False,
    ) -> None:
        """Record an event now. host: with the host's time, also where a device is followed."""

    def put_at(
        self, time_ns: int, kind: int, key: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0
    ) -> None: ...
    def stamper(
        self, kind: int, key: int = 0, a: int = 0, b: int = 0, *, awaited: bool = False, host: bool = False
    ) -> Stamper:
        """What records this event. awaited: settle() waits until it is freed."""

    def put_ready(self, offsets: list[int], sent: list[tuple[int, tuple[int, ...]]], since_ns: int, /) -> int:
        """Stamp GRAD_READY for each parameter, with its index as key.

        offsets: ns after the begin of a backward pass, an entry for each parameter; 0 or less: it has none. sent: when
        each bucket was sent, and the parameters in it, in order of time; () if unknown. The begin is the latest time by
        which no bucket was sent before its gradients were ready; it is late by at most what a reducer does between a
        gradient and the bucket that it completes. Returns it; 0, without stamps, if it lies before since_ns (the clock
        of the offsets was set during the pass) or if there is no offset.
        """

    def operation(self, key: int, nbytes: int, bucket: int, about: int, /) -> Operation:
        """What records the events of an operation that is repeated. about: its kind and dtype, as in OP_SUBMIT."""

    def settle(self) -> bool:
        """Wait, at most 0.1 s, until all awaited stampers are freed."""

    def follow(self, tensor: object, library: str | None = None, /) -> None:
        """From now on, events get the time at which the current stream of the tensor's device reaches them.

        The times are on the host's clock. read() writes the events. library: the CUDA driver in place of libcuda.so.1.
        Raises Error without a driver, ValueError for a tensor in host memory and for a second device.
        """

    def read(self) -> int:
        """Write the events that the device has passed; return the number of the others. Raises Error for a failure."""

    @property
    def device_stream(self) -> int | None:
        """Address of a stream of our own on the device that is followed."""

    @property
    def detailed(self) -> Never: ...  # can only be set
    @detailed.setter
    def detailed(self, value: bool) -> None:
        """False: a device's events of single gradients are left out."""

    @property
    def step(self) -> int: ...
    @step.setter
    def step(self, value: int) -> None: ...
    @property
    def overwritten(self) -> int: ...
    def close(self) -> None: ...

@final
@type_check_only
class Stamper:
    """Made by Recorder.stamper and Operation.started: a C callable that records an event."""

    def __call__(self, *args: object) -> None: ...
    def twin(self) -> Stamper:
        """What records the same event and is not awaited. Of all calls of the two, the first one records."""

@final
@type_check_only
class Operation:
    """Made by Recorder.operation. Numbers its turns from 0."""

    def submitted(self) -> int:
        """Record OP_SUBMIT of the next turn; return its time in ns."""

    def started(self, host: bool = False, blocked: bool = False, moved: int = 0, /) -> Stamper:
        """Record OP_START of this turn; return an awaited stamper of its OP_DONE. blocked: at the time of OP_SUBMIT.

        moved: 1 + the tensor bytes that travel; 0: those of the operation; 1: unknown."""

@final
class Work:
    """A pending operation."""

    def test(self) -> bool:
        """True when done. Raises the operation's failure."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits with the GIL released (signals are served); False after timeout_s. Raises the operation's failure:
        PeerError naming the rank, WireError, MismatchError, TimeoutError."""

    def times(self) -> tuple[int, int, int, int, int]:
        """(submit, agreed, start, first byte, done) in ns of now_ns(); 0: not yet."""

@final
class Comm:
    """A job's communicator: all ranks. One communication thread, which never touches Python.

    shm: "auto", "0" or "1": memory shared between ranks whose `host` (16 bytes) is equal; without host it is off.
    algorithm: of all-reduces over the network: "auto" (rank 0 selects by measured costs), or "ring",
    "recursive_doubling", "halving_doubling", "two_level" (a ring if no host has several ranks). Rank 0's value applies.
    timeout_s: deadline for a silent peer. start_timeout_s: deadline for joining and opening of lanes; default:
    timeout_s. cpus: of the communication threads of this host's ranks, in the order of the ranks.

    Joining releases the GIL and serves signals: an exception of a handler, such as KeyboardInterrupt, ends it. To the
    other ranks this one has then left.

    Raises, before any byte of data moves: ValueError for a bad argument; Error with errno ENOENT for a missing
    libfabric, ENODEV for a missing provider or interface; MismatchError when ranks disagree on `tag`; TimeoutError
    naming the missing ranks."""

    def __new__(
        cls,
        rank: int,
        size: int,
        *,
        secret: bytes,
        listener: Listener | None = None,
        address: str | None = None,
        tag: str = "",
        transport: str = "tcp",
        streams: int = 0,
        provider: str | None = None,
        library: str | None = None,
        ifname: str | None = None,
        ports: tuple[int, int] = (0, 0),
        segment_bytes: int = 0,
        timeout_s: float = 30.0,
        start_timeout_s: float = ...,
        stall_s: float = 60.0,
        stall_end_s: float = 0.0,
        recorder: Recorder | None = None,
        shm: str = "auto",
        host: bytes | None = None,
        algorithm: str = "auto",
        cpus: tuple[int, ...] = (),
        congestion: str | None = None,
        cuda_library: str | None = None,
        cuda_gather_bytes: int = 0,
    ) -> Self: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def failed(self) -> bool:
        """True if a failure ended it, such as a lost rank; close() must still be called."""

    def submit(
        self,
        name: str,
        kind: int,
        memory: _Memory | Sequence[_Memory],
        dtype: int,
        *,
        op: int = ...,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        bucket: int = 0,
        keep: Any = None,
        awaited: bool = False,
        group: int = 0,
        shape: int = 0,
        limit_s: float = 0.0,
    ) -> Work:
        """Starts an operation in place; `keep` lives as long as the transfer. awaited: the caller waits for it at once,
        so that no thread has to be woken. ValueError for an operation that no rank could run, or while one of this
        name is pending here. group: only the ranks of this group take part; root is a rank of the group. shape: a
        64-bit hash of the shape of `memory`; ranks with different hashes are refused. limit_s: after which the
        operation fails, and its error names the ranks that have not submitted it; 0: never. That of the rank that
        submits it first counts."""

    def group(self, number: int, ranks: Sequence[int]) -> None:
        """Creates a group of some ranks, in ascending order and including this one. All its ranks use the same
        number, above 0. The group lives until close(). ValueError for invalid ranks, or a number in use."""

    def map(self, arena: Arena, /) -> None:
        """Registers memory that many operations will use with the lanes."""

    def exchange(
        self, blob: bytes, *, limit_s: float = 0.0, name: str | None = None, raised: list[BaseException] = ...
    ) -> list[bytes]:
        """All-gather of equal-length blobs over the lanes, by rank; blocking, GIL released. limit_s: deadline, after
        which TimeoutError names the missing ranks on the others; 0: none. The communicator stays usable. Exchanges
        match by their order; one with a name of its own matches by that, so that some ranks may leave it out. raised:
        gets the exceptions of signal handlers, which then do not end the exchange."""

    def info(self) -> dict[str, Any]:
        """streams_open, streams_used, bytes_out, bytes_in, lanes_lost, provider, clock_offset_ns, and
        probe: list of (lanes, bytes, ns). ports: at which its lanes accept TCP connections; [] with libfabric.
        refused: arrivals and messages on the lanes that failed authentication, and were dropped."""

    def missing(self, name: str, group: int = 0) -> list[int]:
        """The first MISSING_MAX ranks that had not submitted an operation at its last stall report; [] otherwise."""

    def record_clock(self, recorder: Recorder | None, /) -> None:
        """Record this rank's clock against rank 0's in a Recorder too, about once a second; None: no longer.

        Replaces the recorder of an earlier call. ValueError for a closed recorder."""

    def notices(self) -> list[str]:
        """Notices for the user since the last call: stalls, lost lanes."""

    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...

@final
class GradHook:
    """The gradient hook backend: records "gradient ready", counts buckets down and submits them, all in C.

    parameters[i] belongs to bucket_of[i], at byte offset[i] of the bucket's memory; views[i] is a tensor over that
    memory. `grad` stays the tensor that autograd or the user put there, and wait() leaves the sum in it. It is copied
    to the bucket and back; from `direct_bytes` on, it is reduced in its own memory unless another tensor shares it."""

    def __new__(
        cls,
        parameters: Sequence[Any],
        views: Sequence[Any],
        bucket_of: Sequence[int],
        offset: Sequence[int],
        buckets: Sequence[tuple[str, int, int, int, int]],
        *,
        recorder: Recorder | None = None,
        direct_bytes: int = 262144,
        passes: int = 1,
        keep: Any = None,
        flags: Sequence[Any] | None = None,
    ) -> Self:
        """buckets: a tuple (name, dtype, address, bytes, priority) for each. flags: a tensor over the end of each
        bucket's memory, with an element for each of its parameters; then a gradient that no rank has stays None."""

    def hook(self, index: int, /) -> Callable[[Any], None]:
        """The C callable for a hook of the node that accumulates the gradient of parameters[index]."""

    def target(
        self,
        sink: Comm | Callable[[int], Any] | None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        op: int = ...,
        group: int = 0,
        limit_s: float = 0.0,
    ) -> None:
        """Sets the destination of complete buckets: a Comm, or a group of it; a callable that gets the bucket's index
        (its memory then has all gradients, without direct ones) and returns an object with wait(); None: no
        destination (null). limit_s: of a Comm's operations, as in Comm.submit. Only between steps."""

    def flush(self) -> None:
        """Submits every bucket that is not submitted; without flags, missing gradients become zeros."""

    def wait(self) -> None:
        """Waits for all buckets, GIL released; re-arms the hook. Raises as Work.wait, and RuntimeError
        for a gradient that was deleted in flight."""

    def hold(self) -> None:
        """Sends nothing more in this pass before flush(), so that autograd may add to a gradient several times."""

    def discard(self) -> None:
        """Ends a pass that has failed: flush(), then wait for all buckets without copying sums back; re-arms the hook.
        Every rank calls it. Raises as wait()."""

    def ready_order(self) -> list[int]:
        """Indices of the parameters in the order in which they became ready in the last complete step."""

    def sparse(self) -> list[int]:
        """Indices of the parameters with sparse gradients, which were made dense, in ascending order."""

    @property
    def passes(self) -> int: ...
    @passes.setter
    def passes(self, value: int) -> None: ...
    @property
    def paused(self) -> bool:
        """While true, gradients are recorded and accumulate, and nothing is sent."""

    @paused.setter
    def paused(self, value: bool) -> None: ...
    @property
    def on_first(self) -> Callable[[], Any] | None:
        """Called at the first gradient of each pass that is not paused; a pass begins after wait()."""

    @on_first.setter
    def on_first(self, call: Callable[[], Any] | None) -> None: ...
    @property
    def begun(self) -> bool:
        """True from the first complete gradient of a step until wait()."""

    @property
    def pending(self) -> int:
        """Buckets submitted and not waited for."""
