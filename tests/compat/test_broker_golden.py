"""Requests recorded between Apache RocketMQ's clients and its broker, replayed in order.

Our broker must answer each with the same code, fields, kind of body and body keys. Where it does
not, the list below says why; a request that starts to match must be removed from it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from brokers import BROKER_HOST, Client, running_broker
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire import framing, lenient_json
from turbopump.wire.bodies import TopicConfig
from turbopump.wire.catalogue import RESPONSE_BODIES, BodyKind
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.record import decode_records
from vectors import Vector, frames

BY_NAME = {vector["name"]: vector for vector in frames()}
RECORDED_FROM_MS = 1_794_728_296_982

ACCESS_CONTROL = "needs access control, which brokers do not support"
OTHER_BROKER = "recorded from a broker with other settings, or from a slave"
NOT_RECORDED = "depends on messages, offsets or heartbeats that are not among the vectors"
OTHER_TIMES = "queries a range of store times, and here messages are stored at other times"
REPORTED = "ignores a wrong expression and delivers everything; here the consumer gets an error"
NO_HALF = "resumes the check of any message; here only of half messages, to prevent duplicates"
TOGETHER = "waits for a request that was sent concurrently; here requests are sequential"

DIFFERENCES: dict[str, str] = {
    "pull_bad_sql_in_request.request": REPORTED,
    "resume_check_half.request": NO_HALF,
    "acl_send_wrong_secret.request": ACCESS_CONTROL,
    "acl_send_unknown_access_key.request": ACCESS_CONTROL,
    "acl_send_unsigned.request": ACCESS_CONTROL,
    "acl_cluster_info.request": ACCESS_CONTROL,
    "acl_update_config.request": ACCESS_CONTROL,
    "acl_global_white.request": ACCESS_CONTROL,
    "acl_delete_config.request": ACCESS_CONTROL,
    "send_slave_not_available.request": OTHER_BROKER,
    "pull_no_permission.request": OTHER_BROKER,
    "pull_topic_no_permission.request": OTHER_BROKER,
    "pull_group_not_exist.request": OTHER_BROKER,
    "send_topic_not_auto_created.request": OTHER_BROKER,
    "send_flush_slave_timeout.request": OTHER_BROKER,
    "send_flush_disk_timeout.request": OTHER_BROKER,
    "send_system_busy.request": OTHER_BROKER,
    "pull_hold_then_found.PULL_MESSAGE.request": TOGETHER,
    "query_by_unique_key.request": OTHER_TIMES,
    "push_consumer_start.PULL_MESSAGE.request": NOT_RECORDED,
    "push_consumer_start.PULL_MESSAGE.request#2": NOT_RECORDED,
    "orderly_messages.request": NOT_RECORDED,
    "reset_offset.INVOKE_BROKER_TO_RESET_OFFSET.request": NOT_RECORDED,
    "reset_offset_list_form.INVOKE_BROKER_TO_RESET_OFFSET.request": NOT_RECORDED,
    "pull_offset_moved_too_small.request": NOT_RECORDED,
    "offset_query_not_found_22.request": NOT_RECORDED,
    "pull_held_by_push_consumer_not_found.request": NOT_RECORDED,
    "sql_messages.request": NOT_RECORDED,
    "pull_filter_data_not_exist.request": NOT_RECORDED,
}


def answers_of(name: str) -> Vector | None:
    return BY_NAME.get(name.replace(".request", ".response"))


def recorded() -> list[Vector]:
    return [
        vector
        for vector in frames()
        if vector["direction"] == "client->broker" and vector["kind"] in {"request", "oneway"}
    ]


def as_recorded(name: str) -> Any:
    """Return a handler that answers as the recorded client did."""
    answer = framing.decode(bytes.fromhex(BY_NAME[name]["hex"]))

    def handle(request: Command, _peer: Connection) -> Command:
        return request.answer(answer.code, remark=answer.remark, body=answer.body)

    return handle


CLIENT = {
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: (
        "request_reply.PUSH_REPLY_MESSAGE_TO_CLIENT.response"
    ),
    RequestCode.GET_CONSUMER_RUNNING_INFO: "running_info.to_client.response",
    RequestCode.CONSUME_MESSAGE_DIRECTLY: "consume_directly.to_client.response",
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: (
        "consume_status.GET_CONSUMER_STATUS_FROM_CLIENT.response"
    ),
}


def difference(vector: Vector, answer: Command) -> str | None:
    """Return how our answer differs from the recorded one; None if it does not."""
    expected_vector = answers_of(vector["name"])
    assert expected_vector is not None, vector["name"]
    expected = framing.decode(bytes.fromhex(expected_vector["hex"]))
    if answer.code != expected.code:
        return f"code {answer.code} ({answer.remark}), not {expected.code}"
    ours, theirs = set(answer.ext_fields or {}), set(expected.ext_fields or {})
    if ours != theirs:
        return f"fields {sorted(ours)}, not {sorted(theirs)}"
    return body_difference(vector["code"], whole_body(answer), whole_body(expected))


def body_difference(code: int, ours: bytes, theirs: bytes) -> str | None:
    if bool(ours) != bool(theirs):
        return f"{len(ours)} bytes of body, not {len(theirs)}"
    kind = RESPONSE_BODIES.get(code)
    if not ours or kind is None or kind is BodyKind.PROPERTIES:
        return None
    if kind is BodyKind.RECORDS:
        found, wanted = (
            [(view.topic, view.body) for view in decode_records(body)] for body in (ours, theirs)
        )
        return None if found == wanted else f"messages {found}, not {wanted}"
    members, expected = (set(lenient_json.loads(body)) for body in (ours, theirs))
    return None if members == expected else f"members {sorted(members)}, not {sorted(expected)}"


@virtual_time()
async def test_the_original_s_conversation(tmp_path: Path) -> None:
    loop = virtual_loop()
    loop.clock.jump_wall((RECORDED_FROM_MS - loop.clock.now_ms()) / 1000)
    network = MemoryNetwork()
    router = Router({code: as_recorded(name) for code, name in CLIENT.items()})
    pool = ConnectionPool(network.host("10.0.0.7"), router=router, clock=loop.clock)
    async with running_broker(tmp_path, network) as (broker, _), pool:
        for topic in ("OrderTopic", "FilterTopic", "OldTopic"):
            await broker.state.topics.update(
                TopicConfig(topic_name=topic, read_queue_nums=2, write_queue_nums=2)
            )
        client = Client(pool, f"{BROKER_HOST}:10911")
        found = await converse(client)
    unexpected = {name: how for name, how in found.items() if name not in DIFFERENCES}
    assert not unexpected, "\n".join(f"{name}: {how}" for name, how in unexpected.items())
    assert found.keys() == DIFFERENCES.keys(), DIFFERENCES.keys() - found.keys()


async def converse(client: Client) -> dict[str, str]:
    found = {}
    connection = await client.pool.connection(client.address)
    for vector in recorded():
        command = framing.decode(bytes.fromhex(vector["hex"]))
        if vector["kind"] == "oneway":
            connection.oneway(command)
            await asyncio.sleep(0.01)
            continue
        answer = await connection.request(command, 60_000)
        how = difference(vector, answer) if answers_of(vector["name"]) else None
        if how is not None:
            found[vector["name"]] = how
    return found
