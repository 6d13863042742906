"""A game class of OpenTinker's interface works after its import line has been changed."""

import opentinker_games
import pytest
from hosting import ISOLATIONS, hosting
from tinkermq.envs.check import check_game
from tinkermq.envs.prompt import open_game
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.job import EnvConfig

GENERATED = ("OnlyReset", "ResetAndState", "Board")


def rows(folder):
    made = [
        verl_row(f"{n}+{n}?", str(2 * n), data_source="sums", split="train", index=n)
        for n in range(12)
    ]
    return [str(write_rows(folder / "rows.parquet", made))]


@pytest.mark.parametrize("name", [*GENERATED, "MathGame"])
def test_every_question_of_env_check_is_answered_well(name, tmp_path):
    data = rows(tmp_path) if name == "MathGame" else []
    results = check_game(EnvConfig(game=f"opentinker_games:{name}", train_data=data))
    assert [result for result in results if not result.ok] == []
    assert results[-1].name == "gold answers score full marks"


@ISOLATIONS
@pytest.mark.parametrize("name", GENERATED)
async def test_a_host_plays_it_and_prompt_and_game_agree(broker, scope, isolation, name):
    game = f"opentinker_games:{name}"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        for seed in range(6):
            opened = await client.reset(f"e{seed}", seed=seed)
            beside = getattr(opentinker_games, name)()
            assert open_game(beside, seed=seed, record=None, kwargs={}) == opened.messages
            assert (await client.step(f"e{seed}", 0, "nothing")).reward < 1
            result = await client.step(f"e{seed}", 1, beside.gold_action())
            assert result.done
            assert result.reward == getattr(beside, "max_return", 1)


async def test_a_state_can_be_asked_for_by_the_arguments_of_reset(broker, scope):
    async with hosting(broker, scope, "opentinker_games:ResetAndState") as client:
        opened = await client.reset("a", target=7)
        assert opened.messages[-1]["content"].endswith("at least 7.")


async def test_a_row_of_verls_columns_reaches_it(broker, scope, tmp_path):
    game, data = "opentinker_games:MathGame", rows(tmp_path)
    async with hosting(broker, scope, game, train_data=data) as client:
        opened = await client.reset("a", sample=5)
        assert [one["content"] for one in opened.messages] == [
            "Put the answer into \\boxed{}.",
            "5+5?",
        ]
        result = await client.step("a", 0, "so \\boxed{10}")
        assert (result.reward, result.done) == (1.0, True)
        expected = {"ground_truth": "10", "data_source": "sums", "split": "train", "index": 5}
        assert result.info == expected
