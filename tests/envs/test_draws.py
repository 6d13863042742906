"""A game's host warns of draws from the generator that all games share."""

import random
from random import Random
from random import choice as pick

import opentinker_games
import pytest
from structlog.testing import capture_logs
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.running.episodes import Episodes, global_draws


class Drawn(AbstractGame):
    """Draws from the module in two ways, and rightly in two others."""

    def reset(self, **_):
        number = random.randint(1, 6)
        return f"{number} {pick('abc')} {Random(3).random()} {self.rng.random()}"

    def step(self, action):
        return StepResult(action, 0.0, True)

    def get_system_prompt(self):
        return None

    def get_initial_user_message(self):
        return ""


def test_draws_are_found_with_their_lines():
    found = [place.split(" in line ") for place in global_draws(Drawn)]
    assert [name for name, _ in found] == ["random.randint", "pick"]
    assert all(line.isdigit() for _, line in found)
    assert global_draws(opentinker_games.Board) == []


@pytest.mark.parametrize(("game", "warned"), [(Drawn, True), (opentinker_games.Board, False)])
def test_who_hosts_such_a_game_says_so_at_the_start(game, warned):
    with capture_logs() as lines:
        Episodes(game, {}).probe()
    assert [line["event"] for line in lines] == ["game_draws_from_random"] * warned
