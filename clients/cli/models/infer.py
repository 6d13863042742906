"""`tinkermq serve` and `tinkermq infer`: put a model behind a URL, or play a game with it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from ....broker.client.faults import shown_url
from ....envs.registry import load_game
from ....schemas.config.load_config import apply_override
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.wire.errors import ConfigError, NotFoundError
from ...address import JobAddress
from ...home import find_openai, find_url
from ...inference.inference import InferenceReport, run_inference_async
from ...inference.inference_client import START_S, submit_inference, until_served
from ...inference.results import EpisodeResult
from ...pool import Pool, is_token
from ..options import COMMON, Common
from ..output import (
    literal,
    note,
    print_json,
    print_json_line,
    print_table,
    say,
)
from ..session import with_pool

FAILED = 1
_TOLD_EVERY = 10
"""Parts of an inference after which its progress is told."""


def serve(
    model: str,
    /,
    *overrides: str,
    adapter: list[str] | None = None,
    servers: int | None = None,
    max_model_len: int | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    gateway: str | None = None,
    detach: Annotated[bool, Parameter(alias="-d")] = False,
    common: Common = COMMON,
) -> int:
    """Serve a model; it goes on until `tinkermq stop`.

    Parameters
    ----------
    model
        A Hugging Face folder or hub name, `RUN@STEP`, or a run: a live one is followed.
    overrides
        Configuration keys: `generator.max_requests=64`.
    adapter
        `RUN@STEP` of a LoRA run on the same base, to be served beside the model under that name;
        may be given several times.
    servers
        Servers that share the requests; each holds one slot.
    max_model_len
        Longest prompt and answer together, in tokens.
    tokenizer
        Folder of the tokenizer; default: the model's own.
    trust_remote_code
        Run code that comes with the model.
    gateway
        URL of the pool's gateway; default: $TINKERMQ_GATEWAY_URL, or the local stack's.
    detach
        Do not wait until the model is loaded.
    """
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)

    async def work(pool: Pool) -> JobRecord:
        record = await submit_inference(
            pool,
            model,
            adapter or (),
            tokenizer_path=tokenizer,
            num_servers=servers,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            overrides=tree,
        )
        if not common.json:
            say(f"[bold green]submitted[/] [bold]{record.name}[/]  (job {record.job})")
        return record if detach else await until_served(pool, record, START_S)

    url = find_url(common.nats_url)
    record = with_pool(url, work)
    told = {
        "job": record.job,
        "name": record.name,
        "state": record.state,
        "model": record.serves or record.name,
        "adapters": list(record.adapters),
        "url": find_openai(gateway),
        "server_url": shown_url(JobAddress(url, record.scope).server_url),
    }
    if common.json:
        print_json(told)
    else:
        _tell_served(record, told)
    return 0


def _tell_served(record: JobRecord, told: dict[str, Any]) -> None:
    follows = " (the newest version of a live run)" if record.follow else ""
    say(f"model       {told['model']}{follows}")
    if told["url"]:
        say(f"OpenAI URL  {told['url']}")
    else:
        say("OpenAI URL  no gateway is known: give --gateway URL or set TINKERMQ_GATEWAY_URL")
    say(f"server_url  {told['server_url']}")
    _print_commands(
        {
            f"tinkermq infer {record.name} --game GAME": "play a game with it",
            f"tinkermq scale {record.name} servers=2": "share its requests",
            f"tinkermq logs {record.name} -f": "what its servers write",
            f"tinkermq stop {record.name}": "end it",
        }
    )


def infer(
    model: str,
    /,
    *game_arguments: str,
    game: str | None = None,
    data: list[Path] | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    tasks: str | None = None,
    max_samples: int | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    max_tokens_per_turn: int | None = None,
    seed: int = 0,
    success_reward: float = 0.5,
    concurrent: int = 256,
    token_ids: bool = False,
    common: Common = COMMON,
) -> int:
    """Play a game with a model, many episodes at once, and tell how it did.

    Started again with the same settings and --output, it goes on where it ended.

    Parameters
    ----------
    model
        A job that serves (`tinkermq serve`), or what is served for the occasion: a model folder,
        a run, `RUN@STEP`.
    game_arguments
        Arguments of the game's constructor: `max_turns=3`. They need --game.
    game
        Registered name or `package.module:Class`, hosted here; default: the run's own game on its
        validation set, hosted by the pool.
    data
        Parquet or JSONL files of a dataset game.
    output
        JSONL file of the results.
    tasks
        A fixed list of rows, or seeds of a generated game: `1,5,9`, or a file with one a line.
    max_samples
        Play at most so many tasks.
    samples
        Episodes per task; over 1 gives pass@k.
    temperature
        Sampling temperature; 0 is greedy.
    top_p
        Nucleus sampling.
    top_k
        Keep the k likeliest tokens; 0: all.
    max_turns
        Answers of the policy per episode; default: as in training, as are the next two.
    max_tokens
        Tokens after the first prompt.
    max_tokens_per_turn
        Tokens of one turn.
    seed
        Seed from which those of the rows follow.
    success_reward
        An episode whose return is above this is solved, unless the game says so in its info.
    concurrent
        Episodes at the same time.
    token_ids
        Keep the token ids in the results.
    """
    url = find_url(common.nats_url)

    async def resolve(pool: Pool) -> tuple[JobRecord | None, dict[str, Any]]:
        return await resolve_served(pool, model)

    served, own = with_pool(url, resolve)
    chosen = game or (own.get("game") if data else None)
    if game_arguments and chosen is None:
        raise ConfigError("arguments of a game need the game", hint="add --game NAME")
    kwargs: dict[str, Any] = dict(own.get("kwargs") or {}) if chosen and not game else {}
    for argument in game_arguments:
        apply_override(kwargs, argument)
    progress = Progress(as_json=common.json)

    report = play_in_pool(
        url,
        served,
        model,
        game_class=load_game(chosen) if chosen else None,
        game_kwargs=kwargs,
        data_path=[str(path) for path in data] if data else None,
        output_path=output,
        progress=progress,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_turns=max_turns,
        max_tokens=max_tokens,
        max_tokens_per_turn=max_tokens_per_turn,
        max_samples=max_samples,
        samples_per_task=samples,
        tasks=read_tasks(tasks) if tasks else None,
        seed=seed,
        success_reward=success_reward,
        max_concurrent=concurrent,
        token_ids=token_ids,
    )
    return conclude(report, output, as_json=common.json)


def play_in_pool(
    url: str,
    served: JobRecord | None,
    model: str,
    *,
    progress: "Progress",
    **options: Any,
) -> InferenceReport:
    """Play with a serving job, or with `model` served for the occasion; see `run_inference`."""
    return asyncio.run(
        run_inference_async(
            served.job if served else None,
            model_path=None if served else model,
            scheduler_url=url,
            on_result=progress.take,
            on_job=progress.announce,
            on_start=progress.start,
            **options,
        )
    )


async def resolve_served(pool: Pool, model: str) -> tuple[JobRecord | None, dict[str, Any]]:
    """Return the serving job that a name means, if it is one, and the `env` of the run it means."""
    run = model.partition("@")[0]
    if not is_token(run):
        return None, {}
    try:
        record = await pool.find(run)
    except NotFoundError:
        return None, {}  # whoever serves it says what is wrong
    is_serving = record.kind == "infer" and record.state not in FINAL_STATES
    return (record if is_serving else None), dict(record.config.get("env") or {})


class Progress:
    """Tells how an inference goes on."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._total = self._done = self._next = 0
        self._reward = 0.0

    def announce(self, record: JobRecord) -> None:
        """Say which job plays."""
        if self._as_json:
            print_json_line({"job": record.model_dump(exclude={"config"})})
        else:
            serves = record.serves or record.config.get("model", {}).get("path")
            say(f"[bold]{record.name}[/]  (job {record.job}) serves {literal(str(serves))}")
            _print_commands(
                {
                    f"tinkermq logs {record.name} -f": "what its servers write",
                    f"tinkermq stop {record.name}": "end it",
                }
            )

    def start(self, total: int, done: int) -> None:
        """Say how much there is to play."""
        self._total, self._next = total - done, 0
        if not self._as_json:
            note(f"{total} episodes" + (f", {done} of them are there already" if done else ""))

    def take(self, result: EpisodeResult) -> None:
        """Tell of one more episode, every tenth part of the way."""
        if self._as_json:
            print_json_line({"result": result.to_dict()})
            return
        self._done += 1
        self._reward += result.reward
        if self._done * _TOLD_EVERY >= self._next * max(1, self._total):
            self._next = self._done * _TOLD_EVERY // max(1, self._total) + 1
            mean = self._reward / self._done
            note(f"{self._done} of {self._total} played, mean reward {mean:.3f}")


def conclude(report: InferenceReport, output: Path | None, *, as_json: bool) -> int:
    """Print the scores of an inference, and where its results are; return the exit code."""
    if as_json:
        print_json_line({"summary": report.summary})
    else:
        _tell_report(report, output)
    return FAILED if report.failed and not report.results else 0


def _tell_report(report: InferenceReport, output: Path | None) -> None:
    summary = report.summary
    rows = score_rows(summary)
    for kind, scores in summary.get("by_type", {}).items():
        rows += [(f"{kind} {name}", text) for name, text in score_rows(scores)]
    print_table(("score", "value"), rows)
    if report.failed:
        note(f"{len(report.failed)} episodes failed; the first: {literal(_first_error(report))}")
        note(
            "the same command tries them again" if output else "--output FILE keeps what was played"
        )
    if output is not None:
        say(f"results  {output}")


def _first_error(report: InferenceReport) -> str:
    return (report.failed[0].error or "").splitlines()[0]


def score_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the scores of a summary as lines of a table, with their intervals."""
    rows = [("tasks", str(summary["tasks"])), ("episodes", str(summary["episodes"]))]
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        rows.append((name, f"{summary[name]:.4f}  ({low:.4f} to {high:.4f})"))
    rows += [(key, f"{value:.4f}") for key, value in summary.items() if key.startswith("pass@")]
    return rows


def read_tasks(text: str) -> list[int]:
    """Return a list of rows or seeds: `1,5,9`, or a file with one number (or JSON object) a line.

    Raises ConfigError.
    """
    file = Path(text)
    words: Sequence[str] = text.split(",")
    if file.is_file():
        words = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return [_task(word) for word in words]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{text!r} is no list of tasks: {error}",
            hint='write 1,5,9, or a file with one number, or one {"task": 5}, a line',
        ) from error


def _task(word: str) -> int:
    value: Any = json.loads(word)
    number: Any = cast("dict[str, Any]", value)["task"] if isinstance(value, dict) else value
    return int(number)


def _print_commands(commands: dict[str, str]) -> None:
    width = max(map(len, commands))
    for command, meaning in commands.items():
        say(f"  {command:<{width}}   [dim]{meaning}[/]")
