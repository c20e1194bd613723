"""`Admin`: everything that operators do, by subject."""

from __future__ import annotations

from collections.abc import Sequence

from turbopump.admin.cluster import Clusters
from turbopump.admin.configuration import Configuration
from turbopump.admin.dead_letters import DeadLetters
from turbopump.admin.groups import Groups
from turbopump.admin.messages import Messages
from turbopump.admin.offsets import Offsets
from turbopump.admin.servers import Servers
from turbopump.admin.topics import Topics
from turbopump.admin.transactions import Transactions
from turbopump.client.config import ClientConfig
from turbopump.client.life_cycle import LifeCycle
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, custom_session


class Admin(LifeCycle):
    """Administers all clusters that some name servers know.

    ::

        async with Admin("127.0.0.1:9876") as admin:
            await admin.topics.create("orders", queues=8)
            print((await admin.groups.progress("billing")).lag)

    It joins no group, and changes no committed offset unless asked to. Pass ``session`` to
    share one, or to run in virtual time.
    """

    def __init__(
        self,
        nameserver: str | Sequence[str] = "",
        *,
        client: ClientConfig | None = None,
        session: Session | None = None,
    ) -> None:
        self._config = client_config(nameserver, "", client, session)
        self._is_given = session is not None
        self._is_running = False
        self._build(session or Session(self._config))

    def _build(self, session: Session) -> None:
        self._session = session
        self._servers = servers = Servers(session)
        self.clusters = Clusters(servers)
        self.topics = Topics(servers)
        self.groups = Groups(servers, self.topics)
        self.offsets = Offsets(servers, self.topics, self.groups)
        self.messages = Messages(servers, self.topics)
        self.dead_letters = DeadLetters(servers, self.topics, self.messages)
        self.transactions = Transactions(servers, self.messages)
        self.configuration = Configuration(servers)

    async def start(self) -> None:
        """Start; connects on the first request."""
        if not self._is_running:
            # Known only now, since not before is it certain which event loop it runs in.
            other = None if self._is_given else custom_session(self._config)
            if other is not None:
                self._build(other)
            await self._session.start()
            self._is_running = True

    async def close(self) -> None:
        """Close the connections; waits for a purge whose caller was cancelled."""
        if self._is_running:
            self._is_running = False
            try:
                await self._servers.finish()
            finally:
                await self._session.close()
