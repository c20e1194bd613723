"""``turbopump message``."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    TagsOption,
    TopicArgument,
    complete_group,
    complete_topic,
    local_now,
    parse_times,
    require_range,
)
from turbopump.cli.command import Console, command
from turbopump.cli.formats import (
    format_number,
    parse_duration_ms,
    parse_pairs,
    parse_queues,
    parse_time,
)
from turbopump.cli.options import option
from turbopump.cli.output import progress_bar
from turbopump.errors import InvalidArgument, NotThere

if TYPE_CHECKING:
    from turbopump.admin.blocking import Admin
    from turbopump.admin.positions import Start
    from turbopump.client.send_hooks import SendReceipt
    from turbopump.filters.sql92 import Sql
    from turbopump.message import Message, MessageQueue
    from turbopump.wire.record import MessageView

app = typer.Typer()

STDIN = "-"

_MISSING = {
    "FLUSH_DISK_TIMEOUT": "the broker's disk does not have it yet",
    "FLUSH_SLAVE_TIMEOUT": "no slave has it yet",
    "SLAVE_NOT_AVAILABLE": "no slave is connected and up to date, only the master has it",
}
"""What a stored message lacks of what its broker's mode promises, by the status of its send."""

TopicOption = Annotated[str | None, option("The topic it is in.", autocompletion=complete_topic)]


@command(app)
def send(
    console: Console,
    topic: TopicArgument,
    body: Annotated[
        str | None, typer.Argument(help="The body as text; - reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, option("Take the body from a file.")] = None,
    lines: Annotated[
        bool, option("Send each line of stdin, or of the file, as a message.", "--lines")
    ] = False,
    tag: Annotated[str | None, option("The tag to filter by.")] = None,
    key: Annotated[list[str] | None, option("A key to find it by; can be repeated.")] = None,
    property_: Annotated[
        list[str] | None,
        option("A property of your own; can be repeated.", "--property", metavar="NAME=VALUE"),
    ] = None,
    delay: Annotated[
        str | None, option("Deliver after this time, such as 5m.", metavar="DURATION")
    ] = None,
    delay_level: Annotated[int, typer.Option(help="A delay by its number; 0 for no delay.")] = 0,
    queue: Annotated[str | None, option("To this queue.", metavar="[BROKER:]ID")] = None,
    sharding_key: Annotated[
        str | None, option("To the queue of this key, as by_hash chooses.")
    ] = None,
    create_topic: Annotated[
        bool, option("Let the broker create a missing topic.", "--create-topic")
    ] = False,
) -> None:
    """Send a message; its body comes from the command line, a file or stdin.

    Exits with 1 if it is stored, but not as safely as the broker's mode promises.
    """
    from msgspec.structs import replace

    from turbopump.message import Message

    if lines and body not in (None, STDIN):
        raise InvalidArgument("specify a body or --lines, not both")
    message = Message(
        topic,
        b"" if lines else _body(body, file),
        tags=tag,
        keys=key or (),
        properties=parse_pairs(property_ or (), "property"),
    )
    delays = _Delays(console.admin, topic, may_be_missing=create_topic)
    level = delays.level(delay, delay_level)
    message = replace(message, delay_level=level)
    to = None if queue is None else _one_queue(console.admin, topic, queue)
    if lines:
        if not create_topic:
            console.admin.topics.route(topic)
        _send_lines(console, message, file, to, sharding_key)
        return
    receipt = console.admin.messages.send(
        message, queue=to, sharding_key=sharding_key, create_topic=create_topic
    )
    if level:
        after = delays.text(level)
        text = f"Stored {receipt.message_id}, to be delivered to {receipt.queue} after {after}."
    else:
        text = f"Stored {receipt.message_id} in {receipt.queue} at offset {receipt.queue_offset}."
    missing = _MISSING.get(receipt.status.name)
    value = _receipt_row(receipt, level)
    console.done(value, text if missing is None else f"{text}\n{receipt.status.name}: {missing}.")
    if missing is not None:
        raise typer.Exit(1)


def _send_lines(
    console: Console,
    template: Message,
    file: Path | None,
    queue: MessageQueue | None,
    sharding_key: str | None,
) -> None:
    """Send a message for each line as it comes; stop at the first that cannot be sent."""
    from msgspec.structs import replace

    from turbopump.admin.messages import TOOLS_PRODUCER_GROUP
    from turbopump.client.blocking import Producer
    from turbopump.client.selectors import by_hash

    if queue is not None and sharding_key is not None:
        raise InvalidArgument("specify --queue or --sharding-key, not both")
    to = queue if sharding_key is None else by_hash(sharding_key)
    unsafe: Counter[str] = Counter()
    count = 0
    try:
        with (
            nullcontext(sys.stdin.buffer) if file is None else file.open("rb") as source,
            Producer(TOOLS_PRODUCER_GROUP, nameserver=console.nameserver) as producer,
        ):
            for number, line in enumerate((each.rstrip(b"\r\n") for each in source), 1):
                if not line:
                    continue
                try:
                    receipt = producer.send(replace(template, body=line), to=to)
                except InvalidArgument as error:
                    raise InvalidArgument(f"line {number}: {error}") from error
                count += 1
                unsafe[receipt.status.name] += receipt.status.name in _MISSING
                if console.as_json:
                    console.line(_receipt_row(receipt, template.delay_level))
    finally:
        if not console.as_json:
            typer.echo(f"Stored {format_number(count)} messages in topic {template.topic}.")
    for status, times in (+unsafe).items():
        typer.echo(f"{status}, {times} times: {_MISSING[status]}.", err=console.as_json)
    if +unsafe:
        raise typer.Exit(1)


def _receipt_row(receipt: SendReceipt, delay_level: int) -> dict[str, Any]:
    return {
        "topic": receipt.queue.topic,
        "message_id": receipt.message_id,
        "offset_id": receipt.offset_id,
        "broker": receipt.queue.broker,
        "queue_id": receipt.queue.queue_id,
        # A delayed message lies elsewhere; where it will be in the queue is not known yet.
        "offset": None if delay_level else receipt.queue_offset,
        "status": receipt.status.name,
    }


@command(app)
def tail(
    console: Console,
    topic: TopicArgument,
    tags: TagsOption = "*",
    sql: Annotated[
        str | None,
        option("Only messages whose properties match, as 'amount > 100'.", metavar="EXPRESSION"),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="now|earliest|TIME", help="Where to start.")
    ] = "now",
    last: Annotated[int | None, option("Start with the last N messages.")] = None,
    count: Annotated[int | None, option("Stop after N messages.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for new messages.")
    ] = True,
) -> None:
    """Print messages of a topic as they arrive; commits nothing. Ctrl-C stops."""
    from turbopump.cli.message_rows import message_line, message_row

    with suppress(KeyboardInterrupt):
        begin = _start(start, last)
        if count is not None:
            require_range("count", count, 1)
        wanted = _wanted(tags, sql)
        with closing(
            console.admin.messages.tail(topic, tags=wanted, start=begin, follow=follow)
        ) as coming:
            for message in islice(coming, count):
                if console.as_json:
                    console.line(message_row(message))
                else:
                    typer.echo(message_line(message))
                sys.stdout.flush()


@command(app)
def show(
    console: Console,
    message_id: Annotated[str, typer.Argument(help="Message id, or offset id.")],
    topic: TopicOption = None,
) -> None:
    """Show a message, and its retries."""
    from turbopump.cli.message_rows import FIELDS, message_row, shown_row

    found = console.admin.messages.find(message_id, topic)
    for place, message in enumerate(found):
        if place and not console.as_json:
            typer.echo()
        console.fields(message_row(message) if console.as_json else shown_row(message), FIELDS)


@command(app, confirms=True)
def consume(
    console: Console,
    message_id: Annotated[str, typer.Argument(help="Message id, or offset id.")],
    group: Annotated[
        str, typer.Option(help="The group whose member gets it.", autocompletion=complete_group)
    ],
    client: Annotated[str | None, option("Which member; needed when there are several.")] = None,
    topic: TopicOption = None,
) -> None:
    """Give a message to a member of a group now, and print the result of its listener."""
    message = console.admin.messages.find(message_id, topic)[0]
    client_id = console.admin.groups.inspect(group, client).client_id
    value: dict[str, Any] = {"message_id": message.message_id, "client_id": client_id}
    if console.is_dry_run:
        unknown = {"result": None, "spent_ms": None, "remark": None}
        console.done(
            {**value, **unknown, "dry_run": True}, f"Would give {message_id} to {client_id}."
        )
        return
    console.confirm(f"Let {client_id} consume {message_id}?")
    done = console.admin.messages.consume(message, group, client_id)
    value |= {"result": done.result, "spent_ms": done.spent_ms, "remark": done.remark}
    remark = f": {done.remark}" if done.remark else ""
    console.done(
        {**value, "dry_run": False},
        f"{client_id} took {done.spent_ms} ms, result {done.result}{remark}",
    )
    if not done.is_success:
        raise typer.Exit(1)


@command(app)
def query(
    console: Console,
    topic: TopicArgument,
    key: Annotated[str | None, option("With this key.")] = None,
    unique_key: Annotated[str | None, option("With this id, given by its producer.")] = None,
    queue: Annotated[
        str | None, option("In this queue, with --offset.", metavar="BROKER:ID")
    ] = None,
    offset: Annotated[int | None, option("At this offset, with --queue.")] = None,
    since: Annotated[str | None, option("Stored at this time or later.", metavar="TIME")] = None,
    until: Annotated[str | None, option("Stored before this time.", metavar="TIME")] = None,
    tags: TagsOption = "*",
    limit: Annotated[int, typer.Option(help="Show at most N.")] = 64,
) -> None:
    """Find messages by key, id, position in a queue, or time.

    Times are 2026-03-01T12:00, 15m (ago), or milliseconds since 1970.
    """
    from turbopump.cli.message_rows import COLUMNS, message_row, shown_row

    _require_one_way(key, unique_key, queue, offset, since, until)
    require_range("limit", limit, 1)
    if unique_key is not None:
        found: Sequence[MessageView] = console.admin.messages.by_unique_key(topic, unique_key)
    elif key is not None:
        found = _by_key(console.admin, topic, key, since, until, limit)
    elif queue is not None and offset is not None:
        found = [console.admin.messages.at(_one_queue(console.admin, topic, queue), offset)]
    else:
        found = list(_by_time(console.admin, topic, since, until, tags, limit))
    row = message_row if console.as_json else shown_row
    nothing = f"No such message in topic {topic}."
    console.rows(map(row, found[:limit]), COLUMNS, nothing=nothing)


def _require_one_way(
    key: str | None,
    unique_key: str | None,
    queue: str | None,
    offset: int | None,
    since: str | None,
    until: str | None,
) -> None:
    if (queue is None) != (offset is None):
        raise InvalidArgument("specify both --queue and --offset, or neither")
    in_time = key is None and (since is not None or until is not None)
    ways = [key is not None, unique_key is not None, queue is not None, in_time]
    if sum(ways) != 1:
        raise InvalidArgument(
            "specify exactly one of --key, --unique-key, --queue with --offset, and --since or "
            "--until"
        )


def _by_key(
    admin: Admin, topic: str, key: str, since: str | None, until: str | None, limit: int
) -> Sequence[MessageView]:
    begin, end = parse_times(since, until)
    return admin.messages.by_key(topic, key, begin=begin, end=end, count_max=limit)


def _by_time(
    admin: Admin, topic: str, since: str | None, until: str | None, tags: str, limit: int
) -> Iterator[MessageView]:
    from datetime import UTC, datetime

    begin, end = parse_times(since, until)
    span = admin.messages.span(topic, begin or datetime.fromtimestamp(0, UTC), end)
    with (
        progress_bar("Reading", min(limit, span.messages)) as advance,
        closing(admin.messages.read(span, tags=tags)) as found,
    ):
        for message in islice(found, limit):
            advance()
            yield message


class _Delays:
    """The delays of the brokers of a topic, which may differ."""

    def __init__(self, admin: Admin, topic: str, *, may_be_missing: bool) -> None:
        self._admin = admin
        self._topic = topic
        self._may_be_missing = may_be_missing

    def level(self, delay: str | None, level: int) -> int:
        """Return the level of a delay, or check a level; 0 for no delay.

        A broker would take its longest delay for a level that it does not have, and not say so.
        """
        if level < 0:
            raise InvalidArgument(f"delay level must be 0 or more, got {level}")
        if delay is None:
            for broker, levels in self._by_broker.items() if level else ():
                if levels and level > len(levels):
                    raise InvalidArgument(
                        f"delay level must be 1–{len(levels)} on broker {broker}, got {level}; the "
                        f"levels are {', '.join(levels)}"
                    )
            return level
        if level:
            raise InvalidArgument("specify --delay or --delay-level, not both")
        return self._level_of(delay)

    def text(self, level: int) -> str:
        """Return what a level stands for."""
        texts = [each for levels in self._by_broker.values() for each in levels[level - 1 : level]]
        return " or ".join(dict.fromkeys(texts)) or f"the delay of level {level}"

    def _level_of(self, delay: str) -> int:
        wanted_ms = parse_duration_ms(delay)
        if not wanted_ms:
            return 0
        found = set()
        for broker, levels in self._by_broker.items():
            # Rounded up, as producers do.
            delays_ms = [parse_duration_ms(each) for each in levels]
            longer = [level for level, each in enumerate(delays_ms, 1) if each >= wanted_ms]
            if not longer:
                raise InvalidArgument(
                    f"delay must be at most the longest of broker {broker}, got {delay}; its delays"
                    f" are {', '.join(levels)}"
                )
            found.add(min(longer, key=lambda level: delays_ms[level - 1]))
        if len(found) != 1:
            raise InvalidArgument(
                f"the brokers of topic {self._topic} have no common level for {delay}; specify"
                " --delay-level"
            )
        return found.pop()

    @cached_property
    def _by_broker(self) -> dict[str, list[str]]:
        try:
            brokers = [each.broker for each in self._admin.topics.route(self._topic).on_brokers]
        except NotThere:
            if not self._may_be_missing:
                raise
            clusters = self._admin.clusters.status()
            brokers = [each.node.broker for found in clusters for each in found.brokers]
        return {
            broker: self._admin.configuration.broker(broker).get("messageDelayLevel", "").split()
            for broker in dict.fromkeys(brokers)
        }


def _one_queue(admin: Admin, topic: str, text: str) -> MessageQueue:
    known = [each.queue for each in admin.topics.status(topic).queues]
    found = parse_queues([text], known) or []
    if len(found) != 1:
        names = ", ".join(f"{queue.broker}:{queue.queue_id}" for queue in found)
        raise InvalidArgument(f"queue {text!r} is ambiguous; specify one of {names}")
    return found[0]


def _wanted(tags: str, sql: str | None) -> str | Sql:
    from turbopump.filters.sql92 import Sql

    if sql is None:
        return tags
    if tags != "*":
        raise InvalidArgument("specify --tags or --sql, not both")
    return Sql(sql)


def _start(text: str, last: int | None) -> Start:
    from turbopump.admin import AtTime, Earliest, Last, Latest

    if last is not None:
        if text != "now":
            raise InvalidArgument("specify --from or --last, not both")
        return Last(last)
    if text == "now":
        return Latest()
    return Earliest() if text == "earliest" else AtTime(parse_time(text, local_now()))


def _body(text: str | None, file: Path | None) -> bytes:
    if text is not None and text != STDIN and file is not None:
        raise InvalidArgument("specify a body or --file, not both")
    if file is not None:
        return file.read_bytes()
    if text is not None and text != STDIN:
        # Bytes on the command line that are not UTF-8 are still a valid body.
        return os.fsencode(text)
    if text is None and sys.stdin.isatty():
        raise InvalidArgument("no body; pass it as text, with --file, or pass - to read stdin")
    return sys.stdin.buffer.read()
