"""Memory and disk of a long observed training: two ranks of DDP over gloo on this machine, variables at their defaults.

python benchmarks/long_run.py [--steps 100000] [--json FILE]

Prints, ten times during the run: resident memory of rank 0, private and with the pages of files that it has touched,
and the bytes that its record takes on the disk. Exit code 0 only if private memory and record do not grow from half of
the run on, and 1 000 steps have at most 2 MB of trace. Touched pages grow until the files, which are mapped, are full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from auto import begin, write
from overhead import free_port

LIMIT_S = 3600
LOOKS = 10
SLACK_KIB = 1024  # of the allocator
MOST_BYTES = 2_000_000  # of 1 000 steps
TRAINING = """
import json, os, sys
import torch
import torch.distributed as dist
import netbottleneck

steps, looks = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.ReLU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.ones(4, 32)
folder = os.environ["NETBOTTLENECK_DIR"]

def held():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    files = [os.path.join(folder, "ranks", name) for name in os.listdir(os.path.join(folder, "ranks"))]
    return {
        "private_kib": int(status["RssAnon"].split()[0]),
        "with_files_kib": int(status["VmRSS"].split()[0]),
        "record_bytes": sum(os.stat(file).st_blocks * 512 for file in files if "/0." in file),
    }

for step in range(1, steps + 1):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    if step % (steps // looks) == 0 and dist.get_rank() == 0:
        print(json.dumps({"step": step, **held()}), flush=True)
dist.destroy_process_group()
"""


def run(steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train, and return what rank 0 held."""
    port, ranks = free_port(), []
    for rank in range(2):
        values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        values |= {"NETBOTTLENECK": 1, "NETBOTTLENECK_DIR": folder}
        command = [sys.executable, "-c", TRAINING, str(steps), str(LOOKS)]
        environ = {**os.environ, **{name: str(value) for name, value in values.items()}}
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    try:
        shown, _ = ranks[0].communicate(timeout=LIMIT_S)
        if any(rank.wait(LIMIT_S) for rank in ranks):
            raise SystemExit("a rank has failed")
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(line) for line in shown.splitlines() if line.startswith("{")]


def main() -> int:
    """Run a short and a long training, and print the table."""
    arguments, facts = begin(__doc__, "--steps", 100_000)
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        run(1000, Path(name) / "short")
        ranks = Path(name) / "short" / "ranks"
        kept = {"ring": ranks / "0.train.ring", "readable": ranks / "0.jsonl.gz"}
        of_1000 = {what: path.stat().st_size for what, path in kept.items()}
        rows = run(arguments.count, Path(name) / "long")
    print("| step | private, MiB | with pages of files, MiB | record, MB |\n| --- | --- | --- | --- |")
    for row in rows:
        kib = f"{row['private_kib'] / 1024:.1f} | {row['with_files_kib'] / 1024:.1f}"
        print(f"| {row['step']} | {kib} | {row['record_bytes'] / 1e6:.1f} |")
    half, last = rows[LOOKS // 2 - 1], rows[-1]
    grown = {what: last[what] - half[what] for what in ("private_kib", "with_files_kib", "record_bytes")}
    sizes = ", ".join(f"{what} {size / 1e6:.2f} MB" for what, size in of_1000.items())
    summary = f"one run; of the first 1 000 steps, a rank has {sizes} of trace; "
    summary += f"from step {half['step']} to {last['step']}, private memory grows by {grown['private_kib']} KiB"
    print(f"{summary} (measured)")
    if arguments.json:
        write(arguments.json, facts, "Memory and disk of a long observed training", summary, rows)
    flat = grown["private_kib"] <= SLACK_KIB and grown["record_bytes"] <= 0
    return 0 if flat and max(of_1000.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
