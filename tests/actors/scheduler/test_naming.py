"""Names of runs."""

import re

from tinkermq.actors.scheduler.submission.submission import names, run_name


def test_a_run_is_named_after_its_game_its_model_and_two_words() -> None:
    name = run_name({"env": {"game": "calculator"}, "model": {"path": "/models/Tiny_0.4M/"}})
    assert re.fullmatch(r"calculator-tiny-0-4m-[a-z]+-[a-z]+", name)


def test_a_game_given_by_its_class_is_named_after_the_class() -> None:
    name = run_name({"env": {"game": "my.games:Maze"}, "model": {"path": "Qwen/Qwen3-0.6B"}})
    assert name.startswith("maze-qwen3-0-6b-")


def test_what_is_not_known_yet_is_left_out() -> None:
    assert re.fullmatch(r"job-[a-z]+-[a-z]+", run_name({}))
    assert re.fullmatch(r"bandit-[a-z]+-[a-z]+", run_name({"env": {"game": "bandit"}, "model": 3}))


def test_any_name_may_stand_in_a_subject() -> None:
    name = run_name({"env": {"game": "x" * 90}, "model": {"path": "ÄÖ/" + "y" * 90}})
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name)


def test_a_run_of_programs_is_named_so() -> None:
    name = run_name({"agent": {"command": ["codex"]}, "model": {"path": "tiny"}})
    assert re.fullmatch(r"agent-tiny-[a-z]+-[a-z]+", name)


def test_what_serves_or_evaluates_says_so_and_of_which_run() -> None:
    config = {"env": {"game": "bandit"}, "model": {"path": "tiny"}}
    served = names(config, "infer", "Guess run@80")
    assert next(served) == "serve-guess-run-80"
    assert re.fullmatch(r"serve-guess-run-80-[a-z]+-[a-z]+", next(served))
    assert re.fullmatch(r"eval-bandit-tiny-[a-z]+-[a-z]+", next(names(config, "eval", "")))
    assert re.fullmatch(r"bandit-tiny-[a-z]+-[a-z]+", next(names(config, "train", "any@1")))
    assert all(
        len(name) <= 64 for name, _ in zip(names(config, "infer", "x" * 99), "ab", strict=False)
    )
