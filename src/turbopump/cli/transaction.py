"""``turbopump transaction``."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    FAILED,
    NAMESERVER,
    DryRunOption,
    JsonOption,
    NameServerOption,
    YesOption,
    administration,
    confirm,
)
from turbopump.cli.formats import format_body, format_number
from turbopump.cli.output import Column, Output
from turbopump.errors import InvalidArgument, RemoteError

if TYPE_CHECKING:
    from turbopump.admin import PendingTransaction
    from turbopump.admin.blocking import Admin

app = typer.Typer()

GroupOption = Annotated[
    str | None, typer.Option(help="Only of this producer group.", show_default=False)
]
BrokerOption = Annotated[str | None, typer.Option(help="Only on this broker.", show_default=False)]
GivenUpOption = Annotated[
    bool, typer.Option("--given-up", help="Only those that are no longer checked.")
]

_TRANSACTIONS = (
    Column("state", "STATE"),
    Column("age_ms", "AGE", "duration"),
    Column("checks", "CHECKS", "number"),
    Column("group", "PRODUCER GROUP"),
    Column("topic", "TOPIC"),
    Column("message_id", "MESSAGE ID", "id"),
    Column("short_body", "BODY"),
)


@app.command("list")
def list_transactions(
    group: GroupOption = None,
    broker: BrokerOption = None,
    given_up: GivenUpOption = False,
    limit: Annotated[int, typer.Option(help="Show at most this many.")] = 100,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """List transactions that have been neither committed nor rolled back."""
    with administration(nameserver) as admin:
        if limit < 1:
            raise InvalidArgument(f"limit must be at least 1, got {limit}")
        with closing(admin.transactions.list(group=group, broker=broker)) as found:
            wanted = (each for each in found if not given_up or _is_given_up(each))
            rows = [_row(each) if json else _shown(each) for each in islice(wanted, limit)]
    nothing = "No abandoned transactions." if given_up else "No open transactions."
    Output(as_json=json).rows(rows, _TRANSACTIONS, nothing=nothing)


@app.command()
def show(
    message_id: Annotated[
        str, typer.Argument(help="Message id, or offset id of the half message.")
    ],
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show everything about a transaction that has not ended."""
    from turbopump.cli.message_rows import FIELDS, shown_row

    with administration(nameserver) as admin:
        pending = admin.transactions.find(message_id)
    own = _row(pending)
    columns = (
        *(Column(each.key, each.title.lower(), each.kind) for each in _TRANSACTIONS[:5]),
        Column("broker", "broker"),
        *FIELDS[1:],
    )
    Output(as_json=json).fields(own if json else {**shown_row(pending.message), **own}, columns)


@app.command()
def resume(
    message_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Message ids, or offset ids of half messages.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All abandoned transactions.")] = False,
    group: GroupOption = None,
    broker: BrokerOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Resume the checks of transactions, as often as for new ones.

    Fix the producers first: checks resume with the next round.
    """
    output = Output(as_json=json)
    with administration(nameserver) as admin:
        if every == bool(message_ids):
            raise InvalidArgument("specify either message ids or --all")
        wanted = set(message_ids or ())
        chosen = _chosen(admin, wanted, group, broker)
        if not dry_run and every:
            text = f"Resume the checks of {format_number(len(chosen))} transactions?"
            confirm(text, is_sure=yes, as_json=json)
        failed = 0
        for pending in chosen:
            outcome = "would be resumed" if dry_run else _resumed(admin, pending)
            failed += outcome not in {"resumed", "would be resumed"}
            value = {**_row(pending), "outcome": outcome}
            output.done(value, f"{pending.message.message_id}: {outcome}")
    if every and not chosen and not json:
        typer.echo("No abandoned transactions.")
    _fail_if_left(failed, wanted - {each for pending in chosen for each in pending.ids})


# --- inside ---------------------------------------------------------------------------------------


def _chosen(
    admin: Admin, ids: set[str], group: str | None, broker: str | None
) -> list[PendingTransaction]:
    """Return those with an id, or all abandoned ones without ids."""
    with closing(admin.transactions.list(group=group, broker=broker)) as found:
        return [each for each in found if (each.ids & ids if ids else _is_given_up(each))]


def _fail_if_left(failed: int, missing: set[str]) -> None:
    if missing:
        ids = ", ".join(sorted(missing))
        typer.echo(
            f"turbopump: no open or abandoned transaction has the id {ids}\n"
            "  `turbopump transaction list` lists all.",
            err=True,
        )
    if missing or failed:
        raise typer.Exit(FAILED)


def _resumed(admin: Admin, pending: PendingTransaction) -> str:
    try:
        admin.transactions.resume(pending)
    except RemoteError as error:
        return f"failed: {error.remark}"
    return "resumed"


def _is_given_up(pending: PendingTransaction) -> bool:
    from turbopump.admin import PendingState

    return pending.state is PendingState.GIVEN_UP


def _row(pending: PendingTransaction) -> dict[str, Any]:
    from turbopump.cli.message_rows import message_row

    message = pending.message
    return {
        **message_row(message),
        "state": pending.state.value,
        "group": pending.group,
        "topic": pending.topic,
        "checks": pending.checks,
        "age_ms": max(0, _now_ms() - message.born_timestamp_ms),
        "broker": pending.broker,
    }


def _shown(pending: PendingTransaction) -> dict[str, Any]:
    return {**_row(pending), "short_body": format_body(pending.message.body, 40)}


def _now_ms() -> int:
    from turbopump.clock import SYSTEM_CLOCK

    return SYSTEM_CLOCK.now_ms()
