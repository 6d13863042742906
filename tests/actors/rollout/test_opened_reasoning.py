"""A chat template that opens the reasoning: what games, programs and clients are told of it."""

from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, save_tiny_model
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.model_apis.canonical import ModelMessage
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.calls.programs import chat_of
from tests.actors.rollout.playing import playing
from tests.support.models import FORGETS_REASONING

ASKED = [{"role": "user", "content": "2+3?"}]
OPENING = ("deepseek_r1_distill", "qwen3_5_think", "nemotron_3_nano")


@pytest.mark.parametrize("name", OPENING)
def test_an_answer_begins_with_what_its_prompt_opened(name: str) -> None:
    chat = chat_of(name)
    prompt = chat.prompt(ASKED)
    said = [*chat.encode_reply("maybe 5"), chat.stop_token_ids[0]]
    assert chat.opened(prompt) == "<think>\n"
    assert chat.answer(prompt, said) == "<think>\nmaybe 5"
    assert chat.decode(said) == "maybe 5"


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma4", "qwen3"])
def test_an_answer_whose_prompt_opens_nothing_is_what_was_generated(name: str) -> None:
    chat = chat_of(name)
    prompt = chat.prompt([{"role": "user", "content": "write <think>"}])
    assert chat.answer(prompt, chat.encode_reply("<think>\nhm")) == "<think>\nhm"


def test_a_prompt_that_closes_what_it_opened_opens_nothing() -> None:
    chat = chat_of("qwen3_5_nothink")
    prompt = chat.prompt(ASKED)
    assert chat.token_text(prompt[-2]) == "</think>" or "</think>" in chat.decode(prompt[-6:])
    assert chat.answer(prompt, chat.encode_reply("5")) == "5"


def test_a_template_that_opens_and_shows_answers_as_they_are_appends() -> None:
    chat_of("deepseek_r1_distill_training").check_template()
    chat_of("qwen3_5_think_training").check_template()


async def test_a_game_is_given_the_mark_that_the_prompt_opened(
    broker: Broker, recorded: JobScope, tmp_path: Path
) -> None:
    opened = CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")
    folder = save_tiny_model(tmp_path / "model", heads=2, template=opened)
    task = Task(task=1, seed=3, group_size=2)
    async with playing(broker, recorded, folder, "EchoGame", rollout={"max_turns": 2}) as play:
        group = await play.run(task)
    for one in group.trajectories:
        said = [message for message in one.messages if message["role"] == "assistant"]
        shown = [message for message in one.messages if message["role"] == "user"]
        assert len(said) == 2
        assert all(message["content"].startswith("<think>") for message in said)
        heard = int(shown[1]["content"].split()[0])  # the game tells how long the text was
        assert heard == len(said[0]["content"])
        first = one.token_ids[: np.argmax(one.mask)].tolist()
        assert play.runner._players.main._chat.opened(first) == "<think>"


async def test_turns_keep_reasoning_that_the_template_leaves_out(
    broker: Broker, recorded: JobScope, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", heads=2, template=FORGETS_REASONING)
    task = Task(task=1, seed=3, group_size=2)
    async with playing(broker, recorded, folder, "EchoGame", rollout={"max_turns": 2}) as play:
        chat = play.runner._players.main._chat
        chat.check_template()
        assert chat.keeps_reasoning
        group = await play.run(task)
    for one in group.trajectories:
        kept = chat.decode_all(one.token_ids.tolist())
        said = [message["content"] for message in one.messages if message["role"] == "assistant"]
        assert len(said) == 2
        assert all(f"<|assistant|>{text}" in kept for text in said)


def test_the_reader_of_a_program_knows_what_a_prompt_opened_before_a_prefill() -> None:
    exact = ExactCalls(chat_of("qwen3_5_think"))
    asked = ModelMessage(role="user", content=("hi",))

    def thinking(prefill: str) -> bool:
        begun = ModelMessage(role="assistant", content=(prefill,))
        return bool(exact.prepare([asked, begun], is_prefill=True).opened)

    assert exact.prepare([asked]).opened
    assert thinking("let me see")
    assert not thinking("<think>let me see")
