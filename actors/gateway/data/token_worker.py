"""A process that decodes tokens with a model's tokenizer: a line of ids in, a line of texts out.

Started by `token_text` as `python -m tinkermq.actors.gateway.data.token_worker FILE SECONDS BYTES`;
FILE is the descriptor of a tokenizer.json. The kernel ends it if loading or one line takes more
than its CPU seconds or memory.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    """Answer line by line until standard input ends."""
    file, seconds, most_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    signal.setitimer(signal.ITIMER_PROF, seconds)
    with os.fdopen(file, "rb") as source:
        tokenizer = Tokenizer.from_buffer(source.read())  # pyright: ignore[reportUnknownMemberType]  # untyped in tokenizers
    signal.setitimer(signal.ITIMER_PROF, 0)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        sys.stdout.write(f"{json.dumps(_texts(tokenizer, json.loads(line)))}\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


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
