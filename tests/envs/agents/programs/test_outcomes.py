"""How programs end, and what that means for their episodes."""

import asyncio
import contextlib

import pytest
from tinkermq.envs.agents.episode import NoCalls
from tinkermq.envs.agents.programs.agent_run import ProgramCrashed, try_number
from tinkermq.envs.agents.programs.runner import NoFreeSlot
from tinkermq.envs.host import HostGone
from tinkermq.schemas.wire.errors import (
    GameError,
    NotFoundError,
    RewardError,
    SandboxError,
    StateError,
    error_from_reply,
)

from tests.envs.agents.programs.conftest import hosting

SLEEP = "time.sleep(1000)"
REWARDED = "ask(); post('/reward', reward=0.5)\n"


async def test_a_program_asks_the_model_and_is_rewarded(play):
    result = await play(
        "print(ask()); print(post('/reward', reward=0.5)); print('x', file=sys.stderr)"
    )
    assert (result.reward, result.done, result.observation) == (0.5, True, "")
    assert (result.info["outcome"], result.info["exit_code"]) == ("done", 0)
    assert "four" in result.info["output"]
    assert "x\n" in result.info["output"]


async def test_a_program_that_says_its_end_is_done_though_it_runs_on(play):
    result = await play(f"{REWARDED}post('/end', status='done')\n{SLEEP}")
    assert (result.reward, result.info["outcome"]) == (0.5, "done")


async def test_a_program_may_say_that_it_has_failed(play):
    result = await play("ask(); post('/end', status='failed')", failed_reward=-1)
    assert (result.reward, result.info["outcome"]) == (-1, "failed")


async def test_time_that_has_run_out_ends_a_program_after_a_word_to_it(play):
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to end', flush=True), sys.exit()))"
    )
    result = await play(f"{code}\nask()\n{SLEEP}", timeout_s=6, grace_s=30, failed_reward=-1)
    assert (result.reward, result.info["outcome"]) == (-1, "timeout")
    assert "asked to end" in result.info["output"]


async def test_a_program_that_will_not_end_is_ended_with_all_that_it_started(play):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: " + SLEEP + "\n"
        f"ask()\n{SLEEP}"
    )
    result = await play(code, timeout_s=6)
    assert (result.reward, result.info["outcome"]) == (0.0, "timeout")
    assert result.info["exit_code"] == 137


async def test_a_program_without_a_call_for_too_long_is_stuck(play):
    result = await play(f"ask()\n{SLEEP}", idle_s=5, failed_reward=-1)
    assert (result.reward, result.info["outcome"]) == (-1, "stuck")


async def test_a_program_that_waits_for_the_model_is_not_stuck(play):
    result = await play("ask(); post('/slow')", idle_s=5, timeout_s=8)
    assert result.info["outcome"] == "timeout"


async def test_a_crash_is_tried_again_and_the_last_try_counts():
    code = "ask(); print('no such luck'); sys.exit(3)"
    async with hosting(code, max_tries=2, failed_reward=-1) as host:
        with pytest.raises(ProgramCrashed, match="exited with code 3 after 1 call") as crashed:
            await host.play("e-1")
        assert "no such luck" in crashed.value.hint
        assert crashed.value.boundary == "environment"
        result = await host.play("e-2")
        assert (result.reward, result.info["outcome"], result.info["exit_code"]) == (-1, "crash", 3)


async def test_a_crash_counts_at_once_where_that_is_wanted(play):
    result = await play(REWARDED + "os.abort()", max_tries=5, on_crash="score")
    assert (result.reward, result.info["outcome"], result.info["exit_code"]) == (0.5, "crash", 134)


async def test_a_stuck_program_is_tried_again_once():
    async with hosting(f"ask()\n{SLEEP}", max_tries=5, idle_s=5) as host:
        with pytest.raises(ProgramCrashed, match=r"made no call for agent.idle_s=5 s"):
            await host.play("e-1")
        assert (await host.play("e-2")).info["outcome"] == "stuck"


@pytest.mark.parametrize(
    ("code", "timeout_s", "words"),
    [
        ("print('hello')", 60, "exited with code 0 without one answered call"),
        ("raise SystemExit('no key')", 60, "exited with code 1 without one answered call"),
        (SLEEP, 0.5, "ran out of time .agent.timeout_s=0.5. without one answered call"),
    ],
)
async def test_a_program_that_never_asks_the_model_is_to_blame(play, code, timeout_s, words):
    with pytest.raises(NoCalls, match=words) as error:
        await play(code, max_tries=1, timeout_s=timeout_s)
    assert error.value.boundary == "task"
    assert "it printed" in error.value.hint


async def test_a_program_that_nobody_rewards_is_an_error_of_its_reward(play):
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play("ask()")


async def test_setup_runs_first_in_the_same_folder(play):
    setup = ["sh", "-c", "echo 0.25 > made; echo $TINKERMQ_EPISODE >> made"]
    code = "ask(); worth, who = open('made').read().split(); post('/reward', reward=float(worth))"
    result = await play(code + "; print(who)", setup=setup)
    assert result.reward == 0.25
    assert result.info["output"] == "e-1\n"


async def test_a_setup_that_fails_is_an_error_of_the_sandbox():
    setup = ["sh", "-c", "echo no wheel; exit 4"]
    async with hosting(setup=setup) as host:
        with pytest.raises(SandboxError, match=r"agent.setup exited with code 4") as error:
            await host.begin()
        assert "no wheel" in error.value.hint
    async with hosting(setup=["sleep", "1000"], setup_timeout_s=0.3) as host:
        with pytest.raises(
            SandboxError, match=r"agent.setup took longer than agent.setup_timeout_s"
        ):
            await host.begin()


async def test_a_program_that_cannot_be_run_fails_its_episode():
    async with hosting(command=["./made-later"], setup=["true"]) as host:
        with pytest.raises(GameError, match=r"cannot be run: .*made-later"):
            await host.begin()


async def test_a_host_without_a_place_says_so_and_the_episode_starts_elsewhere():
    async with hosting(f"ask()\n{SLEEP}", per_host=1, setup_timeout_s=0.5) as host:
        await host.begin("e-1")
        with pytest.raises(NoFreeSlot, match=r"no place .* agent.per_host=1") as error:
            await host.begin("f-1")
        told = error_from_reply(error.value.code, error.value.message, error.value.hint)
        assert type(told) is HostGone
        host.runner.drop("e-1")
        assert await host.begin("f-1")


async def test_an_episode_that_nobody_wants_any_more_is_ended():
    async with hosting(f"ask()\n{SLEEP}", per_host=1) as host:
        await host.begin("e-1")
        host.runner.drop("e-1")
        assert await host.begin("e-2")
        with pytest.raises(NotFoundError):
            await host.end("e-1")
        with pytest.raises(StateError):
            await host.runner.turn("e-2")
        assert host.endpoint.closed == ["e-1"]


async def test_nothing_is_left_of_episodes_that_are_dropped_at_any_moment():
    async with hosting(f"ask()\n{SLEEP}", per_host=8) as host:
        begun = []
        for number in range(8):
            begun.append(asyncio.ensure_future(host.begin(f"e{number}-1")))
            await asyncio.sleep(0.02)
        for number in range(8):
            host.runner.drop(f"e{number}-1")
            host.runner.drop(f"e{number}-1")
        for one in begun:
            with contextlib.suppress(NotFoundError):
                await one


@pytest.mark.parametrize(
    ("episode", "number"), [("t.4-12", 12), ("t", 1), ("a-b", 1), ("7-2-1", 1)]
)
def test_an_episodes_id_tells_which_try_it_is(episode, number):
    assert try_number(episode) == number
