"""Why a model of the hub, `owner/name`, cannot be had: told apart by classes of errors."""

import socket
from collections.abc import Iterator

from ...schemas.wire.errors import ModelError

_HUB_S = 5.0


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
        return any(isinstance(one, kinds) for one in behind)

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
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
