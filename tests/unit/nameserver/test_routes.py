"""The route table, rule by rule."""

from __future__ import annotations

from collections.abc import Iterable

from nameserver_peers import validate
from turbopump.nameserver.routes import (
    SILENCE_MAX_MS,
    Registered,
    Registration,
    RouteTable,
    TableFull,
)
from turbopump.wire.bodies import BrokerData, DataVersion, QueueData, TopicConfig, TopicRoute
from turbopump.wire.headers import RegisterBrokerAnswer

NOW = 1000
V1, V2 = DataVersion(counter=1, timestamp=1), DataVersion(counter=2, timestamp=2)


def topics_of(names: Iterable[str], perm: int = 6) -> dict[str, TopicConfig]:
    return {name: TopicConfig(topic_name=name, perm=perm) for name in names}


def broker(
    name: str = "a",
    broker_id: int = 0,
    *,
    address: str | None = None,
    cluster: str = "c",
    version: DataVersion = V1,
    topics: dict[str, TopicConfig] | None = None,
    filter_servers: tuple[str, ...] | None = (),
) -> Registration:
    address = address or f"{name}{broker_id}:1"
    return Registration(
        name=name,
        address=address,
        cluster=cluster,
        broker_id=broker_id,
        ha_address=f"ha-{address}",
        version=version,
        topics=topics_of(["T"]) if topics is None else topics,
        filter_servers=filter_servers,
    )


def table(*registrations: Registration) -> RouteTable:
    routes = RouteTable()
    for registration in registrations:
        routes.register(registration, NOW)
        validate(routes)
    return routes


def perms(routes: RouteTable, topic: str = "T") -> dict[str, int]:
    route = routes.route(topic)
    return {} if route is None else {queue.broker_name: queue.perm for queue in route.queue_datas}


def addresses(routes: RouteTable, name: str = "a") -> dict[int, str]:
    found = routes.cluster_info().broker_addr_table.get(name)
    return {} if found is None else found.broker_addrs


def test_a_route_lists_queues_and_all_replicas() -> None:
    config = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=2, topic_sys_flag=1)
    routes = table(broker(broker_id=1), broker(topics={"T": config}))
    assert routes.route("T") == TopicRoute(
        broker_datas=[
            BrokerData(broker_addrs={0: "a0:1", 1: "a1:1"}, broker_name="a", cluster="c")
        ],
        queue_datas=[
            QueueData(
                broker_name="a", perm=6, read_queue_nums=3, write_queue_nums=2, topic_sys_flag=1
            )
        ],
    )


def test_unknown_topic_has_no_route() -> None:
    assert table(broker()).route("other") is None


def test_topic_on_several_brokers() -> None:
    routes = table(broker("a"), broker("b"), broker("c", topics=topics_of(["other"])))
    assert perms(routes) == {"a": 6, "b": 6}


def test_a_slave_registers_no_topics() -> None:
    assert table(broker(broker_id=1)).topics() == []


def test_slave_gets_the_address_of_its_master() -> None:
    routes = table(broker())
    master = RegisterBrokerAnswer(master_addr="a0:1", ha_server_addr="ha-a0:1")
    assert routes.register(broker(broker_id=1), NOW) == Registered(master)
    assert routes.register(broker(), NOW) == Registered(RegisterBrokerAnswer())
    assert routes.register(broker("b", broker_id=1), NOW) == Registered(RegisterBrokerAnswer())


def test_same_version_changes_nothing() -> None:
    routes = table(broker())
    routes.register(broker(topics=topics_of(["T", "U"], perm=2)), NOW)
    assert routes.topics() == ["T"]
    assert perms(routes) == {"a": 6}


def test_an_identical_registration_is_a_heartbeat_and_no_change() -> None:
    routes = table(broker())
    changes = routes.changes
    routes.register(broker(), NOW + SILENCE_MAX_MS)
    assert routes.changes == changes
    assert routes.expire(NOW + SILENCE_MAX_MS + 1) == []
    assert routes.expiry_min_ms(0) == NOW + 2 * SILENCE_MAX_MS
    routes.register(broker(cluster="d"), NOW)
    assert routes.changes > changes


def test_new_version_replaces_and_adds_but_never_removes() -> None:
    routes = table(broker(topics=topics_of(["T", "U"])))
    routes.register(broker(version=V2, topics=topics_of(["T", "V"], perm=4)), NOW)
    assert routes.topics() == ["T", "U", "V"]
    assert perms(routes, "T") == {"a": 4}
    assert perms(routes, "U") == {"a": 6}


def test_a_lower_version_is_a_change_too() -> None:
    routes = table(broker(version=V2))
    routes.register(broker(version=V1, topics=topics_of(["U"])), NOW)
    assert routes.topics() == ["T", "U"]


def test_a_promoted_slave_drops_its_old_id_and_registers_its_topics() -> None:
    routes = table(broker(broker_id=1, address="x:1"))
    routes.register(broker(broker_id=0, address="x:1"), NOW)
    validate(routes)
    assert addresses(routes) == {0: "x:1"}
    assert routes.topics() == ["T"]


def test_a_master_at_a_new_address_replaces_the_old_one() -> None:
    routes = table(broker(address="old:1"))
    assert routes.register(broker(address="new:1"), NOW) == Registered(
        RegisterBrokerAnswer(), displaced="old:1"
    )
    assert routes.register(broker(address="new:1"), NOW) == Registered(RegisterBrokerAnswer())
    assert addresses(routes) == {0: "new:1"}
    assert "old:1" not in routes
    assert not routes.remove("old:1")
    assert perms(routes) == {"a": 6}


def test_address_under_a_new_name_leaves_the_old_name() -> None:
    routes = table(broker("a", address="x:1"), broker("b", address="x:1"))
    assert perms(routes) == {"b": 6}
    assert routes.cluster_info().cluster_addr_table == {"c": ["b"]}


def test_broker_that_changes_its_cluster_leaves_the_old() -> None:
    routes = table(broker(cluster="one"), broker(cluster="two"))
    assert routes.cluster_info().cluster_addr_table == {"two": ["a"]}


def test_filter_servers_by_address() -> None:
    routes = table(broker(filter_servers=("f:1", "f:2")), broker("b"))
    route = routes.route("T")
    assert route is not None
    assert route.filter_server_table == {"a0:1": ["f:1", "f:2"]}


def test_filter_servers_remain_unless_given_and_are_removed_when_empty() -> None:
    routes = table(broker(filter_servers=("f:1",)), broker(filter_servers=None))
    route = routes.route("T")
    assert route is not None
    assert route.filter_server_table == {"a0:1": ["f:1"]}
    routes.register(broker(filter_servers=()), NOW)
    route = routes.route("T")
    assert route is not None
    assert route.filter_server_table == {}


def test_broker_is_removed_when_silent_for_too_long() -> None:
    routes = table(broker("a"))
    routes.register(broker("b"), NOW + 1)
    assert routes.expire(NOW + SILENCE_MAX_MS) == []
    assert routes.expire(NOW + SILENCE_MAX_MS + 1) == ["a0:1"]
    assert perms(routes) == {"b": 6}


def test_a_version_query_counts_as_a_heartbeat() -> None:
    routes = table(broker())
    assert routes.known_version("a0:1", V1, NOW + 100) == V1
    assert routes.expire(NOW + SILENCE_MAX_MS + 100) == []


def test_a_query_with_another_version_is_not_a_heartbeat() -> None:
    routes = table(broker())
    assert routes.known_version("a0:1", V2, NOW + 100) == V1
    assert routes.expire(NOW + SILENCE_MAX_MS + 1) == ["a0:1"]


def test_a_version_query_of_an_unknown_broker() -> None:
    assert table().known_version("x:1", V1, NOW) is None


def test_topics_remain_while_a_slave_is_left() -> None:
    routes = table(broker(), broker(broker_id=1))
    assert routes.remove("a0:1")
    validate(routes)
    assert addresses(routes) == {1: "a1:1"}
    assert perms(routes) == {"a": 6}


def test_a_returning_master_registers_again() -> None:
    routes = table(broker(), broker(broker_id=1))
    routes.remove("a0:1")
    routes.register(broker(topics=topics_of(["T"], perm=4)), NOW)
    assert perms(routes) == {"a": 4}


def test_removing_the_last_address_removes_the_name_and_its_topics() -> None:
    routes = table(broker("a", topics=topics_of(["T", "U"])), broker("b"))
    assert routes.remove("a0:1")
    validate(routes)
    assert routes.topics() == ["T"]
    assert routes.cluster_info().cluster_addr_table == {"c": ["b"]}
    assert routes.remove("b0:1")
    assert routes.topics() == []
    assert routes.cluster_info().cluster_addr_table == {}


def test_unregistering_removes_immediately() -> None:
    routes = table(broker())
    assert routes.unregister("a", 0, "a0:1")
    assert routes.route("T") is None
    assert not routes.unregister("a", 0, "a0:1")


def test_unregistering_a_predecessor_does_not_affect_its_successor() -> None:
    routes = table(broker(address="old:1"), broker(address="new:1"))
    assert not routes.unregister("a", 0, "old:1")
    assert not routes.unregister("a", 1, "new:1")
    assert addresses(routes) == {0: "new:1"}


def test_write_permission_is_wiped_until_the_broker_registers_a_change() -> None:
    routes = table(broker(topics=topics_of(["T", "U"], perm=7)), broker("b"))
    assert routes.wipe_write_permission("a") == 2
    assert perms(routes) == {"a": 5, "b": 6}
    routes.register(broker(topics=topics_of(["T"])), NOW)
    assert perms(routes)["a"] == 5
    routes.register(broker(version=V2, topics=topics_of(["T"])), NOW)
    assert perms(routes)["a"] == 6
    assert perms(routes, "U") == {"a": 5}


def test_write_permission_is_added_to_reading() -> None:
    routes = table(broker(topics=topics_of(["T", "U"], perm=0)))
    assert routes.add_write_permission("a") == 2
    assert perms(routes) == {"a": 6}


def test_permission_of_an_unknown_broker() -> None:
    assert table(broker()).wipe_write_permission("x") == 0
    assert table(broker()).add_write_permission("x") == 0


def test_the_number_of_brokers_is_bounded() -> None:
    routes = RouteTable(brokers_max=1)
    assert isinstance(routes.register(broker("a"), NOW), Registered)
    assert routes.register(broker("b"), NOW) == TableFull(
        "1 brokers are already registered, which is the limit"
    )
    assert "b0:1" not in routes
    assert isinstance(routes.register(broker("a"), NOW), Registered)
    routes.remove("a0:1")
    assert isinstance(routes.register(broker("b"), NOW), Registered)


def test_the_number_of_topics_is_bounded() -> None:
    routes = RouteTable(topics_max=3)
    assert isinstance(routes.register(broker("a", topics=topics_of("TU")), NOW), Registered)
    full = routes.register(broker("b", topics=topics_of("TU")), NOW)
    assert full == TableFull("at most 3 topics can be registered, got 4")
    assert "b0:1" not in routes
    validate(routes)
    slave = broker("b", broker_id=1, topics=topics_of("TUVW"))
    assert isinstance(routes.register(slave, NOW), Registered)
    routes.delete_topic("U")
    assert isinstance(routes.register(broker("b", topics=topics_of("TU")), NOW), Registered)
    validate(routes)


def test_topic_is_deleted_everywhere_or_in_one_cluster() -> None:
    routes = table(broker("a", cluster="one"), broker("b", cluster="two"))
    routes.delete_topic("T", "unheard of")
    assert perms(routes) == {"a": 6, "b": 6}
    routes.delete_topic("T", "one")
    validate(routes)
    assert perms(routes) == {"b": 6}
    routes.delete_topic("T")
    assert routes.topics() == []
    routes.delete_topic("T")


def test_topics_by_cluster() -> None:
    routes = table(broker("a", cluster="one"), broker("b", cluster="two", topics=topics_of("UT")))
    assert routes.topics() == ["T", "U"]
    assert routes.topics_in("one") == ["T"]
    assert routes.topics_in("two") == ["T", "U"]
    assert routes.topics_in("three") == []


def test_topics_by_flag() -> None:
    flags = {"none": 0, "unit": 1, "sub": 2, "both": 3}
    topics = {n: TopicConfig(topic_name=n, topic_sys_flag=flag) for n, flag in flags.items()}
    routes = table(broker(topics=topics))
    assert routes.topics_flagged(1, 1) == ["unit", "both"]
    assert routes.topics_flagged(2, 2) == ["sub", "both"]
    assert routes.topics_flagged(2, 3) == ["sub"]


def test_system_topics_are_clusters_and_brokers() -> None:
    found = table(broker("a"), broker("b", cluster="d"), broker("d", cluster="d")).system_topics()
    assert found.topic_list == ["c", "d", "a", "b"]
    assert found.broker_addr == "a0:1"
    assert table().system_topics().broker_addr is None
