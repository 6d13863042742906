"""Calls of one episode: limits, samples, retries, hang-ups, and the log; in each engine."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tinkermq.actors.engine.engine import KvOnSwap
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_tree import CallRow, rows_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.partial_rollouts import Fenced
from tinkermq.envs.agents.episode import ContextTooLong, EpisodeLimit, EpisodeOver
from tinkermq.envs.agents.proxy.calls import GatheredAnswer
from tinkermq.schemas.agent import CallDelivered, CallPart, CallRequest
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from tests.actors.engine.conftest import BLOCK_TOKENS
from tests.actors.rollout.calls.asking import (
    Asking,
    hang_up,
    held,
    opened,
    request,
    text_of,
)
from tests.support.models import changed, loaded, plain_logprobs
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_conversation_is_one_row_of_what_the_engine_drew(asking: Asking) -> None:
    calls = asking.calls()
    first = await calls.answer(request("hi"), asking.tell)
    second = await calls.answer(request("hi", text_of(first), "on"), asking.tell)
    assert (first.calls, second.calls) == ([0], [1])
    assert second.parent == 0
    assert second.num_reused == calls.tree.calls[0].num_tokens
    calls.note_delivered(CallDelivered(calls=[1], whole=True))
    (row,) = rows_of(calls.tree, 160).rows
    drawn = [token for part in (first, second) for token in part.deltas[0].token_ids]
    assert row.token_ids[row.mask == 1].tolist() == drawn
    assert len(row.turn_ends) == 2


async def test_a_stream_tells_the_whole_bit_by_bit(asking: Asking) -> None:
    calls = asking.calls()
    last = await calls.answer(request("hi", stream=True), asking.tell)
    told = [delta for part in (*asking.parts, last) for delta in part.deltas]
    call = calls.tree.calls[0]
    assert [token for delta in told for token in delta.token_ids] == (
        call.generated.token_ids.tolist()
    )
    assert "".join(delta.text for delta in told) == asking.chat.decode(call.generated.token_ids)
    assert asking.parts[0].prompt_tokens == len(call.given_ids)
    assert [delta.finish for delta in told][-1] == call.generated.finish_reason


async def test_the_same_request_is_a_new_sample_unless_it_says_that_it_is_a_retry(
    asking: Asking,
) -> None:
    calls = asking.calls()
    first = await calls.answer(request("hi"), asking.tell)
    other = await calls.answer(request("hi"), asking.tell)
    again = await calls.answer(request("hi", is_retry=True), asking.tell)
    assert (first.calls, other.calls, again.calls) == ([0], [1], [1])
    assert text_of(first) != text_of(other) == text_of(again)
    assert calls.tree.calls[1].branch == "sample"


async def test_an_answer_that_did_not_arrive_is_told_again(asking: Asking) -> None:
    calls = asking.calls()
    first = await calls.answer(request("hi"), asking.tell)
    calls.note_delivered(CallDelivered(calls=first.calls, whole=False))
    again = await calls.answer(request("hi"), asking.tell)
    assert (again.calls, text_of(again)) == (first.calls, text_of(first))


async def test_a_program_that_hangs_up_may_come_back_for_its_answer(asking: Asking) -> None:
    calls = asking.calls()
    await hang_up(calls, request("hi", stream=True))
    back = await calls.answer(request("hi"), asking.tell)
    assert back.calls == [0]
    assert len(calls.tree.calls) == 1


async def test_an_answer_that_nobody_heard_is_not_trained(asking: Asking) -> None:
    calls = asking.calls()
    await hang_up(calls, request("hi", stream=True))
    await until(lambda: bool(calls.tree.calls), "the answer to end")
    assert calls.tree.calls[0].delivered is False
    assert not rows_of(calls.tree, 160).rows


async def test_several_choices_are_samples_of_one_prompt(asking: Asking) -> None:
    calls = asking.calls()
    last = await calls.answer(request("hi", num_choices=3), asking.tell)
    assert last.calls == [0, 1, 2]
    assert len(set(last.names)) == 3
    assert len({text_of(last, choice) for choice in range(3)}) == 3
    assert [call.parent for call in calls.tree.calls] == [None] * 3


async def test_a_stop_text_ends_an_answer_and_is_not_kept(asking: Asking) -> None:
    whole = text_of(await asking.calls().answer(request("hi"), asking.tell))
    stop = whole[3:5]
    calls = asking.calls()
    last = await calls.answer(request("hi", stop=[stop]), asking.tell)
    assert text_of(last) == whole[: whole.index(stop)]
    assert last.deltas[0].finish == "stop"
    call = calls.tree.calls[0]
    assert whole.startswith(asking.chat.decode(call.generated.token_ids))
    assert call.reply.text == text_of(last)


async def test_what_a_program_wrote_of_the_answer_itself_is_given(asking: Asking) -> None:
    calls = asking.calls()
    last = await calls.answer(request("hi", "So", is_prefill=True), asking.tell)
    call = calls.tree.calls[0]
    assert asking.chat.decode(call.given_ids).endswith("So")
    assert call.reply.text == "So" + text_of(last)
    then = await calls.answer(request("hi", "So" + text_of(last), "on"), asking.tell)
    assert then.parent == 0


async def test_an_answer_is_continued_by_its_number(asking: Asking) -> None:
    calls = asking.calls()
    await calls.answer(request("hi"), asking.tell)
    assert (await calls.answer(request("on", previous=0), asking.tell)).parent == 0
    with pytest.raises(NotFoundError, match="no answer 7"):
        await calls.answer(request("on", previous=7), asking.tell)


async def test_tokens_are_counted_as_the_call_would_be_continued(asking: Asking) -> None:
    calls = asking.calls()
    first = await calls.answer(request("hi"), asking.tell)
    history = request("hi", text_of(first), "on")
    counted = await calls.answer(history.model_copy(update={"count_only": True}), asking.tell)
    done = await calls.answer(history, asking.tell)
    assert counted.prompt_tokens == done.prompt_tokens
    assert len(calls.tree.calls) == 2


async def test_limits_are_named_with_their_values(asking: Asking) -> None:
    calls = asking.calls(max_calls=2)
    await calls.answer(request("hi", num_choices=2), asking.tell)
    with pytest.raises(EpisodeLimit, match=r"2 calls .* agent.max_calls is 2"):
        await calls.answer(request("hi"), asking.tell)
    assert calls.limit_hit == "turns"
    calls = asking.calls(max_tokens=4)
    last = await calls.answer(request("hi"), asking.tell)
    assert len(last.deltas[0].token_ids) <= 4
    with pytest.raises(EpisodeLimit, match=r"agent.max_tokens is 4"):
        await calls.answer(request("hi"), asking.tell)
    with pytest.raises(ContextTooLong, match=r"\d+ tokens > 160 maximum"):
        await calls.answer(request("x" * 400), asking.tell)
    await calls.close("its program has ended")
    with pytest.raises(EpisodeOver, match="its program has ended"):
        await calls.answer(request("hi"), asking.tell)


async def test_the_next_holder_goes_on_with_the_tree_and_the_one_before_ends_no_answer(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    first = await calls.answer(request("hi"), asking.tell)
    history = request("hi", text_of(first), "on")
    second = await calls.answer(history, asking.tell)

    later = await opened(held(broker, recorded, 2))
    assert (later.episode, later.host) == ("e-1", "host")
    restored = asking.calls(later)
    assert [call.path_ids.tolist() for call in restored.tree.calls] == [
        call.path_ids.tolist() for call in calls.tree.calls
    ]
    assert [call.reply for call in restored.tree.calls] == [c.reply for c in calls.tree.calls]
    again = await restored.answer(history.model_copy(update={"is_retry": True}), asking.tell)
    assert (again.calls, text_of(again)) == (second.calls, text_of(second))
    onward = await restored.answer(
        request("hi", text_of(first), "on", text_of(second), "more"), asking.tell
    )
    assert (onward.parent, onward.delivery) == (1, 2)

    with pytest.raises(Fenced):
        await calls.answer(request("hi", text_of(first), "else"), asking.tell)
    await eventually(lambda: _failed(calls), "the first holder to know")
    assert isinstance(calls.failed.exception(), Fenced)


async def _failed(calls: CallAnswers) -> bool:
    return calls.failed.done()


async def test_a_program_that_starts_again_is_answered_from_the_log(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    first = await calls.answer(request("hi"), asking.tell)
    history = request("hi", text_of(first), "on")
    second = await calls.answer(history, asking.tell)
    before = [call.path_ids.copy() for call in calls.tree.calls]
    await calls.start_again()
    log.hold("e-2", "other", anew=True)
    assert not calls.tree.calls
    again = await calls.answer(request("hi"), asking.tell)
    then = await calls.answer(request("hi", text_of(again), "on"), asking.tell)
    assert (text_of(again), text_of(then)) == (text_of(first), text_of(second))
    assert again.names == first.names
    for call, ids in zip(calls.tree.calls, before, strict=True):
        np.testing.assert_array_equal(call.path_ids, ids)
    assert calls.num_replayed == sum(len(c.generated.token_ids) for c in calls.tree.calls)
    other = await calls.answer(request("hi", text_of(again), "another way"), asking.tell)
    assert other.calls == [2]
    later = await opened(held(broker, recorded, 2))
    assert (later.episode, len(later.segments)) == ("e-2", 3)


async def test_choices_that_a_dead_generator_has_not_written_down_are_generated(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    whole = await calls.answer(request("hi", num_choices=3, request="r"), asking.tell)
    for num_written in range(3):
        found = await opened(held(broker, recorded, 2 + num_written))
        found.segments = found.segments[:num_written]  # it died behind the first of them
        later = asking.calls(found, episode=f"e{num_written}")
        asked = request("hi", num_choices=3, request="r-1", is_retry=True)
        again = await later.answer(asked, asking.tell)
        assert again.calls == [0, 1, 2]
        assert [text_of(again, n) for n in range(3)] == [text_of(whole, n) for n in range(3)]
        assert [call.branch for call in later.tree.calls] == [""] * 3
        once_more = asked.model_copy(update={"request": "r-2"})
        assert (await later.answer(once_more, asking.tell)).calls == [0, 1, 2]


async def test_a_proxy_that_asks_again_before_anything_began_gets_a_new_sample(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    first = await asking.calls(log).answer(request("hi", request="a"), asking.tell)
    later = asking.calls(await opened(held(broker, recorded, 2)), episode="e1")
    lacking = request("hi", request="b-1", is_retry=True)
    other = await later.answer(lacking, asking.tell)
    same = await later.answer(request("hi", request="a-1", is_retry=True), asking.tell)
    assert (other.calls, same.calls, text_of(same)) == ([1], [0], text_of(first))


async def cut_off(calls: CallAnswers, asked: CallRequest, num_parts: int) -> CallRequest:
    """Ask for a stream that breaks behind so many parts; return how a proxy asks for the rest."""
    gathered = GatheredAnswer(asked.decoding.num_choices)

    async def tell(part: CallPart) -> None:
        gathered.add(part)
        if gathered.num_parts == num_parts:
            asking.cancel()

    asking = asyncio.create_task(calls.answer(asked, tell))
    await asyncio.wait([asking])
    assert asking.cancelled()
    again = {"request": f"{asked.request}-1", "begun": gathered.begun(), "is_retry": True}
    return asked.model_copy(update=again)


async def go_on(calls: CallAnswers, lacking: CallRequest) -> GatheredAnswer:
    """Ask for the rest of an answer; return all of it, which is what its calls have."""
    told = GatheredAnswer(lacking.decoding.num_choices)
    assert lacking.begun is not None
    told.add(lacking.begun)

    async def tell(part: CallPart) -> None:
        told.add(part)

    told.add((await calls.answer(lacking, tell)).model_copy(update={"last": True}))
    generated = [calls.tree.calls[number].generated for number in told.calls]
    assert [choice.token_ids for choice in told.choices] == [
        generation.token_ids.tolist() for generation in generated
    ]
    return told


async def test_choices_that_are_written_down_are_told_to_a_program_that_lacks_their_ends(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    asked = await cut_off(calls, request("hi", num_choices=2, stream=True), num_parts=1)
    whole = await calls.answer(asked, asking.tell)
    later = asking.calls(await opened(held(broker, recorded, 2)), episode="e1")
    again = await go_on(later, asked.model_copy(update={"request": "r-2"}))
    assert again.calls == whole.calls == [0, 1]
    assert len(later.tree.calls) == 2


async def test_answers_to_equal_requests_at_the_same_time_stay_apart(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    asked = [request("hi", num_choices=2, request=name) for name in "ab"]
    told = await asyncio.gather(*(calls.answer(one, asking.tell) for one in asked))
    later = asking.calls(await opened(held(broker, recorded, 2)), episode="e1")
    for one, whole in zip(asked, told, strict=True):
        again = one.model_copy(update={"request": f"{one.request}-1", "is_retry": True})
        assert (await later.answer(again, asking.tell)).calls == whole.calls


async def test_an_answer_is_found_by_its_own_name_after_its_program_has_started_again(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    await calls.answer(request("hi", num_choices=2), asking.tell)
    await calls.start_again()
    log.hold("e-2", "other", anew=True)
    first = await calls.answer(request("hi", num_choices=2), asking.tell)
    on = request("hi", text_of(first), "on", stream=True, request="s")
    asked = await cut_off(calls, on, num_parts=1)
    assert asked.begun is not None
    assert not {*first.names} & {*asked.begun.names}
    second = await calls.answer(asked, asking.tell)
    later = asking.calls(await opened(held(broker, recorded, 2)), episode="e1")
    again = await later.answer(asked.model_copy(update={"request": "s-2"}), asking.tell)
    assert again.calls == second.calls == [2]


async def test_of_equal_requests_each_that_was_cut_off_goes_on_with_its_own_answer(
    asking: Asking,
) -> None:
    calls = asking.calls(max_turn=40)
    equal = [request("hi", stream=True, request=name) for name in "ab"]
    lacking = await asyncio.gather(*(cut_off(calls, asked, num_parts=2) for asked in equal))
    told = await asyncio.gather(*(go_on(calls, asked) for asked in lacking))
    assert sorted(answer.calls for answer in told) == [[0], [1]]


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_answer_goes_on_at_the_next_holder_though_another_request_has_its_name(
    at_once: bool, asking: Asking
) -> None:
    lacking = await cut_off(
        before := asking.calls(max_turn=40), request("hi", stream=True), num_parts=2
    )
    await before.close("its generator has died")
    later = asking.calls(max_turn=40, episode="e1")
    another = asyncio.create_task(later.answer(request("else", request="other"), asking.tell))
    await (asyncio.sleep(0) if at_once else asyncio.wait([another]))
    told = await go_on(later, lacking)
    assert sorted([told.calls, (await another).calls]) == [[0], [1]]
    assert lacking.begun is not None
    assert told.choices[0].token_ids[: len(lacking.begun.deltas[0].token_ids)] == (
        lacking.begun.deltas[0].token_ids
    )


# Calls that each engine answers, against the model's own pass: what was its context, and whose
# weights they were.

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
