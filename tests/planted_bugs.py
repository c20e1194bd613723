"""Bugs to plant in the product, each of which the simulator must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from msgspec.structs import replace

from turbopump import supervisor, tables
from turbopump.broker import delays, retries
from turbopump.broker.arrivals import Arrivals
from turbopump.broker.delays import Delays
from turbopump.broker.durability import Durability, Promise
from turbopump.broker.membership_file import MembershipFile
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.replication import mastership
from turbopump.broker.replication.copying import Copying
from turbopump.broker.replication.master import Slaves
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.replica import Replica
from turbopump.broker.replication.role_changes import RoleChanges
from turbopump.broker.replication.slave import Follower, MasterConnection
from turbopump.broker.retries import Dropped, Retries
from turbopump.broker.send import Sends
from turbopump.broker.transactions.transactions import Transactions
from turbopump.client import calls, continuity, rebalance
from turbopump.client.consumption import Consumption
from turbopump.client.delivery.orderly import OrderlyDelivery
from turbopump.client.offsets import RemoteOffsets
from turbopump.client.process_queue import ProcessQueue
from turbopump.core import TakenUnits
from turbopump.errors import WriteFailed
from turbopump.machine import text_files
from turbopump.machine.files import Files
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.nameserver.kv import KvConfig
from turbopump.store import log_end, reading, store
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import UNIT
from turbopump.store.dispatch import Dispatcher
from turbopump.store.outcomes import OffsetTooSmall, ReadOutcome
from turbopump.store.recovery import Replay
from turbopump.store.store import Store
from turbopump.tables import Table
from turbopump.wire.batch import decode_batch, encode_batch

Function = Callable[..., Any]


@dataclass(slots=True)
class Calls:
    """The number of calls to a wrong function."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A wrong version of one function of the product."""

    name: str
    where: Any
    """The class or module of the function."""
    function: str
    wrong: Function
    """Takes the right version as its first argument; its docstring says what is wrong."""
    found_by: tuple[str, ...]
    """Prefixes of the violations it may cause: the names of the invariants."""
    near: int
    """The first seed that finds it, where short runs start."""

    @contextmanager
    def planted(self) -> Iterator[Calls]:
        """Use the wrong version in the block; fail if the product has no such function."""
        right, calls = getattr(self.where, self.function), Calls()
        is_property = isinstance(right, property)

        def counted(*args: Any, **options: Any) -> Any:
            calls.count += 1
            return self.wrong(right.fget if is_property else right, *args, **options)

        wrong = property(counted) if is_property else counted
        with mock.patch.object(self.where, self.function, wrong):
            yield calls


BUGS: list[PlantedBug] = []


def bug(where: Any, function: str, *found_by: str, near: int = 0) -> Callable[[Function], Function]:
    """Declare a planted bug, named after its wrong function."""

    def add(wrong: Function) -> Function:
        name = wrong.__name__.replace("_", " ")
        BUGS.append(PlantedBug(name, where, function, wrong, found_by, near))
        return wrong

    return add


@bug(Durability, "acknowledge", "acknowledged messages are kept", "every message ends", near=12)
def acknowledge_before_flush(
    right: Function, self: Durability, appended: Any, pending: Any, *rest: Any, **options: Any
) -> None:
    """A synchronous broker answers a send when the message is written, not when it is flushed."""
    if pending.promise is Promise.DURABLE:
        pending.promise = Promise.WRITTEN
    right(self, appended, pending, *rest, **options)


@bug(
    Durability,
    "acknowledge_all",
    "acknowledged messages are kept",
    "every message ends",
    near=202,
)
def burst_acknowledged_before_flush(
    right: Function, self: Durability, appended: Any, pending: Sequence[Any]
) -> None:
    """A synchronous broker without slaves answers sends that came in one chunk before the flush."""
    for each in pending if self.slaves is None else ():
        each.promise = Promise.WRITTEN
    right(self, appended, pending)


@bug(Retries, "accept", "every message ends", near=13)
def send_back_acknowledged_early(
    right: Function, self: Retries, failed: Any, on_outcome: Function, *args: Any
) -> None:
    """A broker answers a send-back before it knows whether the copy is stored."""
    on_outcome(Dropped(), *args)
    right(self, failed, lambda _: None)


@bug(Arrivals, "notify", "calm deliveries are prompt")
def lost_wake_up(right: Function, self: Arrivals, arrival: Any) -> None:
    """Of the groups that wait for a queue, only the first is woken by a message."""
    queue = self._by_topic.get(arrival.topic, {}).get(arrival.queue_id)
    for pull in list(queue.wanting(arrival) if queue is not None else ())[:1]:
        self._wake(pull)


@bug(ProcessQueue, "remove", "commits pass no unfinished message", near=1)
def highest_offset_committed(
    right: Function, self: ProcessQueue[Any], messages: Sequence[Any]
) -> Any:
    """A consumer commits behind the last message that is finished, not the first that is not."""
    offset = right(self, messages)
    last = max((message.queue_offset for message in messages), default=-1)
    return max(offset, QueueOffset(last + 1)) if offset >= 0 else offset


@bug(Consumption, "lose", "one call per orderly queue", near=165)
async def lock_dropped_early(right: Function, self: Consumption, owned: Any) -> bool:
    """A consumer that loses a queue returns its lock immediately, but the queue only later."""
    if self._locks is not None and not owned.is_leaving:
        owned.is_leaving = True
        await self._locks.unlock([owned.queue])
        return False
    done: bool = await right(self, owned)
    return done


@bug(MembershipFile, "load", "a restart moves no queue", "one call per orderly queue", near=29)
def incomplete_member_list_after_restart(right: Function, self: MembershipFile, *_: Any) -> None:
    """A broker that starts lists only the members that have sent a heartbeat since."""


@bug(log_end, "scan", "queues are dense", near=8)
def crc_skipped_on_recovery(right: Function, *args: Any, **options: Any) -> Any:
    """Recovery accepts records whose bodies do not match their checksums."""
    return right(*args, **{**options, "check_crc": False})


@bug(Store, "readable_end", "readable messages stay", near=12)
def queue_unit_written_before_the_log(right: Function, self: Store) -> PhysicalOffset:
    """A message enters its queue when it is written, although the log is not flushed yet."""
    return self.written_end


@bug(Dispatcher, "_delay_ms", "delays are not cut short", near=1)
def delayed_message_early(right: Function, self: Dispatcher, level: int) -> Any:
    """The delay of a level is that of the level below."""
    return right(self, max(level - 1, 1))


@bug(
    text_files,
    "_write_synced",
    "commits do not go back",
    "nothing unexpected: broker-a does not start",
)
def offset_table_not_synced(right: Function, files: Files, path: Path, data: bytes) -> None:
    """The file of committed offsets replaces the one before without being synced."""
    _write_unsynced(right, files, path, data, "consumerOffset")


def _write_unsynced(right: Function, files: Files, path: Path, data: bytes, name: str) -> None:
    if not path.name.startswith(name):
        right(files, path, data)
        return
    fd = files.open_new(path)
    files.write(fd, data, 0)
    files.close(fd)


@bug(Table, "try_save", "commits do not go back")
async def offsets_saved_only_at_the_end(right: Function, self: Table) -> None:
    """A broker saves committed offsets when it stops, but not while it runs."""
    if self.what != "offsets":
        await right(self)


@bug(RemoteOffsets, "_offset_at", "commits do not go back")
async def earlier_offset_committed(
    right: Function, self: RemoteOffsets, replica: Any, queue: MessageQueue
) -> QueueOffset | None:
    """A consumer that commits an offset again commits the one before it."""
    offset: QueueOffset | None = await right(self, replica, queue)
    is_repeated = bool(offset) and offset == self._history[queue]._offset
    return QueueOffset(offset - 1) if offset and is_repeated else offset


@bug(retries, "_again", "every message ends", near=1)
def retry_counter_lost(right: Function, *args: Any) -> Any:
    """The copy of a failed message counts as never retried."""
    return replace(right(*args), reconsume_times=0)


@bug(supervisor.Supervisor, "_restart_on_error", "nothing unexpected: the failure of", near=70)
async def supervisor_that_swallows(
    right: Function, self: supervisor.Supervisor, watch: Any, work: Function
) -> None:
    """Background work that fails is neither reported nor started again."""
    with suppress(Exception):
        await work()


@bug(
    rebalance,
    "changes",
    "one call per orderly queue",
    "duplicates are bounded",
    "nothing unexpected: queues do not have one owner",
)
def queue_of_another_member_kept(right: Function, *args: Any) -> Any:
    """A member keeps the queues that a rebalance gives to another."""
    gained, _ = right(*args)
    return gained, []


@bug(Sends, "_add_batch", "acknowledged messages are kept", "order of each producer", near=3)
def part_of_batch_stored(right: Function, self: Sends, send: Any, *args: Any) -> Any:
    """All messages of a batch are acknowledged, but the last is not stored."""
    entries = list(decode_batch(bytes(send.body)))[:-1]
    fields = {name: getattr(send, name) for name in dir(send) if not name.startswith("_")}
    return right(self, SimpleNamespace(**{**fields, "body": encode_batch(entries)}), *args)


@bug(Replay, "run", "readable messages stay", "acknowledged messages are kept", near=2)
def dispatcher_skips_a_message_after_restart(
    right: Function, self: Replay, start: PhysicalOffset, end: PhysicalOffset
) -> Any:
    """After a crash, messages enter their queues from the second one on."""
    entry = self.log.entry_at(start)
    return right(self, start if entry is None else PhysicalOffset(start + entry.size), end)


@bug(QueueLocks, "_is_over", "one call per orderly queue", near=236)
def lock_given_to_two(right: Function, self: QueueLocks, lock: object, now_ms: int) -> bool:
    """A broker gives the lock of a queue to any client that requests it."""
    return True


@bug(Delays, "load", "duplicates are bounded", near=36)
def delay_progress_not_loaded(right: Function, self: Delays) -> bool:
    """A broker that starts delivers all delayed messages again."""
    return True


@bug(delays, "readable_queue", "every message ends", near=184)
def topic_of_a_delayed_message_lost(right: Function, topics: Any, topic: str, queue_id: int) -> int:
    """A delayed message is delivered although a crash has left its topic out of the table."""
    return queue_id


@bug(OrderlyDelivery, "_dead_letter", "every message ends", near=94)
async def failed_dead_letter_committed(
    right: Function, self: OrderlyDelivery, *arguments: Any, **options: Any
) -> bool:
    """An orderly consumer commits a message that could not be sent to the dead letters."""
    await right(self, *arguments, **options)
    return True


@bug(
    continuity,
    "_has",
    "every message ends",
    "commits pass no unfinished message",
    "orderly groups consume in order",
    near=4,
)
async def other_messages_not_noticed(right: Function, *_: Any) -> bool:
    """A consumer that reconnects assumes that the broker has the same messages."""
    return True


@bug(supervisor.Watch, "failed", "nothing unexpected: the failure of", near=24)
def failure_not_reported(right: Function, self: supervisor.Watch, *_: Any, **__: Any) -> int:
    """Background work that fails is restarted, but the failure is not reported."""
    return supervisor.BACKOFF_FIRST_MS


@bug(Durability, "_copy", "acknowledged messages have a copy", near=16)
def acknowledged_without_the_slave(
    right: Function, self: Durability, pending: Any, outcome: Any
) -> None:
    """A SYNC_MASTER answers a send without waiting for a slave."""
    pending.report(outcome)


@bug(Slaves, "when_stored", "nothing unexpected: sends wait for slaves", near=16)
def report_before_the_wait_missed(
    right: Function, self: Slaves, end: PhysicalOffset, on_stored: Function
) -> Any:
    """A master waits for the next report of a slave, although the last one was enough."""
    with mock.patch.object(Slaves, "_confirmed", PhysicalOffset(0)):
        return right(self, end, on_stored)


@bug(Slaves, "_forget", "nothing unexpected: waits for slaves outlive their sends", near=18)
def sends_kept_after_their_timeout(right: Function, self: Slaves, number: int) -> None:
    """A send that no slave has stored in time stays in memory until one has."""


@bug(Durability, "_copy", "nothing unexpected: waits for slaves of", near=133)
def own_messages_wait_for_ever(
    right: Function, self: Durability, pending: Any, outcome: Any
) -> None:
    """What a SYNC_MASTER stores by itself waits for as long as a slave stays connected."""
    if pending.promise is Promise.DURABLE:
        right(self, pending, outcome)
        return
    with mock.patch.object(self, "deadlines"):
        right(self, pending, outcome)


@bug(Replica, "_kept_from", "copies stay", near=79)
def slave_deletes_what_its_master_has(right: Function, self: Replica) -> None:
    """A slave whose disk is full deletes its oldest messages."""


@bug(MasterConnection, "_note_stored", "replicas agree", near=45)
def slave_reports_before_the_flush(right: Function, self: MasterConnection) -> None:
    """A slave with SYNC_FLUSH reports what it has written, although it is not flushed yet."""
    right(self)
    if not self.copying.is_comparing:
        self._report(self._store.written_end)


@bug(Copying, "_same_bytes", "replicas agree", "nothing unexpected: not in sync", near=39)
def divergence_not_noticed(
    right: Function, self: Copying, position: PhysicalOffset, data: memoryview
) -> int:
    """A slave assumes that its log equals that of its master."""
    return max(0, min(len(data), self._end - position))


@bug(Follower, "_drop_tail", "copies stay", near=66)
def whole_log_dropped(right: Function, self: Follower, position: PhysicalOffset, how: str) -> None:
    """A slave whose last messages differ from its master's drops all of its log."""
    self._drop(None, how)


@bug(Store, "append_raw", "nothing unexpected: not in sync", "replicas agree", near=13)
def part_of_a_frame_skipped(
    right: Function, self: Store, position: PhysicalOffset, data: bytes | memoryview
) -> Any:
    """A slave stores zeros in place of the second half of what its master sends."""
    half = len(data) // 2
    return right(self, position, bytes(data[:half]) + bytes(len(data) - half))


@bug(
    RoleChanges,
    "_demote",
    "replaced masters are silent",
    "nothing unexpected: no settled roles",
    near=13,
)
async def fencing_ignored(right: Function, self: RoleChanges, claim: Any) -> None:
    """A master that hears that it was replaced continues as before."""


@bug(
    Mastership,
    "assume",
    "replaced masters are silent",
    "nothing unexpected: no settled roles",
    near=35,
)
async def start_without_asking(right: Function, self: Mastership, address: str) -> Any:
    """A master that starts does not ask name servers whether it was replaced."""
    return self.load(), None


@bug(mastership, "is_majority", "one master of each epoch", near=13)
def promotion_without_a_majority(right: Function, having: int, count: int) -> bool:
    """A promotion continues although most name servers have not stored its claim."""
    return True


@bug(
    RoleChanges,
    "promote",
    "one master of each epoch",
    "nothing unexpected: no settled roles",
    near=18,
)
async def fenced_before_the_claim(right: Function, self: RoleChanges, role: Any, **how: Any) -> Any:
    """A promotion fences the old master before name servers have stored its claim."""
    found = await self.mastership._claims.read()
    claim = self.mastership._next_claim(found.newest, self.address, self.broker_id)
    await self._fenced_end(self.master_address(), claim)
    return await right(self, role, **how)


@bug(KvConfig, "replace", "one master of each epoch", near=2553)
async def claim_replaced_without_comparing(
    right: Function, self: KvConfig, namespace: str, key: str, expected: Any, value: str
) -> bool:
    """A name server stores a claim without comparing the value that it replaces."""
    await self.put(namespace, key, value)
    return True


@bug(Transactions, "end", "transactions end as decided", near=1)
def rolled_back_message_visible(
    right: Function, self: Transactions, end: Any, on_ended: Any, *args: Any
) -> Any:
    """A broker commits the transactions that their producers roll back."""
    return right(self, replace(end, commits=True), on_ended, *args)


@bug(Transactions, "_begin", "duplicates are bounded", near=1)
def commit_stored_twice(
    right: Function, self: Transactions, key: Any, ending: Any, record: Any
) -> None:
    """The message of a transaction that commits is stored twice."""
    right(self, key, ending, record)
    if ending.commits:
        self.writer.append_all([record])


@bug(Transactions, "load_open", "transactions end as decided", near=1)
async def open_transactions_forgotten(right: Function, self: Transactions, age_ms: int) -> bool:
    """The check loop skips all half messages that have not ended in time."""
    self.ledger.seen = self.queues.half_range[1]
    return False


@bug(text_files, "_write_synced", "name servers keep values", near=5)
def key_values_not_synced(right: Function, files: Files, path: Path, data: bytes) -> None:
    """The file of a name server's key-values replaces the one before without being synced."""
    _write_unsynced(right, files, path, data, "kvConfig")


@bug(
    Transactions, "was_committed", "transactions end as decided", "duplicates are bounded", near=27
)
async def commit_before_a_crash_not_looked_for(
    right: Function, self: Transactions, offset: QueueOffset, view: Any
) -> bool:
    """A broker that starts treats every half message without an operation as open."""
    return False


@bug(KvConfig, "_replace", "name servers keep values", near=25)
async def failed_value_acknowledged(right: Function, self: KvConfig, table: Any) -> None:
    """A name server acknowledges a value although it could not write it."""
    with suppress(WriteFailed):
        await right(self, table)


@bug(
    store,
    "read_queue",
    "commits pass no unfinished message",
    "every message ends",
    "orderly groups consume in order",
    near=154,
)
def read_error_taken_for_a_deleted_file(
    right: Function, log: Any, queue: Any, *args: Any
) -> ReadOutcome:
    """A broker that cannot read a queue tells consumers to continue at its end."""
    try:
        outcome: ReadOutcome = right(log, queue, *args)
    except OSError:
        return OffsetTooSmall(
            next_offset=queue.max_offset, min_offset=queue.max_offset, max_offset=queue.max_offset
        )
    return outcome


@bug(tables, "backup_of", "nothing unexpected: broker-a does not start", near=4)
def backup_not_used(right: Function, path: Path) -> Path:
    """A table that is damaged is not replaced by its backup."""
    return path.with_name("no such file")


@bug(calls, "read_records", "damage is contained", near=4)
def body_not_verified(right: Function, data: bytes, *, check_crc: bool, kind: Any) -> Any:
    """Consumers do not compare bodies with their checksums."""
    return right(data, kind=kind)


@bug(
    reading,
    "take_units",
    "readable messages stay",
    "nothing unexpected: looking at the brokers failed with RecordError",
    near=112,
)
def unit_not_compared(
    right: Function, units: bytes, first: int, view: memoryview, *args: Any, **kwargs: Any
) -> TakenUnits:
    """A broker serves what units point to without checking that it is their message."""
    found: TakenUnits = right(units, first, view, *args, **kwargs)
    if not found.is_mismatch:
        return found
    position, size, _ = UNIT.unpack_from(units, found.stop * UNIT_BYTES)
    base, _, _, offset, *_ = args
    at = position - base
    if size <= 0 or not 0 <= at <= len(view) - size:
        return found
    return found._replace(
        stop=found.stop + 1,
        is_mismatch=False,
        offsets=[*found.offsets, offset + found.stop],
        sizes=[*found.sizes, size],
        pieces=[*found.pieces, view[at : at + size]],
    )
