"""Charges customers for their orders: a typical consumer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turbopump.aio import ConsumeContext, ConsumeResult, MessageView, PushConsumer

TOPIC = "orders"
GROUP = "billing"
GIVE_UP = -1


class BankUnavailable(Exception):
    """The bank is unreachable."""


class Bank(Protocol):
    """Moves money; charging the same order again has no effect."""

    async def charge(self, order: str, cents: int) -> None:
        """Take the money; raises BankUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """The content of a message."""

    number: str
    cents: int

    @classmethod
    def from_json(cls, body: bytes) -> Order:
        """Parse an order; raises ValueError if it is invalid."""
        try:
            fields = json.loads(body)
            order = cls(str(fields["number"]), int(fields["cents"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an order: {body!r}") from error
        if order.cents <= 0:
            raise ValueError(f"order {order.number} costs {order.cents} cents")
        return order


class Billing:
    """Listens to orders."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    async def __call__(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        (message,) = messages
        try:
            order = Order.from_json(message.body)
        except ValueError:
            # Retrying does not help: dead-letter it immediately, for a human to examine.
            context.delay_level = GIVE_UP
            return ConsumeResult.RETRY_LATER
        # BankUnavailable is left to propagate: the message is redelivered with backoff.
        await self._bank.charge(order.number, order.cents)
        return ConsumeResult.SUCCESS


def consumer(bank: Bank, nameserver: str) -> PushConsumer:
    """Create the project's consumer."""
    return PushConsumer(
        GROUP,
        Billing(bank),
        nameserver=nameserver,
        subscriptions={TOPIC: "created"},
        start_from="first",
    )
