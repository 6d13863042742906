"""`tinkermq tinker up`: let programs that speak the Tinker API train adapters on a base model."""

from pathlib import Path
from typing import Any

from ....schemas.config.load_config import apply_override
from ....schemas.job import JobRecord
from ....schemas.wire.codec import merged
from ....schemas.wire.errors import ConfigError, ModelError
from ...home import find_openai, find_url
from ...inference.serving import model_config
from ...pool import Pool
from ...validation.paths import resolve_paths
from ..options import COMMON, Common
from ..output import print_commands, print_json, say
from ..session import with_pool


def up(
    *overrides: str,
    model: list[str],
    gateway: str | None = None,
    common: Common = COMMON,
) -> int:
    """Train adapters on base models for whoever comes; it goes on until `tinkermq stop`.

    Parameters
    ----------
    overrides
        Configuration keys: `tinker.max_rank=32`.
    model
        `NAME=FOLDER`: a base model under the name that programs ask for, such as
        `Qwen/Qwen3.5-9B-Base=/models/qwen`, or an absolute path, which is its name then; may be
        given several times, for a service each.
    gateway
        URL of the pool's gateway; default: $TINKERMQ_GATEWAY_URL, or the local stack's.
    """
    wanted = [_named(text) for text in model]
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)

    async def work(pool: Pool) -> list[JobRecord]:
        configs = [
            resolve_paths(
                merged(_config(base, folder), tree), pool.broker.url, has_users=pool.has_users
            )
            for base, folder in wanted
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
                    {"job": one.job, "name": one.name, "base": one.config["tinker"]["base"]}
                    for one in records
                ],
            }
        )
        return 0
    for record in records:
        base = record.config["tinker"]["base"]
        say(f"[bold green]submitted[/] [bold]{record.name}[/]  for {base}")
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
    if not equals and Path(text).is_absolute():  # its path is its name
        name = folder = text.rstrip("/")
    if not name or not folder:
        raise ConfigError(
            f"--model {text!r} is neither NAME=FOLDER nor the absolute path of a folder",
            hint="as in org/model=./folder",
        )
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder: it has no config.json")
    return name, str(Path(folder).expanduser().resolve())
