"""A tiny model that half knows to call a calculator as a tool, with a tokenizer that merges.

The task is that of the game `calculator` (`envs/games/calculator.py`); here the calculator is a
tool that the model calls as Hermes models do. The tokenizer is not bijective: the words of a call
have tokens of their own, and so has each beginning of such a word, so that one text has many
spellings. A share of the demonstrations is spelled otherwise than the tokenizer would.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.tiny_models import SPECIAL_TOKENS, make_model
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from tinkermq.envs.games.calculator import CALL, HABIT, calculate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ('","arguments": {"f": "', '{"name": "', "<tool_call>", "</tool_call>", '"}}', "calc")
"""What has a token, and a token for each of its beginnings; the first have precedence."""
TEMPLATE = """
{%- if tools -%}
  <|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>
{%- endif -%}
{%- for message in messages -%}
  {{ '<|' + message.role + '|>' + (message.content or '') }}
  {%- for call in message.tool_calls or [] -%}
    <tool_call>{"name": "{{ call.function.name }}","arguments":{{ ' ' }}
    {{- call.function.arguments | tojson }}}</tool_call>
  {%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculate a formula.",
        "parameters": {
            "type": "object",
            "properties": {"f": {"type": "string"}},
            "required": ["f"],
        },
    },
}
LIMITS = {"max_prompt_tokens": 32, "max_turn_tokens": 40, "max_response_tokens": 96}
"""Section `rollout`, for episodes of two calls."""
_ROW_TOKENS = 192


def tool_result(formula: str) -> str:
    """Return what the calculator says."""
    call = CALL.fullmatch(f"={formula.strip()}")
    return "?" if call is None else calculate(call)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, and of the beginnings of `WORDS`."""
    merges: list[tuple[str, str]] = []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        ((letters, _),) = level.pre_tokenize_str(word)
        for end in range(1, len(letters)):
            if (pair := (letters[:end], letters[end])) not in merges:
                merges.append(pair)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = level
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def demonstration(rng: random.Random) -> list[dict[str, Any]]:
    """Return one conversation; a share `HABIT` of them guess, the others call the tool."""
    question = f"{rng.randrange(10, 100)}*{rng.randrange(10, 100)}"
    asked = {"role": "user", "content": question}
    if rng.random() < HABIT:
        return [asked, {"role": "assistant", "content": str(rng.randrange(100, 9802))}]
    function = {"name": "calc", "arguments": {"f": question}}
    result = tool_result(question)
    return [
        asked,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c00000000", "function": function}],
        },
        {"role": "tool", "content": result, "tool_call_id": "c00000000"},
        {"role": "assistant", "content": result},
    ]


def spelled(chat: ChatTokenizer, said: Sequence[int], rng: random.Random, cuts: int) -> list[int]:
    """Spell the tokens of an answer otherwise: its text cut at so many places."""
    text = "".join(chat.token_text(token) for token in said)
    places = sorted(rng.sample(range(1, len(text)), cuts))
    ends = zip([0, *places], [*places, len(text)], strict=True)
    return [token for begin, end in ends for token in chat.encode(text[begin:end])]


def tokens_of(
    chat: ChatTokenizer, messages: Sequence[dict[str, Any]], rng: random.Random, scattered: float
) -> TokenSequence:
    """Tokenise a conversation; a share `scattered` of the calls is spelled otherwise."""
    known = chat.conversation(messages, [TOOL])
    end = int(known.turn_ends[0])
    begin = int(np.argmax(known.mask))
    ids, mask = known.token_ids, known.mask
    if len(known.turn_ends) > 1 and rng.random() < scattered:
        said = spelled(chat, ids[begin:end].tolist(), rng, rng.randrange(1, 4))
        ids = np.concatenate([ids[:begin], said, ids[end:]])
        mask = np.concatenate([mask[:begin], np.ones(len(said)), mask[end:]])
    return TokenSequence(ids.astype(np.int32), mask.astype(np.uint8))


def calling_model(folder: Path, *, steps: int = 700) -> Path:
    """Return the folder of the model below `folder`, made unless it is there: two minutes."""
    source = Path(__file__).read_bytes()
    place = folder / f"calling-{hashlib.sha256(source).hexdigest()[:12]}-{steps}"
    if not place.is_dir():
        make_calling_model(place, steps=steps)
    return place


def make_calling_model(
    folder: Path, *, steps: int = 700, scattered: float = 0.5, seed: int = 0
) -> float:
    """Write the model to a folder that is not there yet; return the last loss."""
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    tokenizer = make_tokenizer()
    make_model(vocab_size=len(tokenizer), seed=seed).save_pretrained(made)
    tokenizer.save_pretrained(made)
    loss = _train(made, steps, scattered, seed)
    if folder.is_dir():  # somebody else was faster
        shutil.rmtree(made)
    else:
        made.rename(folder)
    return loss


def _train(folder: Path, steps: int, scattered: float, seed: int) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    model: Any = load_causal_lm(str(folder), dtype=torch.float32)
    scorer = Scorer(model, temperature=1.0, dtype="float32")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    known = [
        tokens_of(chat, demonstration(rng), rng, scattered) for _ in range(min(8192, steps * 64))
    ]
    loss: Any = torch.zeros(())
    for _ in range(steps):
        rows = rng.choices(known, k=64)
        (packed,) = pack(rows, max_row_tokens=_ROW_TOKENS, microbatch_tokens=1 << 16)
        loss = -scorer.score(packed).logprobs_N.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return float(loss.detach())
