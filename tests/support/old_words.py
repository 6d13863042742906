"""Keep unclear words out of the product: `python -m tests.support.old_words` lists their places.

A variable says what it holds, a function is a verb and its object, and a message says what a value
must be. `make lint` runs this and fails for each place.
"""

import ast
import re
import sys
from collections.abc import Iterator

from tests.support.code_size import PRODUCT, ROOT, modules

VARIABLES = {
    "asked",
    "came",
    "foreign",
    "found",
    "given",
    "gone",
    "heard",
    "hopeless",
    "kept",
    "lacking",
    "nobody",
    "one",
    "ones",
    "said",
    "spoken",
    "taken",
    "told",
    "wanted",
    "went",
}
"""Names that do not say what a variable, parameter or attribute holds."""
FUNCTIONS = {
    "ask",
    "hear",
    "heed",
    "look",
    "lost",
    "missing",
    "owed",
    "say",
    "take",
    "tell",
}
"""Private functions with these names lack their object."""
TEXTS = re.compile(
    r"(?<![Tt]here )\b(?:is|are) no (?!longer\b|more\b)"
    r"|\bwhat it was told\b|\bwho(?:ever)? is told\b"
)
"""Phrases of messages and docstrings: a message says what a value must be, or is not."""


def old_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each use in one module."""
    tree = ast.parse(source)
    fields = set(_fields(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Name() if node in fields:
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                if name.lstrip("_") in VARIABLES:
                    yield node.lineno, f"variable {name}"
            case ast.Attribute(attr=name, ctx=ast.Store()):
                if name.lstrip("_") in VARIABLES:
                    yield node.lineno, f"attribute {name}"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("_") and name.lstrip("_") in FUNCTIONS:
                    yield node.lineno, f"function {name}"
            case ast.Constant(value=str(text)):
                if matched := TEXTS.search(text):
                    yield node.lineno, f"text {matched[0]!r}"
            case _:
                pass


def _fields(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the fields of records: their names are those of messages and of configuration keys."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (item.target for item in node.body if isinstance(item, ast.AnnAssign))


def main(rooms: list[str]) -> int:
    """Print every place in the rooms; return 1 if there is any."""
    places = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for room in rooms
        for path in modules(room)
        for line, word in sorted(old_words(path.read_text()))
    ]
    for place in places:
        print(place)
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(PRODUCT)))
