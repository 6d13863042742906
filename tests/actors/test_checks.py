"""What a job reads of its model, data and chat template is looked at before it runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinkermq.actors.model_checks import chat_checks, model_checks
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy, load_tokenizer
from tinkermq.actors.policy.tiny_models import (
    CHAT_TEMPLATE,
    TinyKind,
    make_tokenizer,
    save_tiny_model,
    save_tiny_vision_model,
)
from tinkermq.envs.check import Exchange
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.checks import run_checks
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig, RolloutConfig

from tests.support.families import make_model

TEMPLATE, ROWS, WEIGHTS, ADAPTER, LAYERS, SAVING = (
    "the model's tokenizer and template can be used",
    "each row can be learnt from",
    "the weights are those of the configuration",
    "the adapter fits the model",
    "its layers can do what the learner asks",
    "a checkpoint can be written",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def faults(path: Path, **sections: Any) -> dict[str, str]:
    """Return what is wrong, by question."""
    job = {"model": {"path": str(path)}, "env": {"game": "bandit"}, **sections}
    if "sft" in sections:
        del job["env"]
    results = run_checks(model_checks(JobConfig.model_validate(job)))
    return {one.name: f"{one.detail}: {one.hint}" for one in results if not one.ok}


def edit(file: Path, **values: Any) -> None:
    told = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**told, **values}))


def chats(folder: Path, *rows: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "hi"}
    good = {"messages": [asked, {"role": "assistant", "content": "ho"}]}
    return {"sft": {"data": [str(write_rows(folder / "chats.jsonl", [good, *rows]))]}}


def test_a_sound_job_has_no_faults(model: Path, tmp_path: Path) -> None:
    assert faults(model) == {}
    assert faults(model, lora={"rank": 4}) == {}
    assert faults(model, **chats(tmp_path)) == {}


@pytest.mark.parametrize("kind", get_args(TinyKind))
def test_models_of_other_kinds_have_no_faults(tmp_path: Path, kind: TinyKind) -> None:
    save_tiny_model(tmp_path / "m", kind=kind)
    assert faults(tmp_path / "m") == {}
    attention = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    assert faults(tmp_path / "m", lora=attention) == {}


def test_a_model_that_sees_has_no_faults(tmp_path: Path) -> None:
    save_tiny_vision_model(tmp_path / "m")
    assert faults(tmp_path / "m") == {}
    assert faults(tmp_path / "m", lora={"rank": 2}) == {}


def test_a_reward_model_is_refused_by_name(model: Path) -> None:
    edit(model / "config.json", architectures=["Qwen2ForSequenceClassification"])
    said = faults(model)["family"]
    assert "is a classifier or reward model (Qwen2ForSequenceClassification)" in said
    assert "env.reward" in said


def test_a_tokenizer_longer_than_the_embedding_is_told(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<new>", "<newer>"])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save_pretrained(model)  # pyright: ignore[reportUnknownMemberType]
    said = faults(model)[TEMPLATE]
    assert "the tokenizer does not match model" in said
    assert "the model knows 264, not '<new>', '<newer>'" in said
    assert "resize_token_embeddings(266)" in said


def test_an_id_behind_a_gap_counts_as_a_token(model: Path) -> None:
    file = model / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 100
    file.write_text(json.dumps(told))
    assert "the tokenizer does not match model" in faults(model)[TEMPLATE]


def test_an_embedding_of_another_size_than_the_configuration_is_told(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:8]])
    save_file(tensors, file, metadata={"format": "pt"})
    said = faults(model)[WEIGHTS]
    assert name in said
    with pytest.raises(Exception, match=r"size|shape"):  # and so does the run
        load_causal_lm(str(model), dtype=torch.float32)


@pytest.mark.parametrize("size", [0, 4, 100, -100])
def test_weights_that_are_cut_are_told(model: Path, size: int) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    assert "is damaged or cut" in faults(model)[WEIGHTS]


@pytest.mark.parametrize("told", [{"temperature": 0.9, "top_p": 0.6}, {"top_k": 5}, {}])
def test_settings_of_generation_that_the_run_saves_are_no_fault(
    model: Path, told: dict[str, Any]
) -> None:
    (model / "generation_config.json").write_text(json.dumps(told))
    assert faults(model) == {}


def test_what_could_not_be_read_again_is_told(model: Path) -> None:
    (model / "generation_config.json").write_text("{")
    assert "generation_config.json" in faults(model)[SAVING]


def test_a_template_that_fails_is_told(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('not me') }}")
    assert "not me" in faults(model)[TEMPLATE]


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 4, "targets": ["no_such_layer"]}, "lora.targets=['no_such_layer']"),
        ({"rank": 4, "targets": ["embed_nothing", "q_prj"]}, "lora.targets="),
    ],
)
def test_targets_that_the_model_has_not_are_told(
    model: Path, lora: dict[str, Any], words: str
) -> None:
    assert words in faults(model, lora=lora)[ADAPTER]


def test_an_adapter_that_the_run_could_not_continue_is_told(model: Path, tmp_path: Path) -> None:
    made: Any = load_policy(str(model), LoraConfig(rank=4), dtype=torch.float32)
    made.save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(model))
    assert faults(tmp_path / "adapter", lora={"rank": 4}) == {}
    assert "lora.rank" in faults(tmp_path / "adapter", lora={"rank": 8})[ADAPTER]
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    assert "cannot be read" in faults(tmp_path / "adapter", lora={"rank": 4})[ADAPTER]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant message is learnt"),
        ({"messages": []}, "messages of row 1"),
        ({"messages": "hi"}, "messages of row 1"),
        ({"other": 1}, "messages of row 1"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho" * 100_000},
                ]
            },
            "tokens, rollout.max_prompt_tokens",
        ),
    ],
)
def test_a_row_that_cannot_be_learnt_from_is_named(
    model: Path, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    said = faults(model, **chats(tmp_path, row))[ROWS]
    assert words in said
    assert "row 1 of" in said


def test_what_a_template_does_not_take_names_the_row(model: Path, tmp_path: Path) -> None:
    only_text = (
        "{%- for m in messages -%}{%- if m['role'] == 'tool' -%}{{ raise_exception('no tools') }}"
        "{%- endif -%}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    )
    (model / "chat_template.jinja").write_text(only_text)
    row = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "ho"},
        ]
    }
    said = faults(model, **chats(tmp_path, row))[ROWS]
    assert "row 1 of" in said
    assert "no tools" in said


# -- What a tokenizer and its chat template say about a game's conversations -----------------------


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
PLAY = Exchange([{"role": "user", "content": "12*34"}], [], ["=12*34", "408"], [[SAID], [SAID]])


def ask(
    template: str = CHAT_TEMPLATE, *, gold: bool = True, play: Exchange = PLAY, **limits: int
) -> dict[str, str]:
    """Return what is wrong, by question."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    rollout = RolloutConfig(**{"max_turns": 2, **limits})
    checks = chat_checks(ChatTokenizer(tokenizer), rollout, [play], gold=gold)
    results = list(run_checks(checks))
    assert [one.name for one in results] == [APPENDS, PROMPTS, *([ANSWERS] if gold else [])]
    return {one.name: f"{one.detail}: {one.hint}" for one in results if not one.ok}


def test_a_game_that_fits_has_no_faults() -> None:
    exactly = {"max_prompt_tokens": 8, "max_turn_tokens": 7, "max_response_tokens": 17}
    assert ask(CHAT_TEMPLATE, gold=True, play=PLAY, **exactly) == {}


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
    found = ask(CHAT_TEMPLATE, gold=True, play=PLAY, **{limit: wanted - 1})
    assert found == {question: f"{said}: raise rollout.{limit} to {wanted}"}


@pytest.mark.parametrize(
    ("family", "asked", "said"),
    [
        (None, {"learner": {"ranks": 3, "slots": 3, "context_parallel": 3}}, "a model with num_"),
        (None, {"algorithm": {"router_replay": True}}, "the model has no routers"),
        ("lfm2", {"learner": {"ranks": 2, "slots": 2, "context_parallel": 2}}, "has recurrent"),
        ("gpt_oss", {"model": {"attn_implementation": "varlen"}}, "its attention has sinks"),
        ("gpt_oss", {"algorithm": {"router_replay": True}}, None),
    ],
)
def test_what_a_models_layers_cannot_do_is_told(
    model: Path, family: str | None, asked: dict[str, Any], said: str | None
) -> None:
    if family is not None:
        make_model(family).save_pretrained(model)
    found = faults(model, **{**asked, "model": {"path": str(model), **asked.get("model", {})}})
    assert found.keys() == ({LAYERS} if said else set())
    assert (said or "") in found.get(LAYERS, "")


def test_a_games_system_prompt_that_the_template_leaves_out_is_told() -> None:
    prompted = replace(PLAY, messages=[{"role": "system", "content": "Add."}, *PLAY.messages])
    assert ask(play=prompted) == {}
    without = CHAT_TEMPLATE.replace("in messages", "in messages if message['role'] != 'system'", 1)
    assert without != CHAT_TEMPLATE
    found = ask(without, play=prompted)
    assert list(found) == [PROMPTS]
    assert "takes no system message" in found[PROMPTS]
    assert "use a game without a system prompt" in found[PROMPTS]


def test_a_template_that_rewrites_the_history_is_told_where_it_matters() -> None:
    assert "rewrites the history" in ask(FORGETS)[APPENDS]
    assert APPENDS not in ask(FORGETS, max_turns=1, gold=False)


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}


def test_a_first_prompt_is_counted_with_the_schemas_of_its_tools() -> None:
    shows_tools = "{{ tools | tojson if tools else '' }}" + CHAT_TEMPLATE
    with_tool = replace(PLAY, tools=[TOOL])
    assert ask(shows_tools, play=PLAY, max_prompt_tokens=40) == {}
    assert "a first prompt has" in ask(shows_tools, play=with_tool, max_prompt_tokens=40)[PROMPTS]


def test_a_template_without_a_place_for_tools_is_refused_for_a_game_that_has_some() -> None:
    with_tool = replace(PLAY, tools=[TOOL])
    assert "omits tools" in ask(play=with_tool)[PROMPTS]
