"""The session that Spark's callbacks share in one process."""

from __future__ import annotations

import logging

import pytest

from turbopump.client.config import ClientConfig
from turbopump.spark.shared_session import close_shared_sessions, shared_session
from turbopump.testing.server import RunningServer


def test_a_closed_session_is_replaced_by_a_new_one(turbopump_server: RunningServer) -> None:
    config = ClientConfig(turbopump_server.nameserver)
    first = shared_session(config)
    assert shared_session(config) is first
    close_shared_sessions()
    assert not first.session.is_running
    second = shared_session(config)
    assert second is not first
    assert second.session.is_running
    close_shared_sessions()


def test_closing_needs_no_cluster(caplog: pytest.LogCaptureFixture) -> None:
    shared_session(ClientConfig("127.0.0.1:1"))
    with caplog.at_level(logging.WARNING):
        close_shared_sessions()
        close_shared_sessions()
    assert not caplog.records
