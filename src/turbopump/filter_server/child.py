"""The process that runs one code filter. A script: it imports only Python's standard library.

Started by `sandbox` with ``python -I -S -B child.py MEMORY_BYTES PROGRESS_FD PARENT``, with an
empty environment and no open files but two pipes and a page of shared memory. It reads the filter's
source, drops every right that it does not need, and only then compiles and runs the source. From
there on the kernel, not Python, keeps the filter from files, sockets and processes.
"""

from __future__ import annotations
import __future__

import ctypes
import marshal
import mmap
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, cast

AVAILABLE = (
    "base64", "binascii", "bisect", "collections", "datetime", "decimal", "fnmatch", "fractions",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "struct", "time", "types", "unicodedata", "zlib",
)  # fmt: skip
"""What filters may import: loaded before the lockdown, after which no file can be opened."""
_NEEDED_BY_THEM = (
    "_strptime", "encodings.ascii", "encodings.cp1252", "encodings.latin_1", "encodings.utf_16",
    "encodings.utf_16_be", "encodings.utf_16_le", "encodings.utf_32", "encodings.utf_8_sig",
)  # fmt: skip
"""What Python itself imports only on first use."""

REPLY = struct.Struct(">cII")
"""Kind, number of messages decided before the reply, length of the text after their verdicts."""
LENGTH = struct.Struct(">I")
PROGRESS = struct.Struct("=I")

LOADED, REFUSED, DECIDED, RAISED, OUT_OF_MEMORY = b"L", b"F", b"D", b"E", b"M"

TEXT_BYTES_MAX = 2000
FILE_NAME = "<filter>"

_IN, _OUT = 0, 1
_NOBODY = 65_534
_NICENESS = 5
_READ_BYTES_MAX = 1 << 20

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_EPERM = 1
_LD_WORD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_PROT_EXEC = 4


class System(NamedTuple):
    """Seccomp's name of a processor architecture, and the numbers of its system calls."""

    audit: int
    read: int
    write: int
    mapping: tuple[int, ...]
    """mmap, mprotect: allowed without executable pages."""
    plain: tuple[int, ...]
    """munmap, brk, mremap, madvise, futex, sched_yield, rt_sigreturn, restart_syscall, exit,
    exit_group, clock_gettime, clock_getres, gettimeofday, getrandom; time where it exists."""


SYSTEMS = {
    "x86_64": System(
        0xC000_003E, 0, 1, (9, 10), (11, 12, 25, 28, 202, 24, 15, 219, 60, 231, 228, 229, 96, 318,
        201),
    ),
    "aarch64": System(
        0xC000_00B7, 63, 64, (222, 226), (215, 214, 216, 233, 98, 124, 139, 128, 93, 94, 113, 114,
        169, 278),
    ),
}  # fmt: skip


class Message(NamedTuple):
    """What a filter is given; the names are those of `turbopump.MessageView`."""

    topic: str
    queue_id: int
    queue_offset: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    reconsume_times: int
    properties: dict[str, str]
    body: bytes

    @property
    def tags(self) -> str | None:
        return self.properties.get("TAGS")

    @property
    def keys(self) -> list[str]:
        return self.properties.get("KEYS", "").split()


class Unavailable(Exception):
    """This system cannot sandbox a filter."""


# --- dropping rights ------------------------------------------------------------------------------


def lock_down(memory_bytes: int, parent: int) -> None:
    """Drop all rights except memory, the clock and the two pipes, permanently."""
    if sys.platform != "linux":
        raise Unavailable(f"this system is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    program = seccomp_program(platform.machine())
    os.nice(_NICENESS)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # After the change of user, which would clear it.
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit
    _prctl(libc, _PR_SET_DUMPABLE, 0)
    for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header))


def _prctl(libc: ctypes.CDLL, option: int, *arguments: Any) -> None:
    words = [a if isinstance(a, ctypes.Array) else ctypes.c_ulong(a) for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    if libc.prctl(option, *words) != 0:
        raise Unavailable(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def seccomp_program(machine: str) -> bytes:
    """Return the system call filter: calls of another architecture kill, others fail."""
    system = SYSTEMS.get(machine)
    if system is None:
        raise Unavailable(f"the processor is {machine}, expected {' or '.join(SYSTEMS)}")
    allow, refuse = _instruction(_RETURN, _RET_ALLOW), _instruction(_RETURN, _RET_ERRNO | _EPERM)
    program = [
        _instruction(_LD_WORD, _ARCHITECTURE_AT),
        _instruction(_JUMP_EQUAL, system.audit, 1, 0),
        _instruction(_RETURN, _RET_KILL_PROCESS),
        _instruction(_LD_WORD, _NUMBER_AT),
    ]
    for number in system.plain:
        program += [_instruction(_JUMP_EQUAL, number, 0, 1), allow]
    has_code = _instruction(_JUMP_SET, _PROT_EXEC, 0, 1)
    checked = [
        (system.read, 0, _instruction(_JUMP_EQUAL, _IN, 0, 1), allow, refuse),
        (system.write, 0, _instruction(_JUMP_EQUAL, _OUT, 0, 1), allow, refuse),
        *((number, 2, has_code, refuse, allow) for number in system.mapping),
    ]
    for number, argument, test, if_true, if_false in checked:
        # The low word of the argument: both architectures are little-endian.
        load = _instruction(_LD_WORD, _ARGUMENTS_AT + 8 * argument)
        program += [_instruction(_JUMP_EQUAL, number, 0, 4), load, test, if_true, if_false]
    return b"".join([*program, refuse])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction; jumps skip as many others as given."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


# --- talking to the filter server -----------------------------------------------------------------


def receive() -> bytes:
    """Return the next frame; exit the process at the end of input."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return _read(length)


def _read(size: int) -> bytes:
    pieces = []
    while size:
        piece = os.read(_IN, min(size, _READ_BYTES_MAX))
        if not piece:
            os._exit(0)
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def reply(kind: bytes, verdicts: bytes | bytearray = b"", text: str = "") -> None:
    note = text.encode(errors="replace")[:TEXT_BYTES_MAX]
    data = REPLY.pack(kind, len(verdicts), len(note)) + verdicts + note
    while data:
        data = data[os.write(_OUT, data) :]


def described(error: BaseException) -> str:
    """Return the error, and the line of the filter that raised it."""
    name, line = type(error).__name__, None
    try:
        text = f"{name}: {error}"[:TEXT_BYTES_MAX]
    except BaseException:  # noqa: BLE001 - the filter's own class; its name is all there is
        text = name
    if isinstance(error, SyntaxError):
        text, line = f"{name}: {error.msg}", error.lineno
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    text = text if line is None else f"{text} (line {line} of the filter)"
    if isinstance(error, PermissionError):
        text += "; filters have no access to files, the network or other processes"
    elif isinstance(error, ImportError):
        text += f"; filters can import {', '.join(AVAILABLE)}"
    return text


# --- the filter -----------------------------------------------------------------------------------


def load(source: bytes) -> Callable[[Message], object]:
    """Compile and run the source; return its function ``matches``."""
    # Annotations are not evaluated: they may name what only the subscriber has.
    flags = __future__.annotations.compiler_flag
    code = compile(source, FILE_NAME, "exec", flags=flags, dont_inherit=True)
    module = types.ModuleType("filter")
    exec(code, module.__dict__)  # noqa: S102 - what this process is for
    matches = getattr(module, "matches", None)
    if not callable(matches):
        raise TypeError("expected a function matches(message), found none")
    return cast(Callable[[Message], object], matches)


def serve(matches: Callable[[Message], object], progress: mmap.mmap) -> NoReturn:
    """Decide batch after batch."""
    while True:
        try:
            messages = marshal.loads(receive())  # noqa: S302 - from the filter server
        except MemoryError:
            reply(OUT_OF_MEMORY)
            os._exit(1)
        verdicts = bytearray()
        kind, text = DECIDED, ""
        for at, fields in enumerate(messages):
            PROGRESS.pack_into(progress, 0, at + 1)
            try:
                result = matches(Message(*fields))
                if result is not True and result is not False:
                    found = type(result).__name__
                    raise TypeError(f"matches must return True or False, got {found}")  # noqa: TRY301
            except MemoryError:
                kind = OUT_OF_MEMORY
                break
            except BaseException as error:  # noqa: BLE001 - whatever it raises, it is reported
                kind, text = RAISED, described(error)
                break
            verdicts.append(result)
        reply(kind, verdicts, text)


def main() -> None:
    memory_bytes, progress_file, parent = map(int, sys.argv[1:])
    for name in (*AVAILABLE, *_NEEDED_BY_THEM):
        import_module(name)
    progress = mmap.mmap(progress_file, mmap.PAGESIZE)
    os.closerange(_OUT + 1, max(progress_file, 64) + 1)
    # Output of the filter must not mix with the replies.
    sys.stdin = sys.stdout = sys.stderr = None
    source = receive()
    try:
        lock_down(memory_bytes, parent)
    except (Unavailable, OSError, ValueError) as error:
        needed = "they need Linux with seccomp, on x86-64 or arm64"
        reply(REFUSED, text=f"code filters cannot drop their rights here: {error}; {needed}")
        return
    try:
        matches = load(source)
    except MemoryError:
        reply(OUT_OF_MEMORY)
        return
    except BaseException as error:  # noqa: BLE001 - whatever it raises, it is reported
        reply(REFUSED, text=described(error))
        return
    reply(LOADED)
    serve(matches, progress)


if __name__ == "__main__":
    main()
