"""``turbopump transaction``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import FAILED, BrokerOption, require_range
from turbopump.cli.command import Console, command
from turbopump.cli.formats import format_body, format_number
from turbopump.cli.options import option
from turbopump.cli.output import columns
from turbopump.clock import SYSTEM_CLOCK
from turbopump.errors import InvalidArgument, RemoteError

if TYPE_CHECKING:
    from turbopump.admin import PendingTransaction
    from turbopump.admin.blocking import Admin

app = typer.Typer()

GroupOption = Annotated[str | None, option("Only of this producer group.")]
AbandonedOption = Annotated[bool, option("Only those that are no longer checked.", "--abandoned")]

_TRANSACTIONS = columns(
    "state age_ms=AGE:duration checks:number group=PRODUCER_GROUP topic message_id:id"
    " short_body=BODY"
)


@command(app, "list", watches=True)
def list_transactions(
    console: Console,
    group: GroupOption = None,
    broker: BrokerOption = None,
    abandoned: AbandonedOption = False,
    limit: Annotated[int, typer.Option(help="Show at most this many.")] = 100,
) -> None:
    """List transactions that have been neither committed nor rolled back."""
    require_range("limit", limit, 1)
    with closing(console.admin.transactions.list(group=group, broker=broker)) as found:
        wanted = (each for each in found if not abandoned or _is_abandoned(each))
        rows = [_row(each) if console.as_json else _shown(each) for each in islice(wanted, limit)]
    nothing = "No abandoned transactions." if abandoned else "No open transactions."
    console.rows(rows, _TRANSACTIONS, nothing=nothing)


@command(app)
def show(
    console: Console,
    message_id: Annotated[
        str, typer.Argument(help="Message id, or offset id of the half message.")
    ],
) -> None:
    """Show everything about a transaction that has not ended."""
    from turbopump.cli.message_rows import FIELDS, shown_row

    pending = console.admin.transactions.find(message_id)
    own = _row(pending)
    shown = (
        *(replace(each, title=each.title.lower()) for each in _TRANSACTIONS[:5]),
        *columns("broker", str),
        *FIELDS[1:],
    )
    console.fields(own if console.as_json else {**shown_row(pending.message), **own}, shown)


@command(app, confirms=True)
def resume(
    console: Console,
    message_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Message ids, or offset ids of half messages.", show_default=False),
    ] = None,
    every: Annotated[bool, option("All abandoned transactions.", "--all")] = False,
    group: GroupOption = None,
    broker: BrokerOption = None,
) -> None:
    """Resume the checks of transactions, as often as for new ones.

    Fix the producers first: checks resume with the next round.
    """
    if every == bool(message_ids):
        raise InvalidArgument("specify either message ids or --all")
    wanted = set(message_ids or ())
    chosen = _chosen(console.admin, wanted, group, broker)
    if not console.is_dry_run and every:
        text = f"Resume the checks of {format_number(len(chosen))} transactions?"
        console.confirm(text)
    failed = 0
    for pending in chosen:
        outcome = "would be resumed" if console.is_dry_run else _resumed(console.admin, pending)
        failed += outcome not in {"resumed", "would be resumed"}
        value = {**_row(pending), "outcome": outcome}
        console.done(value, f"{pending.message.message_id}: {outcome}")
    if every and not chosen and not console.as_json:
        typer.echo("No abandoned transactions.")
    _fail_if_left(failed, wanted - {each for pending in chosen for each in pending.ids})


def _chosen(
    admin: Admin, ids: set[str], group: str | None, broker: str | None
) -> list[PendingTransaction]:
    """Return those with an id, or all abandoned ones without ids."""
    with closing(admin.transactions.list(group=group, broker=broker)) as found:
        return [each for each in found if (each.ids & ids if ids else _is_abandoned(each))]


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


def _is_abandoned(pending: PendingTransaction) -> bool:
    from turbopump.admin import PendingState

    return pending.state is PendingState.ABANDONED


def _row(pending: PendingTransaction) -> dict[str, Any]:
    from turbopump.cli.message_rows import message_row

    message = pending.message
    return {
        **message_row(message),
        "state": pending.state.value,
        "group": pending.group,
        "topic": pending.topic,
        "checks": pending.checks,
        "age_ms": max(0, SYSTEM_CLOCK.now_ms() - message.born_timestamp_ms),
        "broker": pending.broker,
    }


def _shown(pending: PendingTransaction) -> dict[str, Any]:
    return {**_row(pending), "short_body": format_body(pending.message.body, 40)}
