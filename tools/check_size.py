"""Fails on files that are too long: C over 1000 lines, Python over 800. lizard checks functions."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = [
    ("csrc", "**/*.[ch]", 1000),
    ("tests/c", "**/*.[ch]", 1000),
    ("python", "**/*.py", 800),
    ("tools", "*.py", 800),
    ("docs", "**/*.py", 800),
]


def main() -> int:
    """Print every file over its limit. Returns 1 if there are any."""
    found = 0
    for folder, pattern, limit in LIMITS:
        for path in sorted((ROOT / folder).glob(pattern)):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                print(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
                found += 1
    print(f"sizes: {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
