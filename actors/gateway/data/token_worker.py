"""A process that decodes tokens with a model's tokenizer: a line of ids in, a line of texts out.

Started by `token_text` as `python -m tinkermq.actors.gateway.data.token_worker FILE SECONDS BYTES`;
FILE is the descriptor of a tokenizer.json. The kernel ends it if loading or one line takes more
than its CPU seconds or memory.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from ....schemas.local.line_worker import answer_lines, limit_memory, limited_time


def main() -> None:
    """Answer line by line until standard input ends."""
    file, seconds, most_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    limit_memory(most_bytes)
    from tokenizers import Tokenizer

    with limited_time(seconds), os.fdopen(file, "rb") as source:
        tokenizer = Tokenizer.from_buffer(source.read())  # pyright: ignore[reportUnknownMemberType]  # untyped in tokenizers

    def answer(ids: list[int]) -> list[str]:
        with limited_time(seconds):
            return _texts(tokenizer, ids)

    answer_lines(answer)


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending, skip_special_tokens=False))
        if text.endswith("�") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text or f"⟨{token}⟩")
        pending.clear()
    if pending and texts:
        texts[-1] = "�"
    return texts


if __name__ == "__main__":
    main()
