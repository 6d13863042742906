"""Programs tried out behind their walls: what is found of them, and that bad ones are told of."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.clients.cli.agents.check import report_lines
from tinkermq.envs.agents.trial.check import check_program
from tinkermq.envs.agents.trial.report import TrialReport
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import ConfigError, DataError

from tests.envs.agents.programs.conftest import LIMITS, PRELUDE

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
Try = Callable[..., Awaitable[TrialReport]]


@pytest.fixture
def tried(broker: Broker) -> Try:
    """Try a Python program out."""

    async def try_it(code: str, *, env: Any = None, **given: Any) -> TrialReport:
        options = {"limit_s": 60.0, "tries_context": False}
        options |= {name: given.pop(name) for name in ("row", *options) if name in given}
        command = ["{python}", "-S", "-c", PRELUDE + HISTORY + code]
        agent = {**LIMITS, "command": command, **given}
        job = JobConfig.model_validate({"model": {"path": "m"}, "agent": agent, "env": env or {}})
        return await check_program(broker, job, **options)

    return try_it


def levels(report: TrialReport, level: str) -> list[str]:
    """The findings of one level."""
    return [finding.text for finding in report.findings if finding.level == level]


async def test_a_program_that_appends_is_one_row(tried: Try) -> None:
    report = await tried("""
history.append(call(tools=TOOLS, user="me", temperature=0.1))
history.append(result())
call(tools=TOOLS)
reward()
""")
    assert report.ok
    assert not levels(report, "costs")
    assert [(call.parent, call.messages, call.new) for call in report.calls] == [
        (None, 2, 2),
        (0, 4, 1),
    ]
    assert (report.rows, report.continuing, report.parallel) == (1, 1.0, 1)
    assert (report.without_effect, report.overruled) == (["user"], ["temperature"])
    assert report.endpoints == {"POST /v1/chat/completions": 2}
    assert (report.outcome, report.reward) == ("done", 0.5)
    assert report.phases is not None
    assert report.phases.first_call is not None


async def test_what_a_program_edits_costs_rows_and_has_a_remedy(tried: Try) -> None:
    report = await tried("""
for turn in range(3):
    answer = call()
    history[0] = {"role": "system", "content": f"Be quick: {turn}"}
    history += [{"role": "assistant", "content": "It said so."}, {"role": "user", "content": "?"}]
reward()
""")
    assert report.ok
    assert (report.rows, report.continuing) == (3, 0.0)
    (system,) = [one for one in report.findings if "system message" in one.text]
    assert (system.level, system.text) == (
        "costs",
        "changes its system message from call to call (2 of 2 calls)",
    )
    assert "newest user message" in system.remedy
    assert any(text.startswith("3 rows: 0 of 2 further") for text in levels(report, "costs"))


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
    assert report.parallel >= 2
    assert [call.streamed for call in report.calls] == [True, True, True, False]
    assert report.calls[-1].choices == 2
    assert report.calls[-1].changes == ["sample"]
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
    ("code", "reaction"),
    [
        ("if call() is None: sys.exit(3)", "gives up, exit code 3"),
        ("while call() is None: pass", "retries for ever"),
        ("if call() is None: history[:] = history[1:2]; call()", "compacts"),
    ],
)
async def test_what_a_program_does_with_too_long_a_history_is_told(
    tried: Try, code: str, reaction: str
) -> None:
    more = 'history += [said, {"role": "user", "content": "More."}]'
    report = await tried(f"call(); {more}\n{code}\nreward()", tries_context=True)
    assert report.ok
    assert report.context == reaction
    assert any(reaction in finding.text for finding in report.findings)


@pytest.mark.parametrize(
    ("code", "told", "remedy"),
    [
        ("reward()", "without one answered call of the model", "OPENAI_BASE_URL"),
        ("call(); sys.exit(1)", "exits with code 1", "exits with 0"),
        ("call()", "nothing says what it is worth", "agent.reward"),
        ("call(); reward('much')", "neither a number nor JSON", "has done nothing"),
        ("post('/embeddings', input='x')", "without one answered call", "answered 404"),
    ],
)
async def test_a_program_that_cannot_be_trained_is_told_why(
    tried: Try, code: str, told: str, remedy: str
) -> None:
    report = await tried(code)
    assert not report.ok
    (failed,) = [one for one in report.findings if one.level == "fail" and told in one.text]
    assert remedy in failed.remedy


async def test_a_program_that_never_ends_is_ended(tried: Try) -> None:
    report = await tried("call(); reward(); time.sleep(1000)", limit_s=1.0)
    assert not report.ok
    assert report.outcome in ("timeout", "stuck")
    assert any("does not end by itself" in text for text in levels(report, "fail"))


async def test_a_program_that_floods_the_model_meets_its_limit(tried: Try) -> None:
    report = await tried("while call(): pass\nreward()", max_calls=5)
    assert [call.refusal for call in report.calls] == [""] * 5 + ["episode_limit"]
    assert "1 calls were refused with episode_limit" in levels(report, "costs")


async def test_a_command_that_is_not_there_and_a_job_without_one_are_refused(
    tried: Try, broker: Broker
) -> None:
    with pytest.raises(ConfigError, match="programs find no 'my-agnet'"):
        await tried("", command=["my-agnet"])
    with pytest.raises(ConfigError, match="'/nowhere' is no folder"):
        await tried("", files="/nowhere")
    game = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "guess"}})
    with pytest.raises(ConfigError, match="no job with a program"):
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
    with pytest.raises(DataError, match="there is no row 3: the training data has 3"):
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
        ("alive", [1, 1, 1, 1, 1], "it can have had a part in the outcome"),
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
    assert told in [one.text for one in report.findings]
    assert any(f"trained: {why}" in line for line in report_lines(report))


async def test_a_program_of_which_no_call_is_trained_cannot_be(tried: Try) -> None:
    report = await tried("call(); reward()", train="/nothing like it/")
    assert not report.ok
    assert levels(report, "fail")[0].startswith("0 of 1 answered calls would be trained")


async def test_a_call_that_the_program_takes_out_is_told(tried: Try) -> None:
    code = 'call(n=2); call(); post("/episode/note", call=1, train=False); reward()'
    report = await tried(code)
    assert [call.trained for call in report.calls] == [1, 1]
    assert report.calls[0].why == "taken out by the program"


async def test_another_agent_that_is_told_the_same_is_no_change_of_tools(tried: Try) -> None:
    """As qwen-code's extraction of memories: the history of the work, other tools and rules."""
    report = await tried("""
history.append(call(tools=TOOLS))
history[0] = {"role": "system", "content": "You keep memories."}
history.append({"role": "user", "content": "Extract what is worth keeping."})
WRITE = [{"type": "function", "function": {"name": "write", "parameters": {}}}]
history += [call(tools=WRITE), {"role": "user", "content": "Go on."}]
call(tools=WRITE)
reward()
""")
    assert report.ok
    assert not levels(report, "costs")
    assert [call.changes for call in report.calls][1] == ["apart"]
    assert [call.main for call in report.calls] == [True, False, False]
    assert [call.trained for call in report.calls] == [1, 1, 1]
