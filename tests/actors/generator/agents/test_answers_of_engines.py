"""Calls that each engine answers, against the model's own pass: what was its context, and whose
weights they were."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tinkermq.actors.engine.engine import KvOnSwap
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_tree import CallRow, rows_of
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.agent import CallDelivered, CallPart, CallRequest
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from tests.actors.generator.agents.asking import Asking, hang_up, held, opened, request
from tests.actors.generator.conftest import BLOCK_TOKENS
from tests.support.models import changed, loaded, plain_logprobs
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def assert_drawn_there(rows: Sequence[CallRow], models: dict[int, PreTrainedModel]) -> None:
    """Assert that each trained token has the log-prob that a version gives it behind its row."""
    for row in rows:
        trained = row.mask[1:] == 1
        assert trained.any()
        for version in set(row.versions[1:][trained].tolist()):
            own = trained & (row.versions[1:] == version)
            expected = plain_logprobs(models[version], row.token_ids[:1], row.token_ids[1:])
            np.testing.assert_allclose(row.logprobs[1:][own], expected[own], atol=1e-4)


async def delivered(calls: CallAnswers, asking: Asking, asked: CallRequest) -> str:
    """Ask, and say that the answer arrived; return its first choice."""
    last = await calls.answer(asked, asking.tell)
    calls.note_delivered(CallDelivered(calls=last.calls, whole=True))
    return calls.tree.calls[last.calls[0]].reply.text


async def a_program(calls: CallAnswers, asking: Asking) -> None:
    """Work with a branch, several choices, tools, a stop text and an answer that it begins."""

    async def ask(*texts: str, **fields: object) -> str:
        return await delivered(calls, asking, request(*texts, **fields))

    first = await ask("hi", stream=True)
    assert len(first) > 5, "the seed draws too little to be cut"
    second = await ask("hi", first, "on")
    await ask("hi", first, "on", second, "two", num_choices=2)
    await ask("hi", first, "else")
    await ask("hi", tools=[TOOL])
    await ask("hi", stop=[first[2:4]], stream=True)
    await ask("hi", "So", is_prefill=True)


async def test_each_trained_token_was_drawn_behind_what_its_row_has_before_it(
    asking: Asking, model: PreTrainedModel
) -> None:
    calls = asking.calls()
    await a_program(calls, asking)
    rows = rows_of(calls.tree, 160, "all").rows
    assert len(calls.tree.calls) == 8
    assert sum(int(row.mask.sum()) for row in rows) == sum(
        len(call.generated.token_ids) for call in calls.tree.calls
    )
    assert_drawn_there(rows, {0: model})
    again = asking.calls()
    await a_program(again, asking)
    assert [call.path_ids.tolist() for call in again.tree.calls] == [
        call.path_ids.tolist() for call in calls.tree.calls
    ]


async def test_a_call_computes_only_what_is_new_behind_the_one_that_it_continues(
    asking: Asking,
) -> None:
    calls = asking.calls()
    first = await delivered(calls, asking, request("hi" * 20))
    computed = asking.engine.stats().prefilled_tokens
    await delivered(calls, asking, request("hi" * 20, first, "on"))
    call = calls.tree.calls[1]
    assert call.parent is not None
    again = call.parent.num_tokens if asking.engine_kind == "vllm" else 1  # it shares whole blocks
    computed = asking.engine.stats().prefilled_tokens - computed
    assert computed <= len(call.given_ids) + min(again, BLOCK_TOKENS)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_new_weights_amid_an_answer_are_told_of_each_token(
    asking: Asking, model: PreTrainedModel, kv: KvOnSwap
) -> None:
    weights = changed(model, 1)
    calls = asking.calls(max_turn=100)
    asked = asyncio.create_task(calls.answer(request("hi", stream=True), asking.tell))
    await until(lambda: any(part.deltas for part in asking.parts), "the answer to begin")
    await asking.engine.load_weights(1, loaded(model, weights).state_dict(), kv)
    last = await asked
    told = [delta for part in (*asking.parts, last) for delta in part.deltas]
    (call,) = calls.tree.calls
    versions = [version for delta in told for version in delta.versions]
    assert versions == call.generated.versions.tolist() == sorted(versions)
    await delivered(calls, asking, request("hi", call.reply.text, "on", max_tokens=4))
    models = {0: model, 1: loaded(model, weights)}
    (row,) = rows_of(calls.tree, 160).rows
    if kv == "recompute":  # else what came before was computed by other weights
        assert_drawn_there([row], models)
    assert set(calls.tree.calls[1].generated.versions.tolist()) == {1}


async def test_an_answer_that_was_cut_in_the_middle_goes_on_behind_its_exact_tokens(
    asking: Asking, broker: Broker, recorded: JobScope, model: PreTrainedModel
) -> None:
    calls = asking.calls(await opened(held(broker, recorded, 1)))
    whole = await calls.answer(request("hi", stream=True), asking.tell)
    told = [delta for part in (*asking.parts, whole) for delta in part.deltas]
    first = told[0]
    ids = calls.tree.calls[0].generated.token_ids.tolist()
    assert len(ids) > 4
    cut = {
        "token_ids": ids[:3],
        "text": asking.chat.decode(ids[:2]),
        "logprobs": calls.tree.calls[0].generated.logprobs[:3].tolist(),
        "versions": [0] * 3,
        "finish": None,
    }
    begun = CallPart(names=asking.parts[0].names, deltas=[first.model_copy(update=cut)])
    asking.parts.clear()
    log = held(broker, recorded, 2)
    await log.end()  # as if the first had not come to its end
    later = asking.calls(await opened(held(broker, recorded, 3)))
    rest = await later.answer(request("hi", stream=True, begun=begun), asking.tell)
    later.note_delivered(CallDelivered(calls=rest.calls, whole=True))
    fresh = [delta for part in (*asking.parts, rest) for delta in part.deltas]
    (call,) = later.tree.calls
    generated = call.generated.token_ids.tolist()
    assert ids[:3] + [token for delta in fresh for token in delta.token_ids] == generated
    text = cut["text"] + "".join(delta.text for delta in fresh)
    assert text == asking.chat.decode(generated) == call.reply.text
    assert_drawn_there(rows_of(later.tree, 160).rows, {0: model})
    if asking.engine_kind == "transformers":  # vLLM cannot begin amid what a seed draws
        assert generated == ids


async def test_the_engine_stops_at_what_nobody_waits_for(asking: Asking) -> None:
    calls = asking.calls(max_turn=100)
    await hang_up(calls, request("hi", stream=True))
    await calls.close("its program has ended")
    await until(lambda: not asking.engine.stats().running, "the engine to be idle")
    assert not calls.tree.calls
