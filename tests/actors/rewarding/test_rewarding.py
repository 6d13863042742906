"""A reward model that is served answers what `env.reward.source: endpoint` posts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from tinkermq.actors.learner.preferences.reward_model import load_reward_model, pad_alike
from tinkermq.actors.models.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.rewarding.__main__ import main
from tinkermq.actors.rewarding.http import RewardApp
from tinkermq.actors.rewarding.judge import Judge
from tinkermq.envs.rewards.endpoint import EndpointSource
from tinkermq.envs.rewards.source import Case
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.config.learner import LearnerConfig
from tinkermq.schemas.config.reward import RewardConfig
from tinkermq.schemas.wire.errors import ModelError, RewardError
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from tests.support.models import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model that tells answers apart."""
    language_model = make_tiny_model(tmp_path_factory.mktemp("model"))
    model: Any = load_reward_model(ModelConfig(path=str(language_model)), LearnerConfig())
    with torch.no_grad():
        weight = model.score.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    folder = tmp_path_factory.mktemp("judge") / "checkpoint"
    model.save_pretrained(folder)
    pad_alike(load_tokenizer(str(language_model)), model).save_pretrained(folder)
    return folder


@asynccontextmanager
async def served(folder: Path, key: str | None = None) -> AsyncIterator[str]:
    """Serve a reward model on a free port."""
    config = uvicorn.Config(RewardApp(Judge(str(folder)), key), port=0, log_level="warning")
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(), name="server")
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True


def case(answer: str) -> Case:
    """What a source is shown of an episode of one turn."""
    messages: Any = [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": answer},
    ]
    return Case("", None, {}, messages, solution_str=answer)


def expected(folder: Path, answer: str) -> float:
    """What transformers says of the conversation as its template shows it."""
    tokenizer: Any = load_tokenizer(str(folder))
    text = tokenizer.apply_chat_template(case(answer).messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(model.eval()(**ids).logits[0, 0])


async def test_an_endpoint_is_answered_as_transformers_would(judge: Path) -> None:
    answers = ["red", "green", "blue", "a long answer that is not like the others"]
    async with served(judge) as url:
        source = EndpointSource(RewardConfig(source="endpoint", url=url))
        await source.start()
        told = await asyncio.gather(*(source.score(case(answer)) for answer in answers))
        await source.stop()
    wanted = [expected(judge, answer) for answer in answers]
    assert [score.value for score in told] == pytest.approx(wanted, abs=1e-4)
    assert len({round(value, 3) for value in wanted}) == len(answers)


async def test_a_key_is_asked_for_and_what_is_no_conversation_refused(
    judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with served(judge, "secret") as url:
        nameless = EndpointSource(RewardConfig(source="endpoint", url=url))
        await nameless.start()
        with pytest.raises(RewardError, match="status 401"):
            await nameless.score(case("red"))
        await nameless.stop()
        config = RewardConfig(source="endpoint", url=url, key_variable="JUDGE_KEY")
        source = EndpointSource(config)
        await source.start()
        assert (await source.score(case("red"))).value != 0
        with pytest.raises(RewardError, match=r"status 422.*has no message of the assistant"):
            await source.score(Case("", None, {}, [{"role": "user", "content": "which?"}]))
        with pytest.raises(RewardError, match=r"status 422.*tokens, the model reads"):
            await source.score(case("red " * 5000))
        with pytest.raises(RewardError, match=r"status 422.*a request holds no messages"):
            await source.post(url, {"solution_str": "red"})
        await source.stop()


def test_a_reward_model_is_no_policy(judge: Path) -> None:
    with pytest.raises(ModelError, match="holds a reward model, which generates nothing"):
        load_causal_lm(str(judge), dtype=torch.float32)


def test_a_folder_without_a_reward_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    assert main([str(folder)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "holds no reward model" in told
    assert main([str(folder), "--key-variable", "NOT_SET"]) == 2
    assert "--key-variable=NOT_SET is not set" in capsys.readouterr().err
