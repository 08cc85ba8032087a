"""Writes docs/reference/environment.md from the table of netbottleneck.config."""

from __future__ import annotations

import sys
from pathlib import Path

from netbottleneck import config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "environment.md"
HEAD = """# Environment variables

`tools/env_docs.py` generates this page from the table of `netbottleneck.config`.
`netbottleneck env` prints the same with the values in force.

Any `NETBOTTLENECK_TRANSPORT` implies `NETBOTTLENECK=1`, unless `NETBOTTLENECK=0` is set. With
neither set, `import netbottleneck` changes nothing. `NETBOTTLENECK=0` also switches the callbacks of
frameworks off, but not calls of `netbottleneck.profile` and `netbottleneck.attach`. Precedence: an
argument, the variable, the variable named under "else", the default. An empty variable counts as
unset. An unknown name that begins with `NETBOTTLENECK` is logged once, with the nearest name. If
ranks disagree about transport, streams, provider, segment size, steps or blocks, an error names
them before the first step.

| variable | default | meaning | allowed | else |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Return the page."""
    rows = config.describe(config.Settings(), {})
    lines = []
    for row in rows:
        default = f"`{row.default}`" if row.default else ""
        instead = " ".join(f"`{name}`" for name in row.instead)
        lines.append(
            f"| `{row.name}` | {default} | {row.text} | {row.allowed} | {instead} |".replace("  ", " ").replace(
                "<", "&lt;"
            )
        )
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
