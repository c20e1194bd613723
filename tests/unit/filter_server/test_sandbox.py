"""The process of a code filter: what it decides, and what it is prevented from doing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from filter_processes import EVERYTHING, is_alive, require_sandbox, sandboxes, wait_for
from turbopump.filter_server import child
from turbopump.filter_server import sandbox as sandbox_module
from turbopump.filter_server.sandbox import FilterRefused, FilterStopped, Sandbox, Verdicts
from turbopump.filters.server_config import CodeLimits
from turbopump.wire import properties
from turbopump.wire.hosts import Host
from turbopump.wire.record import MessageView, Record, decode_record

LIMITS = CodeLimits(memory_bytes_max=96 * 1024 * 1024, cpu_ms_max=200, time_ms_max=30_000)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    require_sandbox()
    yield
    assert sandboxes(os.getpid()) == []


def message(body: bytes = b"{}", offset: int = 7, **named: str) -> MessageView:
    record = Record(
        topic=b"orders",
        queue_id=3,
        body=body,
        properties=properties.encode(named).encode(),
        born_timestamp_ms=1000,
        born_host=Host(bytes(4), 1),
        store_host=Host(bytes(4), 2),
        reconsume_times=2,
    )
    return decode_record(record.encode(offset, 0, 2000))  # type: ignore[arg-type]


def run(main: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(limited())


async def decided(source: str, *messages: MessageView, limits: CodeLimits = LIMITS) -> Verdicts:
    sandbox = await Sandbox.start(source.encode(), limits)
    try:
        return await sandbox.decide(messages or [message()])
    finally:
        await sandbox.close()


def body(*lines: str) -> str:
    return "\n    ".join(["def matches(message):", *lines])


def failure(*lines: str) -> str:
    verdicts: Verdicts = run(decided(body(*lines)))
    assert verdicts.failure is not None, verdicts
    return verdicts.failure


def stopped(*lines: str, limits: CodeLimits = LIMITS) -> str:
    with pytest.raises(FilterStopped) as raised:
        run(decided(body(*lines), limits=limits))
    return str(raised.value)


# --- what filters do ------------------------------------------------------------------------------


def test_decides_by_everything_that_a_message_has() -> None:
    expected = {
        "topic": "orders",
        "queue_id": 3,
        "queue_offset": 7,
        "born_timestamp_ms": 1000,
        "store_timestamp_ms": 2000,
        "reconsume_times": 2,
        "tags": "paid",
        "keys": ["a", "b"],
        "body": b"{}",
    }
    checks = [
        f"assert message.{name} == {value!r}, message.{name}" for name, value in expected.items()
    ]
    source = body(*checks, "return message.properties['amount'] == '5'")
    messages = [
        message(TAGS="paid", KEYS="a b", amount="5"),
        message(TAGS="paid", KEYS="a b", amount="6"),
    ]
    # The same names as in the message that consumers get, so filters can be tested with one.
    assert all(getattr(messages[0], name) == value for name, value in expected.items())
    assert run(decided(source, *messages)) == Verdicts([True, False])


def test_messages_cannot_be_changed() -> None:
    assert "AttributeError" in failure("message.body = b''")


def test_modules_that_need_no_files() -> None:
    source = body(
        f"import {', '.join(child.AVAILABLE)}",
        "assert datetime.datetime.strptime('2026-01-02', '%Y-%m-%d').month == 1",
        "assert 'ä'.encode('latin-1').decode('cp1252') == 'ä'",
        "assert 'a'.encode('utf-16').decode('utf-16') == 'a'",
        "assert hashlib.sha256(b'').hexdigest().startswith('e3b0')",
        "assert json.loads(message.body) == {} and re.match('a', 'a') and time.time() > 0",
        "assert random.Random(1).random() < random.random() + 1",
        "print('printing goes nowhere')",
        "return decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')",
    )
    assert run(decided(source)) == Verdicts([True])


def test_annotations_are_not_evaluated() -> None:
    source = "def matches(message: MessageView) -> OtherName: return True"
    assert run(decided(source)) == Verdicts([True])


def test_an_exception_names_message_and_line_and_the_filter_continues() -> None:
    async def main() -> None:
        source = body("", "return int(message.properties['amount']) > 5").encode()
        sandbox = await Sandbox.start(source, LIMITS)
        batch = [message(amount="6"), message(amount="5"), message(other="1"), message(amount="7")]
        verdicts = await sandbox.decide(batch)
        assert verdicts.matched == [True, False]
        assert verdicts.failure == "KeyError: 'amount' (line 3 of the filter)"
        assert await sandbox.decide(batch[:2]) == Verdicts([True, False])
        await sandbox.close()

    run(main())


def test_only_true_and_false_are_answers() -> None:
    async def main() -> None:
        source = b"def matches(message): return eval(message.body)"
        sandbox = await Sandbox.start(source, LIMITS)
        for value, found in (("None", "NoneType"), ("1", "int"), ("'x'", "str")):
            verdicts = await sandbox.decide([message(value.encode())])
            assert f"must return True or False, got {found}" in str(verdicts.failure)
        await sandbox.close()

    run(main())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def matches(message)\n  return True", "SyntaxError: expected ':' (line 1 of the filter)"),
        ("class Filter {}", "SyntaxError"),
        ("def other(message): return True", "expected a function matches(message), found none"),
        ("matches = 5", "expected a function matches(message), found none"),
        ("x = 1\nundefined()\ndef matches(m): return True", "NameError"),
        ("import requests\ndef matches(m): return True", "filters can import base64"),
        ("(" * 50_000, "too many nested parentheses"),
        ("def matches(m): return " + "-" * 50_000 + "1", ""),
        ("raise SystemExit(3)", "SystemExit: 3 (line 1 of the filter)"),
        ("\0", "null bytes"),
    ],
)
def test_invalid_filters_are_rejected(source: str, reason: str) -> None:
    # The second one may crash the compiler, depending on the version of Python.
    with pytest.raises((FilterRefused, FilterStopped)) as raised:
        run(decided(source))
    assert reason in str(raised.value)


# --- what filters are prevented from doing --------------------------------------------------------


REFUSED = (
    "open('/etc/passwd')",
    "os.open('/tmp/x', os.O_CREAT | os.O_WRONLY)",
    "os.listdir('/')",
    "os.unlink('/tmp/x')",
    "os.read(5, 1)",
    "os.write(2, b'x')",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "os.kill(os.getppid(), 9)",
    "os.setuid(0)",
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "time.sleep(1)",
    "mmap.mmap(-1, 4096, prot=mmap.PROT_EXEC)",
)


def test_the_kernel_refuses() -> None:
    async def main() -> None:
        lines = ["import mmap, os, resource, signal, time", "exec(message.body)", "return True"]
        sandbox = await Sandbox.start(body(*lines).encode(), LIMITS)
        for statement in REFUSED:
            verdicts = await sandbox.decide([message(statement.encode())])
            text = str(verdicts.failure)
            assert "not permitted" in text or "not allowed" in text, (statement, text)
        await sandbox.close()

    run(main())


def test_no_sockets_even_past_python() -> None:
    # Directly into the C library, which the filter gets hold of.
    source = body(
        "import ctypes",
        "libc = ctypes.CDLL(None, use_errno=True)",
        "calls = {",
        "    'socket': libc.socket(2, 1, 0), 'fork': libc.fork(), 'ptrace': libc.ptrace(0, 1),",
        "    'socketpair': libc.socketpair(1, 1, 0, ctypes.create_string_buffer(8)),",
        "    'open': libc.open(b'/etc/passwd', 0), 'unshare': libc.unshare(0x10000000),",
        "    'prctl': libc.prctl(38, 0, 0, 0, 0),",
        "}",
        "assert set(calls.values()) == {-1}, calls",
        "return ctypes.get_errno() == 1",
    )
    assert run(decided(source)) == Verdicts([True])


def test_no_import_from_files_and_no_environment() -> None:
    assert "No module named 'socket'" in failure("import socket")
    source = body("import os, sys", "return set(os.environ) <= {'LC_CTYPE'} and sys.stdout is None")
    assert run(decided(source)) == Verdicts([True])


@pytest.mark.slow
def test_an_endless_loop() -> None:
    text = stopped("while True: pass")
    assert "ms of processor time for one message, the limit is 200 ms" in text
    assert "filterCodeCpuTimePerMessage" in text


@pytest.mark.slow
def test_an_endless_loop_outside_of_functions() -> None:
    with pytest.raises(FilterStopped, match=r"to load, the limit is .* outside of functions"):
        run(decided("while True: pass"))


def test_waiting_without_using_the_processor() -> None:
    lines = ["import _thread", "lock = _thread.allocate_lock()", "lock.acquire()", "lock.acquire()"]
    limits = CodeLimits(cpu_ms_max=100, time_ms_max=150)
    assert "it took" in stopped(*lines, limits=limits)


def test_time_is_limited_however_much_processor_time_is_allowed() -> None:
    lines = ["import os", "os.read(0, 1)"]
    limits = CodeLimits(cpu_ms_max=10_000_000, time_ms_max=150)
    assert "it took" in stopped(*lines, limits=limits)


def test_waiting_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = replace(sandbox_module._LOADING, cpu_ms=1000, waiting_ms=300)
    monkeypatch.setattr(sandbox_module, "_LOADING", loading)
    with pytest.raises(FilterStopped, match="ms to load: filters must not wait"):
        run(decided("import os\nos.read(0, 1)"))


async def checked_until_stopped(sandbox: Sandbox) -> None:
    while True:
        await sandbox.check_idle()
        await asyncio.sleep(0.01)


UNASKED = {
    "after a reply": "import os\ndef spin(*_):\n    while True: pass\n"
    "def matches(message):\n    os.read = spin\n    return True",
    "after a forged reply": "import os\nos.write(1, b'L' + bytes(8))\nwhile True: pass",
}


@pytest.mark.parametrize("source", UNASKED.values(), ids=UNASKED)
def test_working_without_a_request(source: str) -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(source.encode(), CodeLimits(cpu_ms_max=20))
        try:
            if "matches" in source:
                await sandbox.decide([message()])
            with pytest.raises(FilterStopped, match="while there was no message to decide"):
                await checked_until_stopped(sandbox)
            assert not is_alive(sandbox._process.pid)
        finally:
            await sandbox.close()

    run(main())


def test_waiting_for_messages_is_not_working() -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(EVERYTHING, CodeLimits(cpu_ms_max=50))
        try:
            for _ in range(20):
                await sandbox.decide([message()])
                await sandbox.check_idle()
            assert sandbox.is_running
        finally:
            await sandbox.close()

    run(main())


@pytest.mark.slow
def test_batches_are_as_large_as_the_filter_is_fast() -> None:
    async def main() -> None:
        slow = body("import time", "end = time.process_time() + 0.04")
        for source, fewest, most in (
            (EVERYTHING, 10, 64),
            (
                (slow + "\n    while time.process_time() < end: pass\n    return True").encode(),
                1,
                3,
            ),
        ):
            sandbox = await Sandbox.start(source, LIMITS)
            try:
                assert sandbox.batch_count == 1
                await sandbox.decide([message()] * 2)
                assert fewest <= sandbox.batch_count <= most
            finally:
                await sandbox.close()

    run(main())


@pytest.mark.slow
def test_forged_progress_does_not_gain_time() -> None:
    lines = [
        "import sys, struct",
        "frame = sys._getframe(1)",
        "at = 1",
        "while True:",
        "    at += 1",
        "    struct.pack_into('=I', frame.f_locals['progress'], 0, at)",
    ]
    assert "ms of processor time" in stopped(*lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        ["return bool(bytes(10 * 1024 ** 3))"],
        ["found = []", "while True: found.append('x' * 100_000)"],
        ["found = [0]", "while True: found *= 2"],
    ],
    ids=["10 GB", "a leak", "doubling"],
)
def test_too_much_memory(lines: list[str]) -> None:
    text = stopped(*lines, limits=CodeLimits(memory_bytes_max=96 * 1024 * 1024, cpu_ms_max=5000))
    assert "more than 100663296 bytes of memory" in text
    assert "filterCodeMemoryMax" in text


def test_a_fork_bomb() -> None:
    lines = [
        "import os",
        "for _ in range(1000):",
        "    try:",
        "        os.fork()",
        "    except OSError:",
        "        pass",
        "return True",
    ]
    assert run(decided(body(*lines))) == Verdicts([True])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("os._exit(0)", "its process ended with exit code 0"),
        ("os._exit(7)", "its process ended with exit code 7"),
        ("os.abort()", "it ended by SIG"),
        ("ctypes.string_at(0)", "it ended by SIGSEGV"),
    ],
)
def test_ending_the_process(line: str, reason: str) -> None:
    assert reason in stopped("import ctypes, os", line)


@pytest.mark.parametrize(
    "reply",
    [
        "child.REPLY.pack(b'D', 2, 0) + b'11'",
        "child.REPLY.pack(b'D', 1, 0) + b'9'",
        "child.REPLY.pack(b'D', 1 << 31, 0)",
        "child.REPLY.pack(b'E', 1, 0) + b'1'",
        "b'nonsense' * 100",
    ],
)
def test_forged_replies(reply: str) -> None:
    lines = ["import os, sys", "child = sys.modules['__main__']", f"os.write(1, {reply})"]
    assert "wrote to its reply pipe" in stopped(*lines, "return True")


def test_a_flood_of_replies() -> None:
    lines = ["import os", "while True: os.write(1, bytes(65536))"]
    assert stopped(*lines, limits=CodeLimits(cpu_ms_max=100, time_ms_max=500))


def test_closing_while_it_decides() -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(
            body("while True: pass").encode(), CodeLimits(cpu_ms_max=60_000, time_ms_max=60_000)
        )
        deciding = asyncio.ensure_future(sandbox.decide([message()]))
        await asyncio.sleep(0)
        await sandbox.close()
        with pytest.raises(FilterStopped, match="it was closed"):
            await deciding

    run(main())


def test_monkey_patches_stay_inside() -> None:
    async def main() -> None:
        lines = [
            "import builtins, json, os, sys",
            "json.loads = lambda text: 'patched'",
            "builtins.isinstance = lambda *_: True",
            "sys.modules['__main__'].described = lambda error: 'patched'",
            "os.read = os.write",
            "return True",
        ]
        hostile = await Sandbox.start(body(*lines).encode(), LIMITS)
        honest_lines = ["import json", "return json.loads('5') == 5 and not isinstance(5, str)"]
        honest = await Sandbox.start(body(*honest_lines).encode(), LIMITS)
        try:
            assert await hostile.decide([message()]) == Verdicts([True])
            with pytest.raises(FilterStopped):
                await hostile.decide([message()])
            assert await honest.decide([message()]) == Verdicts([True])
        finally:
            await hostile.close()
            await honest.close()

    run(main())


def test_the_rights_that_are_left() -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(b"def matches(message): return True", LIMITS)
        directory = Path(f"/proc/{sandbox._process.pid}")
        status = dict(
            line.split(":", 1) for line in (directory / "status").read_text().splitlines()
        )
        assert status["Seccomp"].strip() == "2"
        assert status["NoNewPrivs"].strip() == "1"
        assert int(status["CapEff"], 16) == 0
        if os.geteuid() == 0:
            assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65534"}
            assert status["Groups"].split() == []
            assert {int(file.name) for file in (directory / "fd").iterdir()} == {0, 1}
        await sandbox.close()

    run(main())


STARTER = """
import asyncio, marshal
from turbopump.filter_server.sandbox import Sandbox
from turbopump.filters.server_config import CodeLimits

async def main():
    source = b"def matches(message):\\n    while True: pass"
    sandbox = await Sandbox.start(source, CodeLimits())
    print(sandbox._process.pid, flush=True)
    await sandbox._exchange(marshal.dumps([("T", 0, 0, 0, 0, 0, {}, b"")]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_ends_with_the_filter_server() -> None:
    """Kill the process that started it while the filter keeps the processor busy."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_alive(pid)
        starter.kill()
    wait_for(lambda: not is_alive(pid))


# --- other systems --------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", sorted(child.SYSTEMS))
def test_a_program_for_each_architecture(machine: str) -> None:
    program = child.seccomp_program(machine)
    assert len(program) % 8 == 0
    assert program.endswith(child._instruction(child._RETURN, child._RET_ERRNO | child._EPERM))


def test_no_program_for_other_architectures() -> None:
    with pytest.raises(child.Unavailable, match="the processor is riscv64, expected x86_64 or"):
        child.seccomp_program("riscv64")


def test_other_systems_refuse_to_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(FilterRefused, match="code filters need Linux with seccomp"):
        run(decided(body("return True")))
