"""What programs without types may pass by mistake: an error says what was expected."""

from __future__ import annotations

import asyncio
import inspect
import math
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import turbopump.client.blocking
import turbopump.client.blocking_transactions
from clusters import cluster
from turbopump import (
    ClientConfig,
    ConsistentHash,
    ConsumeContext,
    ConsumeResult,
    LitePullConsumer,
    Message,
    MessageQueue,
    MessageRules,
    MessageView,
    Producer,
    PullConsumer,
    PushConsumer,
    SendReceipt,
    Sql,
    TransactionProducer,
    TransactionState,
    Worker,
    aio,
)
from turbopump.admin import blocking as admin_blocking
from turbopump.client.outgoing import Outgoing, outgoing
from turbopump.durations import Duration
from turbopump.errors import InvalidArgument
from turbopump.testing import virtual_time

NAMESERVER = "127.0.0.1:9876"


def listen(messages: list[MessageView], context: ConsumeContext) -> ConsumeResult:
    """Take messages; typed as a list, which every type checker accepts."""
    return ConsumeResult.SUCCESS


class SendingHook:
    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None: ...
    def after_send(
        self, group: str, sent: Outgoing, queue: MessageQueue, outcome: SendReceipt | Exception
    ) -> None: ...


def push(**given: Any) -> PushConsumer:
    listener = given.pop("listener", listen)
    subscriptions = given.pop("subscriptions", {"orders": "*"})
    return PushConsumer(
        "billing", listener, nameserver=NAMESERVER, subscriptions=subscriptions, **given
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"listener": lambda messages: None}, r"listener must be .*\(messages, context\), got"),
        ({"listener": "handle"}, "listener must be a function .* got 'handle'"),
        ({"subscriptions": ["orders"]}, "subscriptions must be a mapping .* got \\['orders'\\]"),
        ({"subscriptions": "orders"}, "subscriptions must be a mapping"),
        ({"subscriptions": {"orders": None}}, "'orders' must be tags, .* got None; pass \"\\*\""),
        ({"subscriptions": {"orders": 5}}, "'orders' must be tags, Sql.* got 5"),
        ({"subscriptions": {5: "*"}}, "topic must be 1–127 of the characters .* got 5"),
        ({"subscriptions": {"orders": "amount > 100"}}, r"SQL92, not tags: pass Sql\('amount"),
        ({"subscriptions": {"orders": "a IS NULL"}}, r"pass Sql\('a IS NULL'\)"),
        (
            {"listening": 3},
            r"listening must be a Listening, got 3; pass Listening\(close_wait=60\)",
        ),
        ({"listening": 4}, r"listening must be a Listening, got 4"),
        ({"flow": 1}, "flow must be a FlowLimits"),
        ({"pulling": 1}, "pulling must be a Pulling"),
        ({"hooks": 5}, "hooks must be a list of objects with before_consume .* got 5"),
        ({"hooks": "ab"}, "hooks must be a list of objects with before_consume .* got 'a' in it"),
        ({"hooks": [SendingHook()]}, "before_consume and after_consume, or with keeps, got"),
        ({"strategy": "average"}, "strategy must be a function"),
        ({"strategy": ConsistentHash}, "strategy must be a function"),
        ({"offsets_directory": 7, "broadcast": True}, "offsets_directory must be a path, got 7"),
        ({"offsets_directory": "offsets"}, "offsets_directory is for broadcasting: pass broadcast"),
    ],
)
def test_a_push_consumer_rejects_ambiguous_arguments(given: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        push(**given)


def test_expressions_that_look_like_sql_may_be_tags() -> None:
    push(subscriptions={"orders": "a=b ||", "more": "paid in full", "other": "order-created"})
    push(subscriptions={"orders": Sql("amount > 100")})


def test_a_push_consumer_without_subscriptions_does_not_start() -> None:
    consumer = push(subscriptions={})
    with pytest.raises(InvalidArgument, match="'billing' has no subscriptions; pass"):
        consumer.start()


def test_offsets_directory_may_be_text(tmp_path: Path) -> None:
    consumer = aio.PushConsumer(
        "billing",
        listen,
        nameserver=NAMESERVER,
        subscriptions={"orders": "*"},
        broadcast=True,
        offsets_directory=str(tmp_path),
    )
    assert consumer._settings.offsets_directory == tmp_path


@pytest.mark.parametrize("kind", [Producer, aio.Producer, TransactionProducer])
@pytest.mark.parametrize("hooks", [5, None, [3], [SendingHook]])
def test_producers_reject_hooks_without_their_methods(kind: Any, hooks: object) -> None:
    check = {"check": lambda message: None} if kind is TransactionProducer else {}
    with pytest.raises(InvalidArgument, match=r"hooks must be .* before_send and after_send, got"):
        kind("group", nameserver=NAMESERVER, hooks=hooks, **check)


@pytest.mark.parametrize("kind", [Worker, aio.Worker])
@pytest.mark.parametrize("name", ["hooks", "send_hooks"])
def test_workers_reject_hooks_without_their_methods(kind: Any, name: str) -> None:
    function = turbopump.consumer("orders", group="billing")(lambda body: None)
    with pytest.raises(InvalidArgument, match=f"^{name} must be a list of objects with .*got 5"):
        kind(function, nameserver=NAMESERVER, **{name: 5})


def test_a_transaction_expects_a_message() -> None:
    async def check() -> None:
        producer = aio.TransactionProducer(
            "group", check=lambda _: TransactionState.COMMIT, nameserver=NAMESERVER
        )
        text: Any = "oops"
        with pytest.raises(InvalidArgument, match=r"transaction\(\) expects a Message, got str"):
            producer.transaction(text)

    asyncio.run(check())


def test_the_topic_of_results_must_be_a_name() -> None:
    to: Any = 5
    with pytest.raises(InvalidArgument, match=r"topic must be 1–127 of the characters .* got 5"):
        turbopump.consumer("orders", group="billing", to=to)


@pytest.mark.parametrize("kind", [LitePullConsumer, aio.LitePullConsumer])
def test_a_lite_pull_consumer_rejects_expressions_of_the_wrong_type(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"'orders' must be tags, .* got None"):
        kind("audit", nameserver=NAMESERVER, subscriptions={"orders": None})


@virtual_time()
async def test_a_lite_pull_consumer_without_anything_to_read_does_not_poll(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        aio.LitePullConsumer("audit", session=world.session()) as consumer,
    ):
        for read in (consumer.poll, consumer.__anext__):
            with pytest.raises(InvalidArgument, match="'audit' has no subscriptions and no"):
                await read()
        await consumer.assign(())
        assert await consumer.poll(timeout=0.001) == []


@pytest.mark.parametrize("kind", [Producer, PullConsumer, LitePullConsumer])
def test_settings_of_the_wrong_type_are_rejected(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"config must be a .*Config, got 3"):
        kind("group", nameserver=NAMESERVER, config=3)
    with pytest.raises(InvalidArgument, match="client must be a ClientConfig, got"):
        kind("group", client=NAMESERVER)


def test_topics_of_a_pull_consumer_must_be_a_list() -> None:
    with pytest.raises(InvalidArgument, match="topics must be a list of names, got 'orders'"):
        PullConsumer("audit", nameserver=NAMESERVER, topics="orders")


def test_name_servers_may_be_a_list() -> None:
    producer = aio.Producer("group", nameserver=["a:1", "b:2"])
    assert producer._client.nameserver_addresses == ("a:1", "b:2")
    assert ClientConfig(["a:1", "b:2"]) == ClientConfig(("a:1", "b:2")) == ClientConfig("a:1;b:2")
    TransactionProducer("group", check=lambda _: TransactionState.COMMIT, nameserver=["a:1", "b:2"])


def test_name_servers_of_the_wrong_type_are_rejected() -> None:
    given: Any = {"a": 1}
    with pytest.raises(InvalidArgument, match=r"nameserver must be .* got {'a': 1}"):
        Producer("group", nameserver=given)


@virtual_time()
async def test_sends_reject_ambiguous_arguments(tmp_path: Path) -> None:
    text: Any = "q"
    async with (
        cluster(tmp_path) as world,
        aio.Producer("group", session=world.session()) as producer,
    ):
        message = Message("T", b"x")
        for send in (producer.send, producer.send_oneway, producer.request):
            with pytest.raises(InvalidArgument, match=r"to must be a MessageQueue .* got 'q'"):
                await send(message, to=text)
            with pytest.raises(InvalidArgument, match=r"timeout must be at least 0.001"):
                await send(message, timeout=0)
            with pytest.raises(InvalidArgument, match=r"expects a Message, got str"):
                await send(text)
            with pytest.raises(InvalidArgument, match=r"queue of .* topic 'T', got other@broker"):
                await send(message, to=MessageQueue("other", "broker-a", 0))
            with pytest.raises(InvalidArgument, match=r"to\(\) must return one .* got None"):
                await send(message, to=nowhere)
        with pytest.raises(InvalidArgument, match=r"to must be a MessageQueue"):
            await producer.send_batch([message], to=text)
        one: Any = message
        with pytest.raises(InvalidArgument, match=r"send_batch\(\) expects a list .* got Message"):
            await producer.send_batch(one)
        with pytest.raises(InvalidArgument, match="queue of the message's topic 'T', got other"):
            await producer.send_batch([message], to=MessageQueue("other", "broker-a", 0))
        with pytest.raises(InvalidArgument, match=r"reply\(\) expects a MessageView, got str"):
            await producer.reply(text, b"1.08")


def nowhere(_: Sequence[MessageQueue]) -> MessageQueue:
    """Choose no queue, as a function without a return statement does."""
    nothing: Any = None
    return nothing  # type: ignore[no-any-return]


@virtual_time()
async def test_queues_of_a_namespace_may_be_sent_to(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        aio.Producer("group", session=world.session(namespace="staging")) as producer,
    ):
        [queue, *_] = await producer.queues("T")
        receipt = await producer.send(Message("T", b"x"), to=queue)
        assert receipt.queue == queue


# --- delays ---------------------------------------------------------------------------------------


def delay_of(message: Message, rules: MessageRules | None = None) -> str | None:
    text = outgoing(message, "0" * 32, rules or MessageRules()).properties
    entries = dict(entry.split("\x01") for entry in text.split("\x02") if entry)
    return entries.get("DELAY")


@pytest.mark.parametrize(
    ("delay", "level"),
    [
        (timedelta(0), None),
        (timedelta(microseconds=1), "1"),
        (timedelta(seconds=1), "1"),
        (timedelta(seconds=1, microseconds=1), "2"),
        (timedelta(minutes=11), "15"),
        (timedelta(hours=2), "18"),
        (0, None),
        (0.001, "1"),
        (5, "2"),
        (5.001, "3"),
        (7200, "18"),
    ],
)
def test_a_delay_becomes_the_shortest_level_that_is_not_earlier(
    delay: Duration, level: str | None
) -> None:
    assert delay_of(Message("orders", b"x", delay=delay)) == level


def test_delays_follow_the_levels_that_brokers_have() -> None:
    rules = MessageRules(delay_levels="1m 10s 3d")
    assert delay_of(Message("orders", b"x", delay=timedelta(seconds=8)), rules) == "2"
    assert delay_of(Message("orders", b"x", delay=timedelta(days=2)), rules) == "3"
    assert delay_of(Message("orders", b"x", delay_level=3), rules) == "3"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"delay_level": 99}, "delay_level must be 0–18, got 99"),
        ({"delay_level": -1}, "delay_level must be 0–18, got -1"),
        ({"delay": timedelta(hours=3)}, "delay must be 0–7200 seconds .*brokers.* got datetime"),
        ({"delay": timedelta(seconds=-1)}, "delay must be 0–7200 seconds"),
        ({"delay": 7200.001}, "a number or a timedelta, got 7200.001"),
        ({"delay": -1}, "a number or a timedelta, got -1"),
        ({"delay": "5m"}, "a number or a timedelta, got '5m'"),
        ({"delay": True}, "a number or a timedelta, got True"),
        ({"delay": math.nan}, "a number or a timedelta, got nan"),
        ({"delay": math.inf}, "a number or a timedelta, got inf"),
        ({"delay": timedelta(seconds=1), "delay_level": 1}, "delay or delay_level, not both"),
    ],
)
def test_delays_beyond_the_levels_of_brokers_are_rejected(
    given: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidArgument, match=error):
        delay_of(Message("orders", b"x", **given))


# --- what users see -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    ["turbopump", "turbopump.spark", "turbopump.spark.pipelines", "turbopump.testing"],
)
def test_dir_shows_every_public_name(package: str) -> None:
    """Completion in a shell shows names that are imported only on use."""
    code = f"import {package} as it; print(set(it.__all__) ^ set(dir(it)))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "set()\n"


@pytest.mark.parametrize(
    "name", ["Producer", "PullConsumer", "LitePullConsumer", "PushConsumer", "TransactionProducer"]
)
def test_blocking_clients_show_the_signatures_of_the_asynchronous_ones(name: str) -> None:
    kind, other = getattr(turbopump, name), getattr(aio, name)
    assert inspect.signature(kind) == inspect.signature(other)
    assert kind.__init__.__name__ == "__init__"
    for method, value in vars(other).items():
        if not method.startswith("_") and asyncio.iscoroutinefunction(value):
            own = getattr(kind, method, None)
            if own is None:
                continue
            assert own.__name__ == method
            assert own.__doc__
            shown = inspect.signature(own).parameters
            assert list(shown) == list(inspect.signature(value).parameters), method


def blocking_classes() -> list[type]:
    """Return the blocking clients and their parts, with the subjects of an `Admin`."""
    modules = (turbopump.client.blocking, turbopump.client.blocking_transactions, admin_blocking)
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


@pytest.mark.parametrize("kind", blocking_classes())
def test_docstrings_of_blocking_clients_show_blocking_code(kind: type) -> None:
    shown = [kind, *(value for name, value in vars(kind).items() if not name.startswith("_"))]
    for each in shown:
        text = inspect.getdoc(each) or ""
        assert "asyncio" not in text, each
        assert "await" not in text, each
        assert "async " not in text, each


if TYPE_CHECKING:

    def _only_public_parameters(producer: Producer, message: Message) -> None:
        """Check statically, by an ignored error, that blocking sends have no internal parameter."""
        producer.send(message, extra={})  # type: ignore[call-arg]
