"""Circles between C files of a room: definition of a use, and findings."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_layers

BELOW = "int nb_below(int x) {\n    return x;\n}\n"
ABOVE = "int nb_above(int x) {\n    return nb_below(x);\n}\n"


def room(tmp_path: Path, **files: str) -> Path:
    """Write the C files of a room, by stem, and return its folder."""
    folder = tmp_path / "room"
    folder.mkdir()
    for stem, text in files.items():
        (folder / f"{stem}.c").write_text(text, encoding="utf-8")
    return folder


def findings(tmp_path: Path) -> list[str]:
    """Return the findings in the rooms below a folder."""
    return [text for _, text in check_layers.c_circle_findings(tmp_path)]


def test_a_file_uses_the_files_whose_functions_and_variables_it_names(tmp_path: Path) -> None:
    table = "const struct nb_ops nb_table = {\n    .run = nb_below,\n};\nstatic int nb_hidden = 1;\n"
    folder = room(
        tmp_path, below=BELOW, above=ABOVE, table=table, top="int nb_top(void) {\n    return !!&nb_table;\n}\n"
    )
    assert check_layers.c_uses(folder) == {
        "below": set(),
        "above": {"below"},
        "table": {"below"},
        "top": {"table"},
    }
    assert check_layers.c_circles(folder) == []


def test_a_definition_may_take_several_lines_and_a_table_counts_as_a_call(tmp_path: Path) -> None:
    wide = (
        "struct nb_thing *nb_wide(int first,\n                         int second) {\n    return nb_table[first];\n}\n"
    )
    folder = room(tmp_path, wide=wide, table="void *nb_table[] = {nb_wide};\n")
    assert check_layers.c_circles(folder) == [{"wide", "table"}]


@pytest.mark.parametrize(
    "code",
    [
        "// nb_above\n",
        "/* nb_above\n nb_above */\n",
        'static const char text[] = "nb_above \\" nb_above";\n',
        "struct nb_above *pointer;\n",
        "static int member(struct pair *p) {\n    return p->nb_above + (*p).nb_above;\n}\n",
        "static int nb_above_all;\n",
    ],
)
def test_comments_strings_tags_and_members_are_not_uses(tmp_path: Path, code: str) -> None:
    assert check_layers.c_circles(room(tmp_path, below=code + BELOW, above=ABOVE)) == []


def test_static_names_belong_to_their_file(tmp_path: Path) -> None:
    folder = room(
        tmp_path, below="static int helper(void) {\n    return 1;\n}\n" + BELOW, above="int helper;\n" + ABOVE
    )
    assert check_layers.c_circles(folder) == []


def test_an_indirect_circle_is_one_and_separate_circles_are_two(tmp_path: Path) -> None:
    call = "void nb_{0}(void) {{\n    nb_{1}();\n}}\n".format
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "e"), ("e", "d"), ("f", "a")]
    folder = room(tmp_path, **{of: call(of, uses) for of, uses in pairs})
    assert check_layers.c_circles(folder) == [{"a", "b", "c"}, {"d", "e"}]


def test_a_circle_is_a_finding(tmp_path: Path) -> None:
    room(tmp_path, below=BELOW + "int nb_low(void) {\n    return nb_above(1);\n}\n", above=ABOVE)
    assert findings(tmp_path) == ["a circle of C files: above below"]


def test_the_core_has_no_circle() -> None:
    assert list(check_layers.c_circle_findings(check_layers.CSRC)) == []
