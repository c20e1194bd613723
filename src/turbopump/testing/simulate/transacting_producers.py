"""Producers with transactions, their database, and an operator that resumes abandoned ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from turbopump.admin.administration import Admin
from turbopump.admin.transactions import PendingState
from turbopump.client.transaction_ends import TransactionState
from turbopump.client.transactions import Transaction, TransactionProducer
from turbopump.errors import TurbopumpError
from turbopump.message import Message, MessageQueue
from turbopump.testing.simulate.bodies import body_of, key_of
from turbopump.testing.simulate.events import (
    Acknowledged,
    Event,
    FaultBegan,
    SendBegan,
    SendFailed,
    SendTried,
    TransactionDecided,
)
from turbopump.testing.simulate.fault_plan import FaultKind
from turbopump.testing.simulate.plan import PLAIN
from turbopump.testing.simulate.producers import Tries
from turbopump.testing.simulate.transaction_plan import Deed, Ending
from turbopump.testing.simulate.world import World
from turbopump.wire.names import HALF_TOPIC
from turbopump.wire.record import MessageView

GROUP = "tellers"
_START_AGAIN_S = 1.0


class Database:
    """The database in which all producers of the group look up answers: it survives them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._states: dict[str, TransactionState] = {}

    def decide(self, producer: str, key: str, state: TransactionState) -> bool:
        """End a local transaction; False if it has already ended."""
        if key in self._states:
            return False
        self._states[key] = state
        commits = state is TransactionState.COMMIT
        self._world.history.add(TransactionDecided(self._world.now_us, producer, key, commits))
        return True

    async def check(self, message: MessageView) -> TransactionState:
        """Answer a broker."""
        return self._states.get(key_of(message.body) or "", TransactionState.UNKNOWN)


class TransactingProducer:
    """One producer with transactions, across its successive processes."""

    def __init__(self, world: World, name: str, deeds: Sequence[Deed], database: Database) -> None:
        self.name = name
        self._world = world
        self._deeds = deeds
        self._database = database
        self._producer: TransactionProducer | None = None
        self._started = asyncio.Event()
        self._session = world.client(name)
        self.crash_broker: Callable[[str, int], None] | None = None
        """Lets a broker die at one of the next changes on its disk, if that is planned."""
        self._key = ""
        """Of the running transaction."""
        self._lives = 0

    async def run(self) -> None:
        """Run all transactions."""
        await self._start()
        for deed in self._deeds:
            await asyncio.sleep(deed.pause_s)
            await self._do(deed)

    async def close(self) -> None:
        """Stop cleanly."""
        if self._producer is not None:
            await self._producer.close()

    async def crash(self) -> None:
        """Die and restart as another process; the running local transaction is lost."""
        producer, session = self._producer, self._session
        self._producer = None
        self._started.clear()
        self._lives += 1
        self._world.kill_client(session)
        if self._key:
            self._database.decide(self.name, self._key, TransactionState.ROLLBACK)
        if producer is not None:
            await producer.close()
        self._session = self._world.client(self.name)
        await self._start()

    async def _start(self) -> None:
        life = self._lives
        while life == self._lives and self._producer is None:
            producer = TransactionProducer(
                GROUP, check=self._database.check, session=self._session, hooks=[Tries(self.tried)]
            )
            try:
                await producer.start()
            except TurbopumpError:
                # No name server answers.
                await asyncio.sleep(_START_AGAIN_S)
            else:
                if life != self._lives:
                    # It died meanwhile.
                    await producer.close()
                    return
                self._producer = producer
                self._started.set()

    def tried(self) -> None:
        """Record that a half message is sent."""
        self._note(SendTried(self._world.now_us, self.name, self._key))

    # --- one transaction --------------------------------------------------------------------------

    async def _do(self, deed: Deed) -> None:
        await self._started.wait()
        producer = self._producer
        assert producer is not None, "started"
        life, self._key = self._lives, deed.key
        self._note(SendBegan(self._world.now_us, self.name, deed.key, PLAIN))
        transaction = producer.transaction(Message(PLAIN, body_of(deed.key, deed.size)))
        try:
            await transaction.begin()
        except TurbopumpError as error:
            self._note(SendFailed(self._world.now_us, self.name, deed.key, type(error).__name__))
            self._database.decide(self.name, deed.key, TransactionState.ROLLBACK)
        else:
            self._note_half(deed.key, transaction)
            await asyncio.sleep(deed.work_s)
            await self._finish(deed, transaction, life)
        self._key = ""

    async def _finish(self, deed: Deed, transaction: Transaction, life: int) -> None:
        if deed.ending is Ending.DIES_BEFORE and life == self._lives:
            await self._die()
            return
        state = TransactionState.COMMIT if deed.ending.commits else TransactionState.ROLLBACK
        if not self._database.decide(self.name, deed.key, state):
            # The process died meanwhile, and its local transaction with it.
            return
        match deed.ending:
            case Ending.COMMITS | Ending.ROLLS_BACK:
                if deed.crash_at_change and self.crash_broker is not None:
                    self.crash_broker(transaction.receipt.queue.broker, deed.crash_at_change)
                await transaction.end(state)
            case Ending.DIES_AFTER:
                await self._die()
            case _:
                await transaction.unknown()

    async def _die(self) -> None:
        kind = FaultKind.KILL_PRODUCER.value
        self._note(FaultBegan(self._world.now_us, kind, self.name, "in a transaction"))
        await self.crash()

    def _note_half(self, key: str, transaction: Transaction) -> None:
        receipt = transaction.receipt
        queue = MessageQueue(HALF_TOPIC, receipt.queue.broker, 0)
        now_us = self._world.now_us
        self._note(Acknowledged(now_us, self.name, key, queue, receipt.queue_offset))

    def _note(self, event: Event) -> None:
        self._world.history.add(event)


async def resume_given_up(world: World) -> None:
    """Let producers be asked again about all abandoned transactions, as operators do."""
    async with Admin(session=world.session()) as admin:
        try:
            found = [each async for each in admin.transactions.list()]
            for pending in found:
                if pending.state is PendingState.ABANDONED:
                    await admin.transactions.resume(pending)
        except TurbopumpError:
            # It is retried.
            return
