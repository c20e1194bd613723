"""The executor's side of a consumer: call the function, act on its results, count.

A row is settled when the function succeeded or the broker took the message back. If neither is
possible, the task fails, so that Spark retries it and never commits past it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import pyarrow as pa

from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.results import (
    DEAD_LETTER_LEVEL,
    GiveUp,
    RetryLater,
    suspend_time_ms,
)
from turbopump.client.retry_sender import RetrySender
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument, SparkError
from turbopump.message import MessageQueue
from turbopump.spark.consuming.message_rows import (
    Delivered,
    Messages,
    RowSlice,
    Table,
    delivered,
    split_by_queue,
    with_original_topic,
)
from turbopump.spark.consuming.outcomes import (
    RETRY_LATER,
    SUCCESS,
    Outcome,
    ordered_step,
    outcome_of,
    outcomes_of,
)
from turbopump.spark.records.schema import DECODE_ERROR, report_schemas
from turbopump.spark.shared_session import shared_session

_log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["row", "batch", "pandas", "arrow"]
Exhausted: TypeAlias = Literal["dead letter", "fail"]

Handler: TypeAlias = Callable[[Any], object]
"""The user's function: of a `MessageView`, a list of them, a DataFrame or a RecordBatch."""

ROWS_MAX = 1_000_000
_INT_MAX = 2**31 - 1
_SUSPEND_MS = (10, 30_000)

DEAD = DEAD_LETTER_LEVEL


@dataclass(frozen=True, slots=True)
class Returned:
    """A message to send back, for redelivery after a delay or as a dead letter."""

    delivered: Delivered
    delay_level: int


@dataclass(frozen=True, slots=True)
class HandlerConfig:
    """How messages are handled; a value that is sent to the executors."""

    group: str
    """As brokers know it, with its namespace."""

    namespace: str = ""
    mode: Mode = "row"
    orderly: bool = False
    batch_size: int | None = None
    """Maximum messages per call; None passes each Arrow batch of Spark's whole."""

    max_attempts: int | None = None
    """How often a message is redelivered; None if its group decides."""

    suspend_ms: int = 1000
    exhausted: Exhausted = "dead letter"
    leaves_out_bad: bool = False
    """Whether records that cannot be decoded are only counted, and not handled."""

    def __post_init__(self) -> None:
        _require_one_of("mode", self.mode, get_args(Mode))
        _require_one_of("exhausted", self.exhausted, get_args(Exhausted))
        if self.max_attempts is not None:
            require_within("max_attempts", self.max_attempts, 0, _INT_MAX)
        require_within("suspend_ms", self.suspend_ms, *_SUSPEND_MS)
        if self.batch_size is not None:
            require_within("batch_size", self.batch_size, 1, ROWS_MAX)
            if self.mode == "row":
                raise InvalidArgument(
                    'batch_size must not be set with mode="row", which passes one message per call'
                )


def require_within(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number, {least}–{most}, got {value!r}")


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of message outcomes, and one of the function's errors."""

    handled: int = 0
    """Messages for which the function succeeded."""
    retried: int = 0
    """Messages sent back for redelivery; each attempt counts."""
    dead: int = 0
    """Messages that were dead-lettered."""
    error: str | None = None
    bad: int = 0
    """Records that could not be decoded, however ``onBadRecord`` handles them."""

    @property
    def received(self) -> int:
        return self.handled + self.retried + self.dead

    def plus(self, other: Counts) -> Counts:
        return Counts(
            self.handled + other.handled,
            self.retried + other.retried,
            self.dead + other.dead,
            self.error or other.error,
            self.bad + other.bad,
        )


COUNTS_SCHEMA, _ARROW_COUNTS = report_schemas(
    "handled long, retried long, dead long, error string, bad long"
)


def counts_batch(counts: Counts) -> pa.RecordBatch:
    """Return counts as the one row that a task reports to the driver."""
    return pa.RecordBatch.from_pylist([asdict(counts)], _ARROW_COUNTS)


class HandlerResult(NamedTuple):
    """The outcome of each message of a call, and the first error."""

    outcomes: list[Outcome]
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class HandlerRunner:
    """Handles the messages of one task."""

    handler: Handler
    plan: HandlerConfig
    send_back: Callable[[Sequence[Returned]], None]
    """Sends messages back to their brokers; raises SparkError if one is not accepted."""

    pause: Callable[[float], None]
    """Sleeps for a number of seconds."""

    group_limit: Callable[[], int]
    """Returns how often messages of the group are redelivered unless the consumer decides."""

    def all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Counts]:
        """Handle batches one after another; counted messages are settled."""
        settle = self._settle_in_order if self.plan.orderly else self._settle
        for batch in batches:
            if batch.num_rows:
                rows, counts = self._without_bad(batch)
                for piece in self._pieces(rows) if rows.num_rows else ():
                    counts = counts.plus(settle(piece))
                yield counts

    def _without_bad(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Counts]:
        """Count the records that could not be decoded, and drop them if configured."""
        at = batch.schema.get_field_index(DECODE_ERROR)
        if at < 0:
            return batch, Counts()
        errors = batch.column(at)
        counts = Counts(bad=batch.num_rows - errors.null_count)
        if not self.plan.leaves_out_bad:
            return batch, counts
        return batch.filter(errors.is_null()).remove_column(at), counts

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[RowSlice]:
        plan = self.plan
        batches = split_by_queue(batch) if plan.orderly else iter((batch,))
        # Row by row in order: the previous call must succeed before the next one is made.
        size = 1 if plan.orderly and plan.mode == "row" else plan.batch_size
        for each in batches:
            named = with_original_topic(each, plan.group, plan.namespace)
            has_objects = plan.mode in ("row", "batch")
            rows = Messages(delivered(named)) if has_objects else Table(named)
            step = size or len(rows)
            for start in range(0, len(rows), step):
                yield rows.part(start, min(start + step, len(rows)))

    @property
    def _limit(self) -> int:
        most = self.plan.max_attempts
        return self.group_limit() if most is None else most

    # --- unordered --------------------------------------------------------------------------------

    def _settle(self, piece: RowSlice) -> Counts:
        answered = self._call(piece)
        outcomes = answered.outcomes
        rows = [row for row, outcome in enumerate(outcomes) if outcome is not SUCCESS]
        if not rows:
            return Counts(handled=len(piece))
        failed, times, most = [outcomes[row] for row in rows], piece.reconsume_times, self._limit
        levels = [each.delay_level if isinstance(each, RetryLater) else DEAD for each in failed]
        self.send_back(list(map(Returned, piece.delivered(rows), levels)))
        dead = sum(isinstance(outcomes[row], GiveUp) or times[row] >= most for row in rows)
        self._log_failures(piece, rows, answered.error)
        return Counts(len(piece) - len(rows), len(rows) - dead, dead, error_text(answered.error))

    # --- in order ---------------------------------------------------------------------------------

    def _settle_in_order(self, piece: RowSlice) -> Counts:
        """Call repeatedly, in order, until every message is processed or dead-lettered."""
        counts = Counts()
        while len(piece):
            answered = self._call(piece)
            outcomes = answered.outcomes
            most = self._limit if any(each is not SUCCESS for each in outcomes) else 0
            step = ordered_step(outcomes, piece.reconsume_times, most)
            if step.exhausted and self.plan.exhausted == "fail":
                raise self._stopped(piece, step.exhausted[0], answered.error)
            # The broker counts deliveries, not the attempts made here, so dead-letter explicitly.
            buried = sorted((*step.given_up, *step.exhausted))
            if buried:
                self.send_back([Returned(each, DEAD) for each in piece.delivered(buried)])
            error = error_text(answered.error)
            counts = counts.plus(Counts(len(step.done), 0, len(buried), error))
            if step.rest == len(piece):
                break
            self._log_failures(piece, [step.rest], answered.error)
            failed = [
                row - step.rest
                for row in range(step.rest, len(piece))
                if isinstance(outcomes[row], RetryLater)
            ]
            piece = piece.part(step.rest, len(piece)).tried(failed)
            failure = outcomes[step.rest]
            assert isinstance(failure, RetryLater)
            self.pause(suspend_time_ms(failure.delay, self.plan.suspend_ms) / 1000)
        return counts

    def _stopped(self, piece: RowSlice, row: int, error: BaseException | None) -> SparkError:
        message = piece.delivered([row])[0].message
        why = f" ({error_text(error)})" if error is not None else ""
        return SparkError(
            f"{_place(message)} failed {message.reconsume_times + 1} times{why}, and "
            'exhausted="fail" stops its queue: fix the cause and restart, or dead-letter such '
            'messages with exhausted="dead letter"'
        )

    # --- calling ----------------------------------------------------------------------------------

    def _call(self, piece: RowSlice) -> HandlerResult:
        mode = self.plan.mode
        if isinstance(piece, Messages):
            once = self._call_once
            return self._call_for_each(piece) if mode == "row" else once(list(piece), len(piece))
        batch = piece.batch
        given = batch if mode == "arrow" else batch.to_pandas(maps_as_pydicts="lossy")
        return self._call_once(given, len(piece))

    def _call_for_each(self, messages: Messages) -> HandlerResult:
        outcomes: list[Outcome] = []
        first: BaseException | None = None
        for message in messages:
            try:
                outcomes.append(outcome_of(self.handler(message)))
            except (RetryLater, GiveUp) as outcome:
                outcomes.append(outcome)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code
                first = first or error
                outcomes.append(RETRY_LATER)
        return HandlerResult(outcomes, first)

    def _call_once(self, given: object, count: int) -> HandlerResult:
        try:
            return HandlerResult(outcomes_of(self.handler(given), count))
        except (RetryLater, GiveUp) as outcome:
            return HandlerResult([outcome] * count)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code
            return HandlerResult([RETRY_LATER] * count, error)

    def _log_failures(
        self, piece: RowSlice, rows: Sequence[int], error: BaseException | None
    ) -> None:
        """Log failures once per call: a thousand of them usually have the same cause."""
        message = piece.delivered(rows[:1])[0].message
        _log.warning(
            "%s: %d of %d messages failed, the first is %s",
            self.plan.group,
            len(rows),
            len(piece),
            _place(message),
            exc_info=error,
        )


def _place(message: Any) -> str:
    return (
        f"{message.message_id} of topic {message.topic!r} "
        f"(queue {message.queue_id}, offset {message.queue_offset})"
    )


def error_text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_IN_FLIGHT_MAX = 64


@dataclass(frozen=True, slots=True)
class SendBack:
    """Sends messages back over the process's shared session; a value sent to executors."""

    client: ClientConfig
    group: str
    max_attempts: int | None

    def __call__(self, returned: Sequence[Returned]) -> None:
        """Return when brokers have stored all of them; raises SparkError if one is not accepted."""
        kept = shared_session(self.client).run(lambda session: self._all(session, returned))
        if kept:
            raise SparkError(
                f"{len(kept)} of {len(returned)} failed messages could not be sent back, the first "
                f"is {kept[0].delivered.message.message_id} of broker "
                f"{kept[0].delivered.broker!r}: the task fails so that none is lost; the "
                "executor's log has the broker's error"
            )

    async def _all(self, session: Session, returned: Sequence[Returned]) -> list[Returned]:
        """Send all back, and return those that no broker accepted."""
        sending = RetrySender(session, self.group, self.max_attempts)

        async def send(number: int) -> bool:
            each = returned[number]
            message, broker = each.delivered.message, each.delivered.broker
            queue = MessageQueue(message.topic, broker, message.queue_id)
            return await sending.send_back(queue, message, each.delay_level)

        sent = await gather_by_key(range(len(returned)), send, _IN_FLIGHT_MAX)
        return [returned[number] for number, is_sent in sent.items() if not is_sent]
