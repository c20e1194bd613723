"""A client that requests a topic's route: ``python -m torture.victim NAMESERVER TOPIC``.

Exits with 0 if the topic is usable, or is reported as unusable.
"""

from __future__ import annotations

import resource
import sys

from turbopump import Message, Producer, ProducerConfig, TurbopumpError

_MEMORY_MAX = 2 * 2**30


def main(nameserver: str, topic: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_MAX, _MEMORY_MAX))
    config = ProducerConfig(send_timeout=3, retries_max=0)
    try:
        with Producer("victim", nameserver=nameserver, config=config) as producer:
            producer.send(Message(topic, b"hello"))
    except TurbopumpError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
