"""Where the reward of a program comes from, and what is none."""

import pytest
from tinkermq.envs.agents.programs.agent_run import ProgramReward, parse_reward
from tinkermq.envs.dataset import Record
from tinkermq.schemas.wire.errors import ConfigError, RewardError

from tests.envs.agents.programs.conftest import hosting

GRADE = """
import json, os, pathlib, sys
row = json.load(open(os.environ["TINKERMQ_ROW"]))
written = pathlib.Path("answer").read_text().strip()
print("a word before")
print(json.dumps({"reward": float(written == row["answer"]), "success": True, "info": row}))
"""
ROW = Record(
    prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    ground_truth="four",
    data_source="sums",
    extra_info={"level": 1, "answer": "four", "solution": "2 + 2 = four"},
)
ANSWER = "open('answer', 'w').write(ask())\n"


@pytest.fixture
def grader(tmp_path):
    folder = tmp_path / "grader"
    folder.mkdir()
    (folder / "grade.py").write_text(GRADE)
    return {"reward": ["{python}", "-S", "{grader}/grade.py"], "reward_files": str(folder)}


async def test_the_reward_command_knows_the_gold_answer_and_what_the_program_wrote(play, grader):
    result = await play(ANSWER, opening={"record": ROW, "seed": 7}, **grader)
    assert (result.reward, result.info["success"]) == (1.0, True)
    assert result.info["answer"] == "four"
    assert result.info["extra_info"] == ROW.extra_info
    assert (result.info["seed"], result.info["data_source"]) == (7, "sums")


async def test_a_posted_reward_comes_first_and_a_number_written_only_without_a_command(
    play, grader
):
    posted = "post('/reward', reward=0.25)\n"
    written = "open(os.environ['TINKERMQ_REWARD'], 'w').write('0.75')\n"
    assert (await play(ANSWER + posted + written, **grader)).reward == 0.25
    assert (await play(posted + written + "ask()")).reward == 0.25
    result = await play(f"ask()\n{written}")
    assert (result.reward, "success" in result.info) == (0.75, False)
    half = {"reward": ["sh", "-c", "echo 0.5"]}
    assert (await play(f"ask()\n{written}", **half)).reward == 0.5


async def test_what_a_timed_out_program_left_is_graded(play, grader):
    result = await play(
        ANSWER + "time.sleep(1000)",
        opening={"record": ROW},
        timeout_s=6,
        failed_reward=-1,
        **grader,
    )
    assert (result.reward, result.info["outcome"]) == (1.0, "timeout")


async def test_a_program_that_failed_and_cannot_be_graded_gets_the_failed_reward(play, grader):
    result = await play("ask(); sys.exit(1)", failed_reward=-0.5, **grader)
    assert (result.reward, result.info["outcome"]) == (-0.5, "crash")
    assert "agent.reward exited with code 1" in result.info["no_reward"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo 1; exit 2", "exited with code 2"),
        ("true", "printed nothing"),
        ("echo well done", "neither a number nor JSON: 'well done'"),
        ("echo NaN", "not finite"),
        ("sleep 1000", "took longer than agent.reward_timeout_s=0.5"),
        ("yes > big; sleep 1000", "exited with code|wrote more than agent.disk_mb"),
    ],
)
async def test_a_reward_command_that_gives_none_is_told_with_what_it_printed(play, command, words):
    timeout_s = 0.5 if command == "sleep 1000" else 60
    with pytest.raises(RewardError, match=words):
        await play("ask()", reward=["sh", "-c", command], reward_timeout_s=timeout_s)


async def test_the_reward_command_runs_when_all_processes_of_the_program_are_dead(play):
    code = (
        "ask()\nif os.fork() == 0:\n os.setsid()\n"
        " while True: open('beat', 'w').write(str(time.time()))\n"
    )
    look = "import os, time\nfirst = os.stat('beat').st_mtime_ns\ntime.sleep(0.3)\n"
    look += "pids = [one for one in os.listdir('/proc') if one.isdigit()]\n"
    look += "print(float(os.stat('beat').st_mtime_ns == first and len(pids) == 2))"
    code += "while not os.path.exists('beat'): time.sleep(0.01)\n"
    assert (await play(code, reward=["{python}", "-S", "-c", look])).reward == 1.0


async def test_the_reward_command_reaches_no_model_and_no_network(play):
    look = "import os, socket\nkeys = [one for one in os.environ if 'KEY' in one or 'URL' in one]\n"
    look += "print(float(not keys and [name for _, name in socket.if_nameindex()] == ['lo']))"
    for network in ("model", "open"):
        result = await play("ask()", reward=["{python}", "-S", "-c", look], network=network)
        assert result.reward == 1.0


async def test_what_the_program_left_in_the_place_of_its_reward_leads_nowhere(play, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0.125")
    code = f"ask(); os.symlink({str(secret)!r}, os.environ['TINKERMQ_REWARD'])"
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play(code)
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play("ask(); os.mkfifo(os.environ['TINKERMQ_REWARD'])")


async def test_graders_that_programs_would_see_are_refused(tmp_path):
    (tmp_path / "grader").mkdir()
    with pytest.raises(ConfigError, match=r"programs would see .*grader in .*agent.read"):
        async with hosting(
            reward=["true"], reward_files=str(tmp_path / "grader"), read=[str(tmp_path)]
        ):
            pass
    with pytest.raises(ConfigError, match=r"programs would see .*grader in .*agent.files"):
        async with hosting(
            reward=["true"], reward_files=str(tmp_path / "grader"), files=str(tmp_path)
        ):
            pass
    with pytest.raises(ConfigError, match=r"names {grader}, and there is no agent.reward_files"):
        async with hosting(reward=["{grader}/grade"]):
            pass


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("1", ProgramReward(1.0)),
        (" -2.5e1\n", ProgramReward(-25.0)),
        ('{"reward": 0}', ProgramReward(0.0)),
        ('{"reward": 1, "success": false, "info": {"a": 1}}', ProgramReward(1.0, False, {"a": 1})),
    ],
)
def test_a_reward_is_a_number_or_an_object_with_one(text, worth):
    assert parse_reward(text, "it") == worth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a number nor JSON"),
        ("nan", "neither"),
        ("NaN", "not finite"),
        ("-Infinity", "not finite"),
        ("1e999", "not finite"),
        ("9" * 400, "not finite"),
        ("true", "True, which is no number"),
        ('"1"', "'1', which is no number"),
        ("[1]", "no number"),
        ("{}", "None, which is no number"),
        ('{"reward": "1"}', "no number"),
        ('{"reward": NaN}', "not finite"),
        ('{"reward": 1, "sucess": true}', "the key 'sucess', which means nothing"),
        ('{"reward": 1, "success": 1}', "has success=1"),
        ('{"reward": 1, "info": []}', "has info="),
        ("[" * 100_000, "neither"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_words(text, words):
    with pytest.raises(RewardError, match=words) as error:
        parse_reward(text, "agent.reward")
    assert "what agent.reward wrote" in error.value.message
    assert len(error.value.message) < 400
