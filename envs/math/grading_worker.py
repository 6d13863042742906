"""The process that compares answers: math-verify, one comparison at a time.

Started by `grading` as `python -m tinkermq.envs.math.grading_worker <seconds> <bytes>`. A
message is a list of the gold answer and the given answer, and is answered with true or false. The
kernel ends the process when a comparison exceeds its seconds of CPU time.
"""

import logging
import sys
from typing import Any

from ...schemas.local.line_worker import answer_lines, limit_memory, limited_time

_RELATIVE = 2e-6
"""Numbers with a larger relative difference are not equal; math-verify rounds to 6 decimals."""


def differ(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether two parsed answers are numbers that differ by more than rounding."""
    numbers = [parsed[0] for parsed in (gold, answer) if parsed]
    if len(numbers) < 2 or not all(getattr(number, "is_number", False) for number in numbers):
        return False
    first, second = (complex(number.evalf(30)) for number in numbers)
    return abs(first - second) > _RELATIVE * max(abs(first), abs(second))


def main() -> None:
    """Answer line by line until standard input ends."""
    seconds, most_bytes = float(sys.argv[1]), int(sys.argv[2])
    import math_verify
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

    logging.disable()  # math-verify warns that time limits are left to the caller
    limit_memory(most_bytes)
    plain = NormalizationConfig(
        basic_latex=True,
        units=False,  # read before: h and m of 2h and 5m may be variables
        malformed_operators=True,
        nits=True,
        boxed="all",
        equations=False,
    )
    reading = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=plain)
    ]

    def read(answer: str) -> list[Any]:
        # only the first match is the whole answer; a later one is a part of an unreadable answer
        return math_verify.parse(
            rf"\boxed{{{answer}}}", reading, extraction_mode="first_match", parsing_timeout=None
        )

    def compare(pair: list[str] | None) -> bool:
        if pair is None:  # whether it has started
            return True
        gold, answer = pair
        with limited_time(seconds):
            right, answered = read(gold), read(answer)
            return math_verify.verify(
                right, answered, allow_set_relation_comp=True, timeout_seconds=None
            ) and ("%" in gold + answer or not differ(right, answered))

    answer_lines(compare)


if __name__ == "__main__":
    main()
