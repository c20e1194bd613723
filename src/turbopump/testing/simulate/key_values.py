"""An operator that stores values on name servers, and reads them again when all faults are over."""

from __future__ import annotations

import asyncio

from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.testing.simulate.events import KeyValuesRead, KeyValueStored
from turbopump.testing.simulate.world import World
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import KvEntry, KvNamespace

_NAMESPACE = "simulation"
_TIMEOUT_MS = 3000


async def store_key_values(world: World) -> None:
    """Store what the plan says on every name server, one value after the other."""
    values = world.plan.machine.values
    if not values:
        return
    async with world.session() as session:
        begin_s = asyncio.get_running_loop().time()
        for at_s, key in values:
            await asyncio.sleep(max(0.0, begin_s + at_s - asyncio.get_running_loop().time()))
            await asyncio.gather(
                *(_store(world, session, number, key) for number in range(len(world.nameservers)))
            )


async def _store(world: World, session: Session, number: int, key: str) -> None:
    entry = KvEntry(namespace=_NAMESPACE, key=key, value=key)
    command = request(RequestCode.PUT_KV_CONFIG, entry)
    try:
        answer = await session.request(world.nameservers[number].address, command, _TIMEOUT_MS)
    except TurbopumpError:
        # It may be stored or not.
        return
    if answer.code == ResponseCode.SUCCESS:
        world.history.add(KeyValueStored(world.now_us, f"ns{number}", key))


async def read_key_values(world: World) -> None:
    """Read what every name server has."""
    if not world.plan.machine.values:
        return
    header = KvNamespace(namespace=_NAMESPACE)
    async with world.session() as session:
        for number, server in enumerate(world.nameservers):
            command = request(RequestCode.GET_KVLIST_BY_NAMESPACE, header)
            answer = await session.request(server.address, command, _TIMEOUT_MS)
            found = (
                KeyValues.decode(whole_body(answer)).table
                if answer.code == ResponseCode.SUCCESS
                else {}
            )
            keys = tuple(sorted(key for key, value in found.items() if key == value))
            world.history.add(KeyValuesRead(world.now_us, f"ns{number}", keys))
