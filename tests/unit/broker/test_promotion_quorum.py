"""What promotions need of name servers, and what two of them at once, or half of one, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from promotable import NAME, PromotableBrokers, mastership_of, promotable_brokers
from turbopump.broker.config import BrokerConfig, IdentityConfig, RegistrationConfig, Role
from turbopump.broker.replication.roles import RoleRecord, effective, promoted, undone
from turbopump.nameserver import handlers
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.mastership import (
    CLAIMS_NAMESPACE,
    FenceBroker,
    MasterClaim,
    PromoteBrokerAnswer,
    parse_claim,
)

MASTER, SLAVE = (Role.ASYNC_MASTER, 0), (Role.SLAVE, 1)
SUCCESS, REFUSED = ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE
OLD = MasterClaim(epoch=1, token="a", master_address="10.0.0.1:10911", former_id=1)


async def until_known(replicas: PromotableBrokers) -> None:
    """Wait until the master has recorded that it has a slave."""
    mastership = mastership_of(replicas.broker(0))
    await wait_until(lambda: mastership.record.has_slaves and not mastership.saving.is_dirty)


async def until_accepting(replicas: PromotableBrokers, number: int) -> None:
    await wait_until(lambda: accepts(replicas, number), 60)


def accepts(replicas: PromotableBrokers, number: int) -> bool:
    """Whether a broker is a master that accepts writes."""
    broker = replicas.broker(number)
    is_master = broker._ready and not broker.config.identity.is_slave
    return is_master and broker.path.writer.suspension is None


async def can_send(replicas: PromotableBrokers, number: int) -> int:
    return (await replicas.client(number).send()).code


async def claim_at(replicas: PromotableBrokers, nameserver: int) -> MasterClaim | None:
    """Return the claim that a name server has."""
    command = request(
        RequestCode.GET_KV_CONFIG, headers.KvKey(namespace=CLAIMS_NAMESPACE, key=NAME)
    )
    answer = await replicas.pool.request(f"10.0.1.{nameserver + 1}:9876", command, 3000)
    return parse_claim(headers.KvValue.from_ext_fields(answer.ext_fields).value)


async def put_claim(replicas: PromotableBrokers, nameserver: int, claim: MasterClaim) -> None:
    value = claim.encode().decode()
    entry = headers.KvEntry(namespace=CLAIMS_NAMESPACE, key=NAME, value=value)
    command = request(RequestCode.PUT_KV_CONFIG, entry)
    await replicas.pool.request(f"10.0.1.{nameserver + 1}:9876", command, 3000)


# --- name servers that do not store the claim -----------------------------------------------------


@pytest.mark.parametrize(("nameservers", "full"), [(1, [0]), (3, [1, 2])])
@virtual_time()
async def test_full_name_servers_refuse_a_promotion_and_the_master_continues(
    tmp_path: Path, nameservers: int, full: list[int]
) -> None:
    async with promotable_brokers(tmp_path, nameservers=nameservers) as replicas:
        await until_known(replicas)
        for number in full:
            replicas.nameserver_disks[number].fail_writes()
        answer = await replicas.promote(1)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        text = f"{nameservers - len(full)} of {nameservers} name servers store the claim"
        assert text in (answer.remark or "")
        assert "10.0.1.2:9876: " in (answer.remark or "") or nameservers == 1
        assert "could not be written" in (answer.remark or "")
        left = [await claim_at(replicas, number) for number in range(nameservers)]
        assert all(claim is None or not claim.epoch for claim in left)
        # Longer than masters take to notice a newer claim.
        await asyncio.sleep(15)
        assert (replicas.role(0), replicas.role(1)) == (MASTER, SLAVE)
        assert await can_send(replicas, 0) == SUCCESS
        for number in full:
            replicas.nameserver_disks[number].heal()
        assert (await replicas.promote(1)).code == SUCCESS
        await until_accepting(replicas, 1)
        assert await can_send(replicas, 0) == REFUSED


@pytest.mark.parametrize("are_down", [True, False])
@virtual_time()
async def test_a_minority_of_name_servers_promotes_no_slave(tmp_path: Path, are_down: bool) -> None:
    """Those that are down, or cut off from the slave, count for nothing."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        for number in (0, 1):
            if are_down:
                await replicas.stop_nameserver(number)
            else:
                replicas.network.partition(replicas.host_of(1), f"10.0.1.{number + 1}")
        answer = await replicas.promote(1)
        assert "1 of 3 name servers store the claim" in (answer.remark or "")
        assert "10.0.1.1:9876: does not answer" in (answer.remark or "")
        assert await can_send(replicas, 0) == SUCCESS
        replicas.network.heal()
        if are_down:
            await replicas.start_nameserver(0)
        await asyncio.sleep(10)
        assert (await replicas.promote(1)).code == SUCCESS
        await until_accepting(replicas, 1)


@virtual_time()
async def test_a_stale_claim_on_one_of_three_does_not_stop_the_new_master(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        await put_claim(replicas, 2, OLD)
        replicas.nameserver_disks[2].fail_writes()
        assert (await replicas.promote(1)).code == SUCCESS
        await until_accepting(replicas, 1)
        assert await claim_at(replicas, 2) == OLD


@virtual_time()
async def test_a_promoted_slave_waits_for_a_majority_that_has_its_own_claim(tmp_path: Path) -> None:
    """Name servers whose disks are full when the promoted slave starts count for nothing."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        await replicas.crash(0)
        assert (await replicas.promote(1)).code == SUCCESS
        for number in (1, 2):
            replicas.nameserver_disks[number].fail_writes()
        await wait_until(lambda: replicas.role(1) == MASTER)
        await asyncio.sleep(15)
        assert await can_send(replicas, 1) == REFUSED
        replicas.nameserver_disks[1].heal()
        await until_accepting(replicas, 1)


@virtual_time()
async def test_a_slave_whose_own_disk_is_full_fences_no_master(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        replicas.disks[1].fail_writes()
        answer = await replicas.promote(1)
        assert "brokerRole.json could not be written" in (answer.remark or "")
        assert await can_send(replicas, 0) == SUCCESS
        assert await claim_at(replicas, 0) is None
        replicas.disks[1].heal()


# --- two promotions -------------------------------------------------------------------------------


def as_apache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let name servers ignore what Turbopump adds to requests, as Apache's do."""

    def ignoring(handler: Callable[..., Any]) -> Callable[..., Any]:
        def ignore(kv: Any, asked: Command, peer: Any) -> Any:
            own = ("compare", "expected")
            fields = {k: v for k, v in (asked.ext_fields or {}).items() if k not in own}
            return handler(kv, replace(asked, ext_fields=fields), peer)

        return ignore

    for name in ("_put_kv", "_get_kv"):
        monkeypatch.setattr(handlers, name, ignoring(getattr(handlers, name)))


@pytest.mark.parametrize("is_apache", [False, True], ids=["turbopump", "apache"])
@pytest.mark.parametrize("nameservers", [1, 3])
@virtual_time()
async def test_two_promotions_at_once_leave_at_most_one_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameservers: int, is_apache: bool
) -> None:
    if is_apache:
        as_apache(monkeypatch)
    async with promotable_brokers(tmp_path, slaves=2, nameservers=nameservers) as replicas:
        await until_known(replicas)
        answers = await asyncio.gather(replicas.promote(1), replicas.promote(2))
        done = [number for number, answer in enumerate(answers, 1) if answer.code == SUCCESS]
        remarks = [answer.remark or "" for answer in answers if answer.code != SUCCESS]
        assert all("another promotion is under way" in remark for remark in remarks)
        assert len(done) == 1
        seen = []
        for _ in range(400):
            await asyncio.sleep(0.1)
            seen.append([number for number in range(3) if accepts(replicas, number)])
        assert all(len(numbers) <= 1 for numbers in seen)
        assert seen[-1] == done


@pytest.mark.parametrize("is_apache", [False, True], ids=["turbopump", "apache"])
@pytest.mark.parametrize("later_s", [0.001, 0.05, 1, 6.9, 8, 12])
@virtual_time()
async def test_of_two_promotions_that_overlap_one_leaves_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_s: float, is_apache: bool
) -> None:
    if is_apache:
        as_apache(monkeypatch)
    async with promotable_brokers(tmp_path, slaves=2, nameservers=3) as replicas:
        await until_known(replicas)
        promotions = [asyncio.ensure_future(replicas.promote(1))]
        await asyncio.sleep(later_s)
        promotions.append(asyncio.ensure_future(replicas.promote(2)))
        seen = []
        for _ in range(600):
            await asyncio.sleep(0.1)
            seen.append([number for number in range(3) if accepts(replicas, number)])
        assert all(len(numbers) <= 1 for numbers in seen)
        codes = [(await promotion).code for promotion in promotions]
        assert SUCCESS in codes
        last = max(number for number, code in enumerate(codes, 1) if code == SUCCESS)
        assert seen[-1] == [last]


@virtual_time()
async def test_two_promotions_that_reach_different_majorities_leave_at_most_one_master(
    tmp_path: Path,
) -> None:
    async with promotable_brokers(tmp_path, slaves=2, nameservers=3) as replicas:
        await until_known(replicas)
        replicas.network.partition(replicas.host_of(1), "10.0.1.3")
        replicas.network.partition(replicas.host_of(2), "10.0.1.1")
        answers = await asyncio.gather(replicas.promote(1), replicas.promote(2))
        done = [number for number, answer in enumerate(answers, 1) if answer.code == SUCCESS]
        assert len(done) <= 1
        for _ in range(600):
            await asyncio.sleep(0.1)
            assert sum(accepts(replicas, number) for number in range(3)) <= 1
        assert [number for number in range(3) if accepts(replicas, number)] == (done or [0])


@virtual_time()
async def test_a_promotion_fences_another_one_that_is_not_complete(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, slaves=2) as replicas:
        await until_known(replicas)
        replicas.broker(1).replica.roles.restart = lambda: None
        assert (await replicas.promote(1)).code == SUCCESS
        assert mastership_of(replicas.broker(1)).is_promoted
        assert (await replicas.promote(2)).code == SUCCESS
        assert not mastership_of(replicas.broker(1)).is_promoted
        await until_accepting(replicas, 2)


@virtual_time()
async def test_a_repeated_promotion_fences_masters_that_were_not_fenced(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        replicas.network.partition(replicas.host_of(0), replicas.host_of(1))
        assert (await replicas.promote(1)).code == SUCCESS
        for number in (1, 2):
            replicas.nameserver_disks[number].fail_writes()
        await wait_until(lambda: replicas.role(1) == MASTER)
        # The old master hears of it from its successor only.
        for number in range(3):
            replicas.network.partition(replicas.host_of(0), f"10.0.1.{number + 1}")
            replicas.nameserver_disks[number].heal()
        replicas.network.join(replicas.host_of(0), replicas.host_of(1))
        answer = await replicas.promote(1)
        assert PromoteBrokerAnswer.from_ext_fields(answer.ext_fields).old_master == (
            replicas.broker(0).address
        )
        assert await can_send(replicas, 0) == REFUSED


@virtual_time()
async def test_name_servers_that_cannot_compare_delay_a_promotion_but_not_the_old_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_apache(monkeypatch)
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        begin_s = virtual_loop().time()
        promotion = asyncio.ensure_future(replicas.promote(1))
        await asyncio.sleep(6)
        assert await can_send(replicas, 0) == SUCCESS
        assert (await promotion).code == SUCCESS
        assert virtual_loop().time() - begin_s >= 7
        await until_accepting(replicas, 1)
        assert virtual_loop().time() - begin_s >= 14


# --- promotions that end half way -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "former_id", "role"),
    [
        (SLAVE, 1, ("", 0)),
        (SLAVE, 2, ("SLAVE", 2)),
        (MASTER, 2, ("SLAVE", 2)),
        (MASTER, 0, ("SLAVE", 1)),
    ],
)
def test_an_abandoned_promotion_leaves_a_slave(
    configured: tuple[Role, int], former_id: int, role: tuple[str, int]
) -> None:
    identity = IdentityConfig(broker_name=NAME, role=configured[0], broker_id=configured[1])
    config = BrokerConfig(
        identity=identity, registration=RegistrationConfig(name_servers=("10.0.1.1:9876",))
    )
    claim = replace(OLD, epoch=3, former_id=former_id)
    record = promoted(config, RoleRecord(has_slaves=True), claim, Role.ASYNC_MASTER, "")
    assert record.is_pending
    after = undone(config, record)
    assert (after.role, after.broker_id) == role
    assert (after.epoch, after.has_slaves, after.is_pending) == (3, True, False)
    assert effective(config, after).identity.is_slave


@virtual_time()
async def test_a_slave_that_crashes_after_its_claim_leaves_the_master_alone(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await mastership_of(replicas.broker(1)).claim(replicas.broker(1).address, 1)
        await replicas.crash(1)
        assert await claim_at(replicas, 0) is not None
        await asyncio.sleep(15)
        assert await can_send(replicas, 0) == SUCCESS
        # The claim may be of a promotion that goes on, so a master that starts waits for it.
        await replicas.stop(0)
        await replicas.start(0)
        assert await can_send(replicas, 0) == REFUSED
        await asyncio.sleep(35)
        assert await can_send(replicas, 0) == SUCCESS
        # The operator tries again.
        await replicas.start(1)
        assert (await replicas.promote(1)).code == SUCCESS
        await until_accepting(replicas, 1)
        assert await can_send(replicas, 0) == REFUSED


@virtual_time()
async def test_a_claim_that_could_not_be_withdrawn_is_removed_by_the_master(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        await put_claim(replicas, 1, replace(OLD, pending=True))
        await asyncio.sleep(50)
        left = await claim_at(replicas, 1)
        assert left is None or not left.epoch
        assert await can_send(replicas, 0) == SUCCESS


@virtual_time()
async def test_a_pending_claim_keeps_no_master_from_registering(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await put_claim(replicas, 0, replace(OLD, pending=True))
        # Which forgets routes, and keeps claims.
        await replicas.stop_nameserver()
        await replicas.start_nameserver()
        await asyncio.sleep(20)
        assert (await replicas.addresses())[0] == replicas.broker(0).address
        assert await claim_at(replicas, 0) == replace(OLD, pending=True)


@virtual_time()
async def test_a_second_promotion_repairs_one_that_ended_after_the_fencing(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        claim, _ = await mastership_of(replicas.broker(1)).claim(replicas.broker(1).address, 1)
        fence = await replicas.client(0).ask(RequestCode.FENCE_BROKER, FenceBroker.of(claim))
        assert fence.code == SUCCESS
        await replicas.crash(1)
        await wait_until(lambda: replicas.role(0) == SLAVE)
        await asyncio.sleep(60)
        assert await can_send(replicas, 0) == REFUSED
        # Either of the two; here the one that is left.
        assert (await replicas.promote(0)).code == SUCCESS
        await until_accepting(replicas, 0)
        await replicas.start(1)
        await wait_until(lambda: replicas.role(1) == SLAVE)


@virtual_time()
async def test_a_disk_that_fails_after_the_fencing_leaves_slaves_to_promote(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        roles = replicas.broker(1).replica.roles
        ask = roles.ask

        async def fail_after_fencing(server: str, command: Command, timeout_ms: int) -> Command:
            answer = await ask(server, command, timeout_ms)
            replicas.disks[1].fail_writes()
            return answer

        roles.ask = fail_after_fencing
        answer = await replicas.promote(1)
        assert "brokerRole.json could not be written" in (answer.remark or "")
        await wait_until(lambda: replicas.role(0)[0] is Role.SLAVE)
        assert replicas.role(1) == SLAVE
        replicas.disks[1].heal()
        roles.ask = ask
        # The name server closes the connection of the broker whose place another one takes.
        while (answer := await replicas.promote(1)).code != SUCCESS:
            assert "closed by the peer" in (answer.remark or "")
        await until_accepting(replicas, 1)
        await wait_until(lambda: replicas.role(0) == SLAVE)


async def promote_half(replicas: PromotableBrokers) -> None:
    """Crash a promoted slave while the master is down, before its claim is final."""
    await replicas.stop(0)
    replicas.broker(1).replica.roles.restart = lambda: None
    assert (await replicas.promote(1)).code == SUCCESS
    await replicas.crash(1)
    claim = await claim_at(replicas, 0)
    assert claim is not None
    assert claim.pending


@pytest.mark.parametrize("is_apache", [False, True], ids=["turbopump", "apache"])
@pytest.mark.parametrize("nameservers", [1, 3])
@virtual_time()
async def test_a_promotion_that_the_old_master_has_ended_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameservers: int, is_apache: bool
) -> None:
    """Or the messages that the old master has acknowledged since would be set aside."""
    if is_apache:
        as_apache(monkeypatch)
    async with promotable_brokers(tmp_path, nameservers=nameservers) as replicas:
        await until_known(replicas)
        await promote_half(replicas)
        await replicas.start(0)
        await until_accepting(replicas, 0)
        await replicas.start(1)
        await asyncio.sleep(30)
        assert (replicas.role(0), replicas.role(1)) == (MASTER, SLAVE)
        assert await can_send(replicas, 0) == SUCCESS
        answer = await replicas.promote(1)
        assert answer.code == SUCCESS
        # An epoch is used once.
        assert PromoteBrokerAnswer.from_ext_fields(answer.ext_fields).epoch == 2
        await until_accepting(replicas, 1)
        assert await can_send(replicas, 0) == REFUSED


@virtual_time()
async def test_a_promotion_that_another_one_followed_is_not_resumed(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, slaves=2) as replicas:
        await until_known(replicas)
        await promote_half(replicas)
        await replicas.start(0)
        await until_accepting(replicas, 0)
        # It knows nothing of the first promotion, whose claim the master has removed.
        assert (await replicas.promote(2)).code == SUCCESS
        await until_accepting(replicas, 2)
        own = mastership_of(replicas.broker(2)).record
        claim = MasterClaim(
            epoch=own.epoch, token="0", master_address="10.0.0.3:10911", former_id=2
        )
        await put_claim(replicas, 0, claim)
        mastership_of(replicas.broker(2)).record = replace(own, token="0")
        await replicas.start(1)
        await asyncio.sleep(30)
        assert accepts(replicas, 2)
        assert replicas.role(1) == SLAVE


@pytest.mark.parametrize("is_repeated", [False, True])
@virtual_time()
async def test_a_promotion_that_has_fenced_the_master_outlives_another_one_that_fails(
    tmp_path: Path, is_repeated: bool
) -> None:
    """Or there would be no master, although name servers and brokers work."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        if is_repeated:
            assert (await replicas.promote(1)).code == SUCCESS
            for number in (1, 2):
                replicas.nameserver_disks[number].fail_writes()
            await wait_until(lambda: replicas.role(1) == MASTER)
            for number in (1, 2):
                replicas.nameserver_disks[number].heal()
        replicas.broker(1).replica.roles.restart = lambda: None
        assert (await replicas.promote(1)).code == SUCCESS
        await wait_until(lambda: replicas.role(0) == SLAVE)
        rival = MasterClaim(
            epoch=3, token="r", master_address="10.0.0.3:10911", former_id=2, pending=True
        )
        for number in range(3):
            await put_claim(replicas, number, rival)
        await replicas.stop(1)
        await replicas.start(1)
        await asyncio.sleep(20)
        # The other one may go on.
        assert await can_send(replicas, 1) == REFUSED
        await until_accepting(replicas, 1)
        assert replicas.role(0)[0] is Role.SLAVE


@virtual_time()
async def test_a_promoted_slave_whose_claim_is_not_confirmed_fences_no_master(
    tmp_path: Path,
) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        await promote_half(replicas)
        await replicas.start(0)
        await until_accepting(replicas, 0)
        replicas.network.partition(replicas.host_of(1), "10.0.1.1")
        await replicas.start(1)
        await asyncio.sleep(30)
        assert await can_send(replicas, 1) == REFUSED
        assert await can_send(replicas, 0) == SUCCESS
        replicas.network.heal()
        await wait_until(lambda: replicas.role(1) == SLAVE, 30)
        assert await can_send(replicas, 0) == SUCCESS


@virtual_time()
async def test_a_promotion_whose_claim_is_still_there_is_resumed(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        await promote_half(replicas)
        await replicas.start(1)
        await until_accepting(replicas, 1)
        await replicas.start(0)
        assert replicas.role(0) == SLAVE
        # Once it was confirmed, it remains master even if name servers lose what they had.
        await replicas.stop(1)
        for number in range(3):
            await replicas.stop_nameserver(number)
            del replicas.nameserver_disks[number]
            await replicas.start_nameserver(number)
        await replicas.start(1)
        await until_accepting(replicas, 1)


@virtual_time()
async def test_a_promotion_whose_claim_is_final_somewhere_is_completed(tmp_path: Path) -> None:
    """The old master has ended it elsewhere, but is replaced by the final claim all the same."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        network, new = replicas.network, replicas.host_of(1)
        await make_the_claim_final_on_one(replicas)
        for number in (1, 2):
            network.partition(new, f"10.0.1.{number + 1}")
            replicas.nameserver_disks[number].heal()
        await asyncio.sleep(50)
        for number in (1, 2):
            left = await claim_at(replicas, number)
            assert left is not None
            assert not left.epoch
        assert [number for number in range(2) if accepts(replicas, number)] == [0]
        assert (await replicas.client(0).send(b"only on the old one")).code == SUCCESS
        for number in (1, 2):
            network.join(new, f"10.0.1.{number + 1}")
        await until_accepting(replicas, 1)
        network.heal()
        await wait_until(lambda: replicas.role(0) == SLAVE, 30)
        await wait_until(lambda: b"only on the old one" in replicas.set_aside(0), 30)
        await asyncio.sleep(30)
        assert [number for number in range(2) if accepts(replicas, number)] == [1]


@virtual_time()
async def test_a_promotion_whose_claim_may_be_final_somewhere_is_not_abandoned(
    tmp_path: Path,
) -> None:
    """The name server that has the final claim is down, and replaces the old master when back."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await make_the_claim_final_on_one(replicas)
        await replicas.stop_nameserver(0)
        await let_the_old_master_end_the_promotion(replicas)
        # It knows that also after a restart.
        await replicas.crash(1)
        await replicas.start(1)
        await asyncio.sleep(20)
        assert [number for number in range(2) if accepts(replicas, number)] == [0]
        replicas.network.heal()
        await replicas.start_nameserver(0)
        await until_accepting(replicas, 1)
        await wait_until(lambda: replicas.role(0) == SLAVE, 30)


@virtual_time()
async def test_a_promotion_whose_claim_becomes_final_late_is_not_abandoned(tmp_path: Path) -> None:
    """A name server whose disk stalls stores the final claim when nothing waits for it."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await promote_across_a_cut(replicas)
        replicas.nameserver_disks[0].stall()
        for number in (1, 2):
            replicas.nameserver_disks[number].fail_writes()
        await wait_until(lambda: replicas.nameserver_disks[0].is_waiting)
        await let_the_old_master_end_the_promotion(replicas)
        await asyncio.sleep(20)
        assert [number for number in range(2) if accepts(replicas, number)] == [0]
        replicas.network.heal()
        replicas.nameserver_disks[0].heal()
        await until_accepting(replicas, 1)
        await wait_until(lambda: replicas.role(0) == SLAVE, 30)


@virtual_time()
async def test_a_promotion_whose_claim_is_final_nowhere_is_abandoned(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        replicas.network.partition(replicas.host_of(0), replicas.host_of(1))
        assert (await replicas.promote(1)).code == SUCCESS
        replicas.network.partition(replicas.host_of(0), "10.0.1.1")
        for number in range(3):
            replicas.nameserver_disks[number].fail_writes()
        await wait_until(lambda: replicas.role(1) == MASTER)
        await asyncio.sleep(5)
        await let_the_old_master_end_the_promotion(replicas)
        # The pending claim, which only the slave can reach, cannot be removed yet.
        await asyncio.sleep(20)
        assert replicas.role(1) == MASTER
        assert not accepts(replicas, 1)
        replicas.nameserver_disks[0].heal()
        await wait_until(lambda: replicas.role(1) == SLAVE, 30)
        left = await claim_at(replicas, 0)
        assert left is None or not left.epoch
        replicas.network.heal()
        await asyncio.sleep(30)
        assert [number for number in range(2) if accepts(replicas, number)] == [0]


@virtual_time()
async def test_a_master_ignores_fencing_by_a_promotion_that_it_has_ended(tmp_path: Path) -> None:
    """The request may arrive when a link is back, long after its sender has given it up."""
    async with promotable_brokers(tmp_path, nameservers=3) as replicas:
        await until_known(replicas)
        claim, _ = await mastership_of(replicas.broker(1)).claim(replicas.broker(1).address, 1)
        fence = FenceBroker.of(claim)
        await asyncio.sleep(50)
        assert [await claim_at(replicas, number) != claim for number in range(3)] == [True] * 3
        answer = await replicas.client(0).ask(RequestCode.FENCE_BROKER, fence)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "not completed in time" in (answer.remark or "")
        assert await can_send(replicas, 0) == SUCCESS
        # Unless the promotion was completed all the same.
        await put_claim(replicas, 1, replace(claim, pending=None))
        answer = await replicas.client(0).ask(RequestCode.FENCE_BROKER, fence)
        assert answer.code == SUCCESS
        await wait_until(lambda: replicas.role(0)[0] is Role.SLAVE)
        assert await can_send(replicas, 0) == REFUSED


async def promote_across_a_cut(replicas: PromotableBrokers) -> None:
    """Promote the slave, which the old master reaches neither itself nor by name server 0."""
    await until_known(replicas)
    old = replicas.host_of(0)
    replicas.network.partition(old, replicas.host_of(1))
    assert (await replicas.promote(1)).code == SUCCESS
    replicas.network.partition(old, "10.0.1.1")


async def make_the_claim_final_on_one(replicas: PromotableBrokers) -> None:
    """Promote the slave across a cut; its claim becomes final on name server 0 only."""
    await promote_across_a_cut(replicas)
    for number in (1, 2):
        replicas.nameserver_disks[number].fail_writes()
    await until_final(replicas, 0)


async def let_the_old_master_end_the_promotion(replicas: PromotableBrokers) -> None:
    """Let it remove the pending claim from name servers 1 and 2 while the slave cannot."""
    network, new = replicas.network, replicas.host_of(1)
    for number in (1, 2):
        network.partition(new, f"10.0.1.{number + 1}")
    # What the slave has sent already is refused.
    await asyncio.sleep(1)
    for number in (1, 2):
        replicas.nameserver_disks[number].heal()
    await asyncio.sleep(50)
    for number in (1, 2):
        left = await claim_at(replicas, number)
        assert left is not None
        assert not left.epoch
        network.join(new, f"10.0.1.{number + 1}")


async def until_final(replicas: PromotableBrokers, nameserver: int) -> None:
    """Wait until a name server has a claim that is not pending."""
    for _ in range(400):
        claim = await claim_at(replicas, nameserver)
        if claim is not None and not claim.pending:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the claim remains pending")


@virtual_time()
async def test_a_promoted_slave_that_is_fenced_before_it_starts_is_a_slave(tmp_path: Path) -> None:
    async with promotable_brokers(tmp_path) as replicas:
        await until_known(replicas)
        replicas.broker(1).replica.roles.restart = lambda: None
        assert (await replicas.promote(1)).code == SUCCESS
        newer = FenceBroker(epoch=2, token="b", master_address="10.0.0.3:10911", former_id=2)
        older = replace(newer, epoch=1, token="")
        for header, code in ((older, ResponseCode.SYSTEM_ERROR), (newer, SUCCESS)):
            answer = await replicas.client(1).ask(RequestCode.FENCE_BROKER, header)
            assert answer.code == code
        await replicas.stop(1)
        await replicas.start(1)
        assert replicas.role(1) == (Role.SLAVE, 2)
