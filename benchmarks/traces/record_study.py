"""Records the stored study: `netbottleneck study --quick`, as its evidence alone.

python benchmarks/traces/record_study.py [FOLDER]

FOLDER: of a quick study that was made already; else one is made, in some minutes. Nothing of the facts names a machine,
a folder or a process. Then run tools/readme.py: the README shows some of it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from netbottleneck import Evidence, study

FILE = Path(__file__).with_name("quick-study.json")
NOTE = "Recorded by benchmarks/traces/record_study.py: netbottleneck study --quick, on links made on one machine."


def record(folder: Path) -> None:
    """Make the study. Raises RuntimeError where it fails."""
    code = study.main(["--quick", "--directory", str(folder)])
    if code:
        raise RuntimeError(f"the study ended with exit code {code}")


def main() -> None:
    """Record, and write the file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "quick"
        if not folder.exists():
            record(folder)
        found = Evidence.read(folder)
    FILE.write_text(Evidence(found.cells, found.title or "A quick study", [NOTE]).to_json(), encoding="utf-8")
    print(found.text)


if __name__ == "__main__":
    main()
