"""What a server and the gateway tell of tokens, and adapters that are served beside each other."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from peft import PeftModel
from tinkermq.actors.engine.engine import Drawn, Engine, Generation, Sampling
from tinkermq.actors.gateway.openai import read_query
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy
from tinkermq.actors.policy.policies import config_of_checkpoint
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.choices import cut
from tinkermq.actors.rollout.completions import Answers
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.server.server import served_step, start_engines
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.infer import InferPart
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.chat import CHAT, COMPLETIONS
from tinkermq.schemas.model_apis.reading import AnswerReader
from tinkermq.schemas.wire.errors import ConfigError, ModelError
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.actors.rollout.calls.programs import TOOLS, chat_of
from tests.support.models import make_tiny_model, plain_logprobs
from tests.support.tokenizers import fallback, merging

TOKENIZERS = {"bytes": make_tokenizer, "merging": merging, "fallback": fallback}
TEXTS = ["END. 日本 über €€!", "a\n\nb 👍🏽 D€ D日", "one two", "é", " leading"]


class Saying:
    """Says some tokens, each of them at its time, and notes what it was asked."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prompts: list[list[int]] = []
        self.cancelled = False
        self.top: tuple[tuple[int, float], ...] = ()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Any,
        *,
        request_id: str,
        on_token: Callable[[Drawn], None] | None = None,
        images: Any = (),
    ) -> Generation:
        """Say the tokens to their end, or until it is cancelled."""
        del sampling, request_id, images
        self.prompts.append(list(prompt_ids))
        self.cancelled = False
        said: list[int] = []
        for token in self.ids:
            said.append(token)
            if on_token is not None:
                on_token(Drawn(token, -0.25 * len(said), 1, self.top))
                await asyncio.sleep(0)
            if self.cancelled:
                break
        n = len(said)
        logprobs = -0.25 * np.arange(1, n + 1, dtype=np.float32)
        columns = np.array(said, np.int32), logprobs, np.ones(n, np.int32)
        return Generation(*columns, "cancelled" if self.cancelled else "stop")

    def cancel(self, request_id: str) -> None:
        """End the answer."""
        del request_id
        self.cancelled = True


class Asked:
    """A server's answers, worded by the gateway, of a model that says what it is told."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | ChatTokenizer) -> None:
        is_chat = isinstance(tokenizer, ChatTokenizer)
        self.chat = tokenizer if is_chat else ChatTokenizer(tokenizer)
        self.engine: Any = Saying()
        self.answers = Answers(self.engine, self.chat, lambda: "m", max_context=99_999, max_open=9)
        self.num_told = self.largest_part = 0
        """Of the parts before the last ones."""

    async def ask(self, ids: list[int], api: ModelApi, **fields: Any) -> list[dict[str, Any]]:
        """Return the whole answer, or the events of a stream."""
        self.engine.ids = ids
        asked, query = read_query(json.dumps({"model": "m", **fields}).encode(), api)
        answer = AnswerReader(api, asked, query.request)
        events: list[str] = []

        async def tell(part: InferPart) -> None:
            self.num_told += 1
            self.largest_part = max(self.largest_part, len(part.to_bytes()))
            events.extend(answer.push(part))

        ask: Any = self.answers.chat if api is CHAT else self.answers.complete
        last = (await ask(query, tell)).model_copy(update={"last": True})
        if not asked.stream:
            for _ in answer.push(last):
                pass
            return [answer.whole()]
        events += answer.push(last)
        return [json.loads(one.removeprefix("data: ")) for one in events]


HELLO: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(params=TOKENIZERS, ids=list(TOKENIZERS))
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(TOKENIZERS[request.param]())


@pytest.mark.parametrize("stream", [False, True])
async def test_of_likely_tokens_with_one_text_the_likeliest_has_its_number(*, stream: bool) -> None:
    asked = Asked(make_tokenizer())
    parts = [asked.chat.encode(letter)[0] for letter in "é€"]  # bytes of unfinished characters
    text = asked.chat.token_text(parts[0])
    assert parts[0] != parts[1]
    assert text == asked.chat.token_text(parts[1])
    (plain,) = asked.chat.encode("a")
    asked.engine.top = ((parts[0], -0.5), (plain, -1.0), (parts[1], -3.0))
    made = await asked.ask(
        asked.chat.encode("b"), COMPLETIONS, prompt="a", logprobs=3, stop="no", stream=stream
    )
    told = made[0]["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{text: -0.5, "a": -1.0}]
    ((other,),) = told["repeated_top_logprobs"]
    assert other["logprob"] == -3.0
    assert bytes(other["bytes"]) == asked.chat.token_bytes(parts[1])


async def test_log_probs_of_a_long_answer_come_in_several_messages() -> None:
    asked = Asked(make_tokenizer())
    ids = asked.chat.encode("é. " * 300)
    asked.engine.top = tuple((token, -1.0) for token in range(20))
    (made,) = await asked.ask(ids, COMPLETIONS, prompt=["a", "b"], n=2, logprobs=20, stop="no")
    assert asked.num_told > 1
    assert asked.largest_part < 4 << 20
    for choice in made["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("é. " * 300, "stop")
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert len(choice["logprobs"]["top_logprobs"]) == len(ids)


def test_a_choice_is_cut_between_tokens() -> None:
    numbers = list(range(5))
    columns: Any = {"token_ids": numbers, "logprobs": [-1.0 * n for n in numbers]}
    whole = Delta(choice=3, text="abcde", finish="length", stop="!", **columns)
    pieces = list(cut(whole, 2))
    assert [piece.token_ids for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert [piece.logprobs for piece in pieces] == [[0.0, -1.0], [-2.0, -3.0], [-4.0]]
    assert [piece.text for piece in pieces] == ["abcde", "", ""]
    assert [(piece.finish, piece.stop) for piece in pieces] == [
        (None, ""),
        (None, ""),
        ("length", "!"),
    ]
    assert list(cut(Delta(choice=1, finish="stop"), 2)) == [Delta(choice=1, finish="stop")]


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_more_answers_than_a_server_ever_holds_are_refused_for_good(
    max_tokens: int,
) -> None:
    asked = Asked(make_tokenizer())
    with pytest.raises(ConfigError, match="one request asks for 10 answers"):
        await asked.ask([5], COMPLETIONS, prompt=["a", "b"], n=5, max_tokens=max_tokens)
    (made,) = await asked.ask([5], COMPLETIONS, prompt=["a", "b", "c"], n=3)
    assert len(made["choices"]) == 9


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_with_and_without_logprobs(
    asked: Asked, stream: bool, logprobs: bool
) -> None:
    for text in TEXTS:
        ids = [*asked.chat.encode(text), asked.chat.stop_token_ids[0]]
        more: dict[str, Any] = {"return_token_ids": True, "stream": stream}
        chats = await asked.ask(ids, CHAT, **HELLO, **more, logprobs=logprobs)
        texts = await asked.ask(
            ids, COMPLETIONS, prompt="ab", **more, **({"logprobs": 0} if logprobs else {})
        )
        for events, judge in ((chats, ChatCompletion), (texts, Completion)):
            model: Any = ChatCompletionChunk if stream and judge is ChatCompletion else judge
            choices = [choice for one in events for choice in one["choices"]]
            assert [i for one in choices for i in one.get("token_ids", [])] == ids
            told = [one["logprobs"] for one in choices if one["logprobs"] is not None]
            assert bool(told) == logprobs
            for one in events:
                model.model_validate(
                    {**one, "choices": [{**c, "finish_reason": "stop"} for c in one["choices"]]}
                )
        (prompt,) = (one["prompt_token_ids"] for one in chats if "prompt_token_ids" in one)
        assert prompt == asked.engine.prompts[-2]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_tokens_make_the_text(asked: Asked, stream: bool) -> None:
    for text in TEXTS:
        ids = [*asked.chat.encode(text), asked.chat.stop_token_ids[0]]
        events = await asked.ask(ids, CHAT, **HELLO, logprobs=True, stream=stream)
        choices = [choice for one in events for choice in one["choices"]]
        part = "delta" if stream else "message"
        said = "".join(one[part].get("content", "") for one in choices)
        told = [one for c in choices if c["logprobs"] for one in c["logprobs"]["content"]]
        assert len(told) == len(ids)
        whole = b"".join(bytes(one["bytes"]) for one in told)
        assert whole == said.encode(), text
        assert said == asked.chat.decode(ids)
        for one in told[:-1]:
            assert one["token"] == bytes(one["bytes"]).decode(errors="replace")
        assert (told[-1]["token"], told[-1]["bytes"]) == ("<|end|>", [])


async def test_a_part_of_a_character_has_its_own_bytes(asked: Asked) -> None:
    ids = asked.chat.encode("👍")[-4:]
    assert len(ids) == 4
    (whole,) = await asked.ask(ids[:3], CHAT, **HELLO, logprobs=True)
    told = whole["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in told] == ["�"] * 3
    assert [one["bytes"] for one in told] == [[byte] for byte in "👍".encode()[:3]]


async def test_offsets_of_a_completion_are_those_of_its_characters(asked: Asked) -> None:
    for text in TEXTS[:2]:
        ids = asked.chat.encode(text)
        (whole,) = await asked.ask(ids, COMPLETIONS, prompt="ab", logprobs=0)
        choice = whole["choices"][0]
        told, said = choice["logprobs"], choice["text"]
        for token, start in zip(told["tokens"], told["text_offset"], strict=True):
            assert said[start : start + len(token)] == token or "�" in token
        assert told["text_offset"] == sorted(told["text_offset"])


async def test_marks_that_stay_in_a_text_have_their_bytes_and_their_place() -> None:
    asked = Asked(make_tokenizer())
    mark = asked.chat.special_token("<|tool|>")
    assert mark is not None
    ids = [*asked.chat.encode("a"), mark, *asked.chat.encode("b")]
    (whole,) = await asked.ask(ids, COMPLETIONS, prompt="ab", logprobs=0)
    assert whole["choices"][0]["text"] == "a<|tool|>b"
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 9]
    (chat,) = await asked.ask(ids, CHAT, **HELLO, logprobs=True)
    told = chat["choices"][0]["logprobs"]["content"]
    assert [bytes(one["bytes"]).decode() for one in told] == ["a", "<|tool|>", "b"]


async def test_a_character_that_was_only_begun_has_a_place_of_its_own() -> None:
    asked = Asked(make_tokenizer())
    begun = asked.chat.encode("€")[:2]
    ids = [*begun, *asked.chat.encode("x"), begun[0], *asked.chat.encode("é")]
    (whole,) = await asked.ask(ids, COMPLETIONS, prompt="ab", logprobs=0)
    assert whole["choices"][0]["text"] == "�x�é"
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3]


async def test_tokens_up_to_a_stop_text_are_told_with_their_logprobs(asked: Asked) -> None:
    ids = asked.chat.encode("one two END. behind it")
    fields: dict[str, Any] = {"stop": ["END"], "return_token_ids": True, "logprobs": True}
    (whole,) = await asked.ask(ids, CHAT, **HELLO, **fields)
    choice = whole["choices"][0]
    num = next(n for n in range(len(ids)) if "END" in asked.chat.decode(ids[:n]))
    assert choice["token_ids"] == ids[:num]
    assert len(choice["logprobs"]["content"]) == num == whole["usage"]["completion_tokens"]
    assert choice["message"]["content"] == asked.chat.decode(ids).partition("END")[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_text_that_ended_an_answer_is_told_where_vllm_does(
    asked: Asked, stream: bool
) -> None:
    ids = [*asked.chat.encode("one two END. DD"), asked.chat.stop_token_ids[0]]
    cases = ((["D", "END"], "END"), (["END", "ND"], "END"), (["never"], None), ([], None))
    for stops, told in cases:
        for api, fields in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "ab"})):
            events = await asked.ask(ids, api, **fields, stop=stops, stream=stream)
            ends = [c for one in events for c in one["choices"] if c["finish_reason"]]
            assert [(one["finish_reason"], one["stop_reason"]) for one in ends] == [("stop", told)]


def begun(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts tokens around a text."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "<|end|>")]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=template, special_tokens=marks)
    return tokenizer


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A <|end|>", "$A"])
@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_a_completions_prompt_begins_as_the_tokenizer_begins_texts(
    kind: str, template: str
) -> None:
    tokenizer = begun(TOKENIZERS[kind](), template)
    asked = Asked(tokenizer)
    for prompt in ("ab", "END €", " ", [5, 6], [7]):
        for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            (whole,) = await asked.ask(
                [9], COMPLETIONS, prompt=prompt, return_token_ids=True, **given
            )
            judge: Any = prompt
            if isinstance(prompt, str):
                special = given.get("add_special_tokens", True)
                judge = tokenizer(prompt, add_special_tokens=special).input_ids
            told = whole["choices"][0]["prompt_token_ids"]
            assert told == asked.engine.prompts[-1] == judge
            assert whole["usage"]["prompt_tokens"] == len(judge)


async def test_a_chat_begins_as_its_template_says_and_no_other_way() -> None:
    tokenizer = begun(make_tokenizer(), "<s> $A")
    asked = Asked(tokenizer)
    (whole,) = await asked.ask([9], CHAT, **HELLO, return_token_ids=True)
    expected: Any = tokenizer.apply_chat_template(
        HELLO["messages"], add_generation_prompt=True, return_dict=False
    )
    assert whole["prompt_token_ids"] == expected


@pytest.mark.parametrize("text", ["hm\n</think>\n\nso", "maybe 5, or"], ids=["closed", "cut off"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_begins_with_the_mark_of_the_reasoning_that_its_prompt_opened(
    stream: bool, text: str
) -> None:
    asked = Asked(chat_of("qwen3_5_think"))
    ids = [*asked.chat.encode(text), asked.chat.stop_token_ids[0]]
    events = await asked.ask(ids, CHAT, **HELLO, stream=stream)
    choices = [choice for one in events for choice in one["choices"]]
    parts = [one["delta" if stream else "message"].get("content") or "" for one in choices]
    assert "".join(parts) == f"<think>\n{text}"


async def test_a_special_mark_of_a_call_reaches_the_parser() -> None:
    tokenizer = chat_of("qwen2_5")._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    asked = Asked(ChatTokenizer(tokenizer))
    text = '<tool_call>{"name": "search", "arguments": {"q": "a"}}</tool_call>'
    ids = asked.chat.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) != text
    (whole,) = await asked.ask(ids, CHAT, **HELLO, tools=list(TOOLS))
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "search"


# -- Adapters that are served beside each other: what each says, and that the base is there once ---


PROMPT = np.arange(40, 52, dtype=np.int32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "base")


def adapter(base: Path, folder: Path, seed: int, **lora: Any) -> str:
    """Write a checkpoint's folder with an adapter that changes something."""
    torch.manual_seed(seed)
    model = load_policy(str(base), LoraConfig(**{"rank": 4, **lora}), dtype=torch.float32)
    with torch.no_grad():
        for tensor in policy_tensors(model).values():
            tensor.normal_(std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def config_of(model: str | Path) -> JobConfig:
    lengths = {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 16}
    return JobConfig.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"game": "", "hosts": 0, "num_val": 0},
            "rollout": lengths,
            "generator": {"max_requests": 4},
        }
    )


def record(**fields: Any) -> JobRecord:
    plain = {"job": "j", "name": "serves", "user": "ada", "kind": "infer", "state": "RUNNING"}
    return JobRecord.model_validate({**plain, "config": {}, "created": 0.0, **fields})


async def say(engine: Engine) -> tuple[list[int], list[float], int]:
    """Generate once, end the engine; return tokens, log-probs and the version."""
    made = await engine.generate(PROMPT, Sampling(max_new_tokens=12, seed=1), request_id="r")
    return made.token_ids.tolist(), made.logprobs.tolist(), int(made.versions[0])


async def said(engines: dict[str, Engine]) -> dict[str, tuple[list[int], list[float], int]]:
    """Ask all engines at once, then end them."""
    try:
        answers = await asyncio.gather(*(say(engine) for engine in engines.values()))
    finally:
        for engine in engines.values():
            await engine.close()
    return dict(zip(engines, answers, strict=True))


async def test_base_and_adapters_served_together_say_what_each_says_alone(
    base: Path, tmp_path: Path
) -> None:
    adapters = {
        "a@3": adapter(base, tmp_path / "a", 1),
        "b@7": adapter(base, tmp_path / "b", 2, rank=8, alpha=4, targets=["q_proj", "v_proj"]),
    }
    together = await said(await start_engines(record(adapters=adapters), config_of(base)))
    alone = {"": (await said({"": await start_engine(config_of(base))}))[""]}
    for name, folder in adapters.items():
        served = record(fork_of=name, serves=name, fork_dir=folder)
        config = config_of_checkpoint(served, config_of("the job's own model"))
        engines = await start_engines(served, config)
        assert list(engines) == [""]
        assert served_step(served) == int(name[-1])
        alone[name] = (await said(engines))[""]
    assert together == alone
    assert len({tuple(tokens) for tokens, _, _ in together.values()}) == 3
    for name, folder in adapters.items():
        tokens, logprobs, version = together[name]
        assert version == int(name[-1])
        plain = load_causal_lm(str(base), dtype=torch.float32)
        peft: Any = PeftModel.from_pretrained(plain, folder)
        expected = plain_logprobs(peft, PROMPT, np.array(tokens))
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    first_is_one = record(fork_of="a@3", serves="a@3", fork_dir=adapters["a@3"], adapters=adapters)
    config = config_of_checkpoint(first_is_one, config_of(base))
    again = await said(await start_engines(first_is_one, config))
    assert again == {"": together["a@3"], "a@3": together["a@3"], "b@7": together["b@7"]}


def test_adapters_of_one_base_share_its_memory(base: Path) -> None:
    plain = load_causal_lm(str(base), dtype=torch.float32)
    shared = {tensor.data_ptr() for tensor in plain.parameters()}
    lora = LoraConfig(rank=4)
    for _ in range(2):
        model = load_policy(str(base), lora, base=plain, dtype=torch.float32)
        own = {name for name, one in model.named_parameters() if one.data_ptr() not in shared}
        assert own
        assert all(".lora_" in name for name in own)


async def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    stray = record(adapters={"a@3": adapter(other, tmp_path / "a", 1)})
    with pytest.raises(ModelError, match=r"adapter a@3 belongs to .*other, the served model to"):
        await start_engines(stray, config_of(base))
