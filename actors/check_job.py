"""Check the inputs of a job with the code that the run uses: model, template, data, saving.

Nothing is trained and no weights are read: the model is built on torch's meta device, which has
shapes and no memory. What passes here does not fail in the run for what can be seen without it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..schemas.config.job import JobConfig, ModelConfig
from ..schemas.wire.errors import ModelError, TinkermqError
from .policy import model_folder
from .policy.chat import make_chat, open_chat
from .storage.adapters import base_of, is_adapter

ROWS_S = 60.0
"""Time for the rows of a job's conversations; of more the first are looked at."""

Question = tuple[str, Callable[[], str]]


def check_job(config: JobConfig) -> Iterator[dict[str, Any]]:
    """Answer one question after the other, as the fields of `envs.check.CheckResult`."""
    for name, question in _questions(config):
        try:
            yield {"name": name, "ok": True, "detail": question(), "hint": ""}
        except TinkermqError as error:
            yield {"name": name, "ok": False, "detail": error.message, "hint": error.hint}


def _questions(config: JobConfig) -> Iterator[Question]:
    yield "the model's tokenizer and template can be used", lambda: _chat(config)
    if config.sft.data:
        yield "each row can be learnt from", lambda: _rows(config)
    yield "the weights are those of the configuration", lambda: _weights(config.model)
    if config.lora.rank or is_adapter(config.model.path):
        yield "the adapter fits the model", lambda: _adapter(config)
    yield "a checkpoint can be written", lambda: _saving(config)


def _chat(config: JobConfig) -> str:
    """Open the chat as a generator does, and its template where episodes are made of turns."""
    if config.sft.data:
        open_chat(config.model)
        return "opened as by the run"
    make_chat(config)
    return "opened and tried as by the run"


def _rows(config: JobConfig) -> str:
    """Tokenise conversations as the job's generators do."""
    from ..envs.data import ChatData
    from .rollout.demonstrations import tokenise_row

    chat, until = open_chat(config.model), time.monotonic() + ROWS_S
    with contextlib.closing(ChatData(config.sft.data)) as data:
        longest, number = 0, 0
        while number < len(data) and (number == 0 or time.monotonic() < until):
            spoken = tokenise_row(data.check_row(number), chat, config)
            longest = max(longest, len(spoken.token_ids))
            number += 1
        some = "" if number == len(data) else f" the first {number:,} of"
        return f"sft.data:{some} {len(data):,} rows, up to {longest} tokens"


def _weights(model: ModelConfig) -> str:
    """Compare the shapes of the stored tensors with those of the model that is configured."""
    path = model.path
    while is_adapter(path):
        path = base_of(path)
    model_folder.check_model_folder(path)
    if not Path(path).is_dir():
        return f"{path} is the hub's: not looked at"
    tensors: dict[str, Any] = _meta_model(model, path).state_dict()
    wanted = {name: tuple(one.shape) for name, one in tensors.items()}
    stored = model_folder.stored_shapes(Path(path))
    for name, shape in stored.items():
        if name in wanted and wanted[name] != shape:
            raise ModelError(
                f"{name} of model {path} has the shape {list(shape)}, config.json makes it "
                f"{list(wanted[name])}",
                hint="config.json and the weights are of two models, or the embedding was resized "
                "and one of them not saved: save both with `model.save_pretrained`",
            )
    return f"{len(stored)} tensors" if stored else "no *.safetensors: not looked at"


def _meta_model(model: ModelConfig, path: str) -> Any:
    import torch

    with torch.device("meta"):
        return model_folder.load_causal_lm(
            path, dtype=torch.float32, trust_remote_code=model.trust_remote_code, hollow=True
        )


def _adapter(config: JobConfig) -> str:
    """Put the adapter on the model as the learner does, without its weights."""
    import torch

    model = config.model
    with torch.device("meta"):
        built: Any = model_folder.load_policy(
            model.path,
            config.lora,
            seed=config.seed,
            dtype=torch.float32,
            trust_remote_code=model.trust_remote_code,
            hollow=True,
        )
    trained = sum(int(one.numel()) for one in built.parameters() if one.requires_grad)
    if not config.lora.rank:
        return f"that of {model.path} is merged into {base_of(model.path)}"
    return f"{trained:,} numbers are trained"


def _saving(config: JobConfig) -> str:
    """Write all of a checkpoint but its weights as a learner does, and read it again."""
    model = config.model
    path = model.path
    while is_adapter(path):
        path = base_of(path)
    model_folder.check_saving(
        path, model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
    )
    return "all but the weights was written and read again"
