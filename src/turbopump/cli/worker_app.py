"""Finding the functions to run: ``module``, or ``module:name``, as given on the command line."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from turbopump.client import blocking, worker
from turbopump.client.handlers import Handler
from turbopump.errors import ClientError, InvalidArgument

AnyWorker = worker.Worker | blocking.Worker

_APP = re.compile(r"(?P<module>\w+(?:\.\w+)*)(?::(?P<name>\w+))?", re.ASCII)
_OWN_FILES = (__file__, importlib.__file__)
_EXPECTED = (
    "a turbopump.Worker, a turbopump.aio.Worker or a function decorated with @turbopump.consumer"
)


def load(app: str, nameserver: str | None = None) -> AnyWorker:
    """Import an application, and return a worker for its functions; it is not started.

    ``nameserver`` replaces the address that a worker was created with. Raises InvalidArgument if
    there is nothing to run, and ClientError if the module cannot be imported.
    """
    module_name, name = _parsed(app)
    module = _imported(module_name)
    if name is None:
        return worker.Worker(*_functions(module), nameserver=nameserver or "")
    try:
        found: object = getattr(module, name)
    except AttributeError:
        raise InvalidArgument(f"{module_name} has no {name!r}{_choices(module)}") from None
    if isinstance(found, Handler):
        return worker.Worker(found, nameserver=nameserver or "")
    if not isinstance(found, AnyWorker):
        raise InvalidArgument(
            f"{app} must be {_EXPECTED}, got {type(found).__name__}{_choices(module)}"
        )
    if nameserver is not None:
        found.connect_to(nameserver)
    return found


def _parsed(app: str) -> tuple[str, str | None]:
    parts = _APP.fullmatch(app)
    is_file = app.partition(":")[0].endswith(".py")
    if parts is None or is_file:
        hint = "; pass the name of the module, without .py" if is_file else ""
        raise InvalidArgument(f"APP must be module or module:name, got {app!r}{hint}")
    return parts["module"], parts["name"]


def _imported(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise InvalidArgument(
                f"no module {missing!r} in {directory}, nor among the installed packages"
            ) from None
        raise ClientError(f"cannot import {name}:\n{_trace(error)}") from error


def _trace(error: BaseException) -> str:
    """Return the traceback of an error from the application's first frame on."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and _is_importing(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _is_importing(file: str) -> bool:
    return file in _OWN_FILES or file.startswith("<frozen importlib")


def _functions(module: ModuleType) -> list[Handler[..., object]]:
    """Return the decorated functions of a module, imported ones too; each once."""
    values = list(vars(module).values())
    if any(isinstance(each, AnyWorker) for each in values):
        # Its hooks and name servers would be ignored.
        raise InvalidArgument(f"{module.__name__} has a worker: name it{_choices(module)}")
    found = dict.fromkeys(each for each in values if isinstance(each, Handler))
    if not found:
        raise InvalidArgument(
            f"{module.__name__} has no functions decorated with @turbopump.consumer"
        )
    return list(found)


def _choices(module: ModuleType) -> str:
    kinds = (Handler, blocking.Worker, worker.Worker)
    names = [name for name, value in vars(module).items() if isinstance(value, kinds)]
    return f"; use {' or '.join(f'{module.__name__}:{each}' for each in names)}" if names else ""
