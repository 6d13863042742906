"""Programs that call a model in every way that was seen, and an engine that keeps its own record.

The tokenizer of these tests is not bijective: an answer is drawn token by token, and its text has
another spelling in tokens than the one that was drawn.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tinkermq.actors.engine.engine import Generation
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout.call_tree import ModelCall
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.schemas.model_apis.canonical import CanonicalCall, ModelMessage
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(sys.prefix, "chat_templates", "trl", "chat_templates")
"""Where `make venv` puts them."""

TEMPLATES = {
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2_2_5": ["<|im_end|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
}
"""Chat templates of models that people use, and what ends a turn there."""

_SPECIAL = re.compile(r"<\|\w+\|?>|<\w+\|>|<\w+_of_turn>|\[/?[A-Z_]+\]|</s>|<｜[^｜<>]+｜>")
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def chat_of(name: str) -> ChatTokenizer:
    """Return a tokenizer with a real template, and stop tokens as the model's files name them."""
    template = (FOLDER / f"{name}.jinja").read_text()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["the answer is in the search result, go on and look at it again\n"] * 3
    bpe.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    stops = TEMPLATES.get(name, ["<|im_end|>"])
    special = sorted({*_SPECIAL.findall(template), *stops} - set(_PLAIN))
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(token, special=False) for token in _PLAIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=stops[0])
    tokenizer.chat_template = template
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    assert isinstance(ids, list)
    return ChatTokenizer(tokenizer, {}, ids)


@dataclass
class RecordingEngine:
    """Draws what it is told, or at random, and writes down each context it had."""

    chat: ChatTokenizer
    random: Random
    contexts: dict[bytes, list[tuple[int, float]]] = field(default_factory=dict)
    """What was drawn behind a context, by the context's bytes."""

    def generate(self, prompt_ids: Sequence[int], text: str | None = None) -> Generation:
        """Draw an answer: the text, letter by letter or as it happens, or tokens at random."""
        ids = self._random_ids() if text is None else spelled(self.chat, text, self.random)
        ended = self.random.random() < 0.8
        if ended or not ids:
            ids.append(self.random.choice(self.chat.stop_token_ids))
        logprobs = np.array([-self.random.random() for _ in ids], np.float32)
        context = list(map(int, prompt_ids))
        for token, logprob in zip(ids, logprobs, strict=True):
            key = np.array(context, np.int32).tobytes()
            self.contexts.setdefault(key, []).append((token, float(logprob)))
            context.append(token)
        return Generation(
            np.array(ids, np.int32),
            logprobs,
            np.full(len(ids), self.random.randrange(9), np.int32),
            "stop" if ended else "length",
        )

    def _random_ids(self) -> list[int]:
        return [self.random.randrange(300) for _ in range(self.random.randrange(0, 12))]


def spelled(chat: ChatTokenizer, text: str, random: Random) -> list[int]:
    """Spell a text in tokens, seldom as the tokenizer would."""
    ids: list[int] = []
    while text:
        special = next((plain for plain in _PLAIN if text.startswith(plain)), None)
        piece = special or text[: random.randrange(1, 4)]
        piece = piece if special else piece.split("<")[0] or piece[:1]
        ids += chat.encode(piece)
        text = text[len(piece) :]
    return ids


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"a {name}",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    for name in ("search", "read")
]


class Program:
    """A program whose next call is drawn: it extends, edits, drops, compacts, forks, asks again."""

    def __init__(
        self, chat: ChatTokenizer, seed: int, *, tools: bool = True, parallel: bool = True
    ) -> None:
        self.random = Random(seed)
        self.exact = ExactCalls(chat)
        self.engine = RecordingEngine(chat, Random(seed + 1))
        self.threads: list[list[ModelMessage]] = []
        self._parallel = parallel
        self._all_tools = self._tools = TOOLS if tools else []

    def step(self) -> ModelCall:
        """Make one call."""
        thread = self._next_thread()
        prepared = self.exact.prepare(self._as_sent(thread), self._tools)
        call = self.exact.finish(
            prepared, self.engine.generate(prepared.prompt_ids.tolist(), self._text())
        )
        if self.random.random() < 0.9:
            call.delivered = True
            self.threads.append([*thread, call.reply])
        return call

    def _next_thread(self) -> list[ModelMessage]:
        choice = self.random.random()
        if not self.threads or choice < 0.05:
            return [user(f"task {len(self.threads)}: " + self._words())]
        thread = list(self.threads[-1] if choice < 0.7 else self.random.choice(self.threads))
        if 0.70 <= choice < 0.76:
            return thread[:-1]  # the same request again
        if 0.76 <= choice < 0.82:
            place = self.random.randrange(len(thread))
            thread[place] = thread[place].replaced(content=("edited " + self._words(),))
        if 0.82 <= choice < 0.86:
            return [user("so far: " + thread[-1].text + self._words())]
        if 0.86 <= choice < 0.9:
            self._tools = self._all_tools[: self.random.randrange(3)]
        return [*thread, *self._observed(thread[-1])]

    def _observed(self, reply: ModelMessage) -> Iterator[ModelMessage]:
        results = [
            ModelMessage(role="tool", content=("found " + self._words(),), call_id=call.id)
            for call in reply.calls
        ]
        self.random.shuffle(results)
        yield from results
        if not results or self.random.random() < 0.2:
            yield user(self._words())

    def _as_sent(self, thread: Sequence[ModelMessage]) -> list[ModelMessage]:
        return [lossy(message, self.random) for message in thread]

    def _words(self) -> str:
        words = ["go", "on", "look", "again", "\n", "the answer", " ", "é", "<b>"]
        return " ".join(self.random.choice(words) for _ in range(self.random.randrange(1, 5)))

    def _text(self) -> str | None:
        if self.random.random() < 0.3:
            return None
        text = "<think>\nhm\n</think>\n\n" if self.random.random() < 0.3 else ""
        text += self._words()
        if self._tools:
            for _ in range(self.random.choice((0, 0, 1, 2) if self._parallel else (0, 1))):
                call = {"name": "search", "arguments": {"query": self._words()}}
                text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return text


def user(text: str) -> ModelMessage:
    """Return what a user says."""
    return ModelMessage(role="user", content=(text,))


def lossy(message: ModelMessage, random: Random) -> ModelMessage:
    """Return a message as some program would send it back: changed, and the same."""
    if random.random() < 0.5:
        message = message.replaced(reasoning=None)
    calls = [_lossy_call(call, random) for call in message.calls]
    return message.replaced(calls=tuple(calls))


def _lossy_call(call: CanonicalCall, random: Random) -> CanonicalCall:
    if isinstance(call.value, str):
        return call
    spellings = [
        {"separators": (",", ":")},
        {"indent": 2},
        {"sort_keys": True},
        {"ensure_ascii": False},
    ]
    arguments = json.dumps(call.value, **random.choice(spellings))
    return call._replace(arguments=arguments)
