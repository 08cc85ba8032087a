"""Scripts with checks that tests run by name: no check is left out, and a list is never empty."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import checks

SCRIPTS = Path(__file__).parent / "scripts"


def test_every_check_of_a_script_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "@check\n@slow\ndef one(): ...\nif here:\n    @check\n    # why\n    def two(): ...\ndef three(): ...\n"
    )
    assert checks(script) == ["one", "two"]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_every_decorator_is_that_of_a_check(script: Path) -> None:
    count = script.read_text(encoding="utf-8").count("@check\n")
    assert not count or len(checks(script)) == count


def test_a_script_without_checks_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def one(): ...\n")
    with pytest.raises(ValueError, match="has no checks"):
        checks(script)
