"""``turbopump dlq``."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from turbopump.cli.administration import (
    FAILED,
    AgainOption,
    GroupArgument,
    RedriveToOption,
    TagsOption,
    complete_group,
    destination,
    parse_times,
    require_range,
)
from turbopump.cli.command import Console, command
from turbopump.cli.formats import format_body, format_number
from turbopump.cli.options import option
from turbopump.cli.output import columns, json_line, progress_bar
from turbopump.errors import InvalidArgument
from turbopump.wire.names import DEAD_LETTER_PREFIX, retry_topic

if TYPE_CHECKING:
    from turbopump.admin import DeadLetter, LetterFilter, Outcome, Redriven, Span
    from turbopump.admin.blocking import Admin

app = typer.Typer()

KeyOption = Annotated[str | None, option("Only with this key.")]
OriginOption = Annotated[str | None, option("Only letters originally sent to this topic.")]
IdOption = Annotated[
    list[str] | None, option("Only this letter or message; can be repeated.", "--id")
]
SinceOption = Annotated[
    str | None, option("Only letters dead-lettered since then.", metavar="TIME")
]
UntilOption = Annotated[
    str | None, option("Only letters dead-lettered before then.", metavar="TIME")
]

_LETTERS = columns(
    "died_ms=DIED:time origin_topic=ORIGIN attempts=TRIES:number tags letter_id:id short_body=BODY"
)


@command(app, "list", watches=True)
def list_letters(
    console: Console,
    group: Annotated[
        str | None,
        typer.Argument(
            help="Consumer group; without it, all groups that have dead letters.",
            autocompletion=complete_group,
        ),
    ] = None,
    tags: TagsOption = "*",
    key: KeyOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: Annotated[int, typer.Option(help="Show at most N.")] = 100,
) -> None:
    """List the dead letters of a group, or the groups that have any."""
    require_range("limit", limit, 1)
    if group is None:
        _list_groups(console)
        return
    _require(console.admin, group)
    span = _span(console.admin, group, since, until)
    wanted = _filter(tags, key, origin, ())
    with (
        progress_bar("Reading", span.messages) as advance,
        closing(
            console.admin.dead_letters.list(group, wanted=wanted, span=span, on_read=advance)
        ) as letters,
    ):
        rows = [_row(each) if console.as_json else _shown(each) for each in islice(letters, limit)]
    console.rows(rows, _LETTERS, nothing=f"Group {group} has no matching dead letters.")


@command(app)
def show(
    console: Console,
    group: GroupArgument,
    letter_id: Annotated[str, typer.Argument(help="Letter id, or message id.")],
) -> None:
    """Show a dead letter, and whether it was redriven to its origin or the retry topic."""
    from turbopump.cli.message_rows import FIELDS, shown_row

    _require(console.admin, group)
    letter = console.admin.dead_letters.show(group, letter_id)
    places = [*filter(None, [letter.origin_topic]), retry_topic(group)]
    is_redriven = console.admin.dead_letters.is_redriven(letter, places)
    own = {**_row(letter), "is_redriven": is_redriven}
    own_fields = (
        "letter_id origin_topic=origin attempts=tries died_ms=died:time is_redriven=sent_back"
    )
    shown = (*columns(own_fields, str), *FIELDS[1:2], *FIELDS[3:])
    console.fields(own if console.as_json else {**shown_row(letter.message), **own}, shown)


@command(app, confirms=True)
def redrive(
    console: Console,
    group: GroupArgument,
    to: RedriveToOption = "origin",
    tags: TagsOption = "*",
    key: KeyOption = None,
    origin: OriginOption = None,
    letter: IdOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    again: AgainOption = False,
    create_topic: Annotated[
        bool, option("Let the broker re-create a deleted origin.", "--create-topic")
    ] = False,
) -> None:
    """Send dead letters again, each once, no matter how often the command runs.

    `origin` redelivers to all groups of the topic, `retry` only to this group.

    Exits with 1 if letters could not be sent, or no letter has a given id.
    """
    _require(console.admin, group)
    span = _span(console.admin, group, since, until)
    question = f"Redrive up to {format_number(span.messages)} dead letters of {group} to {to}?"
    if not console.is_dry_run:
        console.confirm(question)
    outcomes: Counter[Outcome] = Counter()
    missing = set(letter or ())
    with progress_bar("Redriving", span.messages) as advance:
        for done in console.admin.dead_letters.redrive(
            group,
            to=destination(to),
            wanted=_filter(tags, key, origin, letter or ()),
            span=span,
            again=again,
            create_topic=create_topic,
            dry_run=console.is_dry_run,
            on_read=advance,
        ):
            outcomes[done.outcome] += 1
            missing -= {done.letter.letter_id, done.letter.message.message_id}
            if console.as_json:
                console.line(_redriven_row(done))
    if not console.as_json:
        if not outcomes:
            typer.echo(f"Group {group} has no matching dead letters.")
        for outcome, count in sorted(outcomes.items(), key=lambda each: each[0].value):
            typer.echo(f"{format_number(count)} {outcome.value}")
    _fail_if_left(group, outcomes, missing)


@command(app, confirms=True)
def delete(console: Console, group: GroupArgument) -> None:
    """Delete all dead letters of a group. There is no other copy of what was not redriven."""
    _require(console.admin, group)
    letters = console.admin.dead_letters.span(group).messages
    value = {"group": group, "letters": letters, "dry_run": console.is_dry_run}
    if not letters:
        console.done(value, f"Group {group} has no dead letters.")
        return
    what = f"{format_number(letters)} dead letters of group {group}"
    if console.is_dry_run:
        console.done(value, f"Would delete {what}.")
        return
    console.confirm(f"Delete {what}?")
    console.admin.dead_letters.delete(group)
    console.done(value, f"Deleted {what}.")


@command(app)
def export(
    console: Console,
    group: GroupArgument,
    output: Annotated[Path | None, option("A file; without it, stdout.", "--output", "-o")] = None,
    force: Annotated[bool, option("Overwrite an existing file.", "--force")] = False,
    tags: TagsOption = "*",
    key: KeyOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
) -> None:
    """Write dead letters as JSON lines, as `dlq list --json` does, all of them.

    With `--json` and a file, the summary is printed as JSON.
    """
    # A file is in UTF-8, whatever stdout is in.
    written = json_line if output is None else partial(json_text.dumps, ensure_ascii=False)
    count = 0
    _require(console.admin, group)
    span = _span(console.admin, group, since, until)
    wanted = _filter(tags, key, origin, ())
    with (
        _writing(output, force=force) as file,
        progress_bar("Writing", span.messages) as advance,
        closing(
            console.admin.dead_letters.list(group, wanted=wanted, span=span, on_read=advance)
        ) as letters,
    ):
        for letter in letters:
            file.write(written(_row(letter)) + "\n")
            count += 1
    if output is not None:
        value = {"group": group, "file": str(output), "letters": count}
        console.done(value, f"Exported {format_number(count)} dead letters to {output}.")


def _list_groups(console: Console) -> None:
    rows = []
    for topic in console.admin.topics.names():
        if topic.startswith(DEAD_LETTER_PREFIX):
            status = console.admin.topics.status(topic)
            last_ms = max((each.last_stored_ms or 0 for each in status.queues), default=0)
            row = {"group": topic.removeprefix(DEAD_LETTER_PREFIX), "letters": status.messages}
            rows.append({**row, "last_ms": last_ms or None})
    shown = columns("group letters:number last_ms=LAST:time")
    console.rows(rows, shown, nothing="No group has dead letters.")


def _require(admin: Admin, group: str) -> None:
    """Refuse a group that never was; one that was deleted may have left letters."""
    if f"{DEAD_LETTER_PREFIX}{group}" not in admin.topics.names():
        admin.groups.require(group)


def _span(admin: Admin, group: str, since: str | None, until: str | None) -> Span:
    from turbopump.admin import AtTime

    begin, end = parse_times(since, until)
    return admin.dead_letters.span(
        group,
        None if begin is None else AtTime(begin),
        None if end is None else AtTime(end),
    )


def _filter(tags: str, key: str | None, origin: str | None, ids: Sequence[str]) -> LetterFilter:
    from turbopump.admin import LetterFilter

    return LetterFilter(tags=tags, key=key, origin_topic=origin, ids=ids)


def _fail_if_left(group: str, outcomes: Counter[Outcome], missing: Collection[str]) -> None:
    left = sum(count for outcome, count in outcomes.items() if outcome.is_left)
    if left:
        typer.echo(
            f"turbopump: {left} dead letters of {group} have no topic to return to\n"
            "  Use --to for another topic, or --create-topic to re-create a deleted one.",
            err=True,
        )
    if missing:
        typer.echo(
            f"turbopump: no matching dead letter of group {group} has the id "
            f"{', '.join(sorted(missing))}\n"
            f"  `turbopump dlq list {group}` lists all.",
            err=True,
        )
    if left or missing:
        raise typer.Exit(FAILED)


def _row(letter: DeadLetter) -> dict[str, Any]:
    from turbopump.cli.message_rows import message_row

    return {
        **message_row(letter.message),
        "broker": letter.queue.broker,
        "letter_id": letter.letter_id,
        "origin_topic": letter.origin_topic,
        "attempts": letter.attempts,
        "died_ms": letter.message.store_timestamp_ms,
    }


def _shown(letter: DeadLetter) -> dict[str, Any]:
    return {**_row(letter), "short_body": format_body(letter.message.body, 40)}


def _redriven_row(done: Redriven) -> dict[str, Any]:
    return {
        "letter_id": done.letter.letter_id,
        "message_id": done.letter.message.message_id,
        "outcome": done.outcome.value,
        "topic": done.topic,
    }


@contextmanager
def _writing(path: Path | None, *, force: bool) -> Iterator[TextIO]:
    """Write to stdout, or to a file that has its name only once it is whole."""
    if path is None:
        yield sys.stdout
        return
    if not force and path.exists():
        raise InvalidArgument(f"file {path} already exists; pass --force to overwrite it")
    if path.exists() and not path.is_file():
        # A pipe or device has no other name to take.
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
