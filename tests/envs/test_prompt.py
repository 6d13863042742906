"""How first prompts are made: prompt and game agree."""

import random
from typing import Any

import pytest
from broken_games import CountingGame, ReturnsNoText
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.dataset import Record
from tinkermq.envs.games.guess import GuessGame
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.wire.errors import DataError, GameError


class OpenTinkerStyle(AbstractGame):
    """Draws within reset, and describes itself by resetting again."""

    def reset(self, size: int = 0, **_: Any) -> str:
        self.board = [self.rng.randrange(10) for _ in range(size)]
        return f"board {self.board}"

    def generate_initial_state(self) -> dict[str, Any]:
        return {"size": self.rng.randrange(3, 6)}

    def get_user_message_with_state(self, **state: Any) -> str:
        return f"Play on this: {self.render_state_for_prompt(**state)}"

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, True)

    def get_system_prompt(self) -> str:
        return "You play."

    def get_initial_user_message(self) -> str:
        return "unused"


class Silent(CountingGame):
    def get_initial_user_message(self) -> str:
        return ""

    def get_system_prompt(self) -> str:
        return ""

    def reset(self, **_: Any) -> str:
        return ""


def test_a_generated_game_opens_with_system_prompt_message_and_state():
    messages = open_game(CountingGame(), seed=1, record=None, kwargs={"start": 9})
    assert messages == [
        {"role": "system", "content": "count"},
        {"role": "user", "content": "Go.\n\nfrom 9"},
    ]


def test_a_game_that_resets_while_describing_itself_is_in_the_state_described():
    for seed in range(20):
        game = OpenTinkerStyle()
        messages = open_game(game, seed=seed, record=None, kwargs={})
        assert messages[1]["content"] == f"Play on this: board {game.board}"


def test_a_seed_reproduces_the_prompt_and_the_global_generator_is_left_alone():
    before = random.getstate()
    first, second, other = (
        open_game(OpenTinkerStyle(), seed=seed, record=None, kwargs={}) for seed in (5, 5, 6)
    )
    assert first == second != other
    assert random.getstate() == before


def test_a_row_brings_its_prompt_and_the_game_its_system_prompt():
    record = Record([{"role": "user", "content": "2+2="}], "4", "sums", {"index": 0})
    messages = open_game(CountingGame(), seed=0, record=record, kwargs={})
    assert [message["content"] for message in messages] == ["count", "2+2="]


def test_a_system_message_in_the_data_wins():
    record = Record([{"role": "system", "content": "be brief"}], "4")
    messages = open_game(CountingGame(), seed=0, record=record, kwargs={})
    assert messages == [{"role": "system", "content": "be brief"}]


def test_a_row_reaches_reset_with_what_the_request_adds():
    class Listens(CountingGame):
        def reset(self, **kwargs: Any) -> str:
            self.heard = kwargs
            return ""

    game = Listens()
    record = Record([{"role": "user", "content": "?"}], "4", "", {"index": 3})
    open_game(game, seed=0, record=record, kwargs={"level": 2})
    assert game.heard == {
        "ground_truth": "4",
        "data_source": "listens",
        "extra_info": {"index": 3},
        "level": 2,
    }


def test_images_take_the_place_of_their_tags():
    record = Record([{"role": "user", "content": "<image>What?"}], "4", images=[b"png"])
    content = record.messages()[0]["content"]
    assert content == [{"type": "image", "image": b"png"}, {"type": "text", "text": "What?"}]


def test_more_image_tags_than_images_are_refused():
    record = Record([{"role": "user", "content": "<image><image>"}], "4", images=[b"png"])
    with pytest.raises(DataError, match="more <image> tags than its row has images"):
        record.messages()


def test_a_reset_that_returns_no_text_is_a_game_error():
    with pytest.raises(GameError, match=r"ReturnsNoText\.reset is 7 \(int\), it must be a str"):
        open_game(ReturnsNoText(), seed=0, record=None, kwargs={})


def test_a_row_without_a_prompt_leaves_the_words_to_the_game():
    game = GuessGame()
    messages = open_game(game, seed=0, record=Record([], "4"), kwargs={"number": 4})
    assert messages == [{"role": "user", "content": "guess 0-6"}]
    assert game.step("4").reward == 1.0


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="Silent makes an empty prompt"):
        open_game(Silent(), seed=0, record=None, kwargs={})
    record = Record([], "4", where="row 7 of a.jsonl")
    with pytest.raises(DataError, match=r"Silent makes an empty prompt of row 7 of a\.jsonl"):
        open_game(Silent(), seed=0, record=record, kwargs={})
