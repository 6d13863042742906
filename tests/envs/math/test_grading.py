"""Answers found in texts, compared by math-verify, and the weighted rules."""

import os
import re
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from tinkermq.envs.math.grading import (
    MEMORY_BYTES,
    Grader,
    MathRewards,
    answer_of,
    shared_grader,
    to_compare,
)
from tinkermq.envs.math.units import clean, split_unit
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.wire.errors import ConfigError

PAIRS = [
    line.replace("␤", "\n").split("\t")
    for line in Path(__file__).with_name("graded_pairs.tsv").read_text().splitlines()
    if not line.startswith("#")
]
"""Answers as people and models write them: right answer, answer given, whether it is right."""
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
def test_the_same_in_other_words_is_right(patient, gold, answer):
    assert patient.grade(gold, answer) == "right"


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


def test_answers_as_people_write_them_are_judged_as_people_would(patient):
    assert [pair for pair in PAIRS if patient.grade(*pair[:2]) != pair[2]] == []


def test_an_answer_that_takes_too_long_ends_its_process_and_the_next_is_graded(grader):
    assert grader.grade("x", DEEP) == "late"
    assert grader.grade("x", "x") == "right"


@pytest.mark.full
def test_a_process_with_thousands_of_open_files_grades() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with ExitStack() as files:
            while files.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
                pass
            with closing(Grader(1)) as grader:
                assert grader.grade(r"\frac{1}{2}", "0.5") == "right"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    found = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            if b"grading_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_a_worker_starts_in_a_folder_with_a_file_named_as_a_module_of_python(tmp_path, monkeypatch):
    (tmp_path / "select.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with closing(Grader(1)) as grader:
        assert grader.grade("4", "4.0") == "right"


def test_many_threads_share_the_workers(grader):
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda n: grader.grade(str(n), str(n % 4)), range(8)))
    assert verdicts == ["right"] * 4 + ["wrong"] * 4


# -- Where an answer stands in a text, and what counts as a number that was written down -----------


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
    ("answer", "number", "unit"),
    [
        ("5", "5", {}),
        ("−5", "-5", {}),
        ("1,234.5", "1234.5", {}),
        (r"10\,000", "10000", {}),
        ("1 000 000", "1000000", {}),
        (r"7\frac12", r"7\frac12", {}),
        ("7 1/2", r"7\frac{1}{2}", {}),
        ("3e-7", r"3\cdot 10^{-7}", {}),
        (r"3\times 10^{8} \text{ m}", r"3\times 10^{8}", {"metre": 1}),
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
        (r"2\pi", r"2\pi", {}),
    ],
)
def test_a_number_is_split_from_its_unit(answer, number, unit):
    measure = split_unit(clean(answer))
    assert measure is not None
    assert (measure.latex, measure.unit) == (number, unit)


@pytest.mark.parametrize(
    "answer",
    ["1,2", "2 or 3", r"2 \text{ or } 3", "2x", "2 x", "2_3", "5!", "x=y=2", r"1\pm 1", "", "x"],
)
def test_what_is_not_a_number_with_a_unit_is_left_to_math_verify(answer):
    assert split_unit(clean(answer)) is None


@pytest.mark.parametrize(
    "piece", ["(", "{", r"3\frac{3", "10^{", r"\sqrt{", "1,000", " a", "°", "5="]
)
def test_no_answer_takes_long_to_read(piece):
    for answer in (text := (piece * 1000)[:1000], f"5 {text}", f"{text}5"):
        started = time.process_time()
        to_compare("5 cm", answer)
        assert time.process_time() - started < 5


# -- Rules and their weighted sum ------------------------------------------------------------------


THOUGHT = r"<think>2 and 2</think> \boxed{4}"


@pytest.mark.parametrize(
    ("weights", "text", "reward"),
    [
        ({"answer": 1}, THOUGHT, 1),
        ({"answer": 1}, r"\boxed{5}", 0),
        ({"answer": 1}, "4", 0),
        ({"answer": 0.9, "think": 0.1}, THOUGHT, 1),
        ({"answer": 0.9, "think": 0.1}, r"\boxed{4}", 0.9),
        ({"answer": 0.9, "think": 0.1}, r"<think>a</think>\boxed{5}", 0.1),
        ({"answer": 0.9, "think": 0.1}, r"<think></think>\boxed{5}", 0),
        ({"answer": 0.9, "think": 0.1}, r"<think>a</think><think>b</think>\boxed{5}", 0),
        ({"answer": 1, "boxed": 0.5}, r"\boxed{4} \boxed{4}", 1),
        ({"answer": 1, "boxed": 0.5}, r"\boxed{5}", 0.5),
        ({"boxed": 1}, r"<think>\boxed{1}</think>\boxed{5}", 1),
    ],
)
def test_a_reward_is_the_weighted_sum_of_its_rules(weights, text, reward):
    judged = MathRewards(weights, shared_grader()).judge(text, "4")
    assert judged.reward == pytest.approx(reward)
    assert set(weights) <= set(judged.parts)


@pytest.mark.parametrize(
    ("weights", "words"), [({"lenght": 1}, "rewards.lenght: there is no such rule"), ({}, "empty")]
)
def test_rules_that_do_not_exist_are_named(weights, words):
    with pytest.raises(ConfigError, match=words):
        MathRewards(weights, shared_grader())
