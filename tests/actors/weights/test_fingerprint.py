"""The digest of weights that is computed where they lie."""

import numpy as np
import pytest
import torch
from tinkermq.actors.weights import tensors
from tinkermq.actors.weights.tensors import DigestedCopy, fingerprint

SQUARE = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 7, 8, 5000, SQUARE - 1, SQUARE, 3 * SQUARE + 5])
def test_up_to_three_changed_words_the_order_and_the_length_are_seen(size: int) -> None:
    draw = np.random.default_rng(size)
    payload = torch.from_numpy(draw.integers(0, 256, size, np.uint8))
    known = {fingerprint(payload)}
    assert known == {fingerprint(payload.clone())}
    known.add(fingerprint(torch.cat([payload, torch.zeros(1, dtype=torch.uint8)])))
    tried = 2
    for num_words in (1, 2, 3) if size >= 5000 else (1,) if size else ():
        other = payload.clone()
        words = draw.choice(-(-size // 8), num_words, replace=False)
        for at in np.minimum(8 * words + 7, size - 1):
            other[at] ^= 128  # the highest bit, whose sums come out even in pairs
        known.add(fingerprint(other))
        tried += 1
    if size > SQUARE:
        known.add(fingerprint(torch.cat([payload[SQUARE:], payload[:SQUARE]])))
        tried += 1
    assert len(known) == tried


@pytest.mark.parametrize(
    "sizes", [[], [0, 3], [SQUARE], [SQUARE - 2, 4, 0, 3 * SQUARE + 7], [5, 2 * SQUARE - 5]]
)
def test_tensors_are_digested_while_they_are_copied_to_the_same_bits(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PART_BYTES", SQUARE)
    draw = np.random.default_rng(1)
    raw = [torch.from_numpy(draw.integers(0, 256, size, np.uint8)) for size in sizes]
    target = torch.empty(sum(sizes), dtype=torch.uint8)
    copy = DigestedCopy(target, torch.device("cpu"))
    for tensor in raw:
        copy.add(tensor)
    assert copy.finish() == fingerprint(target)
    assert torch.equal(target, torch.cat([target[:0], *raw]))
