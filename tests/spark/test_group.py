"""A streaming query as a member of a consumer group, beside other members."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from servers import Standalone
from source_topics import fill, fresh_topic, made_topic, wait_for
from turbopump.admin import Admin
from turbopump.client.blocking import PushConsumer
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.wire.record import MessageView

PATIENCE_S = 120


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def topic(broker: Standalone) -> str:
    return made_topic(broker.nameserver, fresh_topic(), queues=2)


def start(
    spark: SparkSession, broker: Standalone, checkpoint: Path, *, is_once: bool, **options: str
) -> StreamingQuery:
    rows = (
        spark.readStream.format("rocketmq")
        .options(nameserver=broker.nameserver, **options)
        .load()
        .select("body")
    )
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    return writer.trigger(availableNow=True).start() if is_once else writer.start()


def rows_of(query: StreamingQuery) -> int:
    assert query.awaitTermination(PATIENCE_S)
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def test_the_query_commits_what_it_has_read_as_the_groups_offset(
    spark: SparkSession, broker: Standalone, topic: str, group: str, tmp_path: Path
) -> None:
    fill(broker.nameserver, topic, range(300))
    options = {"topic": topic, "group": group, "maxOffsetsPerTrigger": "120"}
    first = start(
        spark, broker, tmp_path / "a", is_once=True, startingOffsets="earliest", **options
    )
    assert rows_of(first) == 300
    with Admin(broker.nameserver) as admin:
        progress = admin.groups.progress(group, topic)
        assert progress.lag == 0
        assert [each.committed for each in progress.queues] == [150, 150]
        fill(broker.nameserver, topic, range(300, 400))
        assert admin.groups.progress(group, topic).lag == 100
        # A new checkpoint starts at the group's offsets.
        assert rows_of(start(spark, broker, tmp_path / "b", is_once=True, **options)) == 100
        assert admin.groups.progress(group, topic).lag == 0
    silent = options | {"commitOffsets": "false", "startingOffsets": "earliest"}
    assert rows_of(start(spark, broker, tmp_path / "c", is_once=True, **silent)) == 400


def test_a_running_query_is_a_member_until_it_stops(
    spark: SparkSession, broker: Standalone, topic: str, group: str, tmp_path: Path
) -> None:
    query = start(spark, broker, tmp_path, is_once=False, topic=topic, group=group)
    with Admin(broker.nameserver) as admin:
        try:
            wait_for(query, lambda: members(admin, group) == 1)
            assert dict(admin.groups.members(group).subscriptions) == {topic: "*"}
        finally:
            query.stop()
        wait_for(None, lambda: members(admin, group) == 0)


def members(admin: Admin, group: str) -> int:
    return sum(each.members for each in admin.groups.list() if each.settings.group == group)


def test_push_consumers_keep_their_group_to_themselves(
    spark: SparkSession, broker: Standalone, topic: str, group: str, tmp_path: Path
) -> None:
    fill(broker.nameserver, topic, range(50))

    def handle(_messages: Sequence[MessageView], _context: ConsumeContext) -> ConsumeResult:
        return ConsumeResult.SUCCESS

    options = {"topic": topic, "group": group, "startingOffsets": "earliest"}
    with (
        PushConsumer(group, handle, nameserver=broker.nameserver, subscriptions={topic: "*"}),
        Admin(broker.nameserver) as admin,
    ):
        wait_for(None, lambda: members(admin, group) == 1)
        client_id = admin.groups.members(group).members[0].connection.client_id
        refused = start(spark, broker, tmp_path / "a", is_once=True, **options)
        with pytest.raises(StreamingQueryException) as raised:
            refused.awaitTermination(PATIENCE_S)
        text = str(raised.value)
        assert "GroupInUse" in text
        assert f"group '{group}' already has push consumers: {client_id}" in text
        assert "allowSharedGroup=true" in text
        shared = options | {"allowSharedGroup": "true"}
        assert rows_of(start(spark, broker, tmp_path / "b", is_once=True, **shared)) == 50
        assert members(admin, group) == 1
