"""Negotiation: a seller and a buyer agree on a price, each knowing only its own value.

The seller knows its cost, the buyer its higher value; they name prices from 0 to 9 in turns, and
`ok` accepts the other's last one. A deal at price p gives the seller p - cost and the buyer value -
p (as shares of 9); no deal in time gives nothing. The policy plays both roles against itself. The
warm start's demonstrations name random prices and accept every third offer, also at a loss;
self-play learns to make deals that pay.
"""

import random
import re
from typing import Any

from ..conversations import converse
from ..game import AbstractGame, ChatMessage, StepResult

HIGHEST = 9
SENSELESS = -0.5
"""Reward of an answer that is neither a price nor `ok`; it ends the negotiation."""
HABIT = 0.35
"""Share of the demonstrations' answers that accept any offer."""


class NegotiationGame(AbstractGame):
    """Agree on a price that pays."""

    roles = ("seller", "buyer")

    def __init__(self, max_offers: int = 4) -> None:
        """At most `max_offers` prices are named; the last one can still be accepted."""
        if max_offers < 1:
            raise ValueError(f"max_offers={max_offers} must be at least 1")
        self._max_offers = max_offers
        self._cost = self._value = 0
        self._offers: list[int] = []

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw cost and higher value, and the role that begins."""
        cost = self.rng.randint(0, HIGHEST - 1)
        value = self.rng.randint(cost + 1, HIGHEST)
        return {"cost": cost, "value": value, "first": self.rng.choice(self.roles)}

    def reset(self, *, cost: int, value: int, first: str, **_: Any) -> str:
        """Begin without any offer."""
        self._cost, self._value = cost, value
        self._offers = []
        self.role = first
        return ""

    def step(self, action: str) -> StepResult:
        """Play a price, or accept the other's last offer."""
        text = self.parse_action(action).lower()
        if text == "ok" and self._offers:
            return self._deal(self._offers[-1])
        if not re.fullmatch(f"[0-{HIGHEST}]", text):
            return StepResult("", SENSELESS, done=True, info=self._info(senseless=True))
        if len(self._offers) == self._max_offers:  # the last offer was not accepted
            return StepResult("", 0.0, done=True, info=self._info())
        self._offers.append(int(text))
        self.role = self.roles[1 - self.roles.index(self.role)]
        return StepResult(text, 0.0, done=False, info=self._info())

    def _deal(self, price: int) -> StepResult:
        gains = {
            "seller": (price - self._cost) / HIGHEST,
            "buyer": (self._value - price) / HIGHEST,
        }
        mine = gains.pop(self.role)
        return StepResult("", mine, done=True, info=self._info(price), rewards=gains)

    def _info(self, price: int | None = None, *, senseless: bool = False) -> dict[str, Any]:
        pays = price is not None and self._cost <= price <= self._value
        return {
            "deal_rate": float(price is not None),
            "good_deal_rate": float(pays),
            "senseless_rate": float(senseless),
            "offers": len(self._offers),
        }

    def get_system_prompt(self) -> str:
        """Return the role and its secret."""
        if self.role == "seller":
            return f"you sell, cost {self._cost}"
        return f"you buy, value {self._value}"

    def get_initial_user_message(self) -> str:
        """Return the question of the first turn."""
        return "" if self._offers else "offer 0-9"

    def get_state(self) -> dict[str, Any]:
        """Return cost, value, the offers so far and whose turn it is."""
        return {
            "cost": self._cost,
            "value": self._value,
            "offers": self._offers,
            "turn": self.role,
        }


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one role's conversation for the warm start."""

    def act(_: str, messages: list[ChatMessage]) -> str:
        offered = messages[-1]["content"].isdecimal()
        if offered and rng.random() < HABIT:
            return "ok"
        return str(rng.randint(0, HIGHEST))

    conversations, _ = converse(NegotiationGame, act, seed=rng.getrandbits(32))
    return conversations[rng.choice(sorted(conversations))]
