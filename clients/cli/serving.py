"""`tinkermq serve`, `infer` and `tinker up`: put models on the pool, and play games with them."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ...broker.client.faults import shown_url
from ...envs.registry import load_game
from ...schemas.config.load_config import apply_override, read_overrides
from ...schemas.job import JobRecord
from ...schemas.model_catalogue import CATALOGUE, find_model
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import ConfigError, ModelError
from ..base import JobAddress
from ..home import find_openai, find_url
from ..inference.inference_client import (
    START_S,
    model_config,
    submit_inference,
    wait_until_served,
)
from ..pool import Pool
from ..validation import resolve_paths
from .evaluation import PLAY_FLAGS, PlayFlags, find_served, play_in_pool, print_queued, print_report
from .output import literal, print_commands, print_json, print_note, print_plain, print_text
from .session import COMMON, Common, with_pool


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
    """Serve a model until `tinkermq stop`.

    Parameters
    ----------
    model
        A Hugging Face folder or hub name, `RUN@STEP`, or a run: a live one is followed.
    overrides
        Configuration keys: `generator.max_requests=64`.
    adapter
        `RUN@STEP` of a LoRA run on the same base, served beside the model under this name;
        may be given several times.
    servers
        Number of servers that share the requests; each takes one slot.
    max_model_len
        Most tokens of prompt and answer together.
    tokenizer
        Folder of the tokenizer; default: the model's own.
    trust_remote_code
        Run Python code from the model's folder.
    gateway
        URL of the pool's gateway; default: $TINKERMQ_GATEWAY_URL, or the local stack's.
    detach
        Do not wait until the model is loaded.
    """
    tree = read_overrides(overrides)

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
            print_text(f"[bold green]submitted[/] [bold]{record.name}[/]  (job {record.job})")
        if detach:
            return record
        try:
            return await wait_until_served(pool, record, START_S, print_queued)
        except asyncio.CancelledError:  # by Ctrl-C
            print_note(f"detached; the run continues (`tinkermq stop {record.name}` ends it)")
            raise

    url = find_url(common.nats_url)
    record = with_pool(url, work)
    document = {
        "job": record.job,
        "name": record.name,
        "state": record.state,
        "model": record.serves or record.name,
        "adapters": list(record.adapters),
        "url": find_openai(gateway),
        "server_url": shown_url(JobAddress(url, record.scope).server_url),
    }
    if common.json:
        print_json(document)
    else:
        _print_served(record, document)
    return 0


def _print_served(record: JobRecord, served: dict[str, Any]) -> None:
    follows = " (the newest version of a live run)" if record.follow else ""
    print_plain(f"model       {served['model']}{follows}")
    if served["url"]:
        print_text(f"OpenAI URL  {served['url']}")
    else:
        print_text(
            "OpenAI URL  no gateway is known: give --gateway URL or set TINKERMQ_GATEWAY_URL"
        )
    print_text(f"server_url  {served['server_url']}")
    question = {"model": served["model"], "messages": [{"role": "user", "content": "Hello"}]}
    chat = f"curl {served['url']}/chat/completions -d '{json.dumps(question)}'"
    play = f"tinkermq infer {record.name}"
    env: dict[str, Any] = record.config.get("env") or {}
    is_hosted = bool(env.get("game")) and env.get("hosts") != 0
    print_commands(
        {
            **({chat: "ask it"} if served["url"] else {}),
            **(
                {f"{play} --max-samples 64": f"play {env['game']}, its run's game"}
                if is_hosted
                else {f"{play} --game GAME --max-samples 64": "play a game with it"}
            ),
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
    flags: PlayFlags = PLAY_FLAGS,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int | None = None,
    success_reward: float = 0.5,
    concurrent: int = 256,
    token_ids: bool = False,
    common: Common = COMMON,
) -> int:
    """Play a game with a model, many episodes at once, and print its scores.

    Repeated with the same settings and --output, it continues where it ended.

    Parameters
    ----------
    model
        A serving run (`tinkermq serve`), or a model to serve for the duration of the command: a
        model folder, a run, `RUN@STEP`.
    game_arguments
        Arguments of the game's constructor: `max_turns=3`. They need --game.
    game
        Registered name or `package.module:Class`, hosted here; default: the run's own game on its
        validation set, hosted by the pool.
    top_p
        Nucleus sampling.
    top_k
        Sample from the k likeliest tokens; 0: all.
    max_tokens
        Most tokens after the first prompt; default: as in training.
    success_reward
        Return above which an episode counts as solved, unless the game's info has `success`.
    concurrent
        Episodes at the same time.
    token_ids
        Keep the token ids in the results.
    """
    url = find_url(common.nats_url)
    served, own = with_pool(url, lambda pool: find_served(pool, model))
    chosen = game or (own.get("game") if flags.data else None)
    if game_arguments and chosen is None:
        raise ConfigError("arguments of a game need the game", hint="add --game NAME")
    kwargs: dict[str, Any] = dict(own.get("kwargs") or {}) if chosen and not game else {}
    for argument in game_arguments:
        apply_override(kwargs, argument, None)
    options = flags.options(
        game_class=load_game(chosen) if chosen else None,
        game_kwargs=kwargs,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        success_reward=success_reward,
        max_concurrent=concurrent,
        token_ids=token_ids,
    )
    report = play_in_pool(url, served, model, options, as_json=common.json)
    return print_report(report, flags.output, as_json=common.json)


# `tinkermq tinker up`: serve the Tinker API on base models.


def up(
    *overrides: str,
    model: list[str],
    gateway: str | None = None,
    common: Common = COMMON,
) -> int:
    """Serve the Tinker API on base models until `tinkermq stop`.

    Parameters
    ----------
    overrides
        Configuration keys: `tinker.max_rank=32`.
    model
        `NAME=FOLDER`: a base model and its name for programs, such as
        `Qwen/Qwen3.5-9B-Base=/models/qwen`; or an absolute path, which then is the name. FOLDER may
        be a model of `tinkermq model list`; alone it is named by its path. May be given several
        times; each starts a service.
    gateway
        URL of the pool's gateway; default: $TINKERMQ_GATEWAY_URL, or the local stack's.
    """
    bases = [_named(text) for text in model]
    tree = read_overrides(overrides)

    async def work(pool: Pool) -> list[JobRecord]:
        configs = [
            resolve_paths(
                merged(_config(base, folder), tree), pool.broker.url, has_users=pool.has_users
            )
            for base, folder in bases
        ]
        return [await pool.submit(config, kind="tinker") for config in configs]

    records = with_pool(find_url(common.nats_url), work)
    url = find_openai(gateway)
    base_url = url.removesuffix("/v1") + "/tinker" if url else None
    if common.json:
        print_json(
            {
                "base_url": base_url,
                "jobs": [
                    {
                        "job": record.job,
                        "name": record.name,
                        "base": record.config["tinker"]["base"],
                    }
                    for record in records
                ],
            }
        )
        return 0
    for record in records:
        base = record.config["tinker"]["base"]
        print_text(f"[bold green]submitted[/] [bold]{record.name}[/]  for {literal(base)}")
    print_commands(
        {
            f"export TINKER_BASE_URL={base_url or 'http://GATEWAY/tinker'}": "for programs",
            "export TINKER_API_KEY=tml-$TINKERMQ_API_KEY": "your key, with tml- before it",
            "tinkermq ps": "see whether it runs",
        }
    )
    return 0


def _config(base: str, folder: str) -> dict[str, Any]:
    return merged(model_config(folder, Path(folder), None), {"tinker": {"base": base}})


def _named(text: str) -> tuple[str, str]:
    """Return name and folder of NAME=FOLDER; raises ConfigError, ModelError."""
    name, equals, folder = text.partition("=")
    if not equals:
        name, folder = "", text
    folder = find_model(folder)
    if not equals and Path(folder).is_absolute():  # a model without a name is named by its path
        name = folder = folder.rstrip("/")
    if not name or not folder:
        raise ConfigError(
            f"--model {text!r} is neither NAME=FOLDER, nor the absolute path of a folder, nor a "
            f"model of the catalogue ({', '.join(CATALOGUE)})",
            hint="as in org/model=./folder",
        )
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return name, str(Path(folder).expanduser().resolve())
