"""Workers of PySpark's daemon: how they exit, and what they collect after each call."""

from __future__ import annotations

import gc
import importlib
import pickle
import socket
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from io import BytesIO
from itertools import count
from types import ModuleType

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import turbopump.spark
from turbopump.spark import worker_process
from turbopump.spark.offline.source import DefaultSource as StoreSource
from turbopump.spark.pipelines.pacing import Pace
from turbopump.spark.pipelines.replay_sender import Schedule, sender
from turbopump.spark.source import DefaultSource
from turbopump.spark.worker_process import begin_call, begins_call
from turbopump.spark.writing.options import SinkOptions

DAEMON = textwrap.dedent("""
    import traceback

    def worker(sock, authenticated):
        outfile = sock.open()
        sock.call()
        outfile.flush()
        return 0

    def manager(sock):
        try:
            return worker(sock, True)
        except BaseException:
            traceback.print_exc()
""")
"""How the daemon runs one call in a worker that it has forked."""


class ClosedFile(BytesIO):
    """A file whose last rows cannot be sent."""

    error: Exception = BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise self.error


class ResetFile(ClosedFile):
    error = ConnectionResetError()


class FailingFile(ClosedFile):
    error = ValueError(7)


class Called:
    """A socket on which Spark sends one call."""

    def __init__(self, call: Callable[[], object], file: type[BytesIO] = BytesIO) -> None:
        self.call = call
        self.open = file

    def recv(self, size: int, flags: int) -> bytes:
        assert flags == socket.MSG_PEEK
        return b"call"[:size]


class ClosedByPeer(Called):
    """A socket that Spark closes before it sends a call."""

    def __init__(self) -> None:
        super().__init__(begin_call, FailingFile)

    def recv(self, size: int, flags: int) -> bytes:
        return b""


class ResetByPeer(ClosedByPeer):
    def recv(self, size: int, flags: int) -> bytes:
        raise ConnectionResetError


def main_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Pretend that this process was started with ``python -m name``."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, loader=None)
    exec(DAEMON, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return main_module("pyspark.daemon", monkeypatch)


def do_nothing() -> None:
    """A call of another package."""


def import_again() -> None:
    """A user's function may import it in any task."""
    importlib.reload(turbopump.spark)


def test_only_a_closed_socket_is_not_worth_a_traceback(
    daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        daemon.manager(Called(begin_call, ClosedFile))
        daemon.manager(Called(begin_call, ResetFile))
        assert capsys.readouterr().err == ""
        daemon.manager(Called(begin_call, FailingFile))
        assert "ValueError: 7" in capsys.readouterr().err
        assert daemon.traceback.format_exc is traceback.format_exc


@pytest.mark.parametrize("call", [DefaultSource.name, StoreSource.name])
def test_lookups_of_the_formats_end_quietly(
    call: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.manager(Called(call, ClosedFile))
    assert capsys.readouterr().err == ""


TOPIC = {"nameserver": "127.0.0.1:1", "topic": "orders"}
BODY = StructType([StructField("body", BinaryType())])


def new_source() -> object:
    return DefaultSource(TOPIC)


def new_store_source() -> object:
    return StoreSource({"path": "/nowhere"})


def new_reader() -> object:
    return DefaultSource(TOPIC).reader(BODY)


def new_stream_reader() -> object:
    return DefaultSource(TOPIC).streamReader(BODY)


def new_store_reader() -> object:
    source = StoreSource({"path": "/nowhere"})
    return source.reader(source.schema())


def new_writer() -> object:
    return DefaultSource(TOPIC).writer(BODY, overwrite=False)


def new_stream_writer() -> object:
    return DefaultSource(TOPIC).streamWriter(BODY, overwrite=False)


@pytest.mark.parametrize(
    "new",
    [
        new_source,
        new_store_source,
        new_reader,
        new_stream_reader,
        new_store_reader,
        new_writer,
        new_stream_writer,
    ],
)
def test_calls_that_receive_an_instance_end_quietly(
    new: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark plans streams, for example, without asking for the name of the format."""
    sent = new()
    data = pickle.dumps(sent)
    received: list[object] = []
    daemon.manager(Called(lambda: received.append(pickle.loads(data)), ClosedFile))
    assert capsys.readouterr().err == ""
    assert received[0].__dict__.keys() == sent.__dict__.keys()


def do_begun() -> None:
    begins_call(do_nothing)()


def replay_nothing() -> None:
    task = sender(SinkOptions.parse(TOPIC), Schedule(Pace(), {}, 0), "write")
    assert list(task(iter(()))) == []


@pytest.mark.parametrize("call", [do_begun, replay_nothing])
def test_functions_of_tasks_end_quietly(
    call: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.manager(Called(call, ClosedFile))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [ClosedByPeer, ResetByPeer])
def test_a_worker_that_waits_for_a_call_ends_when_its_socket_is_closed(
    closed: type[ClosedByPeer], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daemon.manager(Called(begin_call)) == 0
    assert daemon.manager(Called(do_nothing)) == 0
    assert daemon.manager(closed()) != 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("call", [do_nothing, import_again])
def test_other_calls_of_the_worker_keep_their_tracebacks(
    call: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        daemon.manager(Called(call, ClosedFile))
        assert "BrokenPipeError" in capsys.readouterr().err
        daemon.manager(Called(begin_call))


def test_other_programs_keep_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_module("turbopump", monkeypatch)
    main.manager(Called(begin_call, ClosedFile))
    assert "BrokenPipeError" in capsys.readouterr().err
    assert main.traceback is traceback


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_process, "_calls", count(1))
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def begin_twice() -> None:
    """Spark calls a data source several times in one call of its worker."""
    begin_call()
    begin_call()


def test_the_second_call_freezes_existing_objects(
    monkeypatch: pytest.MonkeyPatch, daemon: ModuleType, nothing_frozen: None
) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    daemon.manager(Called(begin_twice))
    assert gc.get_freeze_count() == 0
    daemon.manager(Called(begin_call))
    there = gc.get_freeze_count()
    assert there > 1000
    daemon.manager(Called(begin_call))
    assert gc.get_freeze_count() <= there


def test_processes_that_are_not_reused_freeze_nothing(
    monkeypatch: pytest.MonkeyPatch, daemon: ModuleType, nothing_frozen: None
) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    for _ in range(3):
        daemon.manager(Called(begin_call))
    assert gc.get_freeze_count() == 0
