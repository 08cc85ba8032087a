"""Trains a DDP model over a stand-in for NCCL that calls the real net plugin; prints a digest of its weights.

Arguments: NCCL's version, steps, and optionally `late` (netbottleneck is imported after torch.distributed was
initialised), `gloo` (the model's group is one of gloo), `named` (the model's group names a network), `unset` (the
script unsets NCCL_NET), `disagree` (NCCL takes another network on rank 1), `unrecorded` (rank 1 stops recording in
the middle), `again` (the arm fails on rank 1, and is opened again) or `twice` (a second run begins in the middle). The
stand-in chooses a network as NCCL does, and calls a plugin's table as NCCL's proxy does: see src/plugin/net.cc and
src/net.cc of NCCL. Its own network is gloo. Two ranks.
"""

import ctypes
import hashlib
import os
import sys
import time
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

VERSION = tuple(int(part) for part in sys.argv[1].split("."))
HOW = sys.argv[3] if len(sys.argv) > 3 else ""
HANDLE_BYTES, PROPERTIES_BYTES, HOST, LIMIT_S = 128, 256, 1, 60.0
INIT, PROPERTIES, LISTEN, CONNECT, ACCEPT, REGISTER, DEREGISTER, SEND, RECEIVE, TEST = (
    1,
    3,
    4,
    5,
    6,
    7,
    9,
    10,
    11,
    13,
)  # in a table

OPENED: list[bool] = []  # of an NCCL before 2.28: whether the plugin's init succeeded
Pointer, Int, Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Network:
    """A net plugin, called through its table of version 11, or 8 for an older NCCL."""

    def __init__(self, library: ctypes.CDLL, traffic_class: int) -> None:
        self._new = VERSION >= (2, 28)
        self._table = Pointer.in_dll(library, "ncclNetPlugin_v11" if self._new else "ncclNetPlugin_v8")
        self._class = Int(traffic_class)
        self._context = Pointer()
        self.send, self.receive = Pointer(), Pointer()

    @property
    def name(self) -> str:
        return ctypes.string_at(self._table.value or 0).decode()

    def _call(self, slot: int, *arguments: Any) -> None:
        address = Pointer.from_address(ctypes.addressof(self._table) + 8 * slot).value
        assert address is not None
        result = ctypes.CFUNCTYPE(Int, *map(type, arguments))(address)(*arguments)
        assert result == 0, f"result {result} of call {slot}"

    def properties(self) -> None:
        """Ask for the properties, as NCCL does for a network that a communicator takes."""
        room = ctypes.create_string_buffer(PROPERTIES_BYTES)
        self._call(PROPERTIES, Int(0), at(room))

    def opens(self) -> bool:
        """Return whether its init succeeds."""
        try:
            if self._new:
                self._call(INIT, at(self._context), ctypes.c_uint64(7), at(self._class), Pointer(), Pointer())
            else:
                self._call(INIT, Pointer())
        except AssertionError:
            return False
        return True

    def meet(self, store: Any, rank: int) -> None:
        """Connect both ways."""
        context = (self._context,) if self._new else ()
        handle, listener = ctypes.create_string_buffer(HANDLE_BYTES), Pointer()
        self._call(LISTEN, *context, Int(0), at(handle), at(listener))
        store.set(f"handle{rank}", handle.raw)
        peer = ctypes.create_string_buffer(store.get(f"handle{1 - rank}"), HANDLE_BYTES)
        until = time.monotonic() + LIMIT_S
        while not (self.send and self.receive):
            assert time.monotonic() < until, "no connection"
            if not self.send:
                self._call(CONNECT, *context, Int(0), at(peer), at(self.send), Pointer())
            if not self.receive:
                self._call(ACCEPT, listener, at(self.receive), Pointer())

    def swap(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Send one tensor's bytes, receive as many into the other."""
        nbytes = mine.numel() * mine.element_size()
        handles = [Pointer(), Pointer()]
        for comm, tensor, handle in zip((self.send, self.receive), (mine, theirs), handles, strict=True):
            self._call(REGISTER, comm, Pointer(tensor.data_ptr()), Size(nbytes), Int(HOST), at(handle))
        size: Any = Size(nbytes) if self._new else Int(nbytes)
        sent, received, data, tag = Pointer(), Pointer(), Pointer(theirs.data_ptr()), Int(0)
        profile = (Pointer(),) if self._new else ()
        while not received:
            self._call(
                RECEIVE, self.receive, Int(1), at(data), at(size), at(tag), at(handles[1]), *profile, at(received)
            )
        while not sent:
            self._call(SEND, self.send, Pointer(mine.data_ptr()), size, Int(0), handles[0], *profile, at(sent))
        for request in (received, sent):
            self._finish(request)
        for comm, handle in zip((self.send, self.receive), handles, strict=True):
            self._call(DEREGISTER, comm, handle)

    def _finish(self, request: Any) -> None:
        done, size, until = Int(0), Int(0), time.monotonic() + LIMIT_S
        while not done.value:
            assert time.monotonic() < until, "a transfer does not end"
            self._call(TEST, request, at(done), at(size))


def at(value: Any) -> Any:
    """Return a pointer to a value that the call may change. It does not keep the value."""
    return ctypes.cast(ctypes.byref(value), Pointer)


class Options:
    """Options of the stand-in, with NCCL's configuration."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        named = "IB" if HOW == "named" else None
        self.config = types.SimpleNamespace(net_name=named, traffic_class=-1, min_ctas=1)


class StandIn(dist.ProcessGroup):  # type: ignore[misc]
    """A process group that chooses its network with its first collective, as NCCL does."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.options = options
        self._store, self._rank = store, rank
        self._made: Any = None
        self._network: Network | None = None
        self._chosen = False

    def getBackendName(self) -> str:
        return "standin"

    @property
    def _gloo(self) -> Any:
        """Its own network, connected with the first collective."""
        if self._made is None:
            gloo = torch._C._distributed_c10d.ProcessGroupGloo
            store = dist.PrefixStore("gloo", self._store)
            self._made = gloo(store, self._rank, self.size(), dist.default_pg_timeout)
        return self._made

    def _choose(self) -> None:
        if self._chosen:
            return
        self._chosen = True
        config = self.options.config
        wanted = os.environ.get("NCCL_NET") or config.net_name
        plugin = os.environ.get("NCCL_NET_PLUGIN")
        if plugin:
            network = Network(ctypes.CDLL(f"libnccl-net-{plugin}.so"), config.traffic_class)
            named = wanted is None or wanted.lower() == network.name.lower()
            if VERSION < (2, 28) and not OPENED:  # with the first communicator, whatever network it has
                OPENED.append(network.opens())
            if named and (OPENED[0] if VERSION < (2, 28) else network.opens()):
                network.properties()
                network.meet(self._store, self._rank)
                self._network = network
                return
        if wanted not in (None, "Socket"):
            raise RuntimeError(f"no network {wanted}")

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._choose()
        if self._network is None:
            return self._gloo.allreduce(tensors, *([] if opts is None else [opts]))
        tensor = tensors[0]
        other = torch.empty_like(tensor)
        self._network.swap(tensor, other)
        tensor.add_(other)
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self._choose()
        return self._gloo.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def shutdown(self) -> None:
        """End nothing: the process ends soon."""


def fail_once(arms: Any) -> None:
    """Let the next attempt of this rank to open an arm fail."""
    try_out = arms._try_out

    def fails(*_: Any) -> None:
        arms._try_out = try_out
        raise ValueError("broken on purpose")

    arms._try_out = fails


def main() -> None:
    """Train, and print the digest, then what the environment says of NCCL."""
    module: Any = dist
    module.ProcessGroupNCCL, module.is_nccl_available = StandIn, lambda: True
    module.distributed_c10d.ProcessGroupNCCL = StandIn
    StandIn.Options = Options  # type: ignore[attr-defined]
    torch.cuda.nccl.version = lambda: VERSION  # type: ignore[assignment]
    dist.Backend.register_backend(
        "standin", lambda store, rank, size, timeout: StandIn(store, rank, size, Options()), devices=["cpu"]
    )
    if HOW != "late":
        import netbottleneck
    if HOW == "disagree" and os.environ["RANK"] == "1":
        nccl: Any = sys.modules["netbottleneck.runtime.nccl"]
        nccl._Arranged.queries = lambda _: 0
    if HOW == "unset":
        del os.environ["NCCL_NET"]
    dist.init_process_group("gloo" if HOW == "gloo" else "standin")
    import netbottleneck  # noqa: F401 - measures DDP models, by the environment
    from netbottleneck.hooks import ddp as hooks

    arms: Any = sys.modules["netbottleneck.runtime.nccl"]
    arms._nccl_here = lambda built: built  # torch may have loaded an NCCL of its own
    if HOW == "again" and dist.get_rank() == 1:
        fail_once(arms)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if HOW == "again":
        hooks.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(int(sys.argv[2])):
        if HOW == "twice" and step == int(sys.argv[2]) // 2:
            hooks.attach(ddp)
        if HOW == "unrecorded" and step == 10 and dist.get_rank() == 1:
            measured: Any = hooks.measured_by(ddp)
            measured.gradients._measuring_ends(RuntimeError("broken on purpose"))
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(16, 37, generator=generator)).square().mean().backward()
        optimizer.step()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    print(found.hexdigest(), os.environ.get("NCCL_NET"), os.environ.get("NCCL_NET_PLUGIN"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
