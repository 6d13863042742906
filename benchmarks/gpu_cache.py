"""Simulated H100s with a bounded cache: engines that hold prefixes, for `benchmarks.gpu_pool`.

A step feeds some tokens to every running sequence, takes as long as the data sheet says, and moves
a simulated clock; nothing is slept. A request whose conversation's keys and values are still there
computes only what is new. When running sequences need room, the least recently used conversations
are evicted first, then the newest running sequence is preempted and computed again later, as in
vLLM. How many groups run is decided by the real `GroupLimit`, and which server is asked by the real
`PrefixHolders`.
"""

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean

from tinkermq.actors.engine.engine import ROOM, EngineStats, GroupLimit, Meter
from tinkermq.actors.gateway.holders import Beginnings, PrefixHolders

from benchmarks.report import Report

BANDWIDTH, FLOPS, MEMORY = 3.35e12, 990e12, 80e9
READING, MULTIPLYING, PREFILLING, USED = 0.7, 0.42, 0.5, 0.9
"""Shares of the data sheet: of bandwidth when decoding, of products when training and prefilling,
of memory for weights and cache."""
STEP = 16
ROWS = 1024
SLACK = 32
COLUMNS = (
    "",
    "",
    "at once",
    "tokens/s",
    "prompt tokens computed",
    "reused",
    "evictions",
    "an answer takes",
)


@dataclass(frozen=True)
class Model:
    """What a model costs."""

    name: str
    weights: float
    kv_bytes: float
    """Of a token in the cache: 2 x layers x key-value heads x head width x 2 bytes."""
    tensor_parallel: int
    layer_s: float
    """Of a token, for the sums between the GPUs of an engine."""

    def token_s(self, cached: float) -> float:
        """Seconds of an engine for a token of each sequence, of so many tokens in the cache."""
        rate = self.tensor_parallel * BANDWIDTH * READING
        return (2 * self.weights + cached * self.kv_bytes) / rate + self.layer_s

    def prefill_s(self, tokens: float) -> float:
        """Seconds of an engine for so many tokens of prompts."""
        return 2 * self.weights * tokens / (self.tensor_parallel * FLOPS * PREFILLING)

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit beside the weights."""
        free = USED * self.tensor_parallel * MEMORY - 2 * self.weights
        return int(free / self.kv_bytes)


MODELS = (
    Model("7 B", 7.6e9, 57e3, 1, 0.0),
    Model("32 B", 32.8e9, 262e3, 4, 2e-3),
)


@dataclass(frozen=True)
class Workload:
    """Episodes or conversations: lengths in tokens, of which answers and observations vary."""

    name: str
    prompt: int
    turns: int
    answer: int
    observation: int
    pause_s: float
    """Of a game or a person between two turns, on average."""
    longest: int

    def length(self, rng: random.Random, mean: int, tail: float = 0.8) -> int:
        """Draw a length with a heavy tail."""
        return int(rng.lognormvariate(math.log(mean) - tail**2 / 2, tail)) + 1


AGENTS = Workload("agents of 12 turns", 2048, 12, 300, 800, 10.0, 32_768)
ANSWERS = Workload("answers of one turn", 512, 1, 1500, 0, 1.0, 8704)
CHATS = Workload("chats of 10 turns", 1024, 10, 300, 200, 30.0, 32_768)


@dataclass(eq=False)
class Conversation:
    """One episode, or one person's conversation."""

    number: int
    group: int
    cached: int
    """Tokens known to the engine; those of the group's prompt are held once."""
    turn: int = 0
    new: int = 0
    """Tokens of the prompt's end that no turn had before."""
    left: int = 0
    """Tokens of the answer that are not drawn."""
    held: int = 0
    """Tokens in the cache."""
    on_end: Callable[[], None] = lambda: None


class Clock:
    """Simulated seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call a function later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = until


class CachedEngine:
    """An engine with a bounded cache."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self.model, self._clock = model, clock
        self.meter = Meter()
        self.meter.cache_tokens = model.cache_tokens
        self.waiting: deque[Conversation] = deque()
        self.running: list[Conversation] = []
        self._idle: OrderedDict[int, Conversation] = OrderedDict()
        self._idle_tokens = 0
        self._steps = False

    @property
    def would_wait(self) -> bool:
        """Whether a server with this engine refuses a request, see `actors/server`."""
        is_full = bool(self.waiting) and self.meter.cache_share >= ROOM
        return len(self.running) + len(self.waiting) >= ROWS or is_full

    def submit(self, turn: Conversation) -> None:
        """Play a turn; `on_end` is called at its end."""
        if (known := self._idle.pop(turn.number, None)) is not None:
            self._idle_tokens -= known.held
        self.waiting.append(turn)
        self._wake()

    def release(self, turn: Conversation) -> None:
        """Forget a conversation."""
        if self._idle.pop(turn.number, None) is not None:
            self._idle_tokens -= turn.held

    def _wake(self) -> None:
        if not self._steps and (self.running or self.waiting):
            self._steps = True
            self._clock.after(self._admit() + self._decode_s(), self._end_step)

    def _admit(self) -> float:
        """Admit what fits; return the seconds that its prompts take."""
        computed, used = 0, sum(one.held for one in self.running)
        while self.waiting and len(self.running) < ROWS:
            turn = self.waiting[0]
            needed = turn.cached + turn.new
            if self.running and used + needed > self.model.cache_tokens:
                break
            self.waiting.popleft()
            self.meter.evicted += turn.held + SLACK < turn.cached
            computed += needed - turn.held
            self.meter.reused += turn.held
            turn.held, turn.cached, turn.new = needed, needed, 0
            used += needed
            self.running.append(turn)
        self.meter.prefilled += computed
        self._evict(used)
        return self.model.prefill_s(computed)

    def _evict(self, used: int) -> None:
        while self._idle and used + self._idle_tokens > self.model.cache_tokens:
            _, turn = self._idle.popitem(last=False)
            self._idle_tokens -= turn.held
            turn.held = 0
        self.meter.cache_share = used / self.model.cache_tokens

    def _decode_s(self) -> float:
        return STEP * self.model.token_s(sum(one.held for one in self.running))

    def _end_step(self) -> None:
        self._steps = False
        ended: list[Conversation] = []
        for turn in self.running:
            drawn = min(STEP, turn.left)
            turn.left -= drawn
            turn.held += drawn
            turn.cached += drawn
            self.meter.generated += drawn
            if not turn.left:
                ended.append(turn)
        self.running = [turn for turn in self.running if turn.left]
        used = sum(one.held for one in self.running)
        while used > self.model.cache_tokens and len(self.running) > 1:
            turn = self.running.pop()
            used -= turn.held
            turn.held = 0
            self.waiting.appendleft(turn)
        for turn in ended:
            self._idle[turn.number] = turn
            self._idle_tokens += turn.held
        self._evict(used)
        for turn in ended:
            turn.on_end()
        self._wake()


@dataclass
class Use:
    """What an engine, or several, did in some time."""

    tokens_per_s: float
    prefilled: int
    """Prompt tokens that were computed."""
    reused: int
    evicted: int
    at_once: float = 0.0
    """Episodes at once, on average."""
    waits: list[float] = field(default_factory=list[float])


def _used(
    engines: list[CachedEngine], seconds: float, before: list[tuple[int, int, int, int]]
) -> Use:
    now = [_counters(engine) for engine in engines]
    spent = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(now, before, strict=True)]
    generated, prefilled, reused, evicted = (sum(column) for column in zip(*spent, strict=True))
    return Use(generated / seconds, prefilled, reused, evicted)


def _counters(engine: CachedEngine) -> tuple[int, int, int, int]:
    meter = engine.meter
    return meter.generated, meter.prefilled, meter.reused, meter.evicted


def play_groups(
    model: Model, work: Workload, most: int, *, adapts: bool, seconds: float, size: int = 8
) -> Use:
    """Play groups for some seconds on one engine; return what the second half of them showed.

    At most `most` episodes, in groups of `size`, run at once; `adapts`: as many as the cache
    allows.
    """
    most //= size
    clock, rng = Clock(), random.Random(7)
    engine = CachedEngine(model, clock)
    numbers, held = itertools.count(), set[int]()
    area, since = 0.0, 0.0

    def stats() -> EngineStats:
        meter = engine.meter
        return meter.stats(
            version=0,
            running=len(engine.running),
            waiting=len(engine.waiting),
            cached_prefixes=0,
            cache_bytes=0,
        )

    limit = GroupLimit(size * work.longest, most, stats()) if adapts else None

    def count() -> float:
        """Return the groups at once, added up over the seconds until now."""
        nonlocal area, since
        area, since = area + len(held) * (clock.now - since), clock.now
        return area

    def fill() -> None:
        count()
        while len(held) < (most if limit is None else limit.limit):
            group = next(numbers)
            held.add(group)
            left = [size]
            for place in range(size):
                episode = Conversation(group * size + place, group, 0)
                # the group's prompt is computed and held once
                begin(episode, work.prompt if place == 0 else 1, left)

    def begin(episode: Conversation, new: int, left: list[int]) -> None:
        episode.new = new
        room = work.longest - episode.cached - new
        episode.left = max(1, min(work.length(rng, work.answer), room))
        episode.on_end = lambda: end(episode, left)
        engine.submit(episode)

    def end(episode: Conversation, left: list[int]) -> None:
        episode.turn += 1
        new = work.length(rng, work.observation) if work.observation else 0
        if episode.turn < work.turns and episode.cached + new < work.longest:
            pause_s = rng.expovariate(1 / work.pause_s)
            clock.after(pause_s, lambda: begin(episode, new, left))
            return
        engine.release(episode)
        left[0] -= 1
        if not left[0]:
            if limit is not None:
                limit.adapt(len(held), stats(), ended=True)
            count()
            held.discard(episode.group)
            fill()

    def look() -> None:
        if limit is not None:
            limit.adapt(len(held), stats())
        clock.after(1.0, look)

    look()
    fill()
    clock.run(seconds / 2)
    before, area_before = [_counters(engine)], count()
    clock.run(seconds)
    use = _used([engine], seconds / 2, before)
    use.at_once = size * (count() - area_before) / (seconds / 2)
    return use


def serve(
    model: Model, work: Workload, people: int, *, stays: bool, seconds: float, servers: int = 4
) -> Use:
    """Answer people's conversations with some servers; return what the second half showed.

    `stays`: as the gateway does; else any server is asked, as a queue group does.
    """
    clock, rng = Clock(), random.Random(7)
    engines = {str(number): CachedEngine(model, clock) for number in range(servers)}
    holders, numbers = PrefixHolders(), itertools.count()
    waits: list[float] = []

    def choose(beginnings: Beginnings) -> str:
        if stays:
            for server in holders.order(beginnings, dict.fromkeys(engines, 0.0)):
                if not engines[server].would_wait:
                    holders.note(beginnings, server)
                    return server
        return rng.choice(list(engines))

    def ask(states: dict[str, Conversation], turn: int, new: int) -> None:
        number = next(iter(states.values())).number
        marks = [f"{number} {earlier}".encode() for earlier in range(turn + 1)]
        server = choose(Beginnings("", "", marks, marks[-1:]))
        state, total = states[server], max(one.cached for one in states.values())
        # what this server computed at its last turn may be there; the rest is new to it
        state.new = total - state.cached + new
        state.left = work.length(rng, work.answer)
        counted = ExitStack()
        counted.enter_context(holders.asking("", server))
        began = clock.now

        def end() -> None:
            counted.close()
            waits.append(clock.now - began)
            pause_s = rng.expovariate(1 / work.pause_s)
            if turn + 1 < work.turns:
                new = work.length(rng, work.observation)
                clock.after(pause_s, lambda: ask(states, turn + 1, new))
                return
            for name, one in states.items():
                engines[name].release(one)
            clock.after(pause_s, meet)

        state.on_end = end
        engines[server].submit(state)

    def meet() -> None:
        number = next(numbers)
        ask({name: Conversation(number, number, 0) for name in engines}, 0, work.prompt)

    for _ in range(people):
        clock.after(rng.uniform(0, work.pause_s * work.turns), meet)
    clock.run(seconds / 2)
    before, skipped = [_counters(engine) for engine in engines.values()], len(waits)
    clock.run(seconds)
    use = _used(list(engines.values()), seconds / 2, before)
    use.waits = waits[skipped:]
    return use


def report_caches(report: Report, model: Model, *, quick: bool) -> None:
    """Compare each way of using the caches with its absence, in one table, and as ratios."""
    rows: list[tuple[str, ...]] = []

    def add(what: str, how: str, use: Use) -> Use:
        wait = f"{mean(use.waits):.1f} s" if use.waits else ""
        millions = [f"{count / 1e6:.1f} M" for count in (use.prefilled, use.reused)]
        at_once = f"{use.at_once:.0f}" if use.at_once else ""
        tokens = f"{use.tokens_per_s:,.0f}"
        rows.append((what, how, at_once, tokens, *millions, f"{use.evicted:,}", wait))
        return use

    for work in (AGENTS, ANSWERS):
        seconds = 300 if quick else 7200
        fixed, _, adapted = (
            add(work.name, how, play_groups(model, work, most, adapts=adapts, seconds=seconds))
            for how, most, adapts in (
                ("256 episodes", 256, False),
                ("2,048 episodes", 2048, False),
                ("adapted, 2,048 at most", 2048, True),
            )
        )
        faster = adapted.tokens_per_s / fixed.tokens_per_s
        report.at_least(f"{work.name}: tokens/s, adapted over 256 episodes", faster, None)
    people, seconds = (40, 300) if quick else (1200, 1800)
    shared, stays = (
        add(
            f"{CHATS.name}, 4 servers", how, serve(model, CHATS, people, stays=way, seconds=seconds)
        )
        for how, way in (("any server", False), ("stays", True))
    )
    fewer = shared.prefilled / max(stays.prefilled, 1)
    report.at_least(f"{CHATS.name}: prompt tokens computed, any server over stays", fewer, None)
    report.at_least(
        f"{CHATS.name}: seconds of an answer, any server over stays",
        mean(shared.waits) / mean(stays.waits),
        None,
    )
    report.table(f"{model.name}: what stays in the cache", COLUMNS, rows)
