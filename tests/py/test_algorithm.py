"""The algorithm of an all-reduce: chosen by measured costs, pinned by a variable, written into the record."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from conftest import Ranks

from netbottleneck import _core
from netbottleneck.config import ALGORITHMS, settings
from netbottleneck.trace import ring_reader

OVER = {"NETBOTTLENECK_SHM": "0", "NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_TIMEOUT_S": "60"}
SUMS = """
import hashlib
import json
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import job, ops
ops.init()
rank, size = ops.rank(), ops.size()
digest = hashlib.sha256()
wrong = 0
for code in ("float32", "float16", "int64"):
    for n in (1, 1000, 70001):
        each = [(np.random.default_rng([n, r]).random(n) * 9).astype(code) for r in range(size)]
        got = nb.allreduce(each[rank], ops.Max, f"max.{code}.{n}")
        wrong += int((got != np.max(each, axis=0)).sum())
        got = nb.allreduce(each[rank], ops.Sum, f"sum.{code}.{n}")
        want = np.sum(np.asarray(each, np.float64), axis=0)
        limit = 0.02 if code == "float16" else 1e-5
        wrong += int((np.abs(got.astype(np.float64) - want) > limit * np.abs(want)).sum())
        digest.update(got.tobytes())
sent = np.arange(3 * size, dtype=np.int64) + 1000 * rank
got = nb.alltoall(sent)
want = np.concatenate([np.arange(3 * rank, 3 * rank + 3) + 1000 * r for r in range(size)])
wrong += int((got != want).sum()) + int((sent != np.arange(3 * size) + 1000 * rank).sum())
print("record", json.dumps([digest.hexdigest(), wrong, job.current().comm.info()["costs"]]))
ops.shutdown()
"""
TRAIN = """
import hashlib
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import ops
ops.init()
rows = np.random.default_rng(2 + ops.rank()).standard_normal((64, 300)).astype(np.float32)
weights = np.random.default_rng(1).standard_normal((300, 40)).astype(np.float32)
for step in range(20):
    gradient = rows.T @ (rows @ weights) / len(rows)
    weights -= np.float32(0.05) * nb.allreduce(gradient, ops.Average, "gradient")
print("record", hashlib.sha256(weights.tobytes()).hexdigest())
ops.shutdown()
"""


KILLED = """
import os
import signal
import numpy as np
from netbottleneck import config
from netbottleneck.runtime import job
from netbottleneck.runtime.session import open_session
session = open_session(config.settings({"transports": "tcp", "start_step": 0}))
comm = session.arms["tcp"].comm
small = np.ones(1000, np.float32)
comm.submit("small", job.core().ALLREDUCE, small, job.core().FLOAT32).wait()
print("record", *comm.info()["costs"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


PINNED = """
import os
import numpy as np
from netbottleneck import config
from netbottleneck.runtime import job
from netbottleneck.runtime.session import open_session
session = open_session(config.settings({"transports": "tcp", "start_step": 0}))
comm = session.arms["tcp"].comm
line = np.ones(100_000, np.float32)
for _ in range(3):
    comm.submit("line", job.core().ALLREDUCE, line, job.core().FLOAT32).wait()
os._exit(0)
"""


def marked_output(stdout: str) -> str:
    return stdout.split("record ", 1)[1].strip()


@pytest.mark.parametrize(
    ("size", "algorithm", "transport"),
    [(2, "auto", "tcp"), (3, "auto", "ofi"), (3, "recursive_doubling", "ofi"), (3, "halving_doubling", "tcp")],
)
def test_sums_are_right_and_equal_on_all_ranks(plain_ranks: Ranks, size: int, algorithm: str, transport: str) -> None:
    variables = {**OVER, "NETBOTTLENECK_ALGORITHM": algorithm, "NETBOTTLENECK_TRANSPORT": transport}
    results = plain_ranks(size, SUMS, env=variables)
    found = [json.loads(marked_output(result.stdout)) for result in results]
    assert [wrong for _, wrong, _ in found] == [0] * size
    assert len({digest for digest, _, _ in found}) == 1
    assert (min(found[0][2][:3]) > 0) == (algorithm == "auto")
    assert found[0][2][3:] == [0, 0]  # of two levels, which one host has not
    assert all(costs == found[0][2] for _, _, costs in found)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "halving_doubling"])
def test_two_runs_with_one_seed_and_algorithm_give_the_same_weights(plain_ranks: Ranks, algorithm: str) -> None:
    variables = {**OVER, "NETBOTTLENECK_ALGORITHM": algorithm, "NETBOTTLENECK_TRANSPORT": "tcp"}
    weights = [marked_output(result.stdout) for _ in range(2) for result in plain_ranks(3, TRAIN, env=variables)]
    assert len(set(weights)) == 1


@pytest.mark.parametrize(
    ("algorithm", "recorded"),
    [
        ("ring", "ring all-reduce"),
        ("recursive_doubling", "recursive doubling"),
        ("halving_doubling", "halving-doubling"),
    ],
)
def test_the_record_names_the_algorithm_that_was_pinned(
    plain_ranks: Ranks, tmp_path: Path, algorithm: str, recorded: str
) -> None:
    plain_ranks(2, PINNED, {**OVER, "NETBOTTLENECK_ALGORITHM": algorithm, "NETBOTTLENECK_DIR": str(tmp_path / "run")})
    found = ring_reader.load(tmp_path / "run").collectives
    assert [c.algorithm for c in found if c.tensor_bytes == 400_000] == [recorded] * 6


def test_the_record_of_a_killed_job_has_the_costs_of_its_choice(plain_ranks: Ranks, tmp_path: Path) -> None:
    results = plain_ranks(2, KILLED, {**OVER, "NETBOTTLENECK_DIR": str(tmp_path / "run")}, check=False)
    assert [result.code for result in results] == [-signal.SIGKILL] * 2, results
    for result, rank in zip(results, ring_reader.load(tmp_path / "run").ranks, strict=True):
        (tcp,) = rank.transports
        known = [float(word) for word in marked_output(result.stdout).split()]
        assert tcp.costs == pytest.approx(known[:3], abs=1e-6)  # a femtosecond
        assert min(known[:3]) > 0


def test_disagreeing_ranks_get_an_error(plain_ranks: Ranks) -> None:
    variables = {**OVER, "NETBOTTLENECK_TRANSPORT": "tcp"}
    names = ("ring", "halving_doubling")
    for result in plain_ranks(2, SUMS, lambda rank: {**variables, "NETBOTTLENECK_ALGORITHM": names[rank]}, check=False):
        assert result.code != 0
        assert "algorithm=ring" in result.stderr
        assert "algorithm=halving_doubling" in result.stderr


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="NETBOTTLENECK_ALGORITHM=tree: must be one of auto, ring"):
        settings(environ={"NETBOTTLENECK_ALGORITHM": "tree"})


def test_an_alltoall_of_uneven_parts_is_refused(plain_ranks: Ranks) -> None:
    script = (
        "import numpy as np, netbottleneck as nb\nfrom netbottleneck.runtime import ops\nops.init()\n"
        "try:\n    nb.alltoall(np.zeros(3))\nexcept ValueError as error:\n    print('record', error)\nops.shutdown()\n"
    )
    for result in plain_ranks(2, script, env={**OVER, "NETBOTTLENECK_TRANSPORT": "tcp"}):
        assert "a first dimension of 3 cannot be split into 2 equal parts" in marked_output(result.stdout)


def test_an_unknown_algorithm_is_refused_with_the_names_that_the_variable_takes() -> None:
    with pytest.raises(ValueError, match='not "fastest"') as refusal:
        _core.Comm(0, 1, secret=b"", algorithm="fastest")
    named = str(refusal.value).replace('"', "").removeprefix("algorithm must be ").removesuffix(", not fastest")
    assert named.replace(" or ", ", ").split(", ") == list(ALGORITHMS)
