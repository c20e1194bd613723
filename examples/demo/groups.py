"""Two groups that consume the orders: one in order, one with a bug."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from demo.board import Board
from demo.orders import TOPIC, order_of
from turbopump import (
    ClientConfig,
    ConsumeContext,
    ConsumeResult,
    MessageView,
    PushConsumer,
)

SHIPPING = "shipping"
BILLING = "billing"
RETRIES_MAX = 3


class Shipping:
    """Handles each customer's orders in order, and counts those that arrive out of order."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last: Counter[str] = Counter()
        self.out_of_order = 0

    def __call__(self, messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        for message in messages:
            order = order_of(message.body)
            self.out_of_order += order.nth != self._last[order.customer] + 1
            self._last[order.customer] = order.nth
            self._board.add(SHIPPING)
        return ConsumeResult.SUCCESS

    def consumer(self, client: ClientConfig) -> PushConsumer:
        return PushConsumer(
            SHIPPING,
            self,
            client=client,
            subscriptions={TOPIC: "*"},
            start_from="first",
            orderly=True,
        )


class Billing:
    """Fails once for some orders, and always for others until the bug is fixed."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()
        self.is_fixed = False
        self.attempts: Counter[str] = Counter()
        self.billed: Counter[str] = Counter()

    def __call__(self, messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        (message,) = messages
        order = order_of(message.body)
        with self._lock:
            self.attempts[order.key] += 1
        if message.reconsume_times:
            self._board.add("retries")
        if order.fails_always and not self.is_fixed:
            raise ArithmeticError(f"{order.key}: the bug of the demo")
        if order.fails_once and not message.reconsume_times:
            return ConsumeResult.RETRY_LATER
        with self._lock:
            self.billed[order.key] += 1
        self._board.add(BILLING)
        return ConsumeResult.SUCCESS

    def consumer(self, client: ClientConfig) -> PushConsumer:
        return PushConsumer(
            BILLING,
            self,
            client=client,
            subscriptions={TOPIC: "*"},
            start_from="first",
            max_attempts=RETRIES_MAX,
        )
