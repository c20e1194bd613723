"""Run by the compatibility tests: controls the C++ client, which may crash its process.

``python cpp_client.py NAMESERVER``; see `peers` for its input and output lines.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rocketmq.client import (
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    RecvMessage,
    SendResult,
)
from rocketmq.exceptions import ffi_check
from rocketmq.ffi import MessageModel, dll

CONSUMED = 0
AGAIN = 1
ASYNC_WAIT_S = 20.0

_output = threading.Lock()


def report(line: dict[str, Any]) -> None:
    with _output:
        sys.stdout.write(f"@{json.dumps(line)}\n")
        sys.stdout.flush()


def message_of(given: dict[str, Any]) -> Message:
    message = Message(given["topic"])
    message.set_body(given["body"].encode())
    message.set_tags(given.get("tags", ""))
    message.set_keys(given.get("keys", ""))
    for name, value in given.get("properties", {}).items():
        message.set_property(name, value)
    if "delay_level" in given:
        message.set_delay_time_level(given["delay_level"])
    return message


def described(message: RecvMessage, wanted: list[str]) -> dict[str, Any]:
    found = {name: message.get_property(name) for name in wanted}
    return {
        "topic": message.topic,
        "body": message.body.decode(),
        "tags": message.tags.decode(),
        "keys": message.keys.decode(),
        "msg_id": message.id,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "reconsume_times": message.reconsume_times,
        "born_ms": message.born_timestamp,
        "stored_ms": message.store_timestamp,
        "at_ms": int(time.time() * 1000),
        "properties": {name: value.decode() for name, value in found.items() if value},
    }


class Listener(PushConsumer):
    """A push consumer whose listener can fail; the wrapper's own turns failure into success."""

    def listen(self, topic: str, expression: str, on_message: Callable[[RecvMessage], int]) -> None:
        ffi_check(dll.Subscribe(self._handle, topic.encode(), expression.encode()))
        self._register_callback(lambda _, handle: on_message(RecvMessage(handle)))


class Client:
    """The C++ client's commands, by their names in the input lines."""

    def __init__(self, nameserver: str) -> None:
        self._nameserver = nameserver
        self._producer: Producer | None = None
        self._consumers: dict[str, Listener] = {}
        self._stopped: list[Listener] = []

    def _started_producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer("cpp-producers")
            self._producer.set_namesrv_addr(self._nameserver)
            self._producer.start()
        return self._producer

    def send(self, message: dict[str, Any], how: str, shard: int = 0) -> dict[str, Any] | None:
        producer, prepared = self._started_producer(), message_of(message)
        match how:
            case "oneway":
                producer.send_oneway(prepared)
                return None
            case "oneway-ordered":
                producer.send_oneway_orderly(prepared, shard)
                return None
            case "ordered":
                return _sent(producer.send_orderly(prepared, shard))
            case "async":
                return self._send_async(prepared)
            case _:
                return _sent(producer.send_sync(prepared))

    def _send_async(self, prepared: Message) -> dict[str, Any]:
        done = threading.Event()
        outcomes: list[SendResult | Exception] = []

        def finish(outcome: SendResult | Exception) -> None:
            outcomes.append(outcome)
            done.set()

        self._started_producer().send_async(prepared, finish, finish)
        if not done.wait(ASYNC_WAIT_S):
            raise TimeoutError("no callback of an asynchronous send")
        [outcome] = outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return _sent(outcome)

    def batch(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return _sent(self._started_producer().send_batch([message_of(one) for one in messages]))

    def push(
        self,
        group: str,
        topic: str,
        expression: str = "*",
        orderly: bool = False,
        broadcasting: bool = False,
        failures: dict[str, int] | None = None,
        properties: list[str] | None = None,
    ) -> None:
        """Start a push consumer; ``failures`` maps bodies to how often they fail."""
        left = Counter(failures or {})
        model = MessageModel.BROADCASTING if broadcasting else MessageModel.CLUSTERING

        def on_message(message: RecvMessage) -> int:
            seen = described(message, properties or [])
            report({"got": {"group": group, **seen}})
            left[seen["body"]] -= 1
            return AGAIN if left[seen["body"]] >= 0 else CONSUMED

        consumer = Listener(group, orderly=orderly, message_model=model)
        consumer.set_namesrv_addr(self._nameserver)
        consumer.listen(topic, expression, on_message)
        consumer.start()
        self._consumers[group] = consumer

    def stop(self, group: str) -> None:
        consumer = self._consumers.pop(group)
        consumer.shutdown()
        # Keep a reference: the wrapper would shut it down a second time on deletion, which crashes.
        self._stopped.append(consumer)

    def pull(self, group: str, topic: str, expression: str = "*") -> list[dict[str, Any]]:
        consumer = PullConsumer(group)
        consumer.set_namesrv_addr(self._nameserver)
        consumer.start()
        try:
            pulled = consumer.pull(topic, expression)
            return [{"group": group, **described(message, [])} for message in pulled]
        finally:
            consumer.shutdown()

    def close(self) -> None:
        for group in list(self._consumers):
            self.stop(group)
        if self._producer is not None:
            self._producer.shutdown()


def _sent(result: SendResult) -> dict[str, Any]:
    return {"status": int(result.status), "msg_id": result.msg_id, "queue_offset": result.offset}


def main(nameserver: str) -> None:
    client = Client(nameserver)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            report({"answer": getattr(client, call["do"])(**call["with"])})
        except Exception as error:  # noqa: BLE001 - the test that asked decides
            report({"error": repr(error)})
    # The library's own threads may crash during interpreter shutdown.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
