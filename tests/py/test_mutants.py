"""The rules of `make mutants`: changes that they make, and code that they do not change."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

import mutants
import mutants_rules

C = """// a < b in a comment
#define LIMIT 1
static int walk(const char *text, int n) {
    const char *why = "a < b"; // not 1
    for (int i = 0; i < n; i++) {
        if (!text || why == NULL) {
            return -EINVAL;
        }
        drop(text);
    }
    return nb_fail(err, rc, "1 of %d", n);
}
"""
PYTHON = '''"""A text with 1 < 2."""


def size(a: int = 1, *, whole: bool = True) -> int:
    """Return 1."""
    if a < 2 and not whole:
        raise ValueError(f"{a + 1}")
    logger.info("said", 1)
    a += min(a, 3)
    return a if whole else -a
'''


def made(tmp_path: Path, name: str, text: str) -> list[mutants_rules.Change]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return list(mutants_rules.changes(path))


def test_changes_of_c_are_in_code(tmp_path: Path) -> None:
    found = [(change.line, change.rule) for change in made(tmp_path, "walk.c", C)]
    assert found == [
        (5, "< to <="),
        (5, "++ to --"),
        (5, "0 to 1"),
        (6, "== to !="),
        (6, "|| to &&"),
        (6, "negation dropped"),
        (6, "condition negated"),
        (7, "error to success"),
        (9, "statement dropped"),
    ]


def test_changes_of_python_are_in_code_and_compile(tmp_path: Path) -> None:
    found = made(tmp_path, "size.py", PYTHON)
    assert {(change.line, change.rule) for change in found} == {
        (4, "constant + 1"),
        (4, "True to False"),
        (6, "condition negated"),
        (6, "< to <="),
        (6, "constant + 1"),
        (6, "and to or"),
        (6, "not dropped"),
        (7, "raise dropped"),
        (9, "+= to -="),
        (9, "min to max"),
        (9, "constant + 1"),
        (10, "None returned"),
        (10, "condition negated"),
        (10, "- dropped"),
    }
    for change in found:
        ast.parse(change.text)
        assert change.text != PYTHON
        assert change.before in PYTHON


def test_the_same_bytecode_is_not_a_mutant() -> None:
    assert mutants_rules.same_bytecode("a = 1\n", "a  =  1\n") is True
    assert mutants_rules.same_bytecode("a = 1\n", "a = 2\n") is False
    assert mutants_rules.same_bytecode("a = 1\n", "a = \n") is None


@pytest.mark.parametrize("room", ["sim", "what-if"])
def test_a_seed_draws_the_same_mutants_each_time_and_numbers_differ(room: str) -> None:
    first, again = ([mutant.number for mutant in mutants.drawn([room], 7)] for _ in range(2))
    assert first == again
    assert first != [mutant.number for mutant in mutants.drawn([room], 8)]
    assert len(set(first)) == len(first) > 100


def result(number: str) -> mutants.Result:
    return mutants.Result(number, "sim", "csrc/sim/a.c", 1, "1 to 0", "", "", "killed", "test_sim", 1.0)


def test_results_of_lines_that_have_changed_do_not_count_as_drawn() -> None:
    options = argparse.Namespace(rooms=["sim"], seed=7, number=1, again=False)
    known = {"gone": result("gone")}
    drawn = next(mutants.chosen(options, known))
    known[drawn.number] = result(drawn.number)
    assert list(mutants.chosen(options, known)) == []


def test_the_extension_is_built_again_after_a_mutant_of_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    source = tmp_path / "walk.c"
    source.write_text(C, encoding="utf-8")
    change = next(mutants_rules.changes(source))

    def run(argv: Sequence[str], _limit_s: float) -> tuple[int, str]:
        if argv == mutants.EXTENSION:
            built.append(source.read_text(encoding="utf-8"))
        return 0, ""

    class EveryTestPasses(mutants.Tests):
        def judge(self, mutant: mutants.Mutant) -> tuple[str, str]:
            for _, command in self.steps(mutants.ROOMS[mutant.room]):
                run(command, self.limit_s)
            return "survived", ""

    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "run", run)
    monkeypatch.setattr(mutants, "same_code", lambda _mutant: False)
    tried = mutants.try_one(EveryTestPasses(1.0), mutants.Mutant("engine", "walk.c", change, "1"))
    assert tried.verdict == "survived"
    assert built == [change.text, C]
