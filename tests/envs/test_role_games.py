"""The games with roles: rules, rewards by role, demonstrations."""

import random

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.conversations import converse, returns
from tinkermq.envs.games import negotiation, tictactoe
from tinkermq.envs.games.negotiation import NegotiationGame
from tinkermq.envs.games.tictactoe import TicTacToeGame
from tinkermq.schemas.config.job import EnvConfig


def played(game_class, actions, **kwargs):
    """Play given actions, whoever's turn it is; return conversations, returns and the last info."""
    left = iter(actions)
    told, results = converse(game_class, lambda *_: next(left), **kwargs)
    assert list(left) == []
    return told, returns(results), results[-1][1].info


@pytest.mark.parametrize("name", ["tictactoe", "negotiation"])
def test_every_check_of_the_game_passes(name):
    assert [result for result in check_game(EnvConfig(game=name)) if not result.ok] == []


@pytest.mark.parametrize("module", [tictactoe, negotiation])
def test_demonstrations_are_conversations_that_end_with_the_policy(module):
    rng = random.Random(0)
    for _ in range(50):
        roles = [m["role"] for m in module.demonstrations(rng) if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize(
    ("actions", "x", "o", "told_of"),
    [
        ("14253", 1.0, -1.0, "x_win_rate"),
        ("142596", -1.0, 1.0, "o_win_rate"),
        ("152374689", 0.0, 0.0, "draw_rate"),
        ("11", 0.0, -1.0, "illegal_rate"),  # o names a taken cell
        ("0", -1.0, 0.0, "illegal_rate"),
        ("145?", 0.0, -1.0, "illegal_rate"),
    ],
)
def test_tictactoe_gives_each_role_its_due(actions, x, o, told_of):
    told, got, info = played(TicTacToeGame, actions)
    assert (got.get("x", 0.0), got.get("o", 0.0)) == (x, o)
    assert {name for name, value in info.items() if value} == {told_of}
    assert ("o" in told) == (len(actions) > 1)


def test_each_role_of_tictactoe_sees_the_board_at_its_own_turns():
    told, _, _ = played(TicTacToeGame, "14253")
    assert [m["content"] for m in told["x"]] == [
        "tic-tac-toe, you are x", "123\n456\n789", "1", "x23\no56\n789", "2",
        "xx3\noo6\n789", "3",
    ]  # fmt: skip
    assert [m["content"] for m in told["o"]] == [
        "tic-tac-toe, you are o", "x23\n456\n789", "4", "xx3\no56\n789", "5",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_another_opponent_leaves_the_policy_one_role(seed):
    def lowest_free(_, messages):
        return next(symbol for symbol in messages[-1]["content"] if symbol.isdecimal())

    told, results = converse(
        TicTacToeGame, lowest_free, seed=seed, reset_kwargs={"opponent": "alphabeta:9"}
    )
    (role,) = told
    info = results[-1][1].info
    assert info["type"] == "alphabeta:9"
    assert returns(results)[role] == info["win_rate"] - info["loss_rate"] <= 0


def test_negotiation_gives_each_role_what_the_price_leaves_it():
    state = {"cost": 3, "value": 8, "first": "buyer"}
    told, got, info = played(NegotiationGame, ["2", "7", "5", "ok"], reset_kwargs=state)
    assert got == pytest.approx({"seller": 2 / 9, "buyer": 3 / 9})
    assert (info["deal_rate"], info["good_deal_rate"], info["offers"]) == (1.0, 1.0, 3)
    assert [m["content"] for m in told["seller"]] == ["you sell, cost 3", "2", "7", "5", "ok"]
    assert [m["content"] for m in told["buyer"]] == [
        "you buy, value 8", "offer 0-9", "2", "7", "5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "seller", "buyer", "good"),
    [
        (["1", "ok"], -2 / 9, 7 / 9, 0.0),  # the seller offers below its cost
        (["5", "4", "5", "4", "5"], 0.0, 0.0, 0.0),  # the last offer is left
        (["ok"], -0.5, 0.0, 0.0),  # there is nothing to take yet
        (["5", "five"], 0.0, -0.5, 0.0),
    ],
)
def test_bad_and_missing_deals_of_a_negotiation(actions, seller, buyer, good):
    state = {"cost": 3, "value": 8, "first": "seller"}
    _, got, info = played(NegotiationGame, actions, reset_kwargs=state)
    assert got == pytest.approx({"seller": seller, "buyer": buyer} | dict.fromkeys(
        {"buyer"} - got.keys(), 0.0)) or got == pytest.approx({"seller": seller})  # fmt: skip
    assert info["good_deal_rate"] == good
