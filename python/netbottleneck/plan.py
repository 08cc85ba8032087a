"""Which gradients travel together: a plan is data, made here and run elsewhere."""

from collections.abc import Hashable, Sequence

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def buckets(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    order: Sequence[int] | None = None,
    first_bytes: int = FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Return the buckets, each the indices of its tensors, in the order in which they become complete.

    sizes: bytes of each tensor. dtypes: its type; a bucket holds one type. order: the indices in the order in which
    the tensors become ready; None: from the last to the first, as a backward pass goes. A bucket of a type is closed
    by the tensor that brings it to its limit (first_bytes for the first, bucket_bytes for all others), as
    torch.nn.parallel.DistributedDataParallel does with its 1 MiB and 25 MiB.

    Raises ValueError when the lengths differ, order is no permutation, a size is negative or a limit is not positive.
    """
    count = len(sizes)
    if order is None:
        order = range(count - 1, -1, -1)
    if len(dtypes) != count:
        raise ValueError(f"{count} sizes but {len(dtypes)} dtypes")
    if sorted(order) != list(range(count)):
        raise ValueError(f"order must name each of the {count} tensors once, got {list(order)}")
    if first_bytes <= 0 or bucket_bytes <= 0:
        raise ValueError(f"a bucket needs at least 1 byte, got limits {first_bytes} and {bucket_bytes}")
    if any(size < 0 for size in sizes):
        raise ValueError("a tensor of fewer than 0 bytes")
    done: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for index in order:
        kind = dtypes[index]
        filling.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + sizes[index]
        if held[kind] >= limit.get(kind, first_bytes):
            done.append(filling.pop(kind))
            held[kind] = 0
            limit[kind] = bucket_bytes
    place = {index: at for at, index in enumerate(order)}
    done.extend(filling.values())
    return sorted(done, key=lambda bucket: place[bucket[-1]])
