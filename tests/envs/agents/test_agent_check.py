"""`agent check` on programs, and the example agent."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.clients.cli.agents import report_lines
from tinkermq.envs.agents.agent_check import AgentReport, check_program
from tinkermq.envs.agents.local_run import LocalCall, open_program
from tinkermq.envs.games.calculator import CalculatorGame
from tinkermq.envs.tools import example_of
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import ConfigError, DataError

from tests.envs.agents.programs.conftest import LIMITS, PRELUDE
from tests.support.configs import example
from tests.support.harbor_tasks import TASKS, Task

pytestmark = pytest.mark.full

HISTORY = """
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
history = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "2 + 2?"}]

def call(**fields):
    global said
    status, answer = post("/chat/completions", model="m", messages=history, **fields)
    said = answer["choices"][0]["message"] if status == 200 else None
    return said

def result():
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}

def reward(worth=0.5):
    open(os.environ["TINKERMQ_REWARD"], "w").write(str(worth))
"""
Try = Callable[..., Awaitable[AgentReport]]


@pytest.fixture
def tried(broker: Broker) -> Try:
    """Try a Python program out."""

    async def try_it(code: str, *, env: Any = None, **given: Any) -> AgentReport:
        options: dict[str, Any] = {"limit_s": 60.0}
        options |= {name: given.pop(name) for name in ("row", *options) if name in given}
        command = ["{python}", "-S", "-c", PRELUDE + HISTORY + code]
        agent = {**LIMITS, "command": command, **given}
        job = JobConfig.model_validate({"model": {"path": "m"}, "agent": agent, "env": env or {}})
        return await check_program(broker, job, **options)

    return try_it


def details(report: AgentReport, outcome: str) -> list[str]:
    """The details of the checks with one outcome."""
    return [check.detail for check in report.checks if check.outcome == outcome]


async def test_a_program_that_appends_is_one_row(tried: Try) -> None:
    report = await tried("""
history.append(call(tools=TOOLS, user="me", temperature=0.1))
history.append(result())
call(tools=TOOLS)
reward()
""")
    assert report.ok
    assert [(call.parent, call.messages, call.new) for call in report.calls] == [
        (None, 2, 2),
        (0, 4, 1),
    ]
    assert report.rows == 1
    assert "each call continues the one before it: one row" in details(report, "ok")
    assert (report.without_effect, report.overruled) == (["user"], ["temperature"])
    assert report.endpoints == {"POST /v1/chat/completions": 2}
    assert (report.outcome, report.reward) == ("done", 0.5)


async def test_a_call_that_continues_none_says_where_it_differs(tried: Try) -> None:
    report = await tried("""
for turn in range(2):
    call()
    history[0] = {"role": "system", "content": f"Be quick: {turn}"}
call()
call(tools=TOOLS)
call(tools=TOOLS)
history += [{"role": "assistant", "content": "It said so."}, {"role": "user", "content": "?"}]
call(tools=TOOLS)
reward()
""")
    assert report.ok
    assert [call.differs for call in report.calls] == [
        "",
        "message 0 (system) differs from call 0",
        "message 0 (system) differs from call 1",
        "the history ends before the answer to call 2",
        "the history ends before the answer to call 3",
        "message 2 (assistant) differs from call 4",
    ]
    assert report.rows == 6
    (rows,) = [one for one in report.checks if one.detail.startswith("6 rows: 0 of 5 further")]
    assert (rows.outcome, "as the API returned it" in rows.hint) == ("note", True)
    assert any("message 0 (system) differs from call 1" in line for line in report_lines(report))


async def test_calls_beside_each_other_streams_and_choices_are_seen(tried: Try) -> None:
    report = await tried("""
import threading
def stream():
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    body = json.dumps({"messages": history, "stream": True})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + "/chat/completions", body, headers)
    assert connection.getresponse().read().count(b"data:") > 3
threads = [threading.Thread(target=stream) for _ in range(3)]
for one in threads: one.start()
for one in threads: one.join()
call(n=2)
reward()
""")
    assert report.ok
    assert [call.streamed for call in report.calls] == [True, True, True, False]
    assert report.calls[-1].choices == 2
    assert report.rows == 5


async def test_what_follows_an_earlier_response_continues_it(tried: Try) -> None:
    report = await tried("""
status, first = post("/responses", input="2 + 2?")
status, second = post("/responses", input="And now?", previous_response_id=first["id"])
assert status == 200, second
post("/episode/reward", reward=0.25)
post("/episode/note", call=0, role="main")
""")
    assert report.ok
    assert [call.parent for call in report.calls] == [None, 0]
    assert report.reward == 0.25
    assert report.posted == {"reward": 0.25, "branch_names": {"0": "main"}}


@pytest.mark.parametrize(
    ("code", "told", "remedy"),
    [
        ("reward()", "without one answered call of the model", "OPENAI_BASE_URL"),
        ("call(); sys.exit(1)", "exits with code 1", "exits with 0"),
        ("call()", "has ended without a reward", "agent.reward"),
        ("call(); reward('much')", "neither a number nor JSON", "has done nothing"),
        ("post('/embeddings', input='x')", "without one answered call", "answered 404"),
    ],
)
async def test_a_program_that_cannot_be_trained_is_told_why(
    tried: Try, code: str, told: str, remedy: str
) -> None:
    report = await tried(code)
    assert not report.ok
    (failed,) = [one for one in report.checks if not one.ok and told in one.detail]
    assert remedy in failed.hint


async def test_a_program_that_never_ends_is_ended(tried: Try) -> None:
    report = await tried("call(); reward(); time.sleep(1000)", limit_s=4.0)
    assert not report.ok
    assert report.outcome in ("timeout", "stuck")
    assert any("does not end by itself" in text for text in details(report, "failed"))


async def test_a_program_that_floods_the_model_meets_its_limit(tried: Try) -> None:
    report = await tried("while call(): pass\nreward()", max_calls=5)
    assert [call.refusal for call in report.calls] == [""] * 5 + ["episode_limit"]
    assert "1 calls were refused with episode_limit" in details(report, "note")


async def test_a_command_that_is_not_there_and_a_job_without_one_are_refused(
    tried: Try, broker: Broker
) -> None:
    with pytest.raises(ConfigError, match="programs do not find 'my-agnet'"):
        await tried("", command=["my-agnet"])
    with pytest.raises(ConfigError, match="'/nowhere' is not a folder"):
        await tried("", files="/nowhere")
    game = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "guess"}})
    with pytest.raises(ConfigError, match="this run has no program"):
        await check_program(broker, game)


async def test_a_row_of_the_data_is_the_task(tried: Try, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(3)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = """
told = json.load(open(os.environ["TINKERMQ_TASK"]))
assert "answer" not in told
call()
reward(float(told["prompt"][0]["content"][0]))
"""
    env = {"train_data": [str(data)]}
    assert (await tried(code, env=env, row=2)).reward == 2.0
    with pytest.raises(DataError, match="row 3 does not exist: the training data has 3"):
        await tried(code, env=env, row=3)


EXTRACTS = """
history = [{"role": "system", "content": "You are a coder."}, {"role": "user", "content": "2 + 2?"}]
history.append(call(tools=TOOLS))
history.append(result())
history.append(call(tools=TOOLS))
whole = json.dumps(history)
history = [{"role": "system", "content": "You keep memories."}, {"role": "user", "content": whole}]
for _ in range(3):
    history += [call(), {"role": "user", "content": "and?"}]
reward()
"""


@pytest.mark.parametrize(
    ("train", "trained", "why"),
    [
        ("all", [1, 1, 1, 1, 1], "every answer that arrives is"),
        ("main", [1, 1, 0, 0, 0], "not of the main conversation"),
        ("/You are a coder/", [1, 1, 0, 0, 0], "left out by the pattern of agent.train"),
        ("not /memories/", [1, 1, 0, 0, 0], "left out by the pattern of agent.train"),
        ("not /coder/", [0, 0, 1, 1, 1], "by the pattern of agent.train=not /coder/"),
    ],
)
async def test_each_call_is_told_to_be_trained_or_why_it_is_not(
    tried: Try, train: str, trained: list[int], why: str
) -> None:
    report = await tried(EXTRACTS, train=train)
    assert report.ok
    assert [call.trained for call in report.calls] == trained
    assert report.calls[-1].why == why
    assert [call.main for call in report.calls] == [True, True, False, False, False]
    told = f"{sum(trained)} of 5 answered calls would be trained (agent.train={train})"
    assert told in [one.detail for one in report.checks]
    assert any(f"trained: {why}" in line for line in report_lines(report))


async def test_a_program_of_which_no_call_is_trained_cannot_be(tried: Try) -> None:
    report = await tried("call(); reward()", train="/nothing like it/")
    assert not report.ok
    assert details(report, "failed")[0].startswith("0 of 1 answered calls would be trained")


async def test_a_call_that_the_program_takes_out_is_told(tried: Try) -> None:
    code = 'call(n=2); call(); post("/episode/note", call=1, train=False); reward()'
    report = await tried(code)
    assert [call.trained for call in report.calls] == [1, 1]
    assert report.calls[0].why == "taken out by the program"


SCHEMA = {
    "type": "object",
    "$defs": {"one": {"enum": [3, 4]}},
    "properties": {
        "ref": {"$ref": "#/$defs/one"},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 7}]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        "text": {"type": ["null", "string"]},
        "left out": {},
    },
    "required": ["ref", "maybe", "list", "text"],
}


def test_arguments_of_a_scripted_call_fit_their_schema() -> None:
    assert example_of(SCHEMA) == {"ref": 3, "maybe": 7, "list": [True, True], "text": "text"}
    assert example_of({"$ref": "#"}) == "text"
    assert example_of("no schema") == "text"


async def test_the_script_calls_a_tool_and_ends_as_the_program_wants_it(tried: Try) -> None:
    report = await tried("""
def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}
tools = [tool("submit_answer"), tool("search"), tool("look")]
names = []
for _ in range(2):
    history.append(call(tools=tools))
    names.append(said["tool_calls"][0]["function"]["name"])
    history.append(result())
assert names == ["search", "submit_answer"], names
assert said["content"] and said["content"].strip()
reward()
""")
    assert report.ok, report.output
    assert [call.parent for call in report.calls] == [None, 0]


async def test_the_script_answers_in_the_form_that_is_demanded(tried: Try) -> None:
    report = await tried("""
schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"]}
form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
assert json.loads(call(response_format=form)["content"]) == {"a": 3}
call(tools=TOOLS, tool_choice="required")
assert said["tool_calls"][0]["function"]["name"] == "look"
reward()
""")
    assert report.ok, report.output


# -- The example agent is worth what the game of the same task is, whatever its model says ---------


ROOT = Path(__file__).resolve().parents[3]
ANSWERS = [["=12*34", " 408\n"], ["=12*3", "=12*34"], ["no idea"]]


class Reciting:
    """A model that says one thing after the other."""

    def __init__(self, answers: list[str]) -> None:
        self._answers = iter(answers)

    async def say(self, call: LocalCall) -> str:
        """Say the next."""
        return next(self._answers)


def as_game(answers: list[str]) -> float:
    """What the game gives for the answers."""
    game = CalculatorGame()
    game.reset(ground_truth="408", extra_info={"question": "12*34"})
    return sum(game.step(answer).reward for answer in answers)


async def test_the_example_agent_earns_what_the_game_gives(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "12*34", "answer": "408"}))
    config = example("agent", f"env.train_data=[{data}]", "env.val_data=[]")
    async with open_program(broker, JobConfig.model_validate(config)) as program:
        for answers in ANSWERS:
            run = await program.run(Reciting(answers).say, row=0)
            assert run.result is not None, run.error
            assert run.result.reward == as_game(answers), answers
            assert len(run.model.calls) == len(answers)


async def test_the_check_of_harbor_tasks_says_which_run_here_and_runs_one(
    tried: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bwrap", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))  # without podman and docker
    tasks = tmp_path / "tasks"
    Task("Go.", "true", "", "FROM debian\nRUN apt-get update\n").write(tasks / "a-refused")
    TASKS["makes-folder"].write(tasks / "b-runs")
    report = await tried("call(); os.makedirs('out/deep')", tasks=f"harbor:{tasks}")
    assert report.ok
    assert report.reward == 1.0
    said = [(check.outcome, check.detail) for check in report.checks]
    assert said[0][0] == "ok"
    assert said[0][1].startswith(
        "1 of 2 Harbor tasks suit the sandbox, by their files (podman and docker are not installed"
    )
    assert said[1] == ("ok", "their reward is that of tests/test.sh, in /logs/verifier")
    assert said[2][0] == "note"
    assert "task a-refused cannot be run: RUN apt-get" in said[2][1]
    assert "(environment/Dockerfile:2)" in said[2][1]
    report = await tried("call()", tasks=f"harbor:{tasks}", row=0)
    assert not report.ok
    assert any("task a-refused cannot be run" in text for text in details(report, "failed"))
    shutil.rmtree(tasks / "b-runs")
    report = await tried("call()", tasks=f"harbor:{tasks}")
    assert details(report, "failed")[0].startswith("0 of 1 Harbor tasks suit the sandbox")
