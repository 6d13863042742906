"""GPUs by name: memory, computation, bandwidth and links, from their makers' data sheets.

Names are accepted as written by nvidia-smi, Slurm (`gres`), Kubernetes (`nvidia.com/gpu.product`,
`nvidia.com/mig-…`) and people. Operation counts are for dense matrices.
"""

import re
from dataclasses import dataclass, replace
from math import ceil

from ..wire.errors import ConfigError

_GIB = 1 << 30
_MIB = 1 << 20
_TERA, _GIGA = 1e12, 1e9
_MIG_PARTS = 7
"""Compute slices of a card divided by MIG."""
_LEAST_A100_80GB = 60 * _GIB
MAX_CARDS = 4096


@dataclass(frozen=True)
class GpuCard:
    """One GPU, or a MIG slice of one."""

    name: str
    memory_bytes: int
    """As the driver reports it."""
    bfloat16_flops: float
    """Operations per second; of a card without bfloat16 those of float16."""
    tf32_flops: float
    """Operations per second of float32 matrices, by TF32 where the card has it."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to another card of the machine, in one direction."""
    has_bfloat16: bool = True
    has_fp8: bool = False
    """Whether its matrix units read FP8."""


@dataclass(frozen=True)
class CardSet:
    """Equal cards, in equal machines."""

    card: GpuCard
    machines: int
    per_machine: int

    @property
    def num(self) -> int:
        """Number of cards."""
        return self.machines * self.per_machine

    def __str__(self) -> str:
        whole = f"{self.per_machine}x{self.card.name}"
        return whole if self.machines == 1 else f"{self.machines}x{whole}"


def _card(name: str, mib: int, bf16: float, tf32: float, gbps: float, link: float) -> GpuCard:
    fp8 = name in ("H100", "H100 NVL", "H100 PCIe", "H200", "B200", "L40S", "L4", "RTX 4090")
    return GpuCard(
        name,
        mib * _MIB,
        bf16 * _TERA,
        tf32 * _TERA,
        gbps * _GIGA,
        link * _GIGA,
        has_bfloat16=name != "T4",
        has_fp8=fp8,
    )


_CARDS = {
    card.name: card
    for card in (
        #      name          MiB     bf16   tf32   GB/s  GB/s of the link
        _card("A100 40GB", 40960, 312, 156, 1555, 300),
        _card("A100 80GB", 81920, 312, 156, 2039, 300),
        _card("H100", 81559, 989, 494, 3350, 450),
        _card("H100 PCIe", 81559, 756, 378, 2000, 64),
        _card("H100 NVL", 95830, 835, 417, 3900, 300),
        _card("H200", 143771, 989, 494, 4800, 450),
        _card("B200", 183359, 2250, 1125, 8000, 900),
        _card("L40S", 46068, 362, 183, 864, 32),
        _card("L4", 23034, 121, 60, 300, 32),
        _card("A10G", 23028, 70, 35, 600, 32),
        _card("RTX 4090", 24564, 165, 82.6, 1008, 32),
        _card("T4", 15360, 65, 8.1, 320, 16),
    )
}
_MIG = re.compile(r"(?<![0-9a-z])([1-7])g[.-](\d+)gb")
_COUNTED = re.compile(r"(?:(\d+)\s*[x*]\s*)?(?:(\d+)\s*[x*]\s*)?(.+)")


def known_cards() -> list[str]:
    """Return the names of the table."""
    return list(_CARDS)


def find_card(name: str, memory_bytes: int = 0) -> GpuCard:
    """Return a card by name; `memory_bytes` is the driver's value, if known.

    Raises ConfigError that lists the known names.
    """
    slice_ = _MIG.search(name.lower())
    whole = name.lower() if slice_ is None else name.lower().replace(slice_[0], "")
    cut_from = None if slice_ is None else _of_slice(int(slice_[1]), int(slice_[2]))
    text = re.sub(r"[\s_/+:-]+", " ", whole)
    card = _find(text, 0 if slice_ else memory_bytes, cut_from)
    if card is None:
        raise ConfigError(
            f"no GPU is known by the name {name!r}",
            hint=f"known are {', '.join(_CARDS)}, and MIG slices of A100, H100, H200 and B200 such "
            "as 'A100 80GB MIG 3g.40gb'",
        )
    if slice_ is None:
        return replace(card, memory_bytes=memory_bytes or card.memory_bytes)
    parts, gigabytes = int(slice_[1]), int(slice_[2])
    share = parts / _MIG_PARTS
    memory_share = gigabytes * _GIB / card.memory_bytes
    return replace(
        card,
        name=f"{card.name} MIG {parts}g.{gigabytes}gb",
        memory_bytes=memory_bytes or gigabytes * _GIB,
        bfloat16_flops=card.bfloat16_flops * share,
        tf32_flops=card.tf32_flops * share,
        bandwidth=card.bandwidth * min(1.0, memory_share),
        link=0.0,  # NCCL does not connect slices
    )


def card_like(name: str, memory_bytes: int) -> GpuCard:
    """Return the card that a driver reports; for an unknown card, only its memory is set."""
    try:
        return find_card(name, memory_bytes)
    except ConfigError:
        return GpuCard(name, memory_bytes, 0.0, 0.0, 0.0, 0.0, has_fp8=True)


def _find(text: str, memory_bytes: int, cut_from: GpuCard | None) -> GpuCard | None:
    """Return the full card whose name a lower-case name contains, else the slice's."""
    words = text.split()

    def has(*prefixes: str) -> bool:
        return any(word.startswith(prefixes) for word in words)

    if has("a100", "a800"):
        is_small = "40gb" in text or 0 < memory_bytes < _LEAST_A100_80GB
        of_slice = cut_from is not None and cut_from.name == "A100 40GB" and "80gb" not in text
        return _CARDS["A100 40GB" if is_small or of_slice else "A100 80GB"]
    if has("h100"):
        kind = "H100 NVL" if "nvl" in words else "H100 PCIe" if "pcie" in words else "H100"
        return _CARDS[kind]
    for part, card in (
        ("h200", "H200"),
        ("b200", "B200"),
        ("l40s", "L40S"),
        ("a10g", "A10G"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
    ):
        if has(part):
            return _CARDS[card]
    named = next((_CARDS[name] for name in ("L4", "T4") if name.lower() in words), None)
    return named or cut_from


def _of_slice(parts: int, gigabytes: int) -> GpuCard | None:
    """Return the card of a slice named without its card, as in Kubernetes.

    Slices of A100 80GB and H100 have the same names: the slower card is returned.
    """
    eighth = ceil(gigabytes / {3: 4, 7: 8}.get(parts, parts))
    return _CARDS.get({5: "A100 40GB", 10: "A100 80GB", 18: "H200", 23: "B200"}.get(eighth, ""))


def parse_cards(text: str) -> CardSet:
    """Read `8xH100`, `2x8xH100` (two machines of eight) or `H100` (one).

    Raises ConfigError for an unknown card or number.
    """
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            "--gpus is empty", hint="write it as 8xH100, or 2x8xH100 for two machines"
        )
    first, second, name = match.groups()
    machines, per_machine = (int(first), int(second)) if first and second else (1, int(first or 1))
    if not 0 < machines * per_machine <= MAX_CARDS:
        raise ConfigError(
            f"--gpus {text}: {machines * per_machine} cards", hint=f"give 1 to {MAX_CARDS}"
        )
    return CardSet(find_card(name), machines, per_machine)
