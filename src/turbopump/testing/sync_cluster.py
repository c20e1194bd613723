"""A cluster in virtual time for tests that are plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from turbopump.testing.cluster import BROKER, Cluster, broker_config
from turbopump.testing.loop import VirtualTimeLoop


@contextmanager
def running_cluster(
    directory: Path,
    brokers: Sequence[str] = (BROKER,),
    *,
    nameservers: int = 1,
    settings: Mapping[str, str] | None = None,
    seed: int = 0,
    skips_idle_time: bool = True,
) -> Iterator[Cluster]:
    """Run a cluster for plain functions, which use `Cluster.run`.

    ``settings`` are the brokers', by their keys in configuration files; ``seed`` decides everything
    left to chance.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        cluster = Cluster(
            directory,
            brokers,
            nameservers=nameservers,
            config=broker_config(settings),
            skips_idle_time=skips_idle_time,
            runner=runner,
        )
        cluster.run(cluster.start())
        try:
            yield cluster
        finally:
            cluster.run(cluster.close())
