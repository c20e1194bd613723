"""Administration while a master is down: its slave answers queries, changes need the master."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas import MASTER, replicas
from turbopump.admin.administration import Admin
from turbopump.admin.groups import GroupSettings
from turbopump.errors import NotThere
from turbopump.message import Message
from turbopump.testing import virtual_time


@virtual_time()
async def test_a_slave_answers_queries_and_rejects_changes(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, Admin(session=cluster.session()) as admin:
        await cluster.make_topic("T", MASTER, 1)
        (receipt,) = await cluster.send(Message("T", b"x", keys=["order-1"]))
        cluster.master.state.offsets.commit("g", "T", 0, 1)
        await admin.groups.create(GroupSettings("g"))
        await cluster.copy()
        await cluster.slave.state.groups.update(cluster.master.state.groups.table["g"])
        await cluster.crash(MASTER)

        (by_id,) = await admin.messages.find(receipt.offset_id)
        assert by_id.body == b"x"
        (by_key,) = await admin.messages.by_key("T", "order-1")
        assert by_key.offset_id == receipt.offset_id
        (unique,) = await admin.messages.find(receipt.message_id, "T")
        assert unique.offset_id == receipt.offset_id
        assert "T" in {each.name for each in await admin.topics.list()}
        assert "g" in {each.settings.group for each in await admin.groups.list()}
        assert (await admin.topics.status("T")).messages == 1
        assert (await admin.groups.progress("g")).lag == 0

        with pytest.raises(NotThere, match="master broker"):
            await admin.topics.create("New")
        with pytest.raises(NotThere, match="master broker"):
            await admin.groups.create(GroupSettings("new"))


@virtual_time()
async def test_an_id_of_another_broker_finds_nothing(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, Admin(session=cluster.session()) as admin:
        (receipt,) = await cluster.send(Message("T", b"x"))
        await cluster.copy()
        elsewhere = "0A09090900002A9F" + receipt.offset_id[16:]
        assert await admin.messages.by_offset_id(elsewhere) is None
