"""Promotion: which broker is master, and that a replaced one never accepts a write again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace as replace_fields

from brokers import use_all_tables
from promotable import NAME, PromotableBrokers, mastership_of, promotable_brokers
from turbopump.broker.config import (
    BrokerConfig,
    IdentityConfig,
    RegistrationConfig,
    ReplicationConfig,
    Role,
)
from turbopump.broker.config_keys import as_properties
from turbopump.broker.replication.roles import (
    RoleRecord,
    Verdict,
    demoted,
    effective,
    judge,
    promoted,
    undone,
)
from turbopump.errors import NetworkError
from turbopump.message import MessageQueue, PhysicalOffset
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.bodies import GroupConfig, LockQueues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.mastership import (
    CLAIMS_NAMESPACE,
    EPOCH_MAX,
    FenceBroker,
    MasterClaim,
    PromoteBroker,
    PromoteBrokerAnswer,
    parse_claim,
)

MASTER, FIRST_SLAVE = (Role.ASYNC_MASTER, 0), (Role.SLAVE, 1)
SUCCESS, REFUSED = ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE


def claim(epoch: int, token: str = "a", former_id: int = 1) -> MasterClaim:
    return MasterClaim(epoch=epoch, token=token, master_address="h:1", former_id=former_id)


def pending(epoch: int, token: str = "a") -> MasterClaim:
    return structs.replace(claim(epoch, token), pending=True)


# --- decisions from known facts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "answers", "count", "expected"),
    [
        (claim(0), [None], 1, Verdict.CONFIRMED),
        (claim(0), [], 1, Verdict.UNCONFIRMED),
        (claim(0), [], 0, Verdict.CONFIRMED),
        (claim(0), [claim(1, "b")], 1, Verdict.REPLACED),
        (claim(1), [claim(1)], 1, Verdict.CONFIRMED),
        (claim(1, "a"), [claim(1, "b")], 1, Verdict.REPLACED),
        (claim(1, "b"), [claim(1, "a")], 1, Verdict.UNCONFIRMED),
        (claim(2), [claim(1, "b")], 1, Verdict.UNCONFIRMED),
        (claim(1), [None], 2, Verdict.UNCONFIRMED),
        (claim(1), [None, None], 3, Verdict.UNCONFIRMED),
        (claim(1), [claim(1), None, None], 3, Verdict.UNCONFIRMED),
        (claim(2), [claim(2), claim(2), claim(1, "b")], 3, Verdict.CONFIRMED),
        (claim(2), [claim(2), claim(1, "b"), claim(1, "b")], 3, Verdict.UNCONFIRMED),
        (claim(1), [None, claim(2, "b")], 3, Verdict.REPLACED),
        (claim(1), [claim(1), claim(1), claim(2, "b")], 3, Verdict.REPLACED),
        (claim(0), [pending(1)], 1, Verdict.UNCONFIRMED),
        (claim(0), [pending(1), None, None], 3, Verdict.CONFIRMED),
        (claim(1), [pending(1)], 1, Verdict.UNCONFIRMED),
    ],
)
def test_verdicts(
    own: MasterClaim, answers: list[MasterClaim | None], count: int, expected: Verdict
) -> None:
    assert judge(own, answers, count).verdict is expected


def broker_config(role: Role, broker_id: int) -> BrokerConfig:
    identity = IdentityConfig(broker_name=NAME, role=role, broker_id=broker_id)
    return BrokerConfig(identity=identity)


def test_a_record_counts_until_the_configuration_changes() -> None:
    slave, master = broker_config(*FIRST_SLAVE), broker_config(*MASTER)
    record = promoted(slave, RoleRecord(), claim(1), Role.SYNC_MASTER, "")
    assert effective(slave, record).identity.role is Role.SYNC_MASTER
    assert effective(slave, record).identity.broker_id == 0
    other = replace(slave, identity=replace(slave.identity, broker_id=2))
    assert effective(other, record) is other
    assert effective(master, record) is master
    back = demoted(slave, record, claim(2, "b", former_id=3))
    assert (back.epoch, back.token) == (2, "")
    assert effective(slave, back).identity.broker_id == 3


@pytest.mark.parametrize("role", [Role.ASYNC_MASTER, Role.SYNC_MASTER])
def test_a_replaced_master_remembers_the_role_that_a_promotion_gives_back(role: Role) -> None:
    master = broker_config(role, 0)
    record = demoted(master, RoleRecord(), claim(1))
    assert record.master_role == role.value
    assert demoted(master, record, claim(2)).master_role == role.value, "a slave has no such role"
    slave = broker_config(*FIRST_SLAVE)
    for broker_id in (1, 2):
        of_promotion = promoted(slave, RoleRecord(), claim(1, former_id=broker_id), role, "")
        assert undone(slave, of_promotion).master_role == role.value


def test_a_recorded_slave_queries_name_servers_for_its_master() -> None:
    """The configured address may be that of the broker that was replaced."""
    config = replace(
        broker_config(*FIRST_SLAVE), replication=ReplicationConfig(master_address="h:1")
    )
    record = demoted(config, RoleRecord(), claim(2))
    assert effective(config, record).replication.master_address == "h:1"
    registered = replace(config, registration=RegistrationConfig(name_servers=("n:1",)))
    assert effective(registered, record).replication.master_address == ""


def test_claims_of_other_brokers_are_ignored() -> None:
    assert parse_claim("not a claim") is None
    assert parse_claim(None) is None
    assert parse_claim(claim(3).encode().decode()) == claim(3)


# --- promotion ------------------------------------------------------------------------------------


def details(answer: Command) -> PromoteBrokerAnswer:
    assert answer.code == SUCCESS, answer.remark
    return PromoteBrokerAnswer.from_ext_fields(answer.ext_fields)


async def until_roles(replicas: PromotableBrokers, **roles: tuple[Role, int]) -> None:
    """Wait until brokers, given as ``b0`` and so on, have their roles."""
    await wait_until(
        lambda: all(replicas.role(int(name[1:])) == role for name, role in roles.items()), 40
    )


async def until_known(replicas: PromotableBrokers) -> None:
    """Wait until the slave has contacted its master, so that the master knows of its slave."""
    await wait_until(lambda: mastership_of(replicas.broker(0)).record.has_slaves)
    await wait_until(lambda: not mastership_of(replicas.broker(0)).saving.is_dirty)


async def can_send(replicas: PromotableBrokers, number: int) -> int:
    return (await replicas.client(number).send()).code


@virtual_time()
async def test_a_running_master_and_its_slave_swap_roles(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        assert await can_send(replicas, 0) == SUCCESS
        done = details(await replicas.promote(1))
        assert (done.epoch, done.old_master) == (1, "10.0.0.1:10911")
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)
        assert await can_send(replicas, 0) == REFUSED
        assert await can_send(replicas, 1) == SUCCESS
        expected = {0: "10.0.0.2:10911", 1: "10.0.0.1:10911"}
        await wait_for_addresses(replicas, expected)
        # And back again.
        assert details(await replicas.promote(0)).epoch == 2
        await until_roles(replicas, b0=MASTER, b1=FIRST_SLAVE)
        assert await can_send(replicas, 0) == SUCCESS


async def wait_for_addresses(replicas: PromotableBrokers, expected: dict[int, str]) -> None:
    for _ in range(100):
        if await replicas.addresses() == expected:
            return
        await asyncio.sleep(0.5)
    assert await replicas.addresses() == expected


@virtual_time()
async def test_a_returning_master_is_a_slave_before_it_serves_requests(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        done = details(await replicas.promote(1))
        assert (done.epoch, done.missing_bytes) == (1, None)
        await until_roles(replicas, b1=MASTER)
        assert await can_send(replicas, 1) == SUCCESS
        await replicas.start(0)
        assert replicas.role(0) == FIRST_SLAVE
        assert await can_send(replicas, 0) == REFUSED


@virtual_time()
async def test_name_servers_remember_promotions_across_their_own_restart(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        await wait_for_addresses(replicas, {0: "10.0.0.2:10911"})
        await replicas.crash(1)
        await replicas.stop_nameserver()
        await replicas.start_nameserver()
        await replicas.start(0)
        assert replicas.role(0) == FIRST_SLAVE


@virtual_time()
async def test_a_replicated_master_without_name_servers_accepts_no_writes(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await replicas.stop(0)
        await replicas.stop_nameserver()
        started_s = virtual_loop().time()
        await replicas.start(0)
        assert virtual_loop().time() - started_s < 2
        answer = await replicas.client(0).send()
        assert answer.code == REFUSED
        assert "may have been replaced" in (answer.remark or "")
        await replicas.start_nameserver()
        await wait_until(lambda: replicas.broker(0).path.writer.suspension is None)
        assert await can_send(replicas, 0) == SUCCESS
        await wait_for_addresses(replicas, {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"})


@virtual_time()
async def test_a_master_that_never_had_a_slave_needs_no_name_server(tmp_path: Path) -> None:
    replicas = PromotableBrokers(tmp_path)
    await replicas.start(0)
    assert await can_send(replicas, 0) == SUCCESS
    await replicas.close()


@virtual_time()
async def test_a_master_that_was_cut_off_learns_that_it_was_replaced(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        # The client still reaches it.
        for other in (replicas.host_of(1), "10.0.1.1"):
            replicas.network.partition(replicas.host_of(0), other)
        assert details(await replicas.promote(1)).missing_bytes is None
        await until_roles(replicas, b1=MASTER)
        await asyncio.sleep(60)
        assert (await replicas.client(0).send(b"only on the old one")).code == SUCCESS
        replicas.network.heal()
        assert await seconds_of_writes(replicas, 0) < 10.5
        await until_roles(replicas, b0=FIRST_SLAVE)
        await until_copied(replicas, 1, 0)
        assert b"only on the old one" in replicas.set_aside(0)
        await wait_until(lambda: not mastership_of(replicas.broker(1)).record.unfenced)


@virtual_time()
async def test_a_master_that_is_cut_off_only_from_its_successor_learns_it_from_name_servers(
    tmp_path: Path,
) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        replicas.network.partition(replicas.host_of(0), replicas.host_of(1))
        assert details(await replicas.promote(1)).missing_bytes is None
        await until_roles(replicas, b1=MASTER)
        await wait_until(lambda: replicas.broker(1).path.writer.suspension is None)
        for number, body in enumerate((b"only on the old one", b"only on the new one")):
            assert (await replicas.client(number).send(body)).code == SUCCESS
        assert await seconds_of_writes(replicas, 0) < 10.5
        replicas.network.heal()
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)
        await until_copied(replicas, 1, 0)
        assert await bodies(replicas, 0) == [b"only on the new one"]
        assert b"only on the old one" in replicas.set_aside(0)


async def seconds_of_writes(replicas: PromotableBrokers, number: int) -> float:
    """Return for how long a broker still accepts writes; it closes connections afterwards."""
    started_s = virtual_loop().time()
    with suppress(NetworkError):
        for _ in range(1000):
            if await can_send(replicas, number) != SUCCESS:
                break
            await asyncio.sleep(0.1)
    return virtual_loop().time() - started_s


@virtual_time()
async def test_a_slave_that_has_nothing_of_its_masters_log_is_promoted_only_by_force(
    tmp_path: Path,
) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        mastership_of(replicas.broker(1)).note_master_begin(PhysicalOffset(1_000_000))
        answer = await replicas.promote(1)
        refusal = answer.remark or ""
        assert "log ends at 0, before its master's begins at 1000000" in refusal
        assert "all messages that the master has would be lost" in refusal
        assert await can_send(replicas, 0) == SUCCESS
        forced = PromoteBroker(broker_role="ASYNC_MASTER", forced=True)
        answer = await replicas.client(1).ask(RequestCode.PROMOTE_BROKER, forced)
        assert answer.code == SUCCESS


@virtual_time()
async def test_a_promotion_survives_a_restart(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        details(await replicas.promote(1, "SYNC_MASTER"))
        await until_roles(replicas, b0=FIRST_SLAVE, b1=(Role.SYNC_MASTER, 0))
        for number in (0, 1):
            await replicas.stop(number)
            await replicas.start(number)
        assert replicas.role(0) == FIRST_SLAVE
        assert replicas.role(1) == (Role.SYNC_MASTER, 0)


@virtual_time()
async def test_a_role_change_keeps_settings_that_were_changed_before(tmp_path: Path) -> None:
    changed = {"haTransferBatchSize": "4096", "regionId": "r", "fileReservedTime": "5"}
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        for number in (0, 1):
            answer = await replicas.client(number).ask(
                RequestCode.UPDATE_BROKER_CONFIG,
                body="".join(f"{key}={value}\n" for key, value in changed.items()).encode(),
            )
            assert answer.code == SUCCESS
        details(await replicas.promote(1))
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)
        for number in (0, 1):
            properties = as_properties(replicas.broker(number).config)
            assert {key: properties[key] for key in changed} == changed


@virtual_time()
async def test_a_promoted_slave_has_the_tables(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        group = GroupConfig(group_name="g", retry_max_times=3)
        await replicas.client(0).ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode()
        )
        await wait_until(lambda: "g" in replicas.broker(1).state.groups.table)
        await use_all_tables(replicas.client(0))
        slave = replicas.broker(1)
        await wait_until(lambda: slave.path.delays.progress.offset_table == {1: 1}, 60)
        await wait_until(lambda: slave.state.consumer_filters.find("g", "T") is not None, 60)
        await wait_until(lambda: slave.state.offsets.find("g", "T", 0) == 1, 60)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        promoted_one = replicas.broker(1)
        assert promoted_one.state.groups.table["g"] == group
        assert promoted_one.state.offsets.find("g", "T", 0) == 1
        kept = promoted_one.state.consumer_filters.find("g", "T")
        assert kept is not None
        assert (kept.data.expression, kept.data.client_version) == ("n > 1", 5)
        # Messages that the old master has delivered are not delivered again.
        assert await can_send(replicas, 1) == SUCCESS
        await asyncio.sleep(30)
        assert promoted_one.path.delays.progress.offset_table == {1: 1}
        assert len(await bodies(replicas, 1)) == 3


@virtual_time()
async def test_a_promoted_slave_grants_locks_once_those_of_the_old_master_expired(
    tmp_path: Path,
) -> None:
    """A listener of the owner may run for 30 s under a lock that the old master has renewed."""
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        assert await can_send(replicas, 0) == SUCCESS
        assert await locked(replicas, 0, "owner") == SUCCESS
        await wait_until(lambda: replicas.broker(1).state.topics.find("T") is not None)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        assert await locked(replicas, 1, "other") == ResponseCode.SERVICE_NOT_AVAILABLE
        await asyncio.sleep(20)
        await replicas.stop(1)
        await replicas.start(1)
        assert await locked(replicas, 1, "other") == ResponseCode.SERVICE_NOT_AVAILABLE
        await asyncio.sleep(30)
        assert await locked(replicas, 1, "other") == SUCCESS
        await replicas.stop(1)
        await replicas.start(1)
        assert await locked(replicas, 1, "other") == SUCCESS, "its own locks are remembered"


async def locked(replicas: PromotableBrokers, number: int, client_id: str) -> int:
    """Request the lock of a queue; return the response code."""
    queue = MessageQueue("T", NAME, 0)
    body = LockQueues(client_id=client_id, consumer_group="g", queues=[queue])
    answer = await replicas.client(number).ask(RequestCode.LOCK_BATCH_MQ, body=body.encode())
    return answer.code


@virtual_time()
async def test_a_majority_of_three_name_servers_is_enough(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        await replicas.stop_nameserver(0)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        assert await can_send(replicas, 1) == SUCCESS
        # One that does not know meets one that does.
        await replicas.start_nameserver(0)
        await replicas.stop_nameserver(1)
        await replicas.start(0)
        assert replicas.role(0) == FIRST_SLAVE


@virtual_time()
async def test_name_servers_reject_masters_that_were_replaced(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        entry = headers.KvEntry(
            namespace=CLAIMS_NAMESPACE, key=NAME, value=claim(7).encode().decode()
        )
        put = request(RequestCode.PUT_KV_CONFIG, entry)
        await replicas.pool.request("10.0.1.1:9876", put, 3000)
        for epoch, code in ((None, ResponseCode.SYSTEM_ERROR), (6, 1), (7, 0), (8, 0)):
            header = headers.RegisterBroker(
                broker_name=NAME,
                broker_addr="10.0.0.7:10911",
                cluster_name="DefaultCluster",
                broker_id=0,
                ha_server_addr="10.0.0.7:10912",
                broker_epoch=epoch,
            )
            command = request(RequestCode.REGISTER_BROKER, header)
            answer = await replicas.pool.request("10.0.1.1:9876", command, 3000)
            assert answer.code == code
            if code:
                assert "was replaced by h:1 with epoch 7" in (answer.remark or "")


# --- rejections -----------------------------------------------------------------------------------


@virtual_time()
async def test_masters_and_bad_roles_cannot_be_promoted(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        answer = await replicas.promote(0)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "master already, with epoch 0" in (answer.remark or "")
        answer = await replicas.promote(1, "SLAVE")
        assert "brokerRole must be ASYNC_MASTER or SYNC_MASTER, got 'SLAVE'" in (
            answer.remark or ""
        )


@virtual_time()
async def test_older_claims_fence_no_broker(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        details(await replicas.promote(1))
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)
        for older in (claim(0, "x"), claim(1, mastership_of(replicas.broker(1)).record.token)):
            answer = await replicas.client(1).ask(RequestCode.FENCE_BROKER, FenceBroker.of(older))
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "is not newer than 1" in (answer.remark or "")
        assert await can_send(replicas, 1) == SUCCESS


@pytest.mark.parametrize(
    ("epoch", "reason"),
    [
        (2**63 - 1, "epoch"),
        (-1, "epoch"),
        (EPOCH_MAX, "the newest one known here and at the name servers is 0"),
        (1001, "at most 1000 more are plausible"),
    ],
)
@virtual_time()
async def test_implausible_epochs_fence_no_broker(tmp_path: Path, epoch: int, reason: str) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        for number in (0, 1):
            fence = FenceBroker.of(claim(epoch))
            answer = await replicas.client(number).ask(RequestCode.FENCE_BROKER, fence)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert reason in (answer.remark or "")
        assert await can_send(replicas, 0) == SUCCESS
        assert details(await replicas.promote(1)).epoch == 1
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)


@virtual_time()
async def test_an_epoch_that_name_servers_show_is_plausible(tmp_path: Path) -> None:
    """A master may have missed any number of promotions."""
    newer = claim(5000, "b")
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await put_claim(replicas, newer)
        answer = await replicas.client(0).ask(RequestCode.FENCE_BROKER, FenceBroker.of(newer))
        assert answer.code == SUCCESS
        await until_roles(replicas, b0=FIRST_SLAVE)


async def put_claim(replicas: PromotableBrokers, value: MasterClaim) -> None:
    entry = headers.KvEntry(namespace=CLAIMS_NAMESPACE, key=NAME, value=value.encode().decode())
    command = request(RequestCode.PUT_KV_CONFIG, entry)
    assert (await replicas.pool.request("10.0.1.1:9876", command, 1000)).code == SUCCESS


@virtual_time()
async def test_no_epoch_follows_the_last_one(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        replicas.network.isolate(replicas.host_of(0))
        await put_claim(replicas, claim(EPOCH_MAX, "b"))
        answer = await replicas.promote(1)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"epoch {EPOCH_MAX} is the last one" in (answer.remark or "")
        assert replicas.role(1) == FIRST_SLAVE


@virtual_time()
async def test_a_broker_without_slaves_is_not_fenced(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, slaves=0) as replicas:
        answer = await replicas.client(0).ask(RequestCode.FENCE_BROKER, FenceBroker.of(claim(1)))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "no slave has followed this broker" in (answer.remark or "")
        assert await can_send(replicas, 0) == SUCCESS


@virtual_time()
async def test_requests_alone_do_not_make_a_broker_a_master_with_slaves(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, slaves=0) as replicas:
        code, master = RequestCode.GET_ALL_TOPIC_CONFIG, replicas.client(0)
        for slave_id in (-1, 0):
            bad = headers.TableCopy.from_ext_fields({"knownVersion": ""})
            answer = await master.ask(code, replace_fields(bad, slave_id=slave_id))
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "slaveId" in (answer.remark or "")
        for slave_id in range(1, 100):
            asked = headers.TableCopy(known_version="", slave_id=slave_id)
            assert (await master.ask(code, asked)).code == SUCCESS
        mastership = mastership_of(replicas.broker(0))
        assert mastership.slave_ids.split(",") == [str(each) for each in range(68, 100)]
        await asyncio.sleep(40)
        await master.ask(code, headers.TableCopy(known_version="", slave_id=7))
        assert list(mastership._asked_ms) == [7]
        await replicas.stop(0)
        await replicas.stop_nameserver()
        await replicas.start(0)
        assert await can_send(replicas, 0) == SUCCESS


@virtual_time()
async def test_an_answer_from_before_the_fencing_allows_no_writes(tmp_path: Path) -> None:
    """Name servers confirm a master that is fenced before their answers arrive."""
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        # The fenced master runs until its slave has its last message.
        replicas.network.stop_reading(replicas.host_of(1))
        assert await can_send(replicas, 0) == SUCCESS
        replicas.network.partition(replicas.host_of(0), "10.0.1.1")
        check = replicas.broker(0).replica.roles.check()
        assert check is not None
        checked = asyncio.ensure_future(check)
        await asyncio.sleep(0.1)
        fence = await replicas.client(0).ask(RequestCode.FENCE_BROKER, FenceBroker.of(claim(1)))
        assert fence.code == SUCCESS
        replicas.network.join(replicas.host_of(0), "10.0.1.1")
        await checked
        assert replicas.role(0) == MASTER
        assert await can_send(replicas, 0) == REFUSED


@virtual_time()
async def test_the_last_promoted_master_is_fenced_by_slaves_that_follow_another(
    tmp_path: Path,
) -> None:
    async with promotable_brokers(tmp_path, slaves=2) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        await wait_until(lambda: replicas.broker(1).path.writer.suspension is None)
        # Name servers have not notified it yet.
        old = f"{replicas.host_of(0)}:10911"
        replicas.broker(2).replica.copies.master = old
        done = details(await replicas.promote(2))
        assert done.old_master == f"{replicas.host_of(1)}:10911"
        assert done.missing_bytes == 0
        assert await can_send(replicas, 1) == REFUSED
        assert mastership_of(replicas.broker(2)).unfenced == [old]
        await until_roles(replicas, b1=(Role.SLAVE, 2), b2=MASTER)
        await replicas.start(0)
        await wait_until(lambda: not mastership_of(replicas.broker(2)).unfenced)


@virtual_time()
async def test_a_master_registers_with_the_epoch_that_it_started_with(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        broker = replicas.broker(0)
        # As while it records on a slow disk that it was replaced.
        mastership_of(broker).record = mastership_of(broker).demoted(claim(2))
        header = headers.RegisterBroker.from_ext_fields(
            broker._registration.command(None).ext_fields
        )
        assert (header.broker_id, header.broker_epoch) == (0, None)


@virtual_time()
async def test_a_slave_with_a_fixed_master_reports_that_the_master_has_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        config, address = replicas.config_of(2), replicas.broker(0).replication.ha_address
        fixed = replace(config.replication, master_address=address)
        await replicas.start(2, replace(config, replication=fixed))
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        moved = f"the master has moved to {replicas.host_of(1)}:10912"
        await wait_until(lambda: moved in caplog.text, 120)
        assert f"but this slave follows haMasterAddress={address}" in caplog.text


@virtual_time()
async def test_a_role_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        replicas.disks[1].fail_writes()
        answer = await replicas.promote(1)
        assert answer.code == REFUSED
        assert "brokerRole.json could not be written" in (answer.remark or "")
        replicas.disks[1].heal()
        assert details(await replicas.promote(1)).epoch == 1
        await until_roles(replicas, b1=MASTER)


# --- messages -------------------------------------------------------------------------------------


def log_of(replicas: PromotableBrokers, number: int) -> bytes:
    """Return the whole commit log of a broker."""
    store = replicas.broker(number).store
    store.flush()
    at, parts = store.min_offset, []
    while (part := store.raw(at, 1 << 20)) is not None:
        parts.append(bytes(part))
        at = PhysicalOffset(at + len(part))
    return b"".join(parts)


async def bodies(replicas: PromotableBrokers, number: int) -> list[bytes]:
    return [bytes(message.body) for message in await replicas.client(number).messages()]


async def until_copied(replicas: PromotableBrokers, master: int, slave: int) -> None:
    """Wait until a slave has its master's log, and its topics."""

    def is_copied() -> bool:
        ours, theirs = replicas.broker(master), replicas.broker(slave)
        tables = ours.state.topics.data_version == theirs.state.topics.data_version
        return tables and ours.store.written_end == theirs.store.written_end

    await wait_until(is_copied, 60)


@virtual_time()
async def test_a_promoted_slave_has_what_was_replicated(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        for body in (b"one", b"two"):
            assert (await replicas.client(0).send(body)).code == SUCCESS
        await until_copied(replicas, 0, 1)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        assert (await replicas.client(1).send(b"three")).code == SUCCESS
        assert await bodies(replicas, 1) == [b"one", b"two", b"three"]


@virtual_time()
async def test_a_switch_over_loses_nothing(tmp_path: Path) -> None:
    """Messages that only a fenced master has are copied before the slave becomes master."""
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        sent = [b"%d" % number for number in range(50)]
        for body in sent:
            assert (await replicas.client(0).send(body)).code == SUCCESS
        done = details(await replicas.promote(1))
        assert done.missing_bytes == 0
        await until_roles(replicas, b0=FIRST_SLAVE, b1=MASTER)
        assert await bodies(replicas, 1) == sent
        assert (await replicas.client(1).send(b"last")).code == SUCCESS
        await until_copied(replicas, 1, 0)
        assert log_of(replicas, 0) == log_of(replicas, 1)


@virtual_time()
async def test_unreplicated_messages_are_saved_aside_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        assert (await replicas.client(0).send(b"both")).code == SUCCESS
        await until_copied(replicas, 0, 1)
        replicas.network.isolate(replicas.host_of(1))
        replicas.network.cut(replicas.host_of(1))
        assert (await replicas.client(0).send(b"only on the old one")).code == SUCCESS
        await replicas.crash(0)
        replicas.network.heal()
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        for body in (b"only on the new one", b"and another"):
            assert (await replicas.client(1).send(body)).code == SUCCESS
        await replicas.start(0)
        await until_copied(replicas, 1, 0)
        assert log_of(replicas, 0) == log_of(replicas, 1)
        assert await bodies(replicas, 0) == [b"both", b"only on the new one", b"and another"]
        assert b"only on the old one" in replicas.set_aside(0)
        directory = replicas.config_of(0).directory
        assert f"are cut off and kept in {directory}/diverged" in caplog.text


@virtual_time()
async def test_operators_see_roles_and_the_link(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        assert (await replicas.client(0).send()).code == SUCCESS
        await until_copied(replicas, 0, 1)
        master = replicas.broker(0).administration.runtime_info()
        assert (master["brokerRole"], master["brokerEpoch"]) == ("ASYNC_MASTER", "0")
        assert master["replicationLink"] == "1 of 1 slaves in sync"
        slave = replicas.broker(1).administration.runtime_info()
        assert (slave["brokerRole"], slave["replicationLink"]) == ("SLAVE", "in sync")
        assert slave["replicationLagMillis"] == "0"
        await replicas.crash(0)
        await asyncio.sleep(30)
        slave = replicas.broker(1).administration.runtime_info()
        assert slave["replicationLink"] == "disconnected"
        assert 28_000 <= int(slave["replicationLagMillis"]) <= 32_000


@virtual_time()
async def test_messages_acknowledged_by_a_sync_master_survive_its_loss(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await replicas.stop(0)
        config = replicas.config_of(0)
        identity = replace(config.identity, role=Role.SYNC_MASTER)
        await replicas.start(0, replace(config, identity=identity))
        slaves = replicas.broker(0).replication.slaves
        await wait_until(lambda: slaves.following, 60)
        acknowledged = []
        for number in range(30):
            body = b"%d" % number
            if (await replicas.client(0).send(body)).code == SUCCESS:
                acknowledged.append(body)
        await replicas.crash(0)
        details(await replicas.promote(1))
        await until_roles(replicas, b1=MASTER)
        assert len(acknowledged) == 30
        assert await bodies(replicas, 1) == acknowledged
