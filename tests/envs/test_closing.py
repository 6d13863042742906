"""A game is closed once, as the last of its methods, however its episode ends."""

from contextlib import closing

import pytest
from broken_games import CountingGame
from structlog.testing import capture_logs
from tinkermq.envs.data import HostData
from tinkermq.envs.running.episodes import Episodes, Opening
from tinkermq.envs.running.local import LocalGame
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

CALLS: list[str] = []


class ClosingGame(CountingGame):
    """Notes its calls; the action `drop` ends its episode in the middle of a step."""

    def reset(self, fails: bool = False, **_: object) -> str:
        CALLS.append("reset")
        if fails:
            raise OSError("no licence")
        return "begun"

    def step(self, action: str):
        if action == "drop":
            EPISODES.drop("e")
        elif action == "fail":
            raise OSError("the licence is gone")
        result = super().step(action)
        CALLS.append("step")
        return result

    def close(self) -> None:
        CALLS.append("close")
        raise OSError("it was lost")


class Toolless(ClosingGame):
    def get_tools(self):
        raise OSError("no tools")


class ClosesLater(CountingGame):
    async def close(self) -> None: ...


EPISODES = Episodes(ClosingGame, {"trouble_at": 0})


@pytest.mark.parametrize(
    ("actions", "calls"),
    [
        ((), "reset close"),
        (("go", "go", "go"), "reset step step step close"),
        (("go", "fail"), "reset step close"),
        (("drop",), "reset step close"),
        (("finish",), "reset close"),
    ],
)
def test_a_game_is_closed_once_after_its_last_call_and_a_failing_close_is_logged(actions, calls):
    CALLS.clear()
    EPISODES.reset(Opening("e", 0))
    with capture_logs() as logs:
        for action in actions:
            try:
                EPISODES.finish("e") if action == "finish" else EPISODES.step("e", action)
            except GameError:
                assert action == "fail"
        EPISODES.drop("e")
        EPISODES.drop_all()
    assert " ".join(CALLS) == calls
    assert [log["event"] for log in logs] == ["game_close_failed"]
    assert "it was lost" in logs[0]["error"]


def test_a_game_whose_reset_fails_is_closed():
    CALLS.clear()
    with pytest.raises(GameError, match="no licence"):
        EPISODES.reset(Opening("e", 0, kwargs={"fails": True}))
    assert CALLS == ["reset", "close"]


def test_a_game_that_is_made_to_learn_of_it_is_closed_also_if_it_cannot_tell():
    CALLS.clear()
    with pytest.raises(GameError, match="no tools"):
        Episodes(Toolless, {}).probe()
    config = EnvConfig(game="test_closing:ClosingGame")
    with closing(LocalGame(config, ClosingGame, HostData(config, 0))) as game:
        game.probe()
        game.describe()
    assert CALLS == ["close"] * 3


def test_an_async_close_is_refused_before_the_first_episode():
    with pytest.raises(GameError, match="close of ClosesLater is async"):
        Episodes(ClosesLater, {}).probe()
