"""Adasum: a sum in which what two ranks agree on counts once.

Of two vectors it is (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their average
where they are equal. Ranks are paired with their neighbours, then pairs with pairs, and so on; one that is left over
goes on alone. Maleki et al.: Scaling Distributed Training with Adaptive Summation, 2020.
"""

import numpy as np
import numpy.typing as npt

from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import Array, Steps, Sum, reduction
from netbottleneck.runtime.collectives import submitted
from netbottleneck.runtime.members import Members

Doubles = npt.NDArray[np.float64]


def _combined(vectors: Doubles, dots: Doubles) -> Doubles:
    """Return the Adasum of each two vectors that follow each other, and the last one of an odd number.

    dots: a.b, |a|^2 and |b|^2 of each two.
    """
    both, first, second = dots
    pairs = 2 * len(both)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_first = np.where(first > 0, 1 - both / (2 * first), 1.0)
        of_second = np.where(second > 0, 1 - both / (2 * second), 1.0)
    joined = of_first[:, None] * vectors[0:pairs:2] + of_second[:, None] * vectors[1:pairs:2]
    found: Doubles = np.concatenate([joined, vectors[pairs:]])
    return found


def adasum_steps(array: Array, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)) -> Steps[None]:
    """Put the Adasum of all ranks' arrays in place of each. factors: before it and after it.

    Each rank works on its part of all vectors, in float64; products of parts are added up for each level of pairs.
    Raises ValueError for types that hold no fractions.
    """
    core = job.core()
    size = among.size
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: Adasum needs floating-point numbers, not {array.dtype}")
    before, after = factors
    flat = array.reshape(-1)
    code = int(getattr(core, array.dtype.name.upper()))
    line = np.zeros((2, size, -(-flat.size // size)), array.dtype)
    line[0].reshape(-1)[: flat.size] = flat
    if line.size:
        yield [submitted(among, f"{name}.parts", core.ALLTOALL, line, code, keep=line)]
    vectors: Doubles = line[1].astype(np.float64) * before
    level = 0
    while len(vectors) > 1:
        pairs = len(vectors) // 2 * 2
        one, other = vectors[0:pairs:2], vectors[1:pairs:2]
        dots = np.stack([np.einsum("ij,ij->i", *pair) for pair in ((one, other), (one, one), (other, other))])
        summed, _ = reduction(Sum, size)
        yield [submitted(among, f"{name}.{level}", core.ALLREDUCE, dots, core.FLOAT64, op=summed, keep=dots)]
        vectors = _combined(vectors, dots)
        level += 1
    line[0, among.rank] = vectors[0] * after
    if line.size:
        yield [submitted(among, f"{name}.whole", core.ALLGATHER, line[0], code, keep=line)]
    flat[:] = line[0].reshape(-1)[: flat.size]
