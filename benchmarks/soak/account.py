"""Account for every group of a finished run, from what the broker and the run folder hold.

It reads the streams raw, with nats-py and msgpack, and the files as JSON. Nothing of the system is
imported: what is wrong in its readers, or in the learner's own book-keeping, is not repeated here.
Needs `training.keep_rollouts`.

A learner that was cut off may have issued tasks beside its successor, and so a position of the data
order under a second number, or a second task under a number. Such a group is refused as malformed,
or left behind when the run ends before its number is reached. It is told from a group that is
malformed by the log alone: its position was trained under another number, and not because the task
itself was issued again. All else that is refused as malformed or left behind is a problem.
"""

import hashlib
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
from nats.js.errors import NotFoundError

FATES_OF_POSITIONS = frozenset({"equal_rewards", "failed"})
"""Reasons for which a position of the data order may end without having been trained."""
_SAME_AGAIN = ("training_step_reward", "actor/", "critic/")
"""Metrics that a step which is trained again must tell again to the bit."""
_SHOWN = 8


@dataclass(frozen=True)
class Stored:
    """One message of a stream."""

    seq: int
    subject: str
    data: bytes

    @property
    def number(self) -> int:
        """The task number at the end of the subject."""
        return int(self.subject.rsplit(".", 1)[1])

    @property
    def value(self) -> dict[str, Any]:
        """The message, unpacked."""
        return msgpack.unpackb(self.data, ext_hook=_array, raw=False)


@dataclass
class Account:
    """What was found of one run."""

    problems: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_trained: int = 0
    num_reported_again: int = 0
    num_foreign: int = 0
    """Groups and tasks of a learner that did not know of another one, refused or left behind."""
    dropped: Counter[str] = field(default_factory=Counter)

    def expect(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)

    def expect_none(self, found: Iterable[Any], problem: str) -> None:
        """Note a problem that names what there should be none of."""
        some = sorted(found)
        more = f" … ({len(some)} in all)" if len(some) > _SHOWN else ""
        listed = ", ".join(map(str, some[:_SHOWN]))
        self.expect(not some, f"{problem}: {listed}{more}")


@dataclass(frozen=True)
class Run:
    """What is told of a run by whoever submitted it."""

    job: str
    user: str
    run_dir: Path
    config: dict[str, Any]
    issued: set[int]
    """Task numbers that were seen on their way into the queue; perhaps not all."""
    num_rows: int | None = None
    """Rows of its training data, of which each is trained once in every epoch."""

    def stream(self, kind: str) -> str:
        """Name one of its streams."""
        return f"tmq-{self.user}-{self.job}-{kind}"


async def account(url: str, run: Run) -> Account:
    """Check a run that has ended; what is wrong is in `problems`."""
    async with await nats.connect(url) as connection:
        stream = connection.jetstream()
        log = await _read(stream, run.stream("rollout"))
        records = await _read(stream, run.stream("batch"))
        dead = await _read(stream, run.stream("dead"))
        feed = await _read(stream, run.stream("feed"))
        left = await _read(stream, run.stream("task"))
        segments = await _read(stream, run.stream("segment"))
    found = Account()
    groups = {one.seq: one for one in log}
    batches = [(one.seq, one.value) for one in records]
    foreign = _Foreign(batches, groups)
    _check_log(found, log)
    _check_batches(found, run, batches, groups)
    left = _check_left(found, left, foreign)
    _check_fates(found, run, batches, groups, left, foreign)
    _check_positions(found, run, batches, groups)
    _check_staleness(found, run, batches, groups)
    _check_dead_letters(found, batches, dead)
    _check_checkpoint(found, run, batches, foreign)
    _check_metrics(found, run, _lines(found, run), "metrics.jsonl")
    _check_metrics(found, run, [_told(one) for one in feed if one.subject.endswith("metric")])
    found.expect_none((one.subject for one in segments), "segments are left of episodes")
    return found


class _Foreign:
    """Knows which tasks another learner had issued, too."""

    def __init__(
        self, batches: list[tuple[int, dict[str, Any]]], groups: dict[int, Stored]
    ) -> None:
        self._trained: dict[int, dict[str, Any]] = {}
        """Position -> the task that was trained, or ended for good."""
        self._reissues: dict[int, int | None] = {}
        """Number -> the number in whose place its task was issued."""
        self.left: set[int] = set()
        """Numbers of which nothing but such tasks and groups is left at the end of the run."""
        for one in groups.values():
            task = one.value["task"]
            self._reissues[one.number] = task.get("reissue_of")
        for _, record in batches:
            dropped = record["dropped"]
            for_good = [one["seq"] for one in dropped if one["reason"] in FATES_OF_POSITIONS]
            for seq in [*record["seqs"], *for_good]:
                if seq in groups:
                    task = groups[seq].value["task"]
                    self._trained.setdefault(task["index"], task)

    def holds(self, task: dict[str, Any]) -> bool:
        """Whether a task's position was trained under a number that its own did not lead to."""
        trained = self._trained.get(task["index"])
        if trained is None:
            return False
        number, seen = trained["task"], set[int]()
        while number is not None and number not in seen:
            if number == task["task"]:
                return False
            seen.add(number)
            number = self._reissues.get(number)
        return True


# -- reading ------------------------------------------------------------------------------------


async def _read(stream: Any, name: str) -> list[Stored]:
    """Return all that a stream holds; nothing of one that is not there."""
    try:
        state = (await stream.stream_info(name)).state
    except NotFoundError:
        return []
    found: list[Stored] = []
    for seq in range(max(state.first_seq, 1), state.last_seq + 1):
        try:
            message = await stream.get_msg(name, seq)
        except NotFoundError:
            continue
        found.append(Stored(seq, message.subject, message.data or b""))
    return found


def _array(code: int, data: bytes) -> Any:
    """Read an array: lengths of dtype and shape, dtype, shape, elements."""
    assert code == 1, f"unknown extension {code}"
    length, num_dims = struct.unpack_from("<BB", data)
    dtype = np.dtype(data[2 : 2 + length].decode())
    shape = struct.unpack_from(f"<{num_dims}Q", data, 2 + length)
    return np.frombuffer(data, dtype, offset=2 + length + 8 * num_dims).reshape(shape)


def _lines(found: Account, run: Run) -> list[tuple[int, dict[str, float]]]:
    told: list[tuple[int, dict[str, float]]] = []
    for number, line in enumerate((run.run_dir / "metrics.jsonl").read_text().splitlines(), 1):
        try:
            values = json.loads(line)
            told.append((values["step"], values))
        except (ValueError, KeyError, TypeError):
            found.problems.append(f"line {number} of metrics.jsonl cannot be read: {line[:80]!r}")
    return told


def _told(message: Stored) -> tuple[int, dict[str, float]]:
    return message.value["step"], message.value["values"]


# -- checking -----------------------------------------------------------------------------------


def _check_log(found: Account, log: list[Stored]) -> None:
    """Each task has one entry at most, and the entry is that task's."""
    numbers = Counter(one.number for one in log)
    found.expect_none((n for n, count in numbers.items() if count > 1), "appended twice")
    strange = [one.seq for one in log if one.value["task"]["task"] != one.number]
    found.expect_none(strange, "entries under another task's subject")


def _check_batches(
    found: Account,
    run: Run,
    batches: list[tuple[int, dict[str, Any]]],
    groups: dict[int, Stored],
) -> None:
    """Steps follow each other, each with a whole batch of what the log holds, by digest."""
    training = run.config["training"]
    found.num_steps = len(batches)
    steps = [record["step"] for _, record in batches]
    wanted = training.get("num_steps") or _steps_of_epochs(run)
    found.expect(
        steps == list(range(1, wanted + 1)),
        f"the batch records are of steps {steps[:3]} … {steps[-3:]}, wanted are 1 to {wanted}",
    )
    for _, record in batches:
        step, seqs = record["step"], record["seqs"]
        if missing := [seq for seq in seqs if seq not in groups]:
            found.problems.append(f"step {step} trained entries that the log lacks: {missing}")
            continue
        found.expect(len(seqs) == training["batch_size"], f"step {step} trained {len(seqs)} groups")
        numbers = [groups[seq].number for seq in seqs]
        found.expect(numbers == record["tasks"], f"step {step} names other tasks than the log")
        digests = b"".join(hashlib.sha256(groups[seq].data).digest() for seq in seqs)
        same = hashlib.sha256(digests).hexdigest() == record["digest"]
        found.expect(same, f"the digest of step {step} is not that of its groups")


def _steps_of_epochs(run: Run) -> int:
    training = run.config["training"]
    assert run.num_rows is not None
    return run.num_rows * training["num_epochs"] // training["batch_size"]


def _check_left(found: Account, left: list[Stored], foreign: _Foreign) -> list[Stored]:
    """Nothing is left in the queue but what another learner had issued, too; return the rest."""
    own = [one for one in left if not foreign.holds(one.value)]
    foreign.left |= {one.number for one in left} - {one.number for one in own}
    found.num_foreign += len(left) - len(own)
    found.expect_none((one.subject for one in own), "tasks are left in the queue")
    return own


def _check_fates(
    found: Account,
    run: Run,
    batches: list[tuple[int, dict[str, Any]]],
    groups: dict[int, Stored],
    left: list[Stored],
    foreign: _Foreign,
) -> None:
    """Every number ends once, every entry of the log is decided once, nothing is malformed."""
    trained = [number for _, record in batches for number in record["tasks"]]
    dropped = [item for _, record in batches for item in record["dropped"]]
    found.num_trained = len(trained)
    found.dropped = Counter(item["reason"] for item in dropped)
    malformed = [item["seq"] for item in dropped if item["reason"] == "malformed"]
    wrong = [seq for seq in malformed if not foreign.holds(groups[seq].value["task"])]
    found.num_foreign += len(malformed) - len(wrong)
    found.expect_none(wrong, "groups were refused as malformed")
    ended = Counter(trained)
    ended.update(item["task"] for item in dropped if item["reason"] != "duplicate")
    found.expect_none((n for n, count in ended.items() if count > 1), "tasks ended twice")
    known = set(ended)
    known_up_to = max(known, default=-1) + 1
    undecided = set(groups) - {seq for _, record in batches for seq in record["seqs"]}
    undecided -= {item["seq"] for item in dropped}
    of_another = {seq for seq in undecided if foreign.holds(groups[seq].value["task"])}
    found.num_foreign += len(of_another)
    foreign.left |= {groups[seq].number for seq in of_another}
    foreign.left -= known
    gaps = set(range(known_up_to)) - known - foreign.left
    found.expect_none(gaps, "task numbers without an end")
    queued = {one.number for one in left} | foreign.left
    found.expect_none(run.issued - known - queued, "tasks that were issued and have no end")
    decided = Counter(seq for _, record in batches for seq in record["seqs"])
    decided.update(item["seq"] for item in dropped)
    found.expect_none((s for s, count in decided.items() if count > 1), "entries decided on twice")
    found.expect_none(undecided - of_another, "entries of the log that nobody decided on")
    found.expect_none(set(decided) - set(groups), "entries decided on that the log lacks")


def _check_positions(
    found: Account,
    run: Run,
    batches: list[tuple[int, dict[str, Any]]],
    groups: dict[int, Stored],
) -> None:
    """No position of the data order is missing, none is trained twice, and so no row."""
    tasks = {seq: one.value["task"] for seq, one in groups.items()}
    trained: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    reasons: defaultdict[int, set[str]] = defaultdict(set)
    for _, record in batches:
        for seq in record["seqs"]:
            trained[tasks[seq]["index"]] += 1
            rows[tasks[seq]["sample"]] += 1
        for item in record["dropped"]:
            reasons[tasks[item["seq"]]["index"]].add(item["reason"])
    found.expect_none((at for at, n in trained.items() if n > 1), "positions trained twice")
    last = max([*trained, *reasons], default=-1)
    lost = [
        f"{at} ({'dropped as ' + ', '.join(sorted(reasons[at])) if at in reasons else 'unknown'})"
        for at in range(last + 1)
        if at not in trained and not reasons.get(at, set()) & FATES_OF_POSITIONS
    ]
    found.expect_none(lost, "positions of the data order that were never trained")
    if run.num_rows is not None:
        epochs = run.config["training"]["num_epochs"]
        uneven = [f"{row}: {rows[row]}" for row in range(run.num_rows) if rows[row] != epochs]
        found.expect_none(uneven, f"rows that were not trained {epochs} times")


def _check_staleness(
    found: Account,
    run: Run,
    batches: list[tuple[int, dict[str, Any]]],
    groups: dict[int, Stored],
) -> None:
    """No trained group is older than the bound, and none is from the future."""
    bound = run.config["training"].get("max_staleness", 2)
    for _, record in batches:
        for seq in record["seqs"]:
            episodes = groups[seq].value["trajectories"]
            made = np.concatenate([one["versions"][one["mask"] == 1] for one in episodes])
            version = record["step"] - 1
            found.expect(
                version - bound <= made.min() and made.max() <= version,
                f"step {record['step']} trained tokens of versions {made.min()} to {made.max()}",
            )


def _check_dead_letters(
    found: Account, batches: list[tuple[int, dict[str, Any]]], dead: list[Stored]
) -> None:
    """What was given up is a dead letter, and the other way round."""
    letters = {one.value["task"]["task"] for one in dead}
    dropped = [item for _, record in batches for item in record["dropped"]]
    failed = {item["task"] for item in dropped if item["reason"] == "failed"}
    trained = {number for _, record in batches for number in record["tasks"]}
    found.expect_none(failed - letters, "tasks given up without a dead letter")
    found.expect_none(letters - failed - trained, "dead letters of tasks without an end")


def _check_checkpoint(
    found: Account, run: Run, batches: list[tuple[int, dict[str, Any]]], foreign: _Foreign
) -> None:
    """The last checkpoint tells of the same trained and dropped tasks as the records."""
    last = batches[-1][1]["step"] if batches else 0
    file = run.run_dir / "checkpoints" / f"step_{last:06d}" / "learner" / "state.json"
    if not file.is_file():
        found.problems.append(f"there is no {file}")
        return
    state = json.loads(file.read_text())
    trained = {number for _, record in batches for number in record["tasks"]}
    dropped = {
        item["task"]
        for _, record in batches
        for item in record["dropped"]
        if item["reason"] != "duplicate"
    }
    found.expect(state["step"] == last, f"the checkpoint is of step {state['step']}, not {last}")
    found.expect(
        state["batch_seq"] == batches[-1][0],
        f"the checkpoint ends at batch record {state['batch_seq']}, the last is {batches[-1][0]}",
    )
    for name, wanted in (("trained", trained), ("dropped", dropped)):
        told = {number for start, end in state[name] for number in range(start, end)}
        found.expect_none(wanted ^ told, f"tasks {name} by records or checkpoint, not both")
    ended = len(trained | dropped)
    found.expect(
        ended <= state["next_task"] <= ended + len(foreign.left),
        f"the next task is {state['next_task']}, {ended} have ended",
    )


def _check_metrics(
    found: Account,
    run: Run,
    told: list[tuple[int, dict[str, float]]],
    where: str = "the feed",
) -> None:
    """Each step is told once, or again with the same numbers; each validation is there, whole."""
    steps: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    validated: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    for step, values in told:
        kind = validated if "val/mean_score" in values else steps
        if kind is validated or "training_step_reward" in values:
            kind[step].append(values)
    last = found.num_steps
    found.expect_none(set(range(1, last + 1)) ^ set(steps), f"steps that {where} lacks or made up")
    again = sum(len(tellings) - 1 for tellings in steps.values())
    found.num_reported_again = max(found.num_reported_again, again)
    for step, tellings in steps.items():
        kept = [_kept(values) for values in tellings]
        found.expect(all(one == kept[0] for one in kept), f"{where} tells two stories of {step}")
    num_val = run.config["env"].get("num_val", 0)
    every = run.config["training"].get("test_freq", 0)
    due = {0, last, *range(every or last, last, every or last)} if num_val else set[int]()
    found.expect_none(due ^ set(validated), f"validations that {where} lacks or made up")
    episodes = num_val * run.config.get("evaluation", {}).get("samples", 1)
    for step, results in validated.items():
        whole = all(one.get("val/num_episodes") == episodes for one in results)
        found.expect(whole, f"the validation of step {step} in {where} is not of {episodes}")


def _kept(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if key.startswith(_SAME_AGAIN)}
