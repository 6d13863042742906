"""An episode is shown as it was: messages, images, turns, tokens, advantages."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.gateway.data.rollouts import (
    EXACT,
    group_advantages,
    image_url,
    show_episode,
    show_message,
    show_part,
    show_tokens,
)
from tinkermq.actors.gateway.data.token_text import TokenTexts, token_texts
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.training import advantages as learner
from tinkermq.schemas.wire.errors import NotFoundError

from tests.support.groups import make_group, make_trajectory

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def two_turns(**fields: Any) -> Any:
    return make_trajectory(
        [1, 2, 3],
        [([10, 11], [4]), ([12], [])],
        [0.5, 1.0],
        logprobs=[-0.01, -3.0, -9.0],
        versions=[4, 4, 5],
        messages=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "two"},
        ],
        **fields,
    )


def test_turns_have_their_reward_version_and_length_and_stand_at_their_messages() -> None:
    group = make_group([two_turns(), make_trajectory([1], [([9], [])], [0.0])])
    shown = show_episode(group, 0, estimator="grpo", step=7)
    assert [turn["reward"] for turn in shown["turns"]] == [0.5, 1.0]
    assert [turn["tokens"] for turn in shown["turns"]] == [2, 1]
    assert [turn["versions"] for turn in shown["turns"]] == [[4], [5]]
    turns = [message["turn"] and message["turn"]["turn"] for message in shown["messages"]]
    assert turns == [None, 0, None, 1]
    assert shown["step"] == 7
    assert shown["reward"] == 1.5


def test_turns_that_were_cut_are_told_where_the_episode_was_recorded_with_reasons() -> None:
    told = two_turns(finish_reasons=["stop", "length"])
    shown = show_episode(make_group([told, two_turns()]), 0, estimator="grpo", step=7)
    assert [turn["finish_reason"] for turn in shown["turns"]] == ["stop", "length"]
    assert shown["finish"] == "length"
    untold = show_episode(make_group([told, two_turns()]), 1, estimator="grpo", step=7)
    assert [turn["finish_reason"] for turn in untold["turns"]] == [None, None]
    assert untold["finish"] == "done"


def test_tokens_show_mask_version_reward_and_a_colour_by_log_prob() -> None:
    shown = show_tokens(two_turns(), TokenTexts())
    tokens = shown["tokens"]
    assert [token["made"] for token in tokens] == [False] * 3 + [True, True, False, True]
    assert [token["level"] for token in tokens if token["made"]] == [0, 4, 5]
    assert [token["reward"] for token in tokens] == [None] * 4 + [0.5, None, 1.0]
    assert tokens[0]["text"] == "⟨1⟩"
    assert not shown["decoded"]


def test_a_missing_episode_is_named() -> None:
    with pytest.raises(NotFoundError, match="has no episode 1"):
        show_episode(make_group([two_turns()]), 1, estimator="grpo", step=None)


@pytest.mark.parametrize("value", [PNG, base64.b64encode(PNG).decode()])
def test_an_image_becomes_a_data_url(value: Any) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert image_url(value) == url
    assert show_part({"type": "image", "image": value}) == {"kind": "image", "url": url}
    assert image_url(url) == url
    assert show_part({"type": "image_url", "image_url": {"url": url}})["kind"] == "image"


@pytest.mark.parametrize(
    "value",
    [
        "https://example.com/a.png",
        "javascript:alert(1)",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,PGI+",
        b"<svg onload=alert(1)>",
        b"RIFF1234AVI ",
        None,
        17,
    ],
)
def test_what_is_no_plain_image_is_never_given_to_the_browser(value: Any) -> None:
    assert image_url(value) == ""
    assert show_part({"type": "image", "image": value})["kind"] == "text"


def test_tool_calls_and_parts_are_shown_whatever_their_shape() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    shown = show_message({"role": "assistant", "content": None, "tool_calls": [call, "odd"]})
    assert shown["tool_calls"][0] == {"name": "add", "arguments": '{"a": 1}'}
    assert shown["tool_calls"][1]["name"] == "odd"
    assert shown["parts"] == []
    parts = show_message({"content": [{"type": "text", "text": "a"}, {"x": 1}, 3]})["parts"]
    assert [part["text"] for part in parts] == ["a", '{"x": 1}', "3"]


@pytest.mark.parametrize("estimator", sorted(EXACT))
@pytest.mark.parametrize("rewards", [[0.0, 1.0, 1.0, 3.0], [0.1, 0.1, 0.1], [2.0]])
def test_advantages_are_those_of_the_learner(estimator: str, rewards: list[float]) -> None:
    count = len(rewards)
    inputs = learner.AdvantageInputs(
        rewards_S=torch.tensor(rewards, dtype=torch.float64),
        group_S=torch.zeros(count, dtype=torch.int64),
        seq_N=torch.arange(count),
        baseline_S=torch.full((count,), 0.5, dtype=torch.float64),
    )
    name, shown = group_advantages(estimator, rewards, 0.5)
    assert estimator in name
    np.testing.assert_allclose(shown, getattr(learner, estimator)(inputs).numpy(), atol=1e-5)


def test_an_estimator_that_needs_more_shows_the_gap_to_the_mean_and_says_so() -> None:
    name, shown = group_advantages("reinforce_pp", [0.0, 1.0])
    assert name == "reward − group mean"
    assert shown == [-0.5, 0.5]


def test_texts_come_from_the_models_tokenizer_characters_at_their_last_byte(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = token_texts("/nonexistent", tmp_path)
    ids = tokenizer.encode("aé<b")
    assert texts.known
    assert "".join(texts.of(ids)) == "aé<b"
    assert len(texts.of(ids)) == len(ids)
    assert not token_texts("/nonexistent").known
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = token_texts(str(tmp_path))
    assert broken.of([7]) == ["⟨7⟩"]
    assert not broken.known


def test_a_tokenizer_that_never_ends_is_ended_and_shown_as_ids(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    hostile = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"}
    whole["decoder"] = {
        "type": "Sequence",
        "decoders": [whole["decoder"], {"type": "Fuse"}, hostile],
    }
    whole["added_tokens"].append(
        {**whole["added_tokens"][0], "id": len(tokenizer), "content": "a" * 26 + "b"}
    )
    file.write_text(json.dumps(whole))
    texts = token_texts("", tmp_path, limit_s=0.5)
    ids = [len(tokenizer)] * 4000
    assert texts.of(ids) == [f"⟨{len(tokenizer)}⟩"] * 4000
    assert not texts.known
