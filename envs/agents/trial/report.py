"""What a program did with a model of no weights, and what of it costs episodes.

Pure: made from what `trial` has seen.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ....schemas.wire.errors import RewardError
from ..call_lines import WHY_NOT
from ..which_calls import WhyNot, main_root, why_untrained
from .calls import Change, Placement, TrialCall, TriedAnswer, answers_of, place
from .script import tool_name
from .trial import TrialRun

Level: TypeAlias = Literal["ok", "note", "costs", "fail"]
"""Well; without effect on what is trained; more rows for one episode; nothing can be trained."""


@dataclass(frozen=True)
class TrialFinding:
    """Something that was found."""

    level: Level
    text: str
    remedy: str = ""
    """What to do about it, where there is something to be done."""


@dataclass(frozen=True)
class CallFacts:
    """One call of the model."""

    number: int
    parent: int | None
    """The call that it continues; None: a root."""
    messages: int
    """Of its history."""
    new: int
    """Of these, those that follow what the parent was given and answered."""
    tools: list[str]
    """Names of the tools that it may call."""
    streamed: bool
    choices: int
    seconds: float
    """From the end of what came before it (the start, or an answer) to the call."""
    changes: list[str]
    """What was changed of the history before it; see `Change`."""
    refusal: str
    """The code of the error that it was told; empty: it was answered."""
    trained: int
    """How many of its answers would be trained, with the episode's reward."""
    why: str
    """Why they would be, or would not."""
    main: bool
    """Whether it is of the main conversation."""


@dataclass(frozen=True)
class Phases:
    """How long each part of the episode took, in seconds."""

    start: float
    """Copy of the folder, setup, start."""
    first_call: float | None
    """From the start to the first call; None: there was none."""
    program: float
    """From the start to the end of its last process."""
    reward: float
    """From there to the reward."""


@dataclass(frozen=True)
class TrialReport:
    """All that was found."""

    ok: bool
    """Whether episodes of the program can be trained."""
    findings: list[TrialFinding]
    calls: list[CallFacts]
    endpoints: dict[str, int]
    """How often it asked for what: `POST /v1/responses`."""
    clients: list[str]
    """How its HTTP clients name themselves."""
    without_effect: list[str]
    """Fields that it sent and that change nothing."""
    overruled: list[str]
    """Sampling that it asked for, where the job's goes before it."""
    continuing: float | None
    """Share of the calls behind the first that continue another; None: there was one at most."""
    rows: int
    """Rows that the episode's calls make: leaves of their tree."""
    parallel: int
    """Most calls at the same time."""
    outcome: str
    """How it ended; empty: it does not count."""
    reward: float | None
    posted: dict[str, object] = field(default_factory=dict[str, object])
    """What it posted to the episode's own endpoints."""
    context: str = ""
    """What it does when its history is too long: gives up, compacts, retries; empty: not tried."""
    phases: Phases | None = None
    output: str = ""
    """The end of what it printed."""


class _Words(NamedTuple):
    level: Level
    text: str
    remedy: str = ""


_AS_IT_CAME = "append the assistant's message as the API returned it (message.model_dump())"
_WORDS: Mapping[Change, _Words] = {
    "text": _Words("costs", "writes the text of answers anew", _AS_IT_CAME),
    "space": _Words("costs", "changes the white space of answers", _AS_IT_CAME),
    "reasoning": _Words("note", "leaves out the reasoning of answers, which is no difference"),
    "reasoning_text": _Words("costs", "changes the reasoning of answers", _AS_IT_CAME),
    "arguments": _Words(
        "note", "writes the arguments of tool calls anew with the same values, which is recognised"
    ),
    "values": _Words("costs", "changes the arguments of tool calls", _AS_IT_CAME),
    "ids": _Words("note", "changes the ids of tool calls, which is recognised"),
    "calls": _Words("costs", "drops or adds tool calls", _AS_IT_CAME),
    "dropped": _Words(
        "costs",
        "leaves answers out of its history",
        "keep them, also those that were wrong: the model learns from what follows them",
    ),
    "history": _Words(
        "costs", "changes earlier messages", "append what is new, and change nothing before it"
    ),
    "system": _Words(
        "costs",
        "changes its system message from call to call",
        "put what changes (the time, what is left) into the newest user message",
    ),
    "tools": _Words(
        "costs", "changes its tools from call to call", "offer the same tools in the same order"
    ),
    "compacted": _Words("note", "compacts its history: what follows is a row of its own"),
    "sample": _Words("note", "asks the same again: each answer is a row of its own"),
    "apart": _Words("note", "has conversations beside each other: each is a row of its own"),
}
_GIVES_UP, _COMPACTS, _RETRIES = "gives up", "compacts", "retries for ever"


def report_of(run: TrialRun, refused: TrialRun | None = None, *, train: str = "all") -> TrialReport:
    """Return what was found in a run, and in a second one whose history was too long.

    `train` is the job's `agent.train`.
    """
    calls = run.model.calls
    placements = [place(call, calls[: call.number]) for call in calls]
    context = "" if refused is None else _reaction(refused)
    info = run.result.info if run.result is not None else {}
    requests = run.seen.requests if run.seen is not None else []
    behind = placements[1:]
    facts = _call_facts(run, placements, train)
    findings = [
        *_of_end(run),
        *_of_training(facts, train),
        *_of_calls(calls, placements),
        *_of_context(context),
    ]
    return TrialReport(
        ok=all(one.level != "fail" for one in findings),
        findings=findings,
        calls=facts,
        endpoints=dict(Counter(request.what for request in requests)),
        clients=sorted({request.client for request in requests if request.client}),
        without_effect=sorted({name for call in calls for name in call.without_effect}),
        overruled=sorted({name for call in calls for name in call.sampled}),
        continuing=sum(one.parent is not None for one in behind) / len(behind) if behind else None,
        rows=_num_rows(calls, placements),
        parallel=max((call.num_beside + 1 for call in calls), default=0),
        outcome=str(info.get("outcome", "")),
        reward=run.result.reward if run.result is not None else None,
        posted=_posted(run),
        context=context,
        phases=_phases(run),
        output=str(info.get("output", "")),
    )


def _call_facts(run: TrialRun, placements: Sequence[Placement], train: str) -> list[CallFacts]:
    answers = answers_of(run.model.calls, placements)
    left_out = run.seen.episode.untrained if run.seen is not None else ()
    why_not = why_untrained(answers, train, left_out)
    main = main_root(answers)
    by_call: dict[int, list[TriedAnswer]] = {}
    for answer in answers:
        by_call.setdefault(answer.call.number, []).append(answer)
    before_s = run.seen.began_s if run.seen is not None else run.began_s
    facts: list[CallFacts] = []
    for call, placement in zip(run.model.calls, placements, strict=True):
        mine = by_call.get(call.number, [])
        trained = [answer for answer in mine if not why_not[answer]]
        facts.append(
            CallFacts(
                trained=len(trained),
                why=_why(mine, why_not, train),
                main=any(answer.origin is main for answer in mine),
                number=call.number,
                parent=placement.parent,
                messages=len(call.history),
                new=placement.num_new,
                tools=[tool_name(tool) for tool in call.tools],
                streamed=call.is_streamed,
                choices=call.num_choices,
                seconds=round(max(0.0, call.asked_s - before_s), 3),
                changes=sorted(placement.changes),
                refusal=call.refusal,
            )
        )
        before_s = call.answered_s or call.asked_s
    return facts


def _why(answers: Sequence[TriedAnswer], why_not: Mapping[TriedAnswer, WhyNot], train: str) -> str:
    """Return why the answers to a call are trained, or why they, or some of them, are not."""
    reasons = [why for answer in answers if (why := why_not[answer])]
    if reasons:
        return WHY_NOT[reasons[0]]
    if not answers:
        return "it was not answered"
    words = {"all": "every answer that arrives is", "main": "it is of the main conversation"}
    words["alive"] = "it can have had a part in the outcome"
    return words.get(train, f"by the pattern of agent.train={train}")


def _num_rows(calls: Sequence[TrialCall], placements: Sequence[Placement]) -> int:
    """Count the answers that no other call continues."""
    parents = {placement.parent for placement in placements}
    return sum(call.num_choices for call in calls if call.replies and call.number not in parents)


def _posted(run: TrialRun) -> dict[str, object]:
    if run.seen is None:
        return {}
    episode = run.seen.episode
    told: dict[str, object] = {"status": episode.status, **episode.told()}
    if episode.reward is not None:
        told["reward"] = episode.reward
    return {name: value for name, value in told.items() if value not in ("", {}, [])}


def _phases(run: TrialRun) -> Phases | None:
    seen, calls = run.seen, run.model.calls
    if seen is None:
        return None
    end_s = seen.ended_s or run.ended_s
    first = calls[0].asked_s - seen.began_s if calls else None
    return Phases(
        start=round(seen.began_s - run.began_s, 3),
        first_call=None if first is None else round(first, 3),
        program=round(end_s - seen.began_s, 3),
        reward=round(run.ended_s - end_s, 3),
    )


# -- findings --------------------------------------------------------------------------------------


def _of_end(run: TrialRun) -> Iterator[TrialFinding]:
    """Say how it ended."""
    if run.result is None:
        if run.error is not None:
            yield TrialFinding("fail", run.error.message, _remedy(run))
        return
    info = run.result.info
    outcome, exit_code = str(info.get("outcome", "")), info.get("exit_code")
    if outcome == "done":
        yield TrialFinding("ok", f"ends by itself, exit code {exit_code}")
    elif outcome == "failed":
        yield TrialFinding("note", "says itself that it has failed (status=failed)")
    elif outcome == "crash":
        yield TrialFinding(
            "fail",
            f"exits with code {exit_code}"
            + (f": it went over agent.{info['limit']}_mb" if "limit" in info else ""),
            "a program that has done what it can exits with 0, whatever the model said",
        )
    else:
        words = {
            "timeout": "does not end by itself: its time was over",
            "stuck": "does not end by itself: it made no call for too long",
        }
        yield TrialFinding(
            "fail", words[outcome], "see what it waits for; bound its turns by an option of its own"
        )
    if "no_reward" in info:
        yield TrialFinding("fail", f"has no reward: {info['no_reward']}")
    else:
        yield TrialFinding("ok", f"has the reward {run.result.reward:g}")


def _remedy(run: TrialRun) -> str:
    """Return what to do about an error; what was asked for tells more than what it printed."""
    assert run.error is not None
    seen = run.seen.requests if run.seen is not None else []
    failed = next((one for one in seen if one.status >= 400), None)
    asked = f"; its {failed.what} was answered {failed.status}" if failed is not None else ""
    if isinstance(run.error, RewardError):
        asked = "\nit must also grade what a program leaves that has done nothing"
    return run.error.hint + asked


def _of_training(facts: Sequence[CallFacts], train: str) -> Iterator[TrialFinding]:
    """Say how many of the answers would be trained."""
    answered = [one for one in facts if not one.refusal]
    num_trained = sum(bool(one.trained) for one in answered)
    text = f"{num_trained} of {len(answered)} answered calls would be trained (agent.train={train})"
    if answered and not num_trained:
        yield TrialFinding("fail", text, "set agent.train to all, main, or another pattern")
    elif answered:
        level: Level = "ok" if num_trained == len(answered) else "note"
        yield TrialFinding(level, text)


def _of_calls(
    calls: Sequence[TrialCall], placements: Sequence[Placement]
) -> Iterator[TrialFinding]:
    """Say what its calls make of the history."""
    behind = placements[1:]
    roots = [one for one in behind if one.parent is None]
    num_rows = _num_rows(calls, placements)
    if behind and not roots and num_rows == 1:
        yield TrialFinding("ok", "each call continues the one before it: one row")
    elif behind:
        is_dear = any(_WORDS[change].level == "costs" for one in behind for change in one.changes)
        continuing = len(behind) - len(roots)
        yield TrialFinding(
            "costs" if is_dear else "note",
            f"{num_rows} rows: {continuing} of {len(behind)} further calls continue one before "
            f"them, {len(roots)} begin a conversation of their own",
        )
    found: Counter[Change] = Counter(change for one in placements for change in one.changes)
    for change, number in found.items():
        words = _WORDS[change]
        times = f" ({number} of {len(behind)} calls)" if len(behind) > 1 else ""
        yield TrialFinding(words.level, words.text + times, words.remedy)
    refused = Counter(call.refusal for call in calls if call.refusal)
    for code, number in refused.items():
        remedy = "it goes on asking after the last call that it may make"
        hint = remedy if code == "episode_limit" else ""
        yield TrialFinding("costs", f"{number} calls were refused with {code}", hint)


def _of_context(reaction: str) -> Iterator[TrialFinding]:
    """Say what it does when its history is too long."""
    if not reaction:
        return
    text = f"when its history is too long for the model it {reaction}"
    if reaction == _RETRIES:
        remedy = "end, or shorten the history, when the API answers context_length_exceeded"
        yield TrialFinding("costs", text, remedy)
    else:
        yield TrialFinding("note", text)


MAX_REFUSALS = 8
"""Refused calls of one program, after which it is taken to ask for ever."""


def _reaction(run: TrialRun) -> str:
    """Return what a program did when a call of it was refused as too long."""
    calls = run.model.calls
    refused = [call for call in calls if call.refusal]
    if not refused:
        return ""
    if len(refused) >= MAX_REFUSALS:
        return _RETRIES
    later = [call for call in calls[refused[0].number + 1 :] if not call.refusal]
    if later:
        return _COMPACTS
    info = run.result.info if run.result is not None else {}
    code = info.get("exit_code")
    return f"{_GIVES_UP}, exit code {code}" if code is not None else _GIVES_UP
