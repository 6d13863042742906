"""Hugging Face model folders: open, check and write them, and say what is wrong with one."""

import json
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...schemas.config.sections import LoraConfig
from ...schemas.model_catalogue import find_model
from ...schemas.wire.errors import ModelError, TinkermqError
from ..storage.adapters import base_of, is_adapter
from ..storage.files import check_digests
from .lora import add_adapter, beside, merge, refuse_unmatched, untie

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

# -- models of the hub -----------------------------------------------------------------------------

_HUB_S = 5.0
_MAX_HEADER_BYTES = 100 << 20
"""Of a file of weights: safetensors' own bound."""


def hub_error(path: str, error: Exception, *, offline: bool) -> ModelError:
    """Return what is told of a hub's model that transformers could not open with `error`.

    `offline`: the hub must not be asked. Which it is tell the classes of the errors behind it.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    behind = list(_behind(error))

    def came_from(*kinds: type[Exception]) -> bool:
        return any(isinstance(cause, kinds) for cause in behind)

    here = (
        f"model {path} is neither a folder on {socket.gethostname()} nor in its Hugging Face cache"
    )
    if offline and came_from(LocalEntryNotFoundError, OfflineModeIsEnabled):
        return ModelError(
            f"{here}, and offline mode (HF_HUB_OFFLINE) keeps it from asking the hub",
            hint="unset HF_HUB_OFFLINE where the node runs, or copy the model there and name its "
            "folder absolutely",
        )
    if came_from(GatedRepoError):
        return ModelError(
            f"model {path} is gated on the hub, and this node may not read it",
            hint="accept its terms on the hub, and set HF_TOKEN where the node runs",
        )
    if came_from(RepositoryNotFoundError):
        return ModelError(
            f"{here}, and the hub has no such model, or a private one",
            hint="see owner and name, set HF_TOKEN where the node runs for a private one, or name "
            "a folder absolutely",
        )
    if came_from(LocalEntryNotFoundError, ConnectionError):
        return ModelError(
            f"{here}, and the hub cannot be reached from there",
            hint="copy the model there and name its folder absolutely, or give the node a way to "
            "the hub (HF_ENDPOINT, HTTPS_PROXY)",
        )
    return ModelError(
        f"the configuration of model {path} cannot be read: {error}",
        hint="see whether the hub's model has a config.json whose model_type transformers knows",
    )


def check_hub_model(path: str) -> None:
    """Raise ModelError for a model of the hub that cannot be had here, asking the hub once.

    What is in the cache is there. Whatever else is wrong is told when the model is loaded.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]  # untyped there
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_S)
    except (OfflineModeIsEnabled, RepositoryNotFoundError) as error:
        raise hub_error(path, error, offline=constants.HF_HUB_OFFLINE) from error
    except (HfHubHTTPError, HFValidationError):
        return
    except Exception as error:  # of an HTTP library that differs with huggingface_hub's release
        raise hub_error(path, ConnectionError(str(error)), offline=False) from error


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Kinds of models whose images and rotary positions `actors/policy/vision.py` knows."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model_folder(path: str, *, hollow: bool = False) -> None:
    """Raise ModelError, naming the missing file, unless `path` can hold a model or an adapter.

    The folder of a `hollow` model needs no weights.

    A name such as `Qwen/Qwen3-0.6B` that is no folder here is left for the hub to answer. Raises
    StorageError for a checkpoint with a damaged file.
    """
    check_digests(Path(path))
    _check_files(path, hollow=hollow)


def check_model_is_here(path: str) -> None:
    """Raise ModelError for a model that this machine cannot have; reads headers, and no weights.

    A name of the hub is asked there, which takes as long as the hub does; one of the catalogue must
    have been fetched.
    """
    path = find_model(path)
    _check_files(path)
    if not Path(path).is_dir():
        check_hub_model(path)
    elif is_adapter(path):
        check_model_is_here(base_of(path))
    else:
        stored_shapes(Path(path))


def check_model_alike(path: str) -> None:
    """Raise as `check_model_is_here`, but in the same words whatever else than a model is there.

    For paths of somebody who may not know which files this machine has.
    """
    try:
        if _is_hub_name(path) and not Path(path).is_dir():
            check_hub_model(path)
        else:
            check_model_is_here(path)
    except (TinkermqError, OSError, ValueError, RecursionError) as error:
        if _is_hub_name(path) and not Path(path).is_dir():
            raise
        raise ModelError(
            f"there is no model at {path}",
            hint="name the folder of a model, which holds config.json and *.safetensors; what else "
            "may be there is not told",
        ) from error


def _check_files(path: str, *, hollow: bool = False) -> None:
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_file():
            raise ModelError(
                f"model.path is a file: {path}",
                hint=f"convert it: `tinkermq model get {path} --output FOLDER`"
                if folder.suffix == ".gguf"
                else "name the folder that holds config.json and the weights",
            )
        if _is_hub_name(path):
            return
        raise ModelError(
            f"there is no model folder {path}",
            hint="make it with `save_pretrained`, or name a model of the hub as owner/name",
        )
    if is_adapter(folder):
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{path} is no model folder: config.json is missing",
            hint="a model folder is what `model.save_pretrained(folder)` writes",
        )
    if not hollow and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ModelError(
            f"{path} holds no weights: model.safetensors is missing",
            hint="copy the *.safetensors files beside config.json",
        )


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder's safetensors files; reads their headers alone.

    Raises ModelError for a file that is cut or damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, told in _header(file).items():
            if name != "__metadata__":
                shapes[name] = tuple(told["shape"])
    return shapes


def _header(file: Path) -> dict[str, Any]:
    """Read what a safetensors file says of itself, and see that it is as long as that."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header is said to have {length:,} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
        if file.stat().st_size < wanted:
            raise ValueError(f"it has {file.stat().st_size:,} of {wanted:,} bytes")
        return header
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(
            f"{file} is damaged or cut: {error}",
            hint="copy or download the model's files again",
        ) from error


def load_model_config(
    path: str, *, trust_remote_code: bool = False, hollow: bool = False
) -> "PreTrainedConfig":
    """Read a model's configuration; ModelError if there is none or it is unknown."""
    from transformers import AutoConfig

    check_model_folder(path, hollow=hollow)
    if is_adapter(path):
        return load_model_config(base_of(path), trust_remote_code=trust_remote_code, hollow=hollow)
    try:
        return cast(
            "PreTrainedConfig",
            AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code),  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        )
    except Exception as error:  # a library's, or code that came with the model
        if not Path(path).is_dir():
            from huggingface_hub import constants

            raise hub_error(path, error, offline=constants.HF_HUB_OFFLINE) from error
        raise ModelError(
            f"the configuration of model {path} cannot be read: {error}",
            hint="see whether config.json is complete and its model_type is one of transformers'",
        ) from error


def sees_images(config: "PreTrainedConfig") -> bool:
    """Whether a model takes images."""
    return config.model_type in VISION_TYPES


def auto_class(config: "PreTrainedConfig") -> Any:
    """Return transformers' class that makes models of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def load_causal_lm(
    path: str,
    *,
    dtype: "torch.dtype",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    hollow: bool = False,
) -> "PreTrainedModel":
    """Load a causal language model in evaluation mode, on the CPU; with its eyes, if it has some.

    An adapter is merged into its base. A hollow model is for somebody else to fill: no weights are
    read, and pages of memory that nobody writes to are not taken.

    Raises ModelError for a folder that is none, and for weights that do not fill the model.
    """
    check_model_folder(path, hollow=hollow)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if is_adapter(path):
        base = load_causal_lm(base_of(path), hollow=hollow, **options)
        untie(base, path)
        return base if hollow else merge(base, path).eval()
    config = load_model_config(path, trust_remote_code=trust_remote_code, hollow=hollow)
    _require_language_model(config, path)
    auto = auto_class(config)
    return _build_hollow(auto, config, options) if hollow else _load_weights(auto, path, options)


def _require_language_model(config: "PreTrainedConfig", path: str) -> None:
    """Raise ModelError for a classifier: transformers would load it with a random output layer."""
    kinds = cast("list[str] | None", getattr(config, "architectures", None)) or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ModelError(
            f"{path} holds a classifier or reward model ({', '.join(kinds)}), which generates "
            "nothing",
            hint="name a language model; a reward model is used through env.reward with "
            "source=endpoint",
        )


def _load_weights(auto: Any, path: str, options: dict[str, Any]) -> "PreTrainedModel":
    """Load a model by one of transformers' classes.

    Raises ModelError for weights that are missing, and for a model that the class lacks.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            auto.from_pretrained(path, output_loading_info=True, **options),
        )
    except SafetensorError as error:
        raise ModelError(
            f"a *.safetensors file of model {path} is damaged or cut: {error}",
            hint="copy or download the model's files again",
        ) from error
    except Exception as error:  # a library's, or code that came with the model
        raise ModelError(
            f"model {path} cannot be loaded: {error}",
            hint=f"`{auto.__name__}.from_pretrained` must be able to open it",
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights of model {path} lack {len(missing)} tensors: {', '.join(missing[:5])}",
            hint="copy all *.safetensors files of the model; they would be random otherwise",
        )
    return model.eval()


def _build_hollow(
    auto: Any, config: "PreTrainedConfig", options: dict[str, Any]
) -> "PreTrainedModel":
    """Make a model whose weights are not read, for somebody else to fill."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = auto.from_config(config, **options)
    model.tie_weights()
    return cast("PreTrainedModel", model.eval())


def load_policy(
    path: str,
    lora: LoraConfig,
    *,
    adapter: str | Path | None = None,
    base: "PreTrainedModel | None" = None,
    seed: int = 0,
    dtype: "torch.dtype",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    hollow: bool = False,
) -> "PreTrainedModel":
    """Load what a job trains or generates with: a model or, with a rank, its base and an adapter.

    The adapter is that of the folder `adapter`, else of `path` if that is one, else a fresh one.
    With `base` that model's weights are used, and stay in memory once. Raises ModelError.
    """
    begins_with = path if is_adapter(path) and lora.rank else None
    model = (
        beside(base)
        if base is not None
        else load_causal_lm(
            base_of(path) if begins_with else path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            hollow=hollow,
        )
    )
    if lora.rank:
        folder = adapter or begins_with
        add_adapter(model, lora, seed=seed, folder=folder)
        if folder is None:
            refuse_unmatched(model, lora)
    return model


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a model's tokenizer; ModelError naming the missing file if there is none."""
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZERS):
        if is_adapter(folder):  # one without a tokenizer of its own has that of its base
            return load_tokenizer(base_of(folder), trust_remote_code=trust_remote_code)
        raise ModelError(
            f"{path} holds no tokenizer: tokenizer.json is missing",
            hint="write it with `tokenizer.save_pretrained(folder)`",
        )
    try:
        return cast(
            "PreTrainedTokenizerBase",
            AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        )
    except Exception as error:  # a library's, or code that came with the model
        raise ModelError(
            f"the tokenizer of model {path} cannot be read: {error}",
            hint="`AutoTokenizer.from_pretrained` must be able to open it",
        ) from error


@lru_cache(maxsize=8)
def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of all tokens and their ids: equal for equal tokenizers."""
    known: dict[str, int] = tokenizer.get_vocab()
    digest = sha256()
    for token, number in sorted(known.items()):
        digest.update(f"{number} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", config: "PreTrainedConfig", path: str
) -> None:
    """Raise ModelError for a tokenizer with tokens that the model does not know."""
    known = int(cast("Any", config).get_text_config().vocab_size)
    ids: dict[str, int] = tokenizer.get_vocab()
    # ids may have gaps: what counts is the last one, not how many there are
    num_tokens = max(len(tokenizer), 1 + max(ids.values(), default=0))
    if num_tokens > known:
        raise ModelError(
            f"the tokenizer does not match model {path}: it has {num_tokens} tokens, the model "
            f"knows {known}",
            hint="use the tokenizer that was saved with the model",
        )


def load_generation_config(path: str) -> "GenerationConfig | None":
    """Return a model's generation settings; None where it has no generation_config.json.

    Raises ModelError for a file that cannot be read.
    """
    from transformers import GenerationConfig

    file = Path(path) / "generation_config.json"
    if not file.is_file() and is_adapter(path):
        return load_generation_config(base_of(path))
    try:
        return GenerationConfig.from_pretrained(path)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
    except Exception as error:  # transformers raises of many kinds for what it cannot read
        if isinstance(error, OSError) and not file.is_file():
            return None  # the file is optional
        raise ModelError(
            f"generation_config.json of model {path} cannot be read: {error}",
            hint="`GenerationConfig.from_pretrained` must open it; or remove it, it is optional",
        ) from error


def load_stop_token_ids(path: str) -> tuple[int, ...]:
    """Return the tokens that end a generation, as the model's generation_config.json says.

    Without that file its config.json says it, as transformers and vLLM read it. Raises ModelError
    for a file that cannot be read.
    """
    settings = load_generation_config(path)
    return _stops_of_config(path) if settings is None else stops_of(settings)


def _stops_of_config(path: str) -> tuple[int, ...]:
    from transformers import PreTrainedConfig

    folder = base_of(path) if is_adapter(path) else path
    fields = cast("dict[str, Any]", cast("Any", PreTrainedConfig).get_config_dict(folder)[0])
    of_text = cast("dict[str, Any]", fields.get("text_config") or {})
    ids: int | list[int] | None = fields.get("eos_token_id", of_text.get("eos_token_id"))
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def stops_of(settings: "GenerationConfig") -> tuple[int, ...]:
    """Return the tokens that end a generation by a model's settings."""
    ids: int | list[int] | None = cast("Any", settings).eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")


# -- models written to folders ---------------------------------------------------------------------
# transformers reads settings that it refuses to write: sampling values without `do_sample` in
# generation_config.json, for one. Such a model trains, so it is written with what it came with; and
# what cannot be written at all is found by writing before training.

_GENERATION_CONFIG = "generation_config.json"


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
    file = Path(folder) / _GENERATION_CONFIG
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
