"""What hostile and faulty peers do; each raises `Broken` if a server misbehaves."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from torture.messages import WORK
from torture.peer import OTHER_HOST, NoAnswer, Peer, answer_ms, ask, frame, header
from torture.processes import Processes

UPDATE_OFFSET, QUERY_OFFSET, MAX_OFFSET = 15, 14, 30
PULL, HEARTBEAT, LOCK = 11, 34, 41
UPDATE_CONFIG, READ_CONFIG = 25, 26
REGISTER, UNREGISTER, ROUTE, CLUSTER = 103, 104, 105, 106
MIB = 2**20
ANSWER_MS_MAX = 5000.0
"""Deadline for a simple request to a server after an attack."""
_PULLED = (0, 19, 20)
_HASH_MODULUS = 2**61 - 1
"""Python hashes an int modulo this number, so its multiples collide."""


class Broken(Exception):
    """A server misbehaved."""


@dataclass(frozen=True)
class Target:
    """The servers to attack."""

    broker: str
    nameserver: str
    chance: random.Random
    processes: Processes
    watch: Callable[[float], None]
    """Sleeps while the servers' memory is sampled."""

    def require_answers(self) -> None:
        """Raise unless both servers answer soon."""
        for address, code in ((self.broker, READ_CONFIG), (self.nameserver, CLUSTER)):
            try:
                waited_ms = answer_ms(address, code)
            except NoAnswer as error:
                raise Broken(f"no answer: {error}") from error
            if waited_ms > ANSWER_MS_MAX:
                raise Broken(f"{address} answered after {waited_ms:.0f} ms")

    def both(self) -> tuple[str, str]:
        return self.broker, self.nameserver


def malformed_frames(target: Target) -> None:
    """Wrong lengths, invalid headers, and noise."""
    chance = target.chance
    for address in target.both():
        for bad in (
            struct.pack(">i", -1),
            struct.pack(">i", 0),
            struct.pack(">ii", 2**31 - 1, 10),
            struct.pack(">ii", 100, 2**24 - 1) + bytes(96),
            struct.pack(">ii", 4, 0),
            struct.pack(">ii", 12, 8) + b"notjson!",
            struct.pack(">ii", 24, 20) + b'{"code":"x","flag":[',
            struct.pack(">ii", 68, 0x01000040) + chance.randbytes(64),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            chance.randbytes(4096),
        ):
            with Peer(address) as peer:
                peer.write(bad)
                target.watch(0.0)


def half_frames(target: Target) -> None:
    """Connections that announce 15 MiB, send half of it and close."""
    for address in target.both():
        head = header(LOCK)
        announced = struct.pack(">ii", 15 * MIB, len(head)) + head
        opened = []
        for number in range(30):
            peer = Peer(address)
            peer.write(announced + bytes(8 * MIB))
            opened.append(peer)
            if len(opened) > 3:
                opened.pop(0).close()
            if number % 5 == 0:
                target.watch(0.0)
        target.watch(0.5)
        for peer in opened:
            peer.close()


def colliding_keys(target: Target) -> None:
    """JSON objects whose keys share one hash value, for parsers that keep them in hash tables."""
    numbers = ",".join(f"{each * _HASH_MODULUS}:0" for each in range(1, 12_000))
    forms = product((1, '"1"'), repeat=12)
    objects = ",".join(
        "{" + ",".join(f'"f{place}":{each}' for place, each in enumerate(form)) + "}:0"
        for form in forms
    )
    bare = ",".join(f"key{each}:0" for each in range(50_000))
    for inner in (numbers, objects, bare):
        body = ('{"mqSet":[],"x":{' + inner + "}}").encode()
        for address, code in ((target.broker, LOCK), (target.nameserver, REGISTER)):
            with Peer(address) as peer:
                peer.write(frame(code, _forged_fields("colliding"), body))
                target.watch(0.2)
                target.require_answers()


def absurd_numbers(target: Target) -> None:
    """Fields that are too large, negative, fractional or not numeric."""
    names = ("queueId", "offset", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset")
    fields = {"consumerGroup": "absurd", "topic": WORK, "subVersion": 0, "suspendTimeoutMillis": 0}
    with Peer(target.broker) as peer:
        for value in ("9" * 400, "-1", str(2**31), str(2**63), "1e999", "NaN", "", "0x10", "1.5"):
            for code in (
                10,
                PULL,
                12,
                13,
                QUERY_OFFSET,
                UPDATE_OFFSET,
                17,
                29,
                MAX_OFFSET,
                36,
                310,
            ):
                given = {**fields, **dict.fromkeys(names, value), "a": value, "e": value}
                if not peer.write(frame(code, given, b"x")):
                    raise Broken(f"request {code} with {value[:20]!r} closed the connection")
        peer.drain()
    target.require_answers()


def forged_registration(target: Target) -> None:
    """A broker that claims to have 2,147,483,647 queues; a client that sees it must survive."""
    topic = f"forged-{target.chance.randrange(10**9)}"
    fields = _forged_fields(topic)
    config = {"topicName": topic, "readQueueNums": 2**31 - 1, "writeQueueNums": 2**31 - 1}
    table = {"topicConfigTable": {topic: {**config, "perm": 6}}, "dataVersion": {"counter": 1}}
    body = json.dumps({"topicConfigSerializeWrapper": table, "filterServerList": []}).encode()
    ask(target.nameserver, REGISTER, fields, body)
    victim = target.processes.python("victim", "torture.victim", [target.nameserver, topic])
    while victim.returncode is None:
        target.watch(0.1)
    ask(target.nameserver, UNREGISTER, {**fields, "brokerId": 0})
    if victim.returncode != 0:
        raise Broken(
            f"a client of the forged topic exited with {victim.returncode}: "
            f"{victim.log_text()[-300:]}"
        )


def commits_then_close(target: Target) -> None:
    """4,000 commits and a close, without reading any answer: all must be executed."""
    queue = {"topic": WORK, "queueId": 0, "consumerGroup": "closer"}
    end = _offset(target, MAX_OFFSET, queue)
    start = max(0, _offset(target, QUERY_OFFSET, queue))
    answer, _ = ask(target.broker, UPDATE_OFFSET, {**queue, "commitOffset": start})
    if answer["code"] != 0:
        raise Broken(f"a commit was refused: {answer}")
    commits = [min(end, start + each * max(1, end - start) // 4000) for each in range(1, 4001)]
    with Peer(target.broker) as peer:
        peer.write(b"".join(frame(UPDATE_OFFSET, {**queue, "commitOffset": n}) for n in commits))
        peer.wait_until_received()
    deadline = time.monotonic() + 5.0
    while True:
        found = _offset(target, QUERY_OFFSET, queue)
        if found >= end:
            return
        if time.monotonic() > deadline:
            raise Broken(f"commits up to {end} were received, up to {found} carried out")
        target.watch(0.1)


def absurd_offset(target: Target) -> None:
    """A commit of an offset beyond the end of any queue."""
    queue = {"topic": WORK, "queueId": 0, "consumerGroup": "absurd-offset"}
    ask(target.broker, UPDATE_OFFSET, {**queue, "commitOffset": 10**15})
    if _is_known(target, queue) and _offset(target, QUERY_OFFSET, queue) == 10**15:
        raise Broken("an offset of 10**15 was accepted")


def oversized_setting(target: Target) -> None:
    """A setting of 5 MB, which every send response would carry."""
    text = "x" * 5_000_000
    with suppress(NoAnswer):  # Frames of this size may be rejected outright.
        ask(target.broker, UPDATE_CONFIG, body=f"regionId={text}\n".encode())
    _, body = ask(target.broker, READ_CONFIG)
    if len(body) > MIB:
        raise Broken(f"a setting makes the configuration {len(body)} bytes long")


def many_groups(target: Target) -> None:
    """Heartbeats from another host that try to use up all consumer groups."""
    number = target.chance.randrange(10**9)
    for beat in range(12):
        groups = [{"groupName": f"greedy-{number}-{beat}-{each}"} for each in range(1000)]
        body = {"clientID": f"greedy-{number}-{beat}", "consumerDataSet": groups}
        try:
            with Peer(target.broker, OTHER_HOST) as peer:
                peer.ask(HEARTBEAT, body=json.dumps(body).encode())
        except NoAnswer:
            break
        target.watch(0.0)
    group = f"modest-{number}"
    body = {"clientID": group, "consumerDataSet": [{"groupName": group}]}
    pull = {
        "consumerGroup": group, "topic": WORK, "queueId": 0, "queueOffset": 0, "maxMsgNums": 1,
        "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
        "subVersion": 0,
    }  # fmt: skip
    with Peer(target.broker) as peer:
        peer.ask(HEARTBEAT, body=json.dumps(body).encode())
        answer, _ = peer.ask(PULL, pull)
    if answer["code"] not in _PULLED:
        raise Broken(f"no new group after 12 heartbeats: {answer['code']} {answer.get('remark')}")


def deaf_readers(target: Target) -> None:
    """Peers that request much data and read none of it."""
    pull = {
        "consumerGroup": "deaf", "topic": WORK, "queueId": 0, "queueOffset": 0, "maxMsgNums": 32,
        "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
        "subVersion": 0,
    }  # fmt: skip
    peers = [Peer(target.broker) for _ in range(10)]
    for peer in peers:
        peer.write(frame(PULL, pull) * 500)
    target.watch(1.0)
    target.require_answers()
    for peer in peers:
        peer.close()


def idle_connections(target: Target) -> None:
    """Peers that connect and send nothing, or half a frame."""
    for address in target.both():
        peers = [Peer(address) for _ in range(200)]
        for peer in peers[::2]:
            peer.write(frame(READ_CONFIG)[:7])
        target.require_answers()
        for peer in peers:
            peer.close()


ATTACKS = (
    malformed_frames,
    half_frames,
    colliding_keys,
    absurd_numbers,
    forged_registration,
    commits_then_close,
    absurd_offset,
    oversized_setting,
    many_groups,
    deaf_readers,
    idle_connections,
)


def _forged_fields(name: str) -> dict[str, object]:
    return {
        "brokerName": name,
        "brokerAddr": "127.0.0.1:9",
        "clusterName": "forged",
        "haServerAddr": "127.0.0.1:9",
        "brokerId": 0,
    }


def _is_known(target: Target, queue: dict[str, object]) -> bool:
    answer, _ = ask(target.broker, QUERY_OFFSET, queue)
    return bool(answer["code"] == 0)


def _offset(target: Target, code: int, queue: dict[str, object]) -> int:
    answer, _ = ask(target.broker, code, queue)
    return int(answer["extFields"]["offset"]) if answer["code"] == 0 else -1
