"""How large the code is, by room: `python -m tests.support.code_size` prints a report.

Lines are counted without blanks, comments, docstrings and the texts below fields. A folder is one
that holds modules. Nothing is asserted here: the figures are for people who change the layout.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("schemas", "broker", "envs", "actors", "clients")
PROCESSES = (
    "scheduler",
    "node",
    "auth",
    "learner",
    "generator",
    "evaluator",
    "server",
    "tinker",
    "gateway",
)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """What one module, or many of them, come to."""

    lines: int = 0
    """Lines of code."""
    imports: int = 0
    """Of these, lines of import statements."""
    longest: int = 0
    """Lines of the longest function, from its `def` to its end."""


def size_of(source: str) -> Size:
    """Count one module."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    imports, texts, longest = set[int](), set[int](), 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= _lines(node) if isinstance(node.value.value, str) else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= _lines(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            longest = max(longest, len(_lines(node)))
    return Size(len(code - texts), len(imports), longest)


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def modules(room: str) -> list[Path]:
    """Return the modules of a room."""
    return sorted((ROOT / room).rglob("*.py"))


def imports_between_processes() -> Iterator[str]:
    """Yield every import that leads from one process's folder of actors/ into another's."""
    for process in PROCESSES:
        for path in modules(f"actors/{process}"):
            depth = len(path.relative_to(ROOT / "actors").parts) - 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == depth + 1 and node.module:
                    other = node.module.partition(".")[0]
                    if other in PROCESSES and other != process:
                        yield f"{path.relative_to(ROOT)} imports actors/{other}"


def main() -> None:
    """Print the report."""
    print(f"{'room':<10}{'lines':>8}{'modules':>9}{'folders':>9}{'imports':>9}{'longest':>9}")
    total = [0, 0, 0, 0, 0]
    for room in (*PRODUCT, "tests"):
        paths = modules(room)
        sizes = [size_of(path.read_text()) for path in paths]
        row = [
            sum(size.lines for size in sizes),
            len(paths),
            len({path.parent for path in paths}),
            sum(size.imports for size in sizes),
            max(size.longest for size in sizes),
        ]
        if room in PRODUCT:
            total = [*(a + b for a, b in zip(total[:4], row, strict=False)), max(total[4], row[4])]
        print(_row(room, row))
    print(_row("product", total))
    print(f"imports between process folders: {len(list(imports_between_processes()))}")


def _row(name: str, row: list[int]) -> str:
    share = f"{100 * row[3] / row[0]:.1f}%"
    return f"{name:<10}{row[0]:>8,}{row[1]:>9}{row[2]:>9}{share:>9}{row[4]:>9}"


if __name__ == "__main__":
    main()
