"""A plan counts what a learner holds in its machine's memory."""

import pytest
from tinkermq.schemas.plan.memory import LearnerLoad, host_terms
from tinkermq.schemas.plan.model_shape import shape_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = shape_of({**SIZES, "intermediate_size": 128, "vocab_size": 512})


@pytest.mark.parametrize(
    ("published_bytes", "ranks", "gib"),
    [
        (1 << 30, 1, 3),
        ((1 << 30) + 1, 1, 6),
        (16_400_000_000, 4, 48),  # 8 B weights in 16 bits
        (61_000_000_000, 8, 192),  # 30 B
    ],
)
def test_versions_in_pinned_memory_count_as_torch_rounds_them(
    published_bytes: int, ranks: int, gib: int
) -> None:
    load = LearnerLoad(SHAPE, 512, 512, False, ranks=ranks, published_bytes=published_bytes)
    terms = {term.name: term.num_bytes for term in host_terms(load)}
    where = ", on the first rank" if ranks > 1 else ""
    assert terms["versions of new weights" + where] == gib << 30
    on_cpu = LearnerLoad(SHAPE, 512, 512, False, published_bytes=1 << 30, on_gpu=False)
    assert not [term for term in host_terms(on_cpu) if "versions" in term.name]
