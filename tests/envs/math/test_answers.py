"""Where an answer stands in a text, and what counts as a number that was written down."""

import time

import pytest
from tinkermq.envs.math.grading import answer_of, to_compare
from tinkermq.envs.math.quantity import read_quantity


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
    ("answer", "latex", "unit"),
    [
        ("5", "5", {}),
        ("−5", "-5", {}),
        (".5", "0.5", {}),
        ("1,234.5", "1234.5", {}),
        (r"10\,000", "10000", {}),
        ("1 000 000", "1000000", {}),
        (r"\frac{1}{-2}", r"\frac{1}{-2}", {}),
        (r"7\frac12", r"\frac{15}{2}", {}),
        (r"0.1\overline{6}", r"\frac{1}{6}", {}),
        (r"3\times 10^{8} \text{ m}", r"3\cdot 10^{8}", {"metre": 1}),
        (r"\$18.00", "18.00", {"dollar": 1}),
        (r"50\%", r"50\%", {}),
        (r"45^{\circ}", "45", {"degree": 1}),
        ("18 dollars each.", "18", {"dollar": 1}),
        (r"5\text{ cm}^2", "5", {"centimetre": 2}),
        ("3 square feet", "3", {"foot": 2}),
        ("60 mph", "60", {"mile": 1, "hour": -1}),
        (r"9.8\ \frac{\text{m}}{\text{s}^2}", "9.8", {"metre": 1, "second": -2}),
        ("12 thousand", r"(12) \cdot 1000", {}),
        ("17 red apples", "17", {"red": 1, "apple": 1}),
        ("x = 3", "3", {}),
        (r"2\pi", r"2\cdot \pi", {}),
    ],
)
def test_a_number_is_read_without_what_stands_around_it_and_with_its_unit(answer, latex, unit):
    quantity = read_quantity(answer)
    assert quantity is not None
    assert (quantity.latex, quantity.unit) == (latex, unit)


@pytest.mark.parametrize(
    "answer",
    [
        *("0 1 2 3", "1,2", "2 or 3", r"2 \text{ or } 3", "2x", "2 x", "2_3", "[0,10]", "1..5"),
        *("1+1", "5!", "2=3", "x=y=2", r"1\pm 1", "1/2/3", "", "-", "x", "--5", "1/0", "(1,2)"),
        *(
            "12,34",
            "1,0000",
            "1.000.000",
            "5 not",
            "0^{-1}",
            "9^{9^{9^9}}",
            r"2\times 3",
            r"\frac{1}",
        ),
    ],
)
def test_a_choice_a_sum_and_the_like_are_no_number(answer):
    assert read_quantity(answer) is None


@pytest.mark.parametrize(
    "piece", ["(", "{", r"3\frac{3", "10^{", r"\sqrt{", "1,000", " a", "°", "5="]
)
def test_no_answer_takes_long_to_read(piece):
    for answer in (text := (piece * 1000)[:1000], f"5 {text}", f"{text}5"):
        started = time.process_time()
        to_compare("5 cm", answer)
        assert time.process_time() - started < 5
