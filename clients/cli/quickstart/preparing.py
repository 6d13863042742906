"""What the quickstart needs before it trains: a configuration, a model, data."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from ....broker.service_process import die_with
from ....schemas.wire.errors import ConfigError, ModelError
from ..output import say, say_plain

GAME = "calculator"
_NEEDS = ("torch", "transformers", "safetensors", "peft", "blake3", "psutil")
_OUTPUTS = re.compile(r"\boutputs/[\w./-]+")
"""The paths in the packaged configuration."""
_HEAD = "# Written by `tinkermq quickstart`, which writes it again: change a copy.\n"


def check_worker() -> None:
    """Raise ConfigError where this Python lacks what trains a model."""
    lacking = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"the quickstart trains on this machine, and {', '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not installed here",
            hint="pip install 'tinkermq[worker]'",
        )


def write_config(folder: Path) -> Path:
    """Write the example's configuration, with its paths below `folder`; return the file."""
    text = (files("tinkermq.clients") / "cli" / f"{GAME}.yaml").read_text(
        encoding="utf-8"
    )

    def below(found: re.Match[str]) -> str:
        # JSON's quotes are YAML's, whatever characters are in the folder's name.
        return json.dumps(str(folder / found[0].removeprefix("outputs/")), ensure_ascii=False)

    if folder != Path("outputs"):
        text = _OUTPUTS.sub(below, text)
        text += f"output_dir: {json.dumps(str(folder), ensure_ascii=False)}\n"
    file = folder / "quickstart.yaml"
    file.write_text(_HEAD + text, encoding="utf-8")
    return file


def make_model(folder: Path) -> None:
    """Warm-start the model, unless it is there; raises ModelError."""
    model = folder / "models" / GAME
    if _run("tinkermq.actors.recipes", GAME, str(model)) == 0:
        say_plain(f"model      {model} (made before)")
        return
    say_plain("model      making it on this machine, a minute or two, once")
    model.parent.mkdir(parents=True, exist_ok=True)
    code = _run("tinkermq.actors.warm_start", GAME, str(model))
    if code:
        raise ModelError(
            f"the warm start ended with code {code}",
            hint="its message is above; `tinkermq doctor` checks this machine",
        )


def _run(module: str, *words: str) -> int:
    """Run a module of the actors to its end, which torch needs no part of this process for."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Ctrl-C is for this process, which ends it; and so does the kernel if this one is killed.
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    ).returncode


def prepare_data(folder: Path) -> None:
    """Write the dataset, unless it is there."""
    from ....envs.games.calculator import make_data

    place = folder / "data" / GAME
    train, val = place / "train.parquet", place / "val.parquet"
    if not (train.exists() and val.exists()):
        make_data(place)
    say(f"data       {train}, {val}")
