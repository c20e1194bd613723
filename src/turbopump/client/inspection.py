"""What operators can inspect in a running consumer, and trigger."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from dataclasses import fields

from turbopump.client.consumption import Consumption
from turbopump.client.delivery.listener import Call, Listener
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult, Verdict
from turbopump.client.push_config import PushSettings
from turbopump.client.session import Session
from turbopump.machine.threads import DaemonThreads
from turbopump.version import __version__
from turbopump.wire.bodies import ConsumeType, DirectConsumption, RunningInfo, Subscription
from turbopump.wire.record import MessageView

_DIRECT_RESULTS = {
    ConsumeResult.SUCCESS: "CR_SUCCESS",
    ConsumeResult.RETRY_LATER: "CR_LATER",
    ConsumeResult.COMMIT: "CR_COMMIT",
    ConsumeResult.ROLLBACK: "CR_ROLLBACK",
}


def running_info(
    running: Consumption,
    session: Session,
    subscriptions: list[Subscription],
    settings: PushSettings,
    *,
    started_ms: int,
    with_stacks: bool,
) -> RunningInfo:
    """Return queues, settings, rates and subscriptions, as the protocol reports them."""
    now_ms = session.clock.monotonic_ms()
    wall_ms = session.clock.now_ms() - now_ms
    positions = running.offsets.positions
    return RunningInfo(
        jstack=stacks() if with_stacks else None,
        mq_table={
            queue: owned.info(positions.of(queue) or 0, wall_ms)
            for queue, owned in running.owned.items()
        },
        properties={
            "PROP_NAMESERVER_ADDR": ";".join(session.name_servers.current),
            "PROP_THREADPOOL_CORE_SIZE": str(running.delivery.threads),
            "PROP_CONSUMEORDERLY": str(running.delivery.is_orderly).lower(),
            "PROP_CONSUME_TYPE": str(ConsumeType.PUSH),
            "PROP_CLIENT_VERSION": f"turbopump {__version__}",
            "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
            **_described(settings),
        },
        status_table={
            each.topic: running.stats.rates(each.topic, now_ms) for each in subscriptions
        },
        subscription_set=subscriptions,
    )


def stacks() -> str:
    """Return the current stack of every thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to see them
    )


async def direct_consumption(
    listener: Listener, messages: list[MessageView], context: ConsumeContext, *, is_orderly: bool
) -> DirectConsumption:
    """Call the listener with messages outside any queue, and return its result."""
    call = Call(messages, context)
    if listener.is_async:
        verdict = await listener.acall(call)
    else:
        threads = DaemonThreads(1, "turbopump-direct")
        loop = asyncio.get_running_loop()
        calling = loop.run_in_executor(threads, listener.call, call)
        threads.shutdown(wait=False)
        verdict = await calling
    return DirectConsumption(
        auto_commit=context.auto_commit,
        consume_result=_direct_result(verdict),
        order=is_orderly,
        remark=None if verdict.error is None else repr(verdict.error),
        spent_time_millis=verdict.spent_ms,
    )


def _direct_result(verdict: Verdict) -> str:
    if verdict.error is not None:
        return "CR_THROW_EXCEPTION"
    return "CR_RETURN_NULL" if verdict.is_none else _DIRECT_RESULTS[verdict.result]


def _described(settings: PushSettings) -> dict[str, str]:
    plain = ("concurrency", "batch_size", "max_attempts")
    return {name: str(getattr(settings, name)) for name in plain} | {
        f"{type(each).__name__}.{field.name}": str(getattr(each, field.name))
        for each in (settings.flow, settings.pulling, settings.listening)
        for field in fields(each)
        if field.init
    }
