"""Peers of the benchmark: other libraries' all-reduce, and iperf3. netbottleneck bench --peers benchmarks/peers."""

from __future__ import annotations

from collections.abc import Mapping

from netbottleneck.bench.paths import Opener

from . import hvd, iperf, mpi

PEERS: Mapping[str, Opener] = {
    **{name: Opener(mpi.missing, mpi.Mpi) for name in (*mpi.OPEN_MPI, *mpi.MPICH, *mpi.ONECCL)},
    hvd.Horovod.name: Opener(hvd.missing, hvd.Horovod),
    hvd.HorovodMpi.name: Opener(hvd.missing, hvd.HorovodMpi),
    **{name: Opener(iperf.missing, iperf.Iperf) for name in iperf.IPERF},
}
