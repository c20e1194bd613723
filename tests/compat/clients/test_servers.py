"""The C++ client with servers that have default settings, stop and return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compat.clients.operating import Operator
from compat.clients.peers import Peers
from servers import standalone

pytestmark = pytest.mark.slow


def test_server_without_any_setting(tmp_path: Path, cpp_of: Callable[[str], Peers]) -> None:
    with standalone(tmp_path / "server") as server, cpp_of(server.nameserver) as cpp:
        peer = cpp.start()
        # Send first: the client retries the route of a missing topic only every 30 s.
        sent = peer.send("Plain", "hello", tags="a")
        Operator(server.nameserver).wait_for_route("Plain")
        peer.call("push", group="plain", topic="Plain", expression="a")
        peer.send("Plain", "not for us", tags="b")
        peer.send("Plain", "later", tags="a", delay_level=1)
        hello, later = cpp.inbox.wait_for("plain", 2)
        assert (hello.body, hello.msg_id, later.body) == ("hello", sent.msg_id, "later")
        assert later.at_ms - later.born_ms >= 1000


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_clients_resume_when_the_server_returns(
    tmp_path: Path, cpp_of: Callable[[str], Peers], is_killed: bool
) -> None:
    with standalone(tmp_path / "server") as first:
        cpp = cpp_of(first.nameserver)
        peer = cpp.start()
        peer.send("Back", "before")
        Operator(first.nameserver).wait_for_route("Back")
        peer.call("push", group="back", topic="Back")
        cpp.inbox.wait_for("back", 1)
        if is_killed:
            first.kill()
    with cpp, standalone(tmp_path / "server", ports=first.ports):
        peer.send("Back", "after")
        # Takes 30 s: the client's pull timeout, even after the connection is lost.
        got = cpp.inbox.wait_for_bodies("back", ["after"])
        # Messages not committed before the kill may be redelivered.
        assert [one.body for one in got if one.body != "before"] == ["after"]
