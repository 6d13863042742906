"""Answers are compared by math-verify, in processes that no answer outlives its limit in."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tinkermq.envs.math.grading import MEMORY_BYTES, Grader
from tinkermq.envs.sandbox.sandbox import descendants

from tests.envs.math.graded_pairs import RIGHT, WRONG

DEEP = "(" * 400 + "x" + ")" * 400
"""Takes the parser minutes."""


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(1, limit_s=1.0)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[Grader]:
    grader = Grader(1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2", "2.0"),
        ("2", r"2\text{ cm}"),
        ("1000", "1,000"),
        ("1.5", r"1\frac12"),
        (r"\frac{2}{3}", "4/6"),
        ("x^2+1", "1+x^2"),
        ("y=2x+1", "2x+1"),
        (r"3\sqrt{13}", r"\sqrt{117}"),
        ("1,2", "2,1"),
        (r"\text{Evelyn}", "Evelyn"),
    ],
)
def test_the_same_in_other_words_is_right(grader, gold, answer):
    assert grader.grade(gold, answer) == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2", "0 1 2 3 4 5 6 7 8 9"),
        ("45", "0 1 2 3 4 5 6 7 8 9"),  # math-verify alone reads spaces as a sum
        ("2", "0, 1, 2, 3"),
        ("2", r"\{1, 2, 3\}"),
        ("2", "2 or 3"),
        ("2", "1=2=3"),
        ("2", "1+1"),
        ("2", r"\int_0^2 1 dx"),
        ("5050", r"\sum_{k=1}^{100} k"),
        ("10", "10!/9!"),
        ("11", "11_2"),
        ("2", "[0, 10]"),
        ("2", "x"),
        ("2", "2y"),
        ("2", ""),
        ("5", "-5"),
        ("12", "112"),
        ("1,2", "1,2,3"),
        (r"\text{odd}", "odd or even"),
        ("x", r"9^{9^{9^{9^9}}}"),
        ("2", "2" + " " * 2000),
    ],
)
def test_what_is_wrong_or_leaves_the_choice_to_the_grader_scores_nothing(grader, gold, answer):
    assert grader.grade(gold, answer) in ("wrong", "late")


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_people_write_for_the_right_answer_is_right(patient, gold, answer):
    assert patient.grade(gold, answer) == "right"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_what_is_another_answer_is_wrong(patient, gold, answer):
    assert patient.grade(gold, answer) == "wrong"


def test_an_answer_that_takes_too_long_ends_its_process_and_the_next_is_graded(grader):
    assert grader.grade("x", DEEP) == "late"
    assert grader.grade("x", "x") == "right"


def test_the_memory_of_a_worker_is_bounded_by_the_kernel_and_it_does_not_stay_for_ever(grader):
    assert grader.grade("2", "2") == "right"
    for pid in (workers := _workers()):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(rf"Max address space +{MEMORY_BYTES} +{MEMORY_BYTES}", limits)
    assert workers
    renewing = Grader(1, renew_after=1)
    assert renewing.grade("2", "2") == "right"
    assert _workers() == workers


def _workers():
    command = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())}
    return {pid for pid, file in command.items() if b"grading_worker" in file.read_bytes()}


def test_many_threads_share_the_workers(grader):
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda n: grader.grade(str(n), str(n % 4)), range(8)))
    assert verdicts == ["right"] * 4 + ["wrong"] * 4
