"""Layers: circles of imports are found without false positives; our headers and a toolkit's are distinguished."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_layers


def package(folder: Path, **files: str) -> Path:
    """Write a package of these files, with `__` for a slash, and return its folder."""
    root = folder / "netbottleneck"
    for name, text in files.items():
        path = root / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "second",
    ["from netbottleneck.room.a import x", "def f():\n    from netbottleneck.room import a", "from . import a"],
    ids=["a name", "inside a function", "relative"],
)
def test_two_files_that_import_each_other_are_a_circle(tmp_path: Path, second: str) -> None:
    root = package(tmp_path, room__a="from netbottleneck.room import b\nx = 1", room__b=second)
    (found,) = check_layers.file_circles(root)
    assert "netbottleneck.room.a" in found
    assert "netbottleneck.room.b" in found


@pytest.mark.parametrize(
    "second",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from netbottleneck.room import a",
        "from netbottleneck import _core",
    ],
    ids=["for types alone", "the extension"],
)
def test_imports_that_do_not_count_make_no_circle(tmp_path: Path, second: str) -> None:
    root = package(tmp_path, room__a="from netbottleneck.room import b", room__b=second)
    (root / "__init__.py").write_text("from netbottleneck.room import a")
    assert list(check_layers.file_circles(root)) == []


def test_names_that_a_package_exports_lazily_make_no_circle(tmp_path: Path) -> None:
    root = package(tmp_path, room__a="import netbottleneck.room")
    (root / "room" / "__init__.py").write_text("def __getattr__(name):\n    from netbottleneck.room import a\n")
    assert list(check_layers.file_circles(root)) == []


def test_a_header_of_the_room_cuda_is_no_header_of_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "engine").mkdir()
    (tmp_path / "cuda" / "driver.h").write_text("")
    user = tmp_path / "engine" / "operation.c"
    monkeypatch.setattr(check_layers, "CSRC", tmp_path)
    user.write_text('#include "cuda/driver.h"\n')
    assert list(check_layers.c_findings(user)) == []
    user.write_text("#include <cuda_runtime.h>\n")
    assert [line for line, _ in check_layers.c_findings(user)] == [1]
