"""Makes ring files in the format of csrc/trace/ring.h, and complete run folders of synthetic steps."""

import json
import struct
from pathlib import Path

from netbottleneck.trace.ring_file import EVENTS

MS = 1_000_000
HEADER_BYTES = 4096


class RingWriter:
    """One ring file. `close` writes it; `orderly=False` leaves it as a killed process would."""

    def __init__(self, path, rank=0, capacity=1 << 16, mono_ns=0, wall_ns=10**18, version=4):
        self.path, self.rank, self.capacity, self.version = Path(path), rank, capacity, version
        self.once = capacity // 4 if version >= 4 else 0
        self.mono_ns, self.wall_ns = mono_ns, wall_ns
        self.events = []
        self.taken = 0

    def put(self, time_ns, kind, step=0, key=0, **fields):
        number, self.taken = self.taken, self.taken + 1
        times, place = divmod(max(0, number - self.once), self.capacity - self.once)
        if times and self.version < 4:
            return
        code = (EVENTS[kind] if isinstance(kind, str) else kind) + 256 * times
        values = [fields.get(name, 0) & (1 << 64) - 1 for name in "abcde"]
        slot = min(number, self.once) + place
        self.events[slot : slot + 1] = [struct.pack("<qIIQ5Q", time_ns, code, step, key, *values)]

    def tear(self):
        """Add a slot that was reserved but never filled."""
        self.taken += 1
        self.events.append(bytes(64))

    def header(self, closed):
        fields = struct.pack(
            "<8sIIQIIqqQQQQ",
            b"NBRING1\0",
            self.version,
            64,
            self.capacity,
            self.rank,
            77,
            self.mono_ns,
            self.wall_ns,
            self.taken,
            int(closed),
            self.once,
            0,
        )
        return fields.ljust(HEADER_BYTES, b"\0")

    def close(self, orderly=True, cut_bytes=0):
        body = b"".join(self.events)
        if not orderly:
            body = body.ljust(self.capacity * 64, b"\0")
        data = self.header(orderly) + body
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(data[: len(data) - cut_bytes])


PARAMETERS = [
    {"name": "conv1.weight", "bytes": 1 << 20, "dtype": "float32", "bucket": 1},
    {"name": "conv1.bias", "bytes": 1 << 10, "dtype": "float32", "bucket": 1},
    {"name": "layer1.weight", "bytes": 6 << 20, "dtype": "float32", "bucket": 1},
    {"name": "fc.weight", "bytes": 2 << 20, "dtype": "float32", "bucket": 0},
]
BUCKETS = [
    {"name": "bucket.0", "key": 0x8000000000000001, "bytes": 2 << 20, "dtype": "float32", "parameters": [3]},
    {"name": "bucket.1", "key": 0x22, "bytes": (7 << 20) + (1 << 10), "dtype": "float32", "parameters": [2, 1, 0]},
]
MODULES = ["conv1", "layer1", "fc"]
NATIVE = ("ofi", "tcp")


class FakeRun:
    """A run of two ranks or more: forward 10 ms, backward 20 ms, two buckets, optimizer 2 ms, as its settings say.

    transfer_ms: by transport, of bucket.0 and bucket.1; late_ms: by rank, a pause before the forward; busy_cores: how
    many each rank keeps busy; costs_fs: of a step, a byte and a byte added, of two levels and a byte there,
    where a transport is native; meta, about: what a rank's description, and that of each transport in it, says too.
    room: by name, how many events a ring holds. version: of the rings. begin_ns: of the run, on rank 0's clock.
    """

    def __init__(self, folder, size=2, transports=("bare", "stock", "ofi"), **settings):
        self.folder, self.size, self.transports = Path(folder), size, tuple(transports)
        self.transfer_ms = {"stock": (35, 123), "ofi": (9, 31), "tcp": (9, 31)} | settings.pop("transfer_ms", {})
        self.late_ms = settings.pop("late_ms", {})
        self.blocks, self.block_steps = settings.pop("blocks", 6), settings.pop("block_steps", 6)
        self.clock_skew_ns = settings.pop("clock_skew_ns", {})
        self.killed = settings.pop("killed", None)
        self.bare_ms = settings.pop("bare_ms", 172)
        self.run = {
            "version": 1,
            "id": "fake",
            "command": ["train.py"],
            "started_wall_ns": 10**18,
            "size": size,
            "arms": list(self.transports),
            "network": {"how": "a lab", "link_bps": 2e9, "flow_bps": [5e8], "verified": {"link_bps": 1.9e9}},
            "model": "fake net",
            "notes": [],
        } | settings.pop("run", {})
        self.probe = settings.pop("probe", [[1, 6_000_000, 100 * MS], [4, 24_000_000, 101 * MS]])
        self.costs_fs = settings.pop("costs_fs", None)
        self.busy_cores = settings.pop("busy_cores", None)
        self.meta = settings.pop("meta", {})
        self.about = settings.pop("about", {})
        self.room = settings.pop("room", {})
        self.version = settings.pop("version", 4)
        self.begin_ns = settings.pop("begin_ns", 0)
        assert not settings, settings

    def write(self):
        ranks = self.folder / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(json.dumps(self.run))
        rings = []
        for rank in range(self.size):
            (ranks / f"{rank}.meta.json").write_text(json.dumps(self._meta(rank)))
            begin = self._clock(rank, self.begin_ns)
            own = {
                name: RingWriter(
                    ranks / f"{rank}.{name}.ring",
                    rank,
                    self.room.get(name, 1 << 16),
                    mono_ns=begin,
                    wall_ns=10**18 + self.begin_ns,
                    version=self.version,
                )
                for name in ("train", *self.transports)
                if name == "train" or name in NATIVE
            }
            for name in self.transports:
                if name in NATIVE:
                    own[name].put(begin, "CLOCK", a=self.clock_skew_ns.get(rank, 0), b=1000)
                    if self.costs_fs is not None:
                        own[name].put(
                            self._clock(rank, self.begin_ns), "COSTS", **dict(zip("abcde", self.costs_fs, strict=False))
                        )
            rings.append(own)
        now, index = self.begin_ns + 100 * MS, 1
        for block in range(self.blocks):
            transport = self.transports[block % len(self.transports)]
            for _ in range(self.block_steps):
                now = self._step(rings, now, index, block, transport)
                index += 1
        for rank, own in enumerate(rings):
            if rank == self.killed:
                own["train"].put(self._clock(rank, now), "STEP_BEGIN", index, a=self.blocks, b=1)
                own["train"].tear()
            for ring in own.values():
                ring.close(orderly=rank != self.killed)
        return self.folder

    def _clock(self, rank, time_ns):
        return time_ns + self.clock_skew_ns.get(rank, 0)

    def _meta(self, rank):
        info = {}
        if "stock" in self.transports:
            info["stock"] = {"provider": "gloo"}
        for name in self.transports:
            if name in NATIVE:
                info[name] = {
                    "streams_open": 8,
                    "streams_used": 4,
                    "provider": f"{name} fake",
                    "bytes_out": 9,
                    "bytes_in": 9,
                    "probe": self.probe,
                    "clock_offset_ns": self.clock_skew_ns.get(rank, 0),
                }
        info = {name: {**entry, **self.about.get(name, {})} for name, entry in info.items()}
        return {
            "version": 1,
            "rank": rank,
            "size": self.size,
            "hostname": f"host{rank}",
            "host_id": f"h{rank}",
            "pid": 77,
            "parameters": PARAMETERS,
            "modules": MODULES,
            "buckets": BUCKETS,
            "transports": info,
            "finished": rank != self.killed,
            "error": None,
        } | self.meta

    def _step(self, rings, begin, index, block, transport):
        """One step on all ranks; says when it ends."""
        jitter = index * 7 % 5 * 100_000
        if transport in ("bare", "single"):
            end = begin + (self.bare_ms if transport == "bare" else 33) * MS + jitter
            for rank, own in enumerate(rings):
                if transport == "bare" or rank == 0:
                    self._bounds(own["train"], rank, (begin, end), (index, block, transport))
            return end
        late = max(self.late_ms.get(rank, 0) for rank in range(self.size)) * MS
        ready0, ready1 = begin + 15 * MS + jitter, begin + 30 * MS + jitter
        first, second = (int(t * MS) for t in self.transfer_ms.get(transport, (0, 0)))
        start0, start1 = ready0 + late, max(ready1 + late, ready0 + late + first)
        done0, done1 = start0 + first, start1 + second
        end = max(done1, ready1 + late) + 2 * MS
        for rank, own in enumerate(rings):
            self._rank_step(own, rank, (index, block, transport), (begin, jitter, done0, done1, start0, start1, end))
        return end + 1

    def _bounds(self, ring, rank, span, what):
        index, block, transport = what
        number = self.transports.index(transport)
        used = [0 if self.busy_cores is None else int(self.busy_cores * at) for at in span]
        ring.put(self._clock(rank, span[0]), "STEP_BEGIN", index, a=block, b=number, c=int(index % 5 == 0), d=used[0])
        ring.put(self._clock(rank, span[1]), "STEP_END", index, d=used[1])

    def _rank_step(self, own, rank, what, times):
        index, _, transport = what
        begin, jitter, done0, done1, start0, start1, end = times
        train = own["train"]
        lag = self.late_ms.get(rank, 0) * MS

        def put(ring, at, kind, key=0, **fields):
            ring.put(self._clock(rank, at), kind, index, key, **fields)

        self._bounds(train, rank, (begin, end + 1), what)
        forward = begin + lag
        put(train, forward, "FORWARD_BEGIN")
        if index % 5 == 0:
            for module in range(3):
                put(train, forward + module * 3 * MS, "FORWARD_BEGIN", module + 1)
                put(train, forward + (module * 3 + 2) * MS, "FORWARD_END", module + 1)
        put(train, forward + 10 * MS, "FORWARD_END")
        ready = {3: 15, 2: 22, 1: 29, 0: 30}
        for parameter, at in ready.items():
            put(train, forward + at * MS + jitter, "GRAD_READY", parameter)
        put(train, forward + 30 * MS + jitter, "WAIT_BEGIN")
        put(train, end - 2 * MS, "WAIT_END")
        put(train, end - 2 * MS, "OPTIMIZER_BEGIN")
        put(train, end, "OPTIMIZER_END")
        if transport == "null":
            return
        ring = own.get(transport, train)
        for number, (at, start, done) in enumerate(((15, start0, done0), (30, start1, done1))):
            bucket = BUCKETS[number]
            key = bucket["key"]
            submit = forward + at * MS + jitter
            put(ring, submit, "OP_SUBMIT", key, a=index, b=bucket["bytes"], c=number + 1, e=6 << 8 | 3 << 32)
            if ring is train:
                put(ring, submit, "OP_START", key, a=index)
                put(ring, done, "OP_DONE", key, a=index)
            else:
                put(ring, start, "OP_AGREED", key, a=index)
                put(ring, start, "OP_START", key, a=index)
                put(ring, start + 1000, "OP_FIRST_BYTE", key, a=index)
                half = bucket["bytes"] // 2
                for lane in range(2):
                    put(ring, done, "OP_LANE", key, a=index, b=lane, c=half, d=half)
                put(ring, done, "OP_DONE", key, a=index, b=2 * half, c=2 * half, d=1)
