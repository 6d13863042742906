"""Models written to folders, and the check at submission that one can be written at all.

transformers reads settings that it refuses to write: sampling values without `do_sample` in
generation_config.json, for one. Such a model trains, so it is written with what it came with; and
what cannot be written at all is found by writing before training.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.wire.errors import ModelError, TinkermqError
from .model_folder import (
    auto_class,
    load_generation_config,
    load_model_config,
    load_stop_token_ids,
    load_tokenizer,
    stops_of,
    vocabulary_digest,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig

GENERATION_CONFIG = "generation_config.json"


def save_model(
    model: Any, folder: str | Path, state_dict: "Mapping[str, Tensor] | None" = None
) -> None:
    """Write a model, or its adapter, with the generation settings it came with, whatever they are.

    `state_dict` are its weights, default those it has; of an empty one no file is written.
    """
    if state_dict is not None:
        state_dict = dict(state_dict)  # transformers takes out what it has written
    settings = getattr(model, "generation_config", None)
    if settings is None or not model.can_generate():
        model.save_pretrained(folder, state_dict=state_dict)
        return
    model.generation_config = type(settings)()
    try:
        model.save_pretrained(folder, state_dict=state_dict)
    finally:
        model.generation_config = settings
    file = Path(folder) / GENERATION_CONFIG
    settings.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])


def unsavable(what: str, error: BaseException) -> ModelError:
    """Return the error for what a library refuses to write or to read again."""
    return ModelError(
        f"{what} cannot be saved as checkpoints are: {type(error).__name__}: {error}",
        hint="mend the model's folder (config.json, generation_config.json, tokenizer files) so "
        "that transformers' `save_pretrained` takes it; nothing was trained yet",
    )


def check_reread(
    folder: str | Path,
    tokenizer: Any,
    settings: "GenerationConfig | None" = None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError unless a folder that was written opens, with the same words and ends.

    `settings` are those of the model that was written, where it came with some.
    """
    path = str(folder)
    load_model_config(path, trust_remote_code=trust_remote_code, hollow=True)
    again: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
    changed: dict[str, bool] = {
        "its vocabulary": vocabulary_digest(again) != vocabulary_digest(tokenizer),
        "its chat template": again.chat_template != tokenizer.chat_template,
        "its special tokens": set(again.all_special_tokens) != set(tokenizer.all_special_tokens),
    }
    for what, is_changed in changed.items():
        if is_changed:
            raise ModelError(
                f"the tokenizer is another once it is saved and opened again: {what} changed",
                hint="save it by `tokenizer.save_pretrained(folder)` and see what "
                "`AutoTokenizer.from_pretrained(folder)` makes of it",
            )
    if settings is not None and load_stop_token_ids(path) != stops_of(settings):
        raise ModelError(
            f"the model generates up to tokens {stops_of(settings)}, and up to "
            f"{load_stop_token_ids(path)} once it is saved",
            hint="see eos_token_id in its generation_config.json",
        )


def check_saving(
    path: str, tokenizer_path: str | None = None, *, trust_remote_code: bool = False
) -> None:
    """Raise ModelError for a model that no checkpoint could be written of; reads no weights.

    For submissions: all but the tensors is written as a learner does, read again, and removed.
    """
    import torch

    from .vision import Processor, load_image_reader

    config = load_model_config(path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(tokenizer_path or path, trust_remote_code=trust_remote_code)
    processor = Processor(tokenizer, load_image_reader(path, trust_remote_code=trust_remote_code))
    settings = load_generation_config(path)
    with tempfile.TemporaryDirectory(prefix="tinkermq-saving-") as folder:
        try:
            with torch.device("meta"):
                options = {"trust_remote_code": trust_remote_code}
                model: Any = auto_class(config).from_config(config, **options)
            if settings is not None:
                model.generation_config = settings
            save_model(model, folder, {})
            processor.save_pretrained(folder)
        except TinkermqError:
            raise
        except Exception as error:  # a library's, or code that came with the model
            raise unsavable(f"model {path}", error) from error
        check_reread(folder, tokenizer, settings, trust_remote_code=trust_remote_code)


def save_plain_weights(tensors: "Mapping[str, Tensor]", file: Path) -> None:
    """Write whole tensors on the CPU as one safetensors file, whatever they share in memory."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # its types are bare

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in plain.values()]
    for (name, tensor), place in zip(list(plain.items()), places, strict=True):
        if places.count(place) > 1:
            plain[name] = tensor.clone()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(plain, file, metadata={"format": "pt"})
