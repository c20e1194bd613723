"""The pytest plugin as users see it: auto-discovered, lightweight, with clear errors."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Before any in-process run: pytester unloads the modules that a run imported, and numpy cannot be
# imported twice.
from documents import Block, programs
from turbopump import testing
from turbopump.errors import NotRunning
from turbopump.machine.files import Files
from turbopump.testing.cluster import Cluster
from turbopump.testing.disk import Disk
from turbopump.testing.server import RunningServer

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "testing.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "testing_a_consumer"

pytest_plugins = ["pytester"]

PLUGIN = "turbopump.testing.pytest_plugin"
# The plugin may already have been imported in this process.
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
QUIET = ("-q", "-p", "no:cacheprovider", "-W", "error", "-W", IMPORTED)


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run inner tests without third-party plugins, which take seconds to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, program: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(program)
    return pytester.runpytest_inprocess(*QUIET, "--strict-markers", "-p", PLUGIN, *options)


def test_the_plugin_costs_next_to_nothing_until_it_is_used() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import turbopump.testing.pytest_plugin;"
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('turbopump')));"
        "print(*sorted({'asyncio', 'numpy', 'msgspec'} & set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    own, foreign = done.stdout.splitlines()
    assert own.split() == [
        "turbopump",
        "turbopump.durations",
        "turbopump.errors",
        "turbopump.json_bodies",
        "turbopump.lazy_names",
        "turbopump.message",
        "turbopump.testing",
        "turbopump.testing.pytest_plugin",
        "turbopump.version",
    ]
    assert "asyncio" not in foreign
    assert "numpy" not in foreign


def test_tests_that_are_coroutines_run_in_the_clusters_time(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio, pytest
        from turbopump.aio import Message

        class TestOrders:
            @pytest.mark.parametrize("body", [b"1", b"2"])
            async def test_method(self, turbopump_cluster, body, tmp_path):
                assert not list(tmp_path.iterdir())
                await turbopump_cluster.send(Message("orders", body))
                await turbopump_cluster.advance(hours=1)
                assert [m.body for m in turbopump_cluster.messages("orders")] == [body]

        async def test_function(turbopump_cluster):
            await asyncio.sleep(3600)
            assert turbopump_cluster.clock.monotonic_ms() >= 3600_000
        """,
    )
    result.assert_outcomes(passed=3)


def test_tests_that_are_plain_functions_run_coroutines(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from turbopump.aio import Message

        def test_plain(turbopump_cluster):
            turbopump_cluster.run(turbopump_cluster.send(Message("orders", b"1")))
            turbopump_cluster.run(turbopump_cluster.advance(hours=1))
            assert len(turbopump_cluster.messages("orders")) == 1
        """,
    )
    result.assert_outcomes(passed=1)


def test_tests_handled_by_pytest_asyncio_run_in_the_clusters_time(
    pytester: pytest.Pytester,
) -> None:
    """It replaces a coroutine with a plain function, which is simulated here."""
    pytester.makeconftest(
        """
        import asyncio, functools, pytest

        class Taken(pytest.Function):
            def runtest(self):
                test = self.obj
                @functools.wraps(test)
                def in_another_loop(**given):
                    asyncio.run(test(**given))
                self.obj = in_another_loop
                super().runtest()

        Taken.__module__ = "pytest_asyncio.plugin"

        @pytest.hookimpl(hookwrapper=True)
        def pytest_pycollect_makeitem(collector, name, obj):
            result = yield
            if asyncio.iscoroutinefunction(obj):
                result.force_result(Taken.from_parent(collector, name=name))
        """
    )
    result = run(
        pytester,
        """
        import asyncio

        async def test_ours(turbopump_cluster):
            await turbopump_cluster.advance(hours=1)

        async def test_theirs(tmp_path):
            await asyncio.sleep(0)
        """,
    )
    result.assert_outcomes(passed=2)


def test_marks_configure_the_cluster(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import pytest
        from turbopump import Message, Producer
        from turbopump.errors import NoRoute

        pytestmark = pytest.mark.turbopump(brokers=2, nameservers=2)

        @pytest.mark.turbopump(settings={"messageDelayLevel": "1s 2s", "fileReservedTime": 1})
        def test_settings(turbopump_cluster):
            assert list(turbopump_cluster.brokers) == ["broker-a", "broker-b"]
            assert len(turbopump_cluster.nameservers) == 2
            config = turbopump_cluster.broker().config.store
            assert config.delay_levels == (1000, 2000)
            assert config.retention.reserved_ms == 3_600_000

        @pytest.mark.turbopump(brokers=0)
        def test_none(turbopump_cluster):
            assert not turbopump_cluster.brokers

        @pytest.mark.turbopump(settings={"autoCreateTopicEnable": False})
        def test_server(turbopump_server):
            with Producer("shop", nameserver=turbopump_server.nameserver) as producer:
                with pytest.raises(NoRoute):
                    producer.send(Message("orders", b"1"))
                queues = producer.queues("BenchmarkTest")
            assert {queue.broker for queue in queues} == {"broker-a", "broker-b"}
        """,
    )
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        ("brokrs=2", "mark turbopump: unknown argument 'brokrs'"),
        ("2", "mark turbopump: unknown argument 2 without a name"),
        ("brokers=-1", "brokers must be 0 to 26, got -1"),
        ("brokers=True", "brokers must be 0 to 26, got True"),
        ("nameservers=0", "nameservers must be 1 to 26, got 0"),
        ("settings=7", "settings must be a dict of settings by their keys in files, got 7"),
        ("seed='x'", "seed must be a whole number, got 'x'"),
        ("settings={'listenPrt': 1}", "listenPrt"),
    ],
)
def test_wrong_marks_are_named(pytester: pytest.Pytester, mark: str, error: str) -> None:
    result = run(
        pytester,
        f"""
        import pytest

        @pytest.mark.turbopump({mark})
        def test_wrong(turbopump_cluster):
            pass
        """,
    )
    result.assert_outcomes(errors=1)
    assert error in result.stdout.str()


def test_a_server_without_brokers_is_a_clear_error(tmp_path: Path) -> None:
    with testing.running_server(tmp_path, brokers=()) as server:
        assert server.nameserver
        with pytest.raises(NotRunning, match="this server has no broker"):
            assert server.broker


@pytest.mark.slow
def test_a_wait_that_times_out_fails_with_the_current_state(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio
        from turbopump.aio import Message

        async def test_until(turbopump_cluster):
            await turbopump_cluster.send(Message("orders", b"1"))
            await turbopump_cluster.until(lambda: len(turbopump_cluster.messages("orders")) == 2)

        async def test_hangs(turbopump_cluster):
            await asyncio.Event().wait()
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E * not so within 1 min of virtual time: await turbopump_cluster.until(lambda: len(*",
            "E *topic orders: 1 messages",
            "E * still waiting after 6 h of virtual time: test_hangs at *",
        ],
        consecutive=False,
    )


def test_a_cluster_awaited_in_another_loop_is_a_clear_error(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio
        from turbopump.aio import Message

        def test_other_loop(turbopump_cluster):
            asyncio.run(turbopump_cluster.advance(hours=1))
        """,
    )
    result.assert_outcomes(failed=1)
    assert "turbopump_cluster" in result.stdout.str()
    assert "another event loop" in result.stdout.str()


def test_the_server_serves_blocking_clients_and_restarts(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import pytest
        from turbopump import Message, Producer

        def test_server(turbopump_server):
            at = turbopump_server.nameserver, turbopump_server.broker
            with Producer("shop", nameserver=turbopump_server.nameserver) as producer:
                producer.send(Message("orders", b"1"))
                assert turbopump_server.cut() >= 1
                producer.send(Message("orders", b"2"))
            turbopump_server.stop()
            with pytest.raises(Exception, match="not running"):
                turbopump_server.messages("orders")
            turbopump_server.start()
            assert (turbopump_server.nameserver, turbopump_server.broker) == at
            assert [m.body for m in turbopump_server.messages("orders")] == [b"1", b"2"]
            assert turbopump_server.lag("nobody") == 0
            assert turbopump_server.dead_letters("nobody") == []
            assert turbopump_server.retrying("nobody") == []
            with pytest.raises(AssertionError, match="topic orders: 2 messages"):
                turbopump_server.until(lambda: turbopump_server.messages("other"), timeout=0.05)
            turbopump_server.until(lambda: turbopump_server.messages("orders"))
        """,
    )
    result.assert_outcomes(passed=1)


def test_fixtures_and_mark_describe_themselves(pytester: pytest.Pytester) -> None:
    fixtures = pytester.runpytest_inprocess("-p", PLUGIN, "--fixtures").stdout.str()
    for name in ("turbopump_cluster", "turbopump_server"):
        assert f"{name} -- " in fixtures
    marks = pytester.runpytest_inprocess("-p", PLUGIN, "--markers").stdout.str()
    assert "@pytest.mark.turbopump(brokers=1" in marks


@pytest.mark.slow
def test_the_example_project_tests_its_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all installed plugins, including ours, found through its entry point."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    shutil.copytree(EXAMPLE, tmp_path / "billing")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "billing",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block", programs(lambda block: block.has_tests), ids=str)
def test_the_tests_in_the_documents_pass(pytester: pytest.Pytester, block: Block) -> None:
    result = run(pytester, block.text)
    result.assert_outcomes(passed=block.text.count("def test_"))


def names_of(kind: type) -> set[str]:
    """Return the public names of a class."""
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        (Cluster, {"start", "close"}),
        (RunningServer, set[str]()),
        (Disk, names_of(Files) | {"die", "lose_unsynced", "close_all", "is_waiting"}),
    ],
)
def test_the_guide_names_every_method(kind: type, left_out: set[str]) -> None:
    missing = {name for name in names_of(kind) - left_out if not re.search(rf"\b{name}\b", GUIDE)}
    assert not missing


def test_the_guide_names_every_public_name() -> None:
    guides = GUIDE + (ROOT / "docs" / "guide" / "virtual-time.md").read_text(encoding="utf-8")
    missing = {name for name in testing.__all__ if not re.search(rf"\b{name}\b", guides)}
    assert not missing
