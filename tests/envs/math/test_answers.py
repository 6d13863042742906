"""Where an answer stands in a text, and what counts as a number that was written down."""

import pytest
from tinkermq.envs.math.answers import answer_of, plain_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7} \boxed {8}", "8"),
        ("5", None),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        ("```python\nprint(r'\\boxed{5}')\n```", None),
        ("```\n\\boxed{5}", None),
        ("\\boxed{4}\n```python\nprint(r'\\boxed{5}')\n```", "4"),
        (r'<tool_call>{"code": "\boxed{5}"}</tool_call>', None),
        (r"<tool_call>\boxed{5}", None),
        (r"<think>perhaps \boxed{4}</think> it is \boxed{5}", "5"),
        (r"<think>perhaps \boxed{4}</think> no idea", None),
        (r"<think>perhaps \boxed{4}", None),
        (r"perhaps \boxed{4}</think> it is \boxed{5}", "5"),
    ],
)
def test_the_answer_is_the_last_box_that_is_meant_as_one(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("5", "5"),
        ("-5", "-5"),
        ("−5", "-5"),
        (".5", ".5"),
        ("7.", "7"),
        ("1,234.5", "1,234.5"),
        ("10{,}000", "10,000"),
        (r"10\,000", "10000"),
        ("1 000 000", "1000000"),
        ("1/2", "1/2"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"7\frac12", r"7\frac12"),
        (r"3\times 10^{8} \text{ m}", r"3\times10^{8}"),
        (r"\$18.00", "18.00"),
        (r"50\%", r"50\%"),
        (r"45^{\circ}", "45"),
        ("18 dollars each.", "18"),
        (r"5\text{ cm}^2", "5"),
        ("x = 3", "3"),
    ],
)
def test_a_plain_number_is_read_without_what_stands_around_it(answer, number):
    assert plain_number(answer) == number


@pytest.mark.parametrize(
    "answer",
    [
        *("0 1 2 3", "1,2", "2 or 3", r"2 \text{ or } 3", "2x", "2 x", "2_3", "[0,10]", "1..5"),
        *("1+1", "2^3", "5!", "=2", "2=2", "x=y=2", r"\sqrt{4}", r"1\pm 1", "1/2/3", "", "-", "x"),
    ],
)
def test_a_choice_a_sum_and_the_like_are_no_plain_number(answer):
    assert plain_number(answer) is None
