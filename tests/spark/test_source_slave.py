"""Spark reads from a slave: to spare the master, and when the master is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from brokers import Client
from replica_processes import MASTER, SLAVE, ReplicaProcesses, runtime_info, until_copied
from source_topics import fill, made_topic, wait_for
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.codes import ResponseCode

PATIENCE_S = 120
TOPIC = "replicated"
OPTIONS = {"topic": TOPIC, "readFrom": "slave", "startingOffsets": "earliest", "retries": "2"}


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[ReplicaProcesses]:
    with ReplicaProcesses(tmp_path) as processes:
        processes.start(MASTER)
        made_topic(processes.nameserver, TOPIC, queues=2)
        processes.start(SLAVE)
        wait_for(None, lambda: asyncio.run(has_topic(processes.addresses[SLAVE])))
        yield processes


async def has_topic(address: str) -> bool:
    async with ConnectionPool(SocketNetwork()) as pool:
        answer = await Client(pool, address).pull(topic=TOPIC)
    return answer.code != ResponseCode.TOPIC_NOT_EXIST


def delivered(replicas: ReplicaProcesses) -> dict[str, int]:
    """Return how many messages each running broker has served."""
    found = {}
    for name, address in replicas.addresses.items():
        if info := asyncio.run(runtime_info(address)):
            found[name] = int(info["msgGetTotalTodayNow"])
    return found


def send(replicas: ReplicaProcesses, numbers: range) -> None:
    fill(replicas.nameserver, TOPIC, numbers, queues=2)
    asyncio.run(until_copied(replicas))


def numbers(rows: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in rows.select("body").collect())


def table(spark: SparkSession, replicas: ReplicaProcesses) -> list[int]:
    read = spark.read.format("rocketmq").options(nameserver=replicas.nameserver, **OPTIONS)
    return numbers(read.load())


def stream(spark: SparkSession, replicas: ReplicaProcesses, checkpoint: Path) -> list[int]:
    """Read what is new since the last run with this checkpoint."""
    read = spark.readStream.format("rocketmq").options(nameserver=replicas.nameserver, **OPTIONS)
    found: list[int] = []
    query = (
        read.load()
        .writeStream.foreachBatch(lambda rows, _: found.extend(numbers(rows)))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE_S)
    return sorted(found)


def test_the_slave_serves_tables_and_streams_with_and_without_its_master(
    spark: SparkSession, replicas: ReplicaProcesses, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    send(replicas, range(300))
    before = delivered(replicas)
    assert table(spark, replicas) == list(range(300))
    assert delivered(replicas) == {MASTER: before[MASTER], SLAVE: before[SLAVE] + 300}
    assert stream(spark, replicas, checkpoint) == list(range(300))
    assert delivered(replicas) == {MASTER: before[MASTER], SLAVE: before[SLAVE] + 600}

    send(replicas, range(300, 400))
    replicas.kill(MASTER)
    assert table(spark, replicas) == list(range(400))
    assert stream(spark, replicas, checkpoint) == list(range(300, 400))
    assert delivered(replicas) == {SLAVE: before[SLAVE] + 1100}
