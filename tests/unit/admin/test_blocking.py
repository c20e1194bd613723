"""Administration without an event loop, over real sockets."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import pytest

from turbopump import Message, aio
from turbopump.admin import Admin, Earliest, GroupSettings
from turbopump.errors import NotRunning, NotThere
from turbopump.testing import running_server
from turbopump.wire.record import MessageView


def test_everything_can_be_called_without_a_loop(tmp_path: Path) -> None:
    with running_server(tmp_path, brokers=("a",)) as server:
        nameserver = server.nameserver
        with Admin(nameserver) as admin:
            admin.topics.create("T", queues=1)
            admin.groups.create(GroupSettings("g"))
            for body in (b"1", b"2"):
                admin.messages.send(Message("T", body))
            admin.offsets.reset("g", "T", Earliest())
            assert admin.groups.progress("g").lag == 2
            tail = admin.messages.tail("T", start=Earliest())
            assert [next(tail).body, next(tail).body] == [b"1", b"2"]
            tail.close()
            read = admin.messages.tail("T", start=Earliest(), follow=False)
            assert len(list(read)) == 2
            assert list(admin.dead_letters.redrive("g")) == []
            assert admin.configuration.broker("a")["brokerName"] == "a"
            assert [cluster.brokers for cluster in admin.clusters.list()] == [("a",)]
            with pytest.raises(NotThere, match="no topic 'U'"):
                list(admin.messages.tail("U"))
        with pytest.raises(NotRunning, match="this Admin is not running"):
            admin.topics.names()


def test_iterators_may_outlive_their_admin(tmp_path: Path) -> None:
    """An exception that leaves the `with` block keeps them, and closes them later."""
    with running_server(tmp_path) as server:
        with Admin(server.nameserver) as admin:
            admin.topics.create("T", queues=1)
            for _ in range(3):
                admin.messages.send(Message("T", b"x"))
            unread, closed = (admin.messages.tail("T", start=Earliest()) for _ in range(2))
            assert next(unread).body == next(closed).body == b"x"
        closed.close()
        with pytest.raises(NotRunning, match="this Admin is not running"):
            next(unread)


def test_nothing_is_missing_in_the_blocking_form() -> None:
    """A new method of a subject must be added here, too."""
    inner = aio.Admin("127.0.0.1:9876")
    outer = Admin("127.0.0.1:9876")
    for subject in vars(inner):
        if subject.startswith("_"):
            continue
        wanted = {name for name in dir(getattr(inner, subject)) if not name.startswith("_")}
        assert wanted - {"nodes_of", "consumers_on", "offsets_on"} <= set(
            dir(getattr(outer, subject))
        ), subject


if TYPE_CHECKING:

    def _types_are_those_of_the_asynchronous_methods(admin: Admin) -> None:
        assert_type(admin.topics.names(), list[str])
        assert_type(admin.groups.settings("g"), dict[str, GroupSettings])
        assert_type(admin.messages.tail("T"), Generator[MessageView, None, None])
        admin.topics.create("T", queues="many")  # type: ignore[arg-type]
