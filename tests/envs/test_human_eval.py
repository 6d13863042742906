"""The game human_eval: what passes, what does not, and what hostile replies come to."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.games import human_eval
from tinkermq.envs.games.human_eval import HumanEvalGame
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError, DataError

from tests.support.configs import example

DECLARATION = '''from typing import Dict, List
import math


def squares(x: int) -> int:
    return x * x


def counts(xs: List[int]) -> Dict[int, int]:
    """ Count the squares of numbers.
    >>> counts([1, -1, 2])
    {1: 2, 4: 1}
    """
'''
BODY = """    found: Dict[int, int] = {}
    for x in xs:
        found[squares(x)] = found.get(squares(x), 0) + 1
    return found
"""
TEST = """
def check(candidate):
    import random
    assert candidate([]) == {}, "without numbers"
    assert candidate([1, -1, 2]) == {1: 2, 4: 1}
    for _ in range(3):
        x = random.randint(2, 9)
        assert candidate([x]) == {squares(x): 1} == counts([x])
"""
PLAIN = {"time_s": 120, "memory_mb": 128, "output_kb": 16}
SHORT_S = 0.6
"""Time of all calls, where some of them have no end."""
RIGHT = "def counts(xs):\n" + BODY


def opened(test: str = TEST, **settings: float) -> HumanEvalGame:
    game = HumanEvalGame({**PLAIN, **settings})
    about = {"declaration": DECLARATION, "function": "counts", "test": test}
    game.reset(ground_truth=BODY, extra_info=about)
    return game


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """See that no test leaves a process."""
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


PASSING = {
    "a function in a block": fenced(RIGHT),
    "a block that a limit on tokens has cut": f"Sure!\n```python\n{RIGHT}",
    "a function without a block": RIGHT,
    "the body alone": BODY,
    "the body in a block": fenced(BODY),
    "an example in another block": f"{fenced(RIGHT)}\n{fenced('print(counts([3]))')}",
    "a helper before": fenced(f"def f(x): return x\n\n{RIGHT}"),
    "a kind of dict": fenced(
        "import collections\ndef counts(xs): return collections.Counter(map(squares, xs))"
    ),
    "debugging": fenced(RIGHT.replace("    return", "    print('passed', xs)\n    return")),
    "reasoning": f"<think>{fenced('def counts(xs): 1 / 0')}</think>{fenced(RIGHT)}",
}


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING)
def test_a_right_function_passes(reply: str) -> None:
    result = opened().step(reply)
    assert (result.reward, result.done) == (1.0, True)
    assert result.info == {"success": True, "calls": 8}


EQUAL = """
class Equal(dict):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "passed"
    def items(self): return []
def counts(xs): return Equal()
"""
NESTED = "class Deep:\n  def __repr__(self): return '(' * 9000\ndef counts(xs): return Deep()"
CODE = """
class Code:
    def __repr__(self): return "exit(0)"
def counts(xs): return Code()
"""
FORKED = """
import os
def counts(xs):
    while True:
        try: os.fork()
        except OSError: pass
"""
FORGED = """
import os
for n in range(3, 4096):
  try: os.write(n, b'.' * 5)
  except OSError: pass
print("passed")
while True: pass
"""
PATCHED = """
import ast, builtins, random
builtins.print = lambda *a, **k: __import__("os").write(1, b"\\npassed\\n")
builtins.repr = lambda value: "passed"
ast.literal_eval = random.seed = lambda *a: {}
def check(candidate): pass
def _resume(*a): print("passed")
def counts(xs): return {}
"""
SEARCHED = """
import gc, glob, sys
def counts(xs):
    seen = [repr(one) for one in gc.get_objects() if isinstance(one, (str, dict, list))]
    for path in glob.glob("/proc/*/cmdline") + glob.glob("/tmp/*"):
        seen.append(open(path, errors="replace").read())
    assert "without " + "numbers" in "".join(seen)
"""
FAILING = {
    "nothing": "",
    "words": "I cannot write that.",
    "no python": fenced("def counts(xs:"),
    "a wrong function": fenced("def counts(xs): return {}"),
    "a function that raises": fenced("def counts(xs): raise ValueError"),
    "the declaration alone": fenced(f"{DECLARATION}    pass"),
    "another function": fenced("def count(xs): return {}"),
    "an end before the tests": fenced(f"{RIGHT}\nimport sys\nsys.exit(0)"),
    "an end within the function": fenced("def counts(xs): raise SystemExit(0)"),
    "an end without words": fenced("import os\ndef counts(xs): os._exit(0)"),
    "an end at its end": fenced(
        "import atexit, os\natexit.register(os._exit, 0)\ndef counts(xs): exit()"
    ),
    "an endless loop": fenced("while True: pass"),
    "an endless loop in the function": fenced("def counts(xs):\n  while True: pass"),
    "a bomb of processes": fenced(FORKED),
    "memory": fenced("def counts(xs): return {1: bytearray(1 << 30)}"),
    "endless output": fenced("def counts(xs):\n  while True: print('passed')"),
    "a printed result": fenced("print('passed')\ndef counts(xs): print('passed')"),
    "a returned result": fenced("def counts(xs): return 'passed'"),
    "an object that equals all": fenced(EQUAL),
    "an object that looks like code": fenced(CODE),
    "an object that cannot be read": fenced(NESTED),
    "a forged end of the program": fenced(FORGED),
    "everything replaced": fenced(PATCHED),
    "a search for the tests": fenced(SEARCHED),
}


@pytest.mark.parametrize("reply", FAILING.values(), ids=FAILING)
def test_what_does_not_return_the_right_values_fails(reply: str) -> None:
    result = opened(time_s=SHORT_S).step(reply)
    assert (result.reward, result.done, result.info["success"]) == (0.0, True, False)


def test_a_file_that_is_written_is_gone_with_its_program(tmp_path: Path) -> None:
    marks = [str(tmp_path / "mark"), "/tmp/tinkermq-mark"]
    write = f"for mark in {marks}:\n  try: open(mark, 'w').write('x')\n  except OSError: pass\n"
    assert opened().step(fenced(f"{write}{RIGHT}")).reward == 1.0
    assert [mark for mark in marks if Path(mark).exists()] == []
    read = f"import os\nassert not os.path.exists({marks[1]!r})\n"
    assert opened().step(fenced(f"{read}{RIGHT}")).reward == 1.0


def test_a_process_that_is_left_behind_ends_with_the_episode() -> None:
    left = "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(4218)\n"
    assert opened().step(fenced(f"{left}{RIGHT}")).reward == 1.0


def test_the_time_of_all_calls_is_bounded() -> None:
    many = "def check(candidate):\n    for n in range(100): candidate([n])"
    slow = fenced("import time\ndef counts(xs): time.sleep(1)")
    result = opened(many, clock_s=2.9).step(slow)
    assert (result.reward, result.info["calls"]) == (0.0, 2)
    assert result.info["stopped"] == "clock"
    spinning = fenced("def counts(xs):\n  while True: pass")
    assert opened(many, time_s=0.3).step(spinning).info["stopped"] == "time"
    endless = "def check(candidate):\n    while True: candidate([])"
    result = opened(endless, time_s=SHORT_S).step(fenced("def counts(xs): 1"))
    assert result.info["calls"] <= human_eval.MAX_CALLS


@pytest.mark.parametrize("missing", ["declaration", "function", "test"])
def test_a_row_without_its_tests_is_refused(missing: str) -> None:
    about: dict[str, Any] = {"declaration": DECLARATION, "function": "counts", "test": TEST}
    with pytest.raises(DataError, match="needs declaration, function and test"):
        HumanEvalGame(PLAIN).reset(ground_truth="x", extra_info={**about, missing: ""})


def test_tests_that_do_not_load_are_the_datas_fault() -> None:
    with pytest.raises(DataError, match="the tests of counts do not load: NameError"):
        opened("undefined").step(fenced(RIGHT))


def test_settings_of_the_sandbox_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs\.sandbox\.memory"):
        HumanEvalGame({"memory": 1})


def test_the_game_of_the_example_can_be_made() -> None:
    env = parse_config(example("human_eval")).env
    HumanEvalGame(**env.kwargs)


@pytest.mark.extras
def test_every_problem_is_in_one_split_and_its_own_solution_passes(tmp_path: Path) -> None:
    train, val = human_eval.make_data(tmp_path)
    rows = [data.record(n) for data in (Dataset([train]), Dataset([val])) for n in range(len(data))]
    assert len({row.extra_info["task_id"] for row in rows}) == len(rows) == 164
    assert len(Dataset([val])) == human_eval.NUM_HELD
    game = HumanEvalGame()
    for row in rows:
        game.reset(ground_truth=row.ground_truth, extra_info=row.extra_info)
        assert game.step(game.gold_action()).reward == 1.0, row.extra_info["task_id"]
        nothing = f"{row.extra_info['declaration']}    pass"
        assert game.step(fenced(nothing)).reward == 0.0, row.extra_info["task_id"]


@pytest.mark.extras
def test_every_check_of_the_game_passes(tmp_path: Path) -> None:
    train, val = human_eval.make_data(tmp_path, 4, 2, seed=3)
    config = EnvConfig(game="human_eval", train_data=[str(train)], val_data=[str(val)])
    results = check_game(config)
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]
