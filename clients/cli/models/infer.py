"""`tinkermq serve` and `tinkermq infer`: put a model behind a URL, or play a game with it."""

from typing import Annotated, Any

from cyclopts import Parameter

from ....broker.client.faults import shown_url
from ....envs.registry import load_game
from ....schemas.config.load_config import apply_override
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConfigError
from ...address import JobAddress
from ...home import find_openai, find_url
from ...inference.inference_client import START_S, submit_inference, until_served
from ...pool import Pool
from ..options import COMMON, Common
from ..output import print_commands, print_json, say
from ..playing import PLAY_FLAGS, PlayFlags, conclude, find_served, play_in_pool
from ..session import with_pool


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
    print_commands(
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
    flags: PlayFlags = PLAY_FLAGS,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int | None = None,
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
    top_p
        Nucleus sampling.
    top_k
        Keep the k likeliest tokens; 0: all.
    max_tokens
        Tokens after the first prompt; default: as in training.
    success_reward
        An episode whose return is above this is solved, unless the game says so in its info.
    concurrent
        Episodes at the same time.
    token_ids
        Keep the token ids in the results.
    """
    url = find_url(common.nats_url)
    served, own = find_served(url, model)
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
    return conclude(report, flags.output, as_json=common.json)
