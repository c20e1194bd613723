"""The route table against a simple model that follows the protocol's text, one table for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from example_counts import at_most
from nameserver_peers import validate
from turbopump.nameserver.routes import SILENCE_MAX_MS, Registered, Registration, RouteTable
from turbopump.wire.bodies import DataVersion, TopicConfig

names = st.sampled_from(["a", "b"])
ids = st.sampled_from([0, 0, 1, 2])
addresses = st.sampled_from(["p:1", "q:1", "r:1", "s:1"])
clusters = st.sampled_from(["c", "d"])
topic_names = st.sampled_from(["T", "U", "V"])
versions = st.integers(0, 1).map(lambda counter: DataVersion(counter=counter))
topic_tables = st.dictionaries(topic_names, st.sampled_from([0, 4, 6, 7]))
servers = st.one_of(st.none(), st.lists(st.sampled_from(["f:1", "g:1"]), unique=True))


@dataclass
class Model:
    """Every fact separately, looked up by a scan of all of them."""

    place: dict[str, tuple[str, int]] = field(default_factory=dict)
    version: dict[str, DataVersion] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    filters: dict[str, list[str]] = field(default_factory=dict)
    cluster: dict[str, str] = field(default_factory=dict)
    perm: dict[tuple[str, str], int] = field(default_factory=dict)

    def forget(self, address: str) -> None:
        if address not in self.place:
            return
        name, _ = self.place.pop(address)
        for facts in (self.version, self.seen, self.filters):
            facts.pop(address, None)
        if all(other != name for other, _ in self.place.values()):
            del self.cluster[name]
            self.perm = {key: perm for key, perm in self.perm.items() if key[1] != name}

    def holder(self, name: str, broker_id: int) -> str | None:
        found = [address for address, place in self.place.items() if place == (name, broker_id)]
        return found[0] if found else None


class Routes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.routes = RouteTable()
        self.model = Model()
        self.now_ms = 0
        self.seen: tuple[int, object] | None = None

    @rule(
        name=names,
        broker_id=ids,
        address=addresses,
        cluster=clusters,
        version=versions,
        topics=topic_tables,
        filters=servers,
    )
    def register(
        self,
        name: str,
        broker_id: int,
        address: str,
        cluster: str,
        version: DataVersion,
        topics: dict[str, int],
        filters: list[str] | None,
    ) -> None:
        model = self.model
        is_changed = model.version.get(address) != version
        is_first = model.holder(name, broker_id) is None
        kept_filters = model.filters.get(address, [])
        if model.place.get(address, (name, 0))[0] != name:
            model.forget(address)
        displaced = model.holder(name, broker_id)
        model.place[address] = (name, broker_id)
        if displaced not in (None, address):
            model.forget(displaced)
        model.version[address] = version
        model.seen[address] = self.now_ms
        model.filters[address] = kept_filters if filters is None else filters
        model.cluster[name] = cluster
        if broker_id == 0 and (is_first or is_changed):
            model.perm.update({(topic, name): perm for topic, perm in topics.items()})

        outcome = self.routes.register(
            Registration(
                name=name,
                address=address,
                cluster=cluster,
                broker_id=broker_id,
                ha_address=f"ha-{address}",
                version=version,
                topics={t: TopicConfig(topic_name=t, perm=perm) for t, perm in topics.items()},
                filter_servers=None if filters is None else tuple(filters),
            ),
            self.now_ms,
        )
        expected = None if broker_id == 0 else model.holder(name, 0)
        assert isinstance(outcome, Registered)
        assert outcome.answer.master_addr == expected

    @rule(address=addresses)
    def remove(self, address: str) -> None:
        assert self.routes.remove(address) == (address in self.model.place)
        self.model.forget(address)

    @rule(name=names, broker_id=ids, address=addresses)
    def unregister(self, name: str, broker_id: int, address: str) -> None:
        is_meant = self.model.place.get(address) == (name, broker_id)
        assert self.routes.unregister(name, broker_id, address) == is_meant
        if is_meant:
            self.model.forget(address)

    @rule(address=addresses, version=versions)
    def compare_version(self, address: str, version: DataVersion) -> None:
        known = self.routes.known_version(address, version, self.now_ms)
        assert known == self.model.version.get(address)
        if known == version:
            self.model.seen[address] = self.now_ms

    @rule(passed_ms=st.sampled_from([1, 30_000, SILENCE_MAX_MS, SILENCE_MAX_MS + 1]))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        silent = {a for a, seen in self.model.seen.items() if self.now_ms - seen > SILENCE_MAX_MS}
        assert set(self.routes.expire(self.now_ms)) == silent
        for address in silent:
            self.model.forget(address)

    @rule(name=names, is_added=st.booleans())
    def change_permission(self, name: str, is_added: bool) -> None:
        mine = {key: perm for key, perm in self.model.perm.items() if key[1] == name}
        change = self.routes.add_write_permission if is_added else self.routes.wipe_write_permission
        assert change(name) == len(mine)
        self.model.perm.update({key: 6 if is_added else perm & ~2 for key, perm in mine.items()})

    @precondition(lambda self: self.model.perm)
    @rule(topic=topic_names, cluster=st.one_of(st.none(), clusters))
    def delete_topic(self, topic: str, cluster: str | None) -> None:
        self.routes.delete_topic(topic, cluster)
        self.model.perm = {
            (t, name): perm
            for (t, name), perm in self.model.perm.items()
            if t != topic or cluster not in (None, self.model.cluster[name])
        }

    @invariant()
    def is_consistent(self) -> None:
        validate(self.routes)

    @invariant()
    def routes_agree(self) -> None:
        topics = {topic for topic, _ in self.model.perm}
        assert set(self.routes.topics()) == topics
        for topic in ("T", "U", "V"):
            route = self.routes.route(topic)
            assert (route is not None) == (topic in topics)
            if route is None:
                continue
            perms = {n: perm for (t, n), perm in self.model.perm.items() if t == topic}
            assert {queue.broker_name: queue.perm for queue in route.queue_datas} == perms
            found = {
                address: (broker.broker_name, broker_id)
                for broker in route.broker_datas
                for broker_id, address in broker.broker_addrs.items()
            }
            assert found == {a: place for a, place in self.model.place.items() if place[0] in perms}
            filters = {a: list(self.model.filters[a]) for a in found if self.model.filters[a]}
            assert route.filter_server_table == filters

    @invariant()
    def answers_change_only_with_the_count_of_changes(self) -> None:
        routes = tuple(self.routes.route(topic) for topic in ("T", "U", "V"))
        seen = (self.routes.changes, routes)
        if self.seen is not None and self.seen[0] == seen[0]:
            assert self.seen == seen
        self.seen = seen

    @invariant()
    def clusters_agree(self) -> None:
        info = self.routes.cluster_info()
        assert {n: data.cluster for n, data in info.broker_addr_table.items()} == self.model.cluster
        listed = {n: cluster for cluster, ns in info.cluster_addr_table.items() for n in ns}
        assert listed == self.model.cluster
        for cluster in ("c", "d"):
            members = {n for n, c in self.model.cluster.items() if c == cluster}
            topics = {topic for topic, name in self.model.perm if name in members}
            assert set(self.routes.topics_in(cluster)) == topics


Routes.TestCase.settings = settings(max_examples=at_most(60), stateful_step_count=30, deadline=None)
TestRoutes = Routes.TestCase
