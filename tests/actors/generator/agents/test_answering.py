"""Calls of one episode: limits, samples, retries, hang-ups, stop texts, and what is in the log."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_log import CallLog
from tinkermq.actors.rollout.call_tree import rows_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.partial_rollouts import Fenced
from tinkermq.envs.agents.episode import ContextTooLong, EpisodeLimit, EpisodeOver
from tinkermq.schemas.agent import CallDelivered
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.agents.asking import (
    Asking,
    hang_up,
    held,
    opened,
    request,
    text_of,
)
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
    assert asking.parts[0].num_prompt == len(call.given_ids)
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
    assert counted.num_prompt == done.num_prompt
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


async def test_several_choices_are_told_to_a_program_that_starts_again(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = asking.calls(log)
    first = await calls.answer(request("hi", num_choices=3), asking.tell)
    await calls.start_again()
    log.hold("e-2", "other", anew=True)
    again = await calls.answer(request("hi", num_choices=3), asking.tell)
    assert [text_of(again, n) for n in range(3)] == [text_of(first, n) for n in range(3)]
    assert (again.calls, again.names) == ([0, 1, 2], first.names)


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


async def a_program(ask: Callable[..., Awaitable[str]]) -> None:
    """Work with two conversations, a branch, and two samples of one request."""
    first = await ask("hi")
    await ask("another task")
    second = await ask("hi", first, "on")
    await ask("hi", first, "on")
    await ask("hi", first, "something else")
    await ask("hi", first, "on", second, "more")


@pytest.mark.parametrize("crash", range(7))
async def test_whenever_a_generator_dies_the_rows_are_those_of_an_undisturbed_episode(
    asking: Asking, broker: Broker, recorded: JobScope, crash: int
) -> None:
    kept_nowhere = CallLog("5 3 0")  # as a task of seed 5 has it
    kept_nowhere.begin_try()
    undisturbed = asking.calls(kept_nowhere)
    log = await opened(held(broker, recorded, 1))
    log.hold("e-1", "host", anew=True)
    calls = [asking.calls(log)]

    def asked_of(answering: list[CallAnswers], crash: int) -> Callable[..., Awaitable[str]]:
        num_asked = 0

        async def ask(*texts: str) -> str:
            nonlocal num_asked
            if num_asked == crash:
                answering.append(asking.calls(await opened(held(broker, recorded, 2))))
            num_asked += 1
            last = await answering[-1].answer(request(*texts), asking.tell)
            answering[-1].note_delivered(CallDelivered(calls=last.calls, whole=True))
            return text_of(last)

        return ask

    await a_program(asked_of([undisturbed], crash=-1))
    await a_program(asked_of(calls, crash))
    wanted, found = rows_of(undisturbed.tree, 160).rows, rows_of(calls[-1].tree, 160).rows
    assert len(found) == len(wanted) > 1
    for row, other in zip(found, wanted, strict=True):
        for column in ("token_ids", "mask", "versions", "turn_ends"):
            np.testing.assert_array_equal(getattr(row, column), getattr(other, column))
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
