from contextlib import AbstractContextManager

_unpinned_env: dict[str, str | None] | None

def unpinned_nccl_env() -> AbstractContextManager[None]: ...
