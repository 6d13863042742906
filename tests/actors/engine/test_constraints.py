"""Answers that are held to a form, and penalties, in each engine."""

import asyncio
import gc
import json
import resource
import weakref
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from tinkermq.actors.engine.engine import Engine, Generation, Sampling
from tinkermq.actors.engine.sampling import RowConstraint
from tinkermq.actors.policy import grammar as token_grammar
from tinkermq.actors.policy import grammar_trial
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.grammar import (
    GrammarCompiler,
    MaskFiller,
    OutputGrammars,
    TokenGrammar,
    read_tokenizer,
)
from tinkermq.actors.policy.grammar_trial import MAX_GRAMMAR_CHARS
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.schemas.output_format import OutputFormat
from tinkermq.schemas.tool_calls import parse_tool_calls
from tinkermq.schemas.wire.errors import BusyError, ConfigError
from transformers import PreTrainedModel

from tests.support.models import HERMES, changed, loaded, plain_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = np.array([3, 77, 78, 79, 1, 4], np.int32)
PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
}
THREE = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 3, "maxItems": 3}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "enum": {"enum": ["red", "green", 3, None]},
    "union": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "reference": {
        "$defs": {"leaf": {"enum": ["a", "b"]}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
    },
}


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatTokenizer:
    """The tiny model's tokenizer and template."""
    return ChatTokenizer(load_tokenizer(str(folder)))


_grammars: weakref.WeakKeyDictionary[ChatTokenizer, OutputGrammars] = weakref.WeakKeyDictionary()


async def grammar_of(chat: ChatTokenizer, schema: Any) -> TokenGrammar:
    grammars = _grammars.setdefault(chat, OutputGrammars(chat))
    return await grammars.of(OutputFormat(json_schema=schema), [])


def sampling(grammar: TokenGrammar | None, chat: ChatTokenizer, **fields: Any) -> Sampling:
    told: dict[str, Any] = {"max_new_tokens": 120, "stop_token_ids": chat.stop_token_ids, "seed": 5}
    return Sampling(**{**told, "grammar": grammar, **fields})


def value_of(chat: ChatTokenizer, generation: Generation) -> Any:
    return json.loads(chat.decode(generation.token_ids))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_an_answer_fits_its_schema_and_has_the_models_own_logprobs(
    engine: Engine, chat: ChatTokenizer, model: PreTrainedModel, schema: Any
) -> None:
    grammar = await grammar_of(chat, schema)
    generation = await engine.generate(
        PROMPT, sampling(grammar, chat, temperature=0.7, top_p=0.9), request_id="held"
    )
    assert generation.finish_reason == "stop"
    assert generation.token_ids[-1] in chat.stop_token_ids
    jsonschema.validate(value_of(chat, generation), schema)
    expected = plain_logprobs(model, PROMPT, generation.token_ids, 0.7)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert generation.masked is not None
    assert len(generation.masked) == len(generation.token_ids)
    assert generation.masked[0] > 0.5, "a random model would begin otherwise"
    assert (generation.masked >= 0).all()
    assert (generation.masked <= 1).all()


async def test_rows_with_and_without_a_form_decode_together(
    engine: Engine, chat: ChatTokenizer, model: PreTrainedModel
) -> None:
    held = sampling(await grammar_of(chat, THREE), chat)
    other = sampling(await grammar_of(chat, SCHEMAS["pattern"]), chat, temperature=0.0)
    free = sampling(None, chat, max_new_tokens=30, seed=11)
    alone = await engine.generate(PROMPT, free, request_id="alone")
    asked = [held, free, other, free, held, other]
    together = await asyncio.gather(
        *(engine.generate(PROMPT, one, request_id=f"r{n}") for n, one in enumerate(asked))
    )
    for one, generation in zip(asked, together, strict=True):
        expected = plain_logprobs(model, PROMPT, generation.token_ids, one.temperature or 1.0)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        if one is free:
            assert generation.token_ids.tolist() == alone.token_ids.tolist()
            assert generation.masked is None
        else:
            value_of(chat, generation)


async def test_an_answer_that_was_begun_elsewhere_goes_on_within_its_form(
    engine: Engine, chat: ChatTokenizer
) -> None:
    grammar = await grammar_of(chat, THREE)
    whole = await engine.generate(PROMPT, sampling(grammar, chat), request_id="whole")
    for cut in (1, 7, len(whole.token_ids) - 1):
        begun = whole.token_ids[:cut]
        rest = await engine.generate(
            np.concatenate([PROMPT, begun]),
            sampling(grammar, chat, num_drawn=cut, max_new_tokens=120 - cut),
            request_id=f"rest {cut}",
        )
        text = chat.decode([*begun.tolist(), *rest.token_ids.tolist()])
        jsonschema.validate(json.loads(text), THREE)


async def test_newer_weights_between_two_steps_leave_the_form(
    engine: Engine, chat: ChatTokenizer, model: PreTrainedModel
) -> None:
    schema = {"type": "array", "items": {"enum": [True, False]}, "minItems": 8, "maxItems": 8}
    grammar = await grammar_of(chat, schema)
    seen = asyncio.Event()
    asked = asyncio.create_task(
        engine.generate(
            PROMPT,
            sampling(grammar, chat, max_new_tokens=150),
            request_id="across",
            on_token=lambda _: seen.set(),
        )
    )
    await seen.wait()
    weights = changed(model, 3)
    await engine.load_weights(1, weights, "recompute")
    generation = await asked
    assert len(json.loads(chat.decode(generation.token_ids))) == 8
    newer = generation.versions == 1
    if newer.any():
        behind = plain_logprobs(loaded(model, weights), PROMPT, generation.token_ids)
        np.testing.assert_allclose(generation.logprobs[newer], behind[newer], atol=1e-4)


async def test_a_cut_answer_says_so(engine: Engine, chat: ChatTokenizer) -> None:
    grammar = await grammar_of(chat, PERSON)
    cut = await engine.generate(PROMPT, sampling(grammar, chat, max_new_tokens=5), request_id="cut")
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == 5
    assert chat.decode(cut.token_ids).lstrip().startswith("{")


async def test_the_likeliest_tokens_are_told_best_first(
    engine: Engine, chat: ChatTokenizer, model: PreTrainedModel
) -> None:
    told: list[Any] = []
    grammar = await grammar_of(chat, SCHEMAS["enum"])
    asked = sampling(grammar, chat, num_top=4)
    generation = await engine.generate(
        PROMPT, asked, request_id="top", on_token=lambda drawn: told.append(drawn.top)
    )
    plain = await engine.generate(PROMPT, sampling(grammar, chat, num_top=4), request_id="whole")
    for one in (generation, plain):
        assert one.top_ids is not None
        assert one.top_logprobs is not None
        assert one.top_ids.shape == (len(one.token_ids), 4)
        for place in range(len(one.token_ids)):
            before = np.concatenate([PROMPT, one.token_ids[:place]])
            own = [
                float(plain_logprobs(model, before, np.array([token]))[0])
                for token in one.top_ids[place]
            ]
            np.testing.assert_allclose(one.top_logprobs[place], own, atol=1e-4)
            assert own == sorted(own, reverse=True)
    assert generation.top_ids is not None
    assert [[token for token, _ in top] for top in told] == generation.top_ids.tolist()


@pytest.mark.parametrize(
    ("penalties", "repeats"),
    [
        ({}, True),
        ({"presence_penalty": 2.0}, False),
        ({"frequency_penalty": 2.0}, False),
        ({"repetition_penalty": 10.0}, False),
        ({"presence_penalty": -2.0}, True),
        ({"frequency_penalty": -2.0}, True),
    ],
)
async def test_penalties_change_what_is_drawn_and_not_what_is_recorded(
    engine: Engine, chat: ChatTokenizer, model: PreTrainedModel, penalties: Any, repeats: bool
) -> None:
    generation = await engine.generate(
        PROMPT, Sampling(12, temperature=0.0, **penalties), request_id="penal"
    )
    expected = plain_logprobs(model, PROMPT, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    ids = generation.token_ids.tolist()
    by_hand = _greedy(model, Sampling(12, temperature=0.0, **penalties))
    assert ids == by_hand
    if repeats and penalties:
        assert len(set(ids)) < len(ids)
    part = await engine.generate(
        np.concatenate([PROMPT, generation.token_ids[:6]]),
        Sampling(6, temperature=0.0, num_drawn=6, **penalties),
        request_id="on",
    )
    assert part.token_ids.tolist() == ids[6:]


def _greedy(model: PreTrainedModel, asked: Sampling) -> list[int]:
    """Draw as OpenAI and vLLM define penalties, by plain passes and plain arithmetic."""
    import torch

    ids = PROMPT.tolist()
    for _ in range(asked.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        for token in set(ids):
            by = asked.repetition_penalty
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        drawn = ids[len(PROMPT) :]
        for token in set(drawn):
            logits[token] -= asked.presence_penalty + asked.frequency_penalty * drawn.count(token)
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"num_top": 21},
        {"num_top": -1},
        {"min_p": 1.5},
        {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((3, float("nan")),)},
        {"top_k": 1 << 63},
        {"stop_token_ids": (3, 1 << 63)},
        {"stop_token_ids": (-1 << 63,)},
    ],
)
async def test_what_cannot_be_sampled_with_is_refused(engine: Engine, fields: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be sampled"):
        await engine.generate(PROMPT, Sampling(4, **fields), request_id="refused")


async def test_biases_and_excluded_tokens_change_what_is_drawn_and_not_what_is_recorded(
    engine: Engine, model: PreTrainedModel
) -> None:
    async def drawn(**fields: Any) -> list[int]:
        asked = Sampling(8, **{"temperature": 0.0, **fields})
        generation = await engine.generate(PROMPT, asked, request_id="biased")
        expected = plain_logprobs(model, PROMPT, generation.token_ids, asked.temperature or 1.0)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        return generation.token_ids.tolist()

    plain = await drawn()
    assert await drawn(logit_bias=((9, 100.0),)) == [9] * 8
    assert plain[0] not in await drawn(logit_bias=((plain[0], -100.0),))
    assert {*await drawn(allowed_token_ids=(7, 8, 9), temperature=1.0, seed=1)} <= {7, 8, 9}
    assert await drawn(allowed_token_ids=(7, 8), bad_words=((7,),)) == [8] * 8
    assert plain[0] not in await drawn(bad_words=((plain[0],),))
    pair = await drawn(bad_words=((plain[0], plain[1]),))
    assert pair[0] == plain[0]
    assert pair[1] != plain[1]
    assert await drawn(min_p=1.0, temperature=1.0, seed=1) == plain
    stops: Any = {"stop_token_ids": (plain[0],)}
    assert await drawn(**stops) == plain[:1]
    late = await drawn(**stops, min_tokens=3)
    assert len(late) >= 4
    assert plain[0] not in late[:3]
    begun = Sampling(8, temperature=0.0, num_drawn=3, **stops, min_tokens=3)
    prompt = np.concatenate([PROMPT, late[:3]]).astype(np.int32)
    rest = await engine.generate(prompt, begun, request_id="begun")
    assert rest.token_ids.tolist()[: len(late) - 3] == late[3:]


async def test_min_p_keeps_the_tokens_near_the_likeliest_that_is_allowed(
    engine: Engine, model: PreTrainedModel
) -> None:
    allowed, least = tuple(range(100, 120)), 0.5
    asked = Sampling(1, temperature=0.5, min_p=least, allowed_token_ids=allowed)
    logprobs = [float(plain_logprobs(model, PROMPT, np.array([t]), 0.5)[0]) for t in allowed]
    kept = {t for t, lp in zip(allowed, logprobs, strict=True) if lp >= max(logprobs) + log(least)}
    assert 1 < len(kept) < len(allowed)
    drawn = [
        await engine.generate(PROMPT, replace(asked, seed=seed), request_id=f"min {seed}")
        for seed in range(60)
    ]
    assert {int(generation.token_ids[0]) for generation in drawn} == kept


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (7,), "bad_words": ((7,),)},
        {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 2},
    ],
)
async def test_a_request_that_excludes_every_token_ends_and_no_other(
    engine: Engine, fields: Any
) -> None:
    wrong = engine.generate(PROMPT, Sampling(4, seed=1, **fields), request_id="none")
    right = engine.generate(PROMPT, Sampling(4, seed=1), request_id="some")
    first, second = await asyncio.gather(wrong, right, return_exceptions=True)
    assert isinstance(first, ConfigError)
    assert "exclude every token" in first.message
    assert isinstance(second, Generation)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": ((1 << 20, 1.0),)},
        {"allowed_token_ids": (3, 1 << 20)},
        {"bad_words": ((3, 1 << 20),)},
    ],
)
async def test_tokens_that_the_model_does_not_have_are_refused(engine: Engine, fields: Any) -> None:
    with pytest.raises(ConfigError, match="name token 1048576"):
        await engine.generate(PROMPT, Sampling(4, **fields), request_id="refused")


async def test_tokens_that_do_not_fit_the_form_end_the_request_and_no_other(
    engine: Engine, chat: ChatTokenizer
) -> None:
    grammar = await grammar_of(chat, THREE)
    wrong = engine.generate(
        PROMPT, sampling(grammar, chat, num_drawn=3, max_new_tokens=8), request_id="wrong"
    )
    right = engine.generate(PROMPT, sampling(grammar, chat), request_id="right")
    first, second = await asyncio.gather(wrong, right, return_exceptions=True)
    assert isinstance(first, ConfigError)
    assert "output format" in first.message
    assert isinstance(second, Generation)
    value_of(chat, second)


async def test_grammars_are_kept_and_forgotten_within_bounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_grammar, "MAX_GRAMMARS", 2)
    compiler = GrammarCompiler(load_tokenizer(str(folder)))
    texts = [f'start: "{letter}" <[1]>' for letter in "abc"]
    first = await compiler.compile(texts[0])
    assert await compiler.compile(texts[0]) is first
    same = await asyncio.gather(*(compiler.compile(texts[1]) for _ in range(4)))
    assert len(set(map(id, same))) == 1
    await compiler.compile(texts[2])
    assert await compiler.compile(texts[0]) is not first
    with pytest.raises(ConfigError, match="characters as a grammar"):
        await compiler.compile(f'start: "{"long" * MAX_GRAMMAR_CHARS}" <[1]>')


def exponential(num_parts: int) -> dict[str, Any]:
    """Return a schema of which the library finds out within gigabytes whether it has an answer."""
    parts = [{"pattern": f"^{'(a*b*c*)' * 3000}{letter}y$"} for letter in "wxyz"[:num_parts]]
    return {"type": "string", "allOf": parts}


@pytest.mark.full
async def test_a_schema_that_takes_too_much_memory_is_refused_and_takes_none_here(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(grammar_trial, "COMPILE_S", 60.0)
    grammars = OutputGrammars(chat)
    await grammars.of(OutputFormat(json_schema={"enum": ["a"]}), [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        with pytest.raises(ConfigError, match="takes more than 64 MiB to compile"):
            await grammars.of(OutputFormat(json_schema=exponential(4)), [])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 16 << 20
    await grammars.of(OutputFormat(json_schema={"enum": ["b"]}), [])


async def test_a_schema_that_takes_too_long_is_refused_and_its_process_killed(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "COMPILE_S", 0.05)
    before = set(psutil.Process().children())
    grammars = OutputGrammars(chat)
    with pytest.raises(ConfigError, match=r"not compiled within 0\.05 s"):
        await grammars.of(OutputFormat(json_schema=exponential(4)), [])
    new = set(psutil.Process().children()) - before
    [trial] = [child for child in new if grammar_trial.__name__ in child.cmdline()]
    assert trial.children() == []


async def test_users_compile_in_turn_and_hold_a_bounded_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(load_tokenizer(str(folder)))
    order: list[str] = []

    async def compile_for(user: str, number: int) -> TokenGrammar:
        grammar = await compiler.compile(f'start: "{user}{number}" <[1]>', user)
        order.append(user)
        return grammar

    many = [asyncio.create_task(compile_for("ada", number)) for number in range(20)]
    await asyncio.sleep(0)
    one = await compile_for("bob", 0)
    assert order.index("bob") <= 2
    held = await asyncio.gather(*many)
    size = sum(grammar.num_bytes for grammar in held)
    monkeypatch.setattr(token_grammar, "MAX_USER_BYTES", size)
    with pytest.raises(BusyError, match="answers in progress use output formats"):
        await compiler.compile('start: "more" <[1]>', "ada")
    assert (await compiler.compile('start: "more" <[1]>', "bob")).user == "bob"
    del held, many
    gc.collect()
    assert (await compiler.compile('start: "again" <[1]>', "ada")).user == "ada"
    assert one.user == "bob"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
    ],
)
async def test_a_form_that_refers_to_itself_alone_is_refused(
    chat: ChatTokenizer, schema: Any
) -> None:
    with pytest.raises(ConfigError, match="allows no answer at all"):
        await grammar_of(chat, schema)


async def test_multiples_of_all_schemas_of_an_answer_are_bounded_together(
    chat: ChatTokenizer,
) -> None:
    await grammar_of(chat, {"type": "number", "multipleOf": 0.01})
    for schema in (
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "integer", "multipleOf": 10**400},
        {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
        {"anyOf": [{"type": "number", "multipleOf": 1.000003}, {"type": "null"}]},
    ):
        with pytest.raises(ConfigError, match="least common multiple"):
            await grammar_of(chat, schema)
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"go_{number}",
                "parameters": {"properties": {"a": {"type": "integer", "multipleOf": number}}},
            },
        }
        for number in (99_991, 99_989)
    ]
    with pytest.raises(ConfigError, match="least common multiple"):
        await OutputGrammars(chat).of(OutputFormat(functions=["go_99991", "go_99989"]), tools)


async def test_a_schema_that_no_client_has_checked_is_checked(chat: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match="required must be a list of names"):
        await grammar_of(chat, {"properties": {"a": {}}, "required": 3})


async def test_a_grammar_that_became_too_complex_is_not_kept(folder: Path) -> None:
    compiler = GrammarCompiler(load_tokenizer(str(folder)))
    schema = {"type": "string", "pattern": f"^{'(a|b|c)?' * 2000}$"}
    text = f"start: json <[1]>\njson: %json {json.dumps(schema)}\n"
    grammar = await compiler.compile(text)
    state = grammar.begin(read_tokenizer(load_tokenizer(str(folder))).tokenize_str('"'))
    MaskFiller().allowed([state], grammar.num_tokens)
    assert "too many expressions" in state.error
    freed = weakref.ref(grammar)
    del grammar, state
    await compiler.compile('start: "other" <[1]>')
    gc.collect()
    assert freed() is None
    assert not (await compiler.compile(text)).failed


async def test_a_state_is_that_of_its_tokens_alone(folder: Path) -> None:
    grammar = await GrammarCompiler(load_tokenizer(str(folder))).compile('start: "ab"* <[1]>')
    one = RowConstraint(Sampling(9, grammar=grammar), PROMPT)
    other = RowConstraint(
        Sampling(9, grammar=grammar, num_drawn=1), np.append(PROMPT, 72).astype(np.int32)
    )
    assert not one.error
    one.accept_token(72)
    assert one.error == other.error


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "token"])
async def test_a_form_follows_reasoning_that_the_prompt_has_opened(is_special: bool) -> None:
    chat = ChatTokenizer(make_tokenizer(more=["<think>", "</think>"] if is_special else []))
    grammar = await OutputGrammars(chat).of(
        OutputFormat(json_schema={"enum": ["yes", "no"]}), [], thinking=True
    )
    stop = chat.stop_token_ids[0]
    for text, fits in (
        ('I think.\n{"so": 1}\n</think>\n\n"yes"', True),
        ('</think>"no"', True),
        ('hm</think> "maybe"', False),
        ('"yes"', False),
    ):
        state = grammar.begin([*chat.encode(text), stop])
        assert (not state.error) is fits, (text, state.error)


async def test_marks_of_calls_are_the_tokens_that_the_template_writes() -> None:
    tokenizer = make_tokenizer(more=["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = HERMES
    chat = ChatTokenizer(tokenizer)
    tool = {"type": "function", "function": {"name": "go"}}
    grammar = await OutputGrammars(chat).of(OutputFormat(functions=["go"]), [tool])
    opened = chat.special_token("<tool_call>")
    said = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    ids = chat.encode(said)
    assert opened in ids
    assert not grammar.begin([*ids, *ids, chat.stop_token_ids[0]]).error
    spelt = make_tokenizer().encode(said, add_special_tokens=False)
    assert grammar.begin(spelt).error, "letter by letter it would be another prompt later"


async def test_a_tokenizer_without_known_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizers library"):
        read_tokenizer(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ['say "hi"', "C:\\new", "über"])
async def test_a_call_of_any_name_is_read_again(name: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HERMES
    chat = ChatTokenizer(tokenizer)
    tool = {"type": "function", "function": {"name": name}}
    grammar = await OutputGrammars(chat).of(OutputFormat(functions=[name]), [tool])
    written = json.dumps(name, ensure_ascii=False)
    said = f'<tool_call>\n{{"name": {written}, "arguments": {{}}}}\n</tool_call>'
    assert not grammar.begin([*chat.encode(said), chat.stop_token_ids[0]]).error
    _, calls = parse_tool_calls(said)
    assert [call["function"]["name"] for call in calls] == [name]


@pytest.mark.parametrize(
    "parameters",
    [
        True,
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [None, {}]}}},
    ],
)
async def test_the_arguments_of_a_call_are_an_object(parameters: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HERMES
    chat = ChatTokenizer(tokenizer)
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    grammar = await OutputGrammars(chat).of(OutputFormat(functions=["go"]), [tool])
    for arguments, fits in (("{}", True), ("null", False)):
        said = f'<tool_call>\n{{"name": "go", "arguments": {arguments}}}\n</tool_call>'
        assert (not grammar.begin(chat.encode(said)).error) is fits
    tool["function"] = {"name": "go", "parameters": {"type": "string"}}
    with pytest.raises(ConfigError, match=r"tools\[0\]\.function\.parameters\.type is 'string'"):
        await OutputGrammars(chat).of(OutputFormat(functions=["go"]), [tool])
