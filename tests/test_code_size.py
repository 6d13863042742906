"""The report of the code's size counts what it says."""

from tests.support.code_size import Size, size_of

SOURCE = '''"""A module's docstring
of two lines."""

import os  # counted
from pathlib import (
    Path,
)

# a comment


class Thing:
    """A class."""

    x: int = 1
    """A text below a field."""

    def path(self) -> Path:
        """A method."""
        text = """counted,
        both lines"""
        return Path(os.sep, text)
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert size_of(SOURCE) == Size(lines=10, imports=4, longest=5)
