"""One member of a consumer group as a separate process: ``push_member.py nameserver file``.

Writes a line for each message immediately, so that a kill loses nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from turbopump import ConsumeContext, ConsumeResult, PushConsumer
from turbopump.wire.record import MessageView


def main() -> None:
    nameserver, path = sys.argv[1:]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        for message in messages:
            os.write(file, message.body + b"\n")
        return ConsumeResult.SUCCESS

    with PushConsumer(
        "members",
        handle,
        nameserver=nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
    ) as consumer:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        consumer.wait()


if __name__ == "__main__":
    main()
