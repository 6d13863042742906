"""An agent's conversations trained as text that is tokenised again, and as tokens as drawn.

    python -m benchmarks.retokenised [--episodes 256]

The same agent asks the same model the same questions: the calculator as a tool, with a tokenizer in
which one text has many spellings (`calling_model.py`). On one side it speaks to a plain endpoint:
each request's messages are rendered and tokenised, the answer is told as text, and what is trained
is the conversation, rendered and tokenised once more. On the other side its calls are attached to a
tree of exact tokens. Both are compared with what the engine wrote down: the prompt that it was
given and each token that it drew, with its log-prob. The learner is the trainer's own.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinkermq.actors.engine.engine import Generation, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.rollout.call_tree import rows_of
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from tinkermq.schemas.model_apis.canonical import ModelMessage, parse_reply
from transformers.utils import logging

from benchmarks.calling_model import TOOL, calling_model, tool_result
from benchmarks.report import Report, parser

CONTEXT = 192
TURN_TOKENS = 48
Ask = Callable[[list[ModelMessage]], Awaitable[ModelMessage]]
MODELS = Path(__file__).resolve().parents[1] / "outputs" / "models"


@dataclass
class RecordingEngine:
    """An engine, and all that it was given and drew."""

    engine: TransformersEngine
    stops: tuple[int, ...]
    drawn: dict[tuple[bytes, int], float] = field(default_factory=dict[tuple[bytes, int], float])
    """Log-prob of each token by all that stood before it."""
    num_asked: int = 0

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], seed: int) -> Generation:
        """Draw an answer; equal prompts and seeds give equal answers."""
        self.num_asked += 1
        sampling = Sampling(
            max_new_tokens=TURN_TOKENS, temperature=1.0, stop_token_ids=self.stops, seed=seed
        )
        name = f"request-{self.num_asked}"
        made = await self.engine.generate(np.asarray(prompt, np.int32), sampling, request_id=name)
        context = np.asarray(prompt, np.int32).tobytes()
        for token, logprob in zip(made.token_ids, made.logprobs, strict=True):
            self.drawn[context, int(token)] = float(logprob)
            context += np.int32(token).tobytes()
        return made


@dataclass
class Trained:
    """What one side trains of all episodes."""

    rows: list[TokenSequence] = field(default_factory=list[TokenSequence])
    answers: list[float] = field(default_factory=list[float])
    """Log-prob of each trained answer as the engine has it, in the order of the rows."""
    ends: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    """Position of the last token of each answer, by row."""


async def agent(question: str, ask: Ask) -> list[ModelMessage]:
    """Answer a question, with the calculator at hand; return the conversation."""
    messages = [ModelMessage(role="user", content=(question,))]
    for _ in range(2):
        messages.append(reply := await ask(list(messages)))
        if not reply.calls:
            break
        for call in reply.calls:
            value = call.value
            formula = str(value.get("f")) if isinstance(value, dict) else str(value)
            messages.append(
                ModelMessage(role="tool", content=(tool_result(formula),), call_id=call.id)
            )
    return messages


async def as_text(
    engine: RecordingEngine, chat: ChatTokenizer, question: str, seed: int, trained: Trained
) -> None:
    """Play an episode with a plain endpoint, and train its text."""
    answers: list[float] = []

    async def ask(messages: list[ModelMessage]) -> ModelMessage:
        prompt = chat.prompt([message.for_template() for message in messages], [TOOL])
        made = await engine.generate(prompt, seed + len(messages))
        answers.append(float(made.logprobs.sum()))
        return parse_reply(chat.decode(made.token_ids), f"c{len(messages):05}", calls=True)

    messages = await agent(question, ask)
    if messages[-1].role == "tool":
        messages.pop()
    known = chat.conversation([message.for_template() for message in messages], [TOOL])
    trained.rows.append(TokenSequence(known.token_ids, known.mask.astype(np.uint8)))
    trained.ends.append(known.turn_ends)
    trained.answers += answers


async def as_tokens(
    engine: RecordingEngine, chat: ChatTokenizer, question: str, seed: int, trained: Trained
) -> None:
    """Play an episode with a tree of exact calls, and train its rows."""
    exact = ExactCalls(chat)

    async def ask(messages: list[ModelMessage]) -> ModelMessage:
        prepared = exact.prepare(messages, [TOOL])
        made = await engine.generate(prepared.prompt_ids, seed + len(messages))
        call = exact.finish(prepared, made)
        call.delivered = True
        return call.reply

    await agent(question, ask)
    for row in rows_of(exact.tree, CONTEXT).rows:
        trained.rows.append(TokenSequence(row.token_ids, row.mask))
        trained.ends.append(row.turn_ends)
        calls = [exact.tree.calls[number] for number in row.calls]
        trained.answers += [float(call.generated.logprobs.sum()) for call in calls]


def share_unlike(trained: Trained, engine: RecordingEngine) -> tuple[int, int]:
    """Count the trained tokens, and those that the engine has not drawn behind their context."""
    num, unlike = 0, 0
    for row in trained.rows:
        ids = row.token_ids.astype(np.int32)
        for at in np.flatnonzero(row.mask):
            num += 1
            unlike += (ids[:at].tobytes(), int(ids[at])) not in engine.drawn
    return num, unlike


def mismatches(trained: Trained, scorer: Scorer) -> NDArray[np.float64]:
    """Return |log p_learner − log p_behaviour| of each trained answer."""
    found: list[float] = []
    for row, ends in zip(trained.rows, trained.ends, strict=True):
        (packed,) = pack([row], max_row_tokens=len(row.token_ids), microbatch_tokens=1 << 16)
        with torch.no_grad():
            logprobs = scorer.score(packed).logprobs_N.double().numpy()
        at = np.flatnonzero(row.mask)
        firsts = np.searchsorted(at, np.concatenate([[-1], ends[:-1]]), side="right")
        found += np.add.reduceat(logprobs, firsts).tolist()
    return np.abs(np.array(found) - np.array(trained.answers))


async def measure(arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    """Play all episodes on both sides, and compare."""
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    model: Any = load_causal_lm(str(folder), dtype=torch.float32)
    scorer = Scorer(model, temperature=1.0)
    rng = Random(1)
    questions = [
        f"{rng.randrange(10, 100)}*{rng.randrange(10, 100)}" for _ in range(arguments.episodes)
    ]
    rows: list[tuple[str, ...]] = []
    shares: dict[str, float] = {}
    for side, play in (("text, tokenised again", as_text), ("tokens as drawn", as_tokens)):
        engine = await TransformersEngine.start(str(folder), max_slots=32, max_context=CONTEXT)
        record, trained = RecordingEngine(engine, chat.stop_token_ids), Trained()
        for number, question in enumerate(questions):
            await play(record, chat, question, 10 * number, trained)
        await engine.close()
        num, unlike = share_unlike(trained, record)
        off = mismatches(trained, scorer)
        shares[side] = 100 * unlike / num
        rows.append(
            (
                side,
                f"{num:,}",
                f"{unlike:,} ({shares[side]:.1f}%)",
                f"{np.mean(off > 1e-2):.1%}",
                f"{off.mean():.2g}",
                f"{off.max():.2g}",
            )
        )
    report.table(
        f"{arguments.episodes} episodes with a tool, one model",
        (
            "trained as",
            "tokens",
            "not drawn so",
            "answers off by > 0.01",
            "mean |Δ log p| of an answer",
            "largest",
        ),
        rows,
    )
    text, tokens = shares.values()
    least = None if arguments.quick else 0.1
    report.at_least("trained tokens with another context: text, tokenised again", text, least, "%")
    report.at_most("trained tokens with another context: tokens as drawn", tokens, 0.0, "%")


def main() -> None:
    """Parse the arguments, make the model if it is not there, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=256)
    arguments = options.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    report = Report(
        "retokenised",
        "Conversations tokenised again, and as they were drawn",
        quick=arguments.quick,
    )
    with tempfile.TemporaryDirectory() as place:
        if arguments.quick:
            arguments.episodes = 32
        folder = calling_model(Path(place), steps=60) if arguments.quick else calling_model(MODELS)
        asyncio.run(measure(arguments, folder, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
