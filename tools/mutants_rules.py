"""Mutation rules of tools/mutants.py: regular expressions for C, the syntax tree for Python.

Each rule makes a common kind of error: a comparison that is off by one or reversed, a negated condition, a wrong sign,
a constant that is off by one, a missing statement.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One replacement in a file's text: `original[start:end]` becomes `new`."""

    rule: str
    original: str = field(repr=False)
    start: int
    end: int
    new: str

    @property
    def text(self) -> str:
        """The complete text with the change."""
        return self.original[: self.start] + self.new + self.original[self.end :]

    @property
    def line(self) -> int:
        """The number of the line where it begins, from 1."""
        return self.original.count("\n", 0, self.start) + 1

    @property
    def before(self) -> str:
        """The changed lines, before the change."""
        return self.original[self._first() : self._last()]

    @property
    def after(self) -> str:
        """The changed lines, after the change."""
        return self.original[self._first() : self.start] + self.new + self.original[self.end : self._last()]

    def _first(self) -> int:
        return self.original.rfind("\n", 0, self.start) + 1

    def _last(self) -> int:
        found = self.original.find("\n", self.end)
        return len(self.original) if found < 0 else found


def changes(path: Path) -> Iterator[Change]:
    """Yield all changes of a file, in a fixed order."""
    text = path.read_text(encoding="utf-8")
    return _python(text) if path.suffix == ".py" else _c(text)


# ---- C

# (rule, pattern, replacement); if the pattern has a group, only the group is replaced.
C_RULES: tuple[tuple[str, str, str], ...] = (
    ("< to <=", r" < ", " <= "),
    ("<= to <", r" <= ", " < "),
    ("> to >=", r" > ", " >= "),
    (">= to >", r" >= ", " > "),
    ("== to !=", r" == ", " != "),
    ("!= to ==", r" != ", " == "),
    ("&& to ||", r" && ", " || "),
    ("|| to &&", r" \|\| ", " && "),
    ("+ to -", r" \+ ", " - "),
    ("- to +", r" - ", " + "),
    ("* to +", r" \* ", " + "),
    ("/ to *", r" / ", " * "),
    ("% to /", r" % ", " / "),
    ("& to |", r" & ", " | "),
    ("| to &", r" \| ", " & "),
    ("<< to >>", r" << ", " >> "),
    (">> to <<", r" >> ", " << "),
    ("+= to -=", r" \+= ", " -= "),
    ("-= to +=", r" -= ", " += "),
    ("++ to --", r"\+\+", "--"),
    ("-- to ++", r"--", "++"),
    ("true to false", r"\btrue\b", "false"),
    ("false to true", r"\bfalse\b", "true"),
    ("negation dropped", r"!(?=[\w(])", ""),
    ("0 to 1", r"(?<![\w.])0(?![\w.])", "1"),
    ("1 to 0", r"(?<![\w.])1(?![\w.])", "0"),
    ("1 to 2", r"(?<![\w.])1(?![\w.])", "2"),
    ("error to success", r"(?<=return )(?:nb_fail\(.*\)|-E[A-Z]+|-NB_E\w+)(?=;$)", "0"),
    ("continue to break", r"\bcontinue;", "break;"),
    ("statement dropped", r"(?<=^)(?<!\w)\s*(?!return\b|if\b|for\b|while\b)[\w>.\[\]-]+(?: [+|&^-]?= .*|\(.*\));$", ""),
    ("condition negated", r"(?<=if )\(.*\)(?= \{$)", "(!*)"),
)
# Lines in which changes are not errors: text, declarations, lines that only the compiler reads.
C_LEFT_OUT = re.compile(r"^\s*(?://|#|_Static_assert|static const|enum \{|struct \w+;)|nb_fail\(\w+, rc,")


def _c(text: str) -> Iterator[Change]:
    at = 0
    for line in text.splitlines(keepends=True):
        code = _blank(line.rstrip("\n"))
        if not C_LEFT_OUT.search(line) and line[:1] in (" ", "\t"):
            for rule, pattern, new in C_RULES:
                for found in re.finditer(pattern, code):
                    start, end = at + found.start(), at + found.end()
                    if rule == "condition negated":
                        yield Change(rule, text, start, end, f"(!{text[start:end]})")
                    else:
                        yield Change(rule, text, start, end, new)
        at += len(line)


def _blank(line: str) -> str:
    """A line of C with blanks in place of strings and comments, of the same length."""
    hidden = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', lambda m: "_" * len(m.group()), line)
    code, comment, rest = hidden.partition("//")
    return code.rstrip() if comment and not rest.isspace() else hidden


# ---- Python

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls that only produce output.
SAID = ("logger", "warnings", "log")


class _Finder(ast.NodeVisitor):
    """Collects the changes of one file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[Change] = []
        encoded = text.encode().splitlines(keepends=True)
        self._starts = [0]
        for row in encoded:
            self._starts.append(self._starts[-1] + len(row.decode()))
        self._rows = encoded

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._rows[line - 1][:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _put(self, rule: str, span: tuple[int, int], new: str) -> None:
        self.found.append(Change(rule, self.text, *span, new))

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        match = re.search(rf"(?<![\w]){re.escape(old)}(?![\w])", self.text[start:end])
        if match is not None:
            self._put(f"{old} to {new}", (start + match.start(), start + match.end()), new)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave formatted text out."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Leave annotations out."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave annotations and decorators out."""
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Leave bases and decorators out."""
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove a raise statement."""
        self._put("raise dropped", self._span(node), "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions out: most are for the type checker."""

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change a comparison: off by one, or reversed."""
        operands = [node.left, *node.comparators]
        for at, operator in enumerate(node.ops):
            self._between(operands[at], operands[at + 1], *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap and and or."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace an operator, unless an operand is a string."""
        texts = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right))
        if type(node.op) in OPERATORS and not texts:
            self._between(node.left, node.right, *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove a negation or a sign."""
        if isinstance(node.op, ast.Not | ast.USub):
            start, end = self._span(node.operand)
            rule = "not dropped" if isinstance(node.op, ast.Not) else "- dropped"
            self._put(rule, self._span(node), self.text[start:end])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Swap += and -=."""
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between(node.target, node.value, old, new)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a constant by one."""
        if isinstance(node.value, bool):
            self._put(f"{node.value} to {not node.value}", self._span(node), str(not node.value))
        elif isinstance(node.value, int | float):
            self._put("constant + 1", self._span(node), repr(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        """Negate a condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition of an expression."""
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        start, end = self._span(test)
        inner = self.text[start:end]
        if inner != "TYPE_CHECKING" and "\n" not in inner:
            self._put("condition negated", (start, end), f"(not ({inner}))")

    def visit_Call(self, node: ast.Call) -> None:
        """Swap min and max, any and all."""
        if isinstance(node.func, ast.Name) and node.func.id in CALLED:
            new = CALLED[node.func.id]
            self._put(f"{node.func.id} to {new}", self._span(node.func), new)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call."""
        if isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func).split(".")[0] in SAID:
                return
            self._put("statement dropped", self._span(node), "pass")
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Return None instead of the value."""
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._put("None returned", self._span(node), "return None")
        self.generic_visit(node)


def _python(text: str) -> Iterator[Change]:
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    yield from sorted(finder.found, key=lambda change: (change.start, change.rule))


def same_bytecode(original: str, changed: str) -> bool | None:
    """Return True if both texts compile to the same bytecode, None if the changed one does not compile."""
    try:
        return _code(compile(original, "", "exec")) == _code(compile(changed, "", "exec"))
    except (SyntaxError, ValueError):
        return None


def _code(code: types.CodeType) -> tuple[object, ...]:
    constants = tuple(_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, constants, code.co_names
