"""Where tasks, threads and conditions are: for errors about those that do not end."""

from __future__ import annotations

import asyncio
import linecache
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from turbopump.machine.threads import busy_threads


def tasks_text(loop: asyncio.AbstractEventLoop, title: str) -> str:
    """Describe all tasks of a loop, a line for each, below a title."""
    tasks = sorted(
        asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())
    )
    return "\n".join([title, *(f"  {task.get_name()}: {where(task)}" for task in tasks)])


def threads_lines() -> list[str]:
    """Describe the threads that are busy."""
    places = [f"  {name}: {_place(frame)}" for name, frame in busy_threads().items()]
    return ["time stands still, and is no longer waited for, while these threads work:", *places]


def _place(frame: FrameType) -> str:
    """Describe the innermost frame outside the waiting of `threading` itself."""
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}"


def where(task: asyncio.Task[Any]) -> str:
    """Return at which line of which function a task waits."""
    name = getattr(task.get_coro(), "__qualname__", "?")
    frames = task.get_stack(limit=1)
    return f"{name} at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else str(name)


def described(fact: Callable[[], object]) -> str:
    """Return where a condition is defined, and its source."""
    code = getattr(fact, "__code__", None)
    if code is None:
        return repr(fact)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    place = f"{code.co_filename}:{code.co_firstlineno}"
    return f"{line}  ({place})" if line else f"{fact.__qualname__} at {place}"
