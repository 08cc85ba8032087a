"""Records the stored runs of the verdicts' pages, `verdicts/CODE.jsonl.gz`: live scenarios of tests/scenarios.

python benchmarks/traces/record_verdicts.py [CODE ...]

A run is stored only if its verdict is the code of its page. `bucket-sizes` is `netbottleneck replay resnet50
--transport stock,null --link 2gbit/500mbit --compute-ms 133 267 --scale 1/4`, stored by record.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from netbottleneck.report import Run
from netbottleneck.trace import model as tr

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "scenarios")]

import record  # noqa: E402
from scenario import live, trainings  # noqa: E402

# The scenario of each page.
SCENARIOS = {
    "transport-limited": trainings.live_flow_cap,
    "link-limited": trainings.live_full_link,
    "host-limited": trainings.live_contended_compute,
    "straggler": trainings.live_sleeping_rank,
    "input-limited": trainings.live_input,
    "optimizer-limited": trainings.live_optimizer,
    "imbalance": trainings.live_jitter,
    "not-network": trainings.live_nothing,
    "inconclusive": trainings.live_few_steps,
    "no-communication": trainings.live_one_rank,
}
SEED = 1


def store(name: str) -> str:
    """Run the scenario of a page and return the verdict; the trace is stored if it is the page's."""
    training = SCENARIOS[name](random.Random(f"{SEED}/{SCENARIOS[name].__name__}")).job
    with tempfile.TemporaryDirectory() as folder:
        live.train(training, folder, SEED)
        trace = record.scrub(Run(folder).trace, name)
        path = Path(folder) / f"{name}.jsonl.gz"
        tr.write(trace, path)
        code = Run(path).verdict.code
        if code == name.upper().replace("-", "_"):
            target = HERE / "verdicts" / path.name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return code


def main() -> int:
    """Record the named runs, by default all. Returns 1 if a verdict differs from its page."""
    found = {name: store(name) for name in sys.argv[1:] or SCENARIOS}
    for name, code in found.items():
        print(f"{name}: {code}")
    return int(any(code != name.upper().replace("-", "_") for name, code in found.items()))


if __name__ == "__main__":
    sys.exit(main())
