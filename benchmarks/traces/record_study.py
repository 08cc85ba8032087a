"""Records the stored study: only the evidence of `netbottleneck study --quick`.

python benchmarks/traces/record_study.py [FOLDER]

FOLDER: a complete quick study; without it, the study is run, in some minutes. The facts name no machine, folder or
process. Then run tools/readme.py, because the README shows some of the numbers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from netbottleneck import Evidence, study

FILE = Path(__file__).with_name("quick-study.json")
NOTE = "Recorded by benchmarks/traces/record_study.py: netbottleneck study --quick, on links made on one machine."


def record(folder: Path) -> None:
    """Run the study. Raises RuntimeError if it fails."""
    code = study.main(["--quick", "--directory", str(folder)])
    if code:
        raise RuntimeError(f"the study ended with exit code {code}")


def main() -> None:
    """Record and write the file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "quick"
        if not folder.exists():
            record(folder)
        found = Evidence.read(folder)
    FILE.write_text(Evidence(found.cells, found.title or "A quick study", [NOTE]).to_json(), encoding="utf-8")
    print(found.text)


if __name__ == "__main__":
    main()
