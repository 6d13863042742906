"""What tokens say: read from a model's tokenizer.json, where this machine has the model's folder.

Without it tokens are shown by their ids; messages are readable either way.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

_MAX_FILE_BYTES = 64 << 20

_log = structlog.get_logger()


class TokenTexts:
    """The texts of one model's tokens."""

    def __init__(self, tokenizer: Any = None) -> None:
        """Take a `tokenizers.Tokenizer`; None shows ids."""
        self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        """Whether the texts are known."""
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; characters of several tokens stand at the last of them."""
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in ids]
        texts: list[str] = []
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            text = str(self._tokenizer.decode(pending, skip_special_tokens=False))
            if text.endswith("�") and len(pending) < 4:
                texts.append("")
                continue
            texts.append(text or f"⟨{token}⟩")
            pending.clear()
        if pending and texts:
            texts[-1] = "�"
        return texts


def token_texts(folders: Sequence[str]) -> TokenTexts:
    """Return the texts of the first of these model folders that has a tokenizer here."""
    for folder in folders:
        file = Path(folder) / "tokenizer.json"
        try:
            stat = file.stat()
        except OSError:
            continue
        if stat.st_size <= _MAX_FILE_BYTES:
            return _load(str(file), stat.st_mtime_ns)
    return TokenTexts()


@functools.lru_cache(maxsize=8)
def _load(file: str, _changed_ns: int) -> TokenTexts:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return TokenTexts()
    try:
        return TokenTexts(Tokenizer.from_file(file))
    except Exception as error:
        if type(error) is not Exception:  # the kind that tokenizers raises for a bad file
            raise
        _log.warning("tokenizer_unreadable", file=file, error=str(error))
        return TokenTexts()
