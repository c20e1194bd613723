"""Failed messages are redelivered after a delay, and finally dead-lettered."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence

from embedded import cluster
from turbopump import (
    ConsumeContext,
    ConsumeResult,
    LitePullConsumer,
    Message,
    MessageView,
    Producer,
    PushConsumer,
)

ATTEMPTS_MAX = 2


def main() -> int:
    calls: Counter[bytes] = Counter()
    given_up = threading.Event()

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        (message,) = messages
        calls[message.body] += 1
        if message.body == b"flaky" and message.reconsume_times > 0:
            return ConsumeResult.SUCCESS
        # Level 1 is one second; with 0, the delay grows from ten seconds to two hours.
        context.delay_level = 1
        if message.reconsume_times == ATTEMPTS_MAX:
            given_up.set()
        return ConsumeResult.RETRY_LATER  # raising means the same

    with cluster() as nameserver:
        with Producer("orders-producer", nameserver=nameserver) as producer:
            for body in (b"flaky", b"hopeless"):
                producer.send(Message("payments", body))
        with PushConsumer(
            "cashier",
            handle,
            nameserver=nameserver,
            subscriptions={"payments": "*"},
            start_from="first",
            max_attempts=ATTEMPTS_MAX,
        ):
            given_up.wait(60)
        # Closing the consumer waits until its last messages are sent back.
        with LitePullConsumer(
            "undertaker",
            nameserver=nameserver,
            subscriptions={"%DLQ%cashier": "*"},
            start_from="first",
        ) as dead_letters:
            letter = next(iter(dead_letters))
    print(f"{letter.body!r} was dead-lettered after {calls[letter.body]} attempts")
    print(f"b'flaky' succeeded on attempt {calls[b'flaky']}")
    is_right = calls == {b"flaky": 2, b"hopeless": 1 + ATTEMPTS_MAX}
    return 0 if is_right and letter.body == b"hopeless" else 1


if __name__ == "__main__":
    sys.exit(main())
