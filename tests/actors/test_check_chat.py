"""What a tokenizer and its chat template say about a game's conversations."""

import pytest
from tinkermq.actors.check_chat import Exchange, check_chat
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tinkermq.schemas.config.sections import RolloutConfig

APPENDS, PROMPTS, ANSWERS = (
    "the chat template only appends",
    "first prompts fit",
    "gold answers fit the limits",
)
# Forgets what the policy said before its last answer.
FORGETS = CHAT_TEMPLATE.replace(
    "message['content']",
    "('' if message['role'] == 'assistant' and not loop.last else message['content'])",
)
SAID = {"role": "user", "content": "408"}
# One token for the role and one for the end of the turn: 6 for `12*34`, 2 + 5 for an observation.
PLAY = Exchange([{"role": "user", "content": "12*34"}], ["=12*34", "408"], [SAID, SAID])


def ask(template: str = CHAT_TEMPLATE, *, gold: bool = True, **limits: int) -> dict[str, str]:
    """Return what is wrong, by question."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    rollout = RolloutConfig(**{"max_turns": 2, **limits})
    results = check_chat(ChatTokenizer(tokenizer), rollout, [PLAY], gold=gold)
    assert [one["name"] for one in results] == [APPENDS, PROMPTS, *([ANSWERS] if gold else [])]
    return {one["name"]: f"{one['detail']}: {one['hint']}" for one in results if not one["ok"]}


def test_a_game_that_fits_has_no_faults() -> None:
    exactly = {"max_prompt_tokens": 8, "max_turn_tokens": 7, "max_response_tokens": 17}
    assert ask(CHAT_TEMPLATE, gold=True, **exactly) == {}


@pytest.mark.parametrize(
    ("limit", "question", "said"),
    [
        ("max_prompt_tokens", PROMPTS, "a first prompt has 8 tokens, rollout.{} is 7"),
        ("max_turn_tokens", ANSWERS, "a gold answer has 7 tokens, rollout.{} is 6"),
        ("max_response_tokens", ANSWERS, "a gold play has 17 tokens, rollout.{} is 16"),
        ("max_turns", ANSWERS, "a gold play has 2 turns, rollout.{} is 1"),
    ],
)
def test_what_does_not_fit_is_told_with_the_key_to_raise(
    limit: str, question: str, said: str
) -> None:
    said = said.format(limit)
    wanted = int(said.split()[4])
    found = ask(CHAT_TEMPLATE, gold=True, **{limit: wanted - 1})
    assert found == {question: f"{said}: raise rollout.{limit} to {wanted}"}


def test_a_template_that_rewrites_the_history_is_told_where_it_matters() -> None:
    assert "rewrites the history" in ask(FORGETS)[APPENDS]
    assert APPENDS not in ask(FORGETS, max_turns=1, gold=False)
