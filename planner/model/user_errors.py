"""Convert what a user's code raises to an error that names the place in their file and the original cause."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.core.errors import FileError, ModelError, UsageError

_DEBUG = "run the file with python to see the whole traceback, or pass `--debug`"

_UNFIT = "the torchvision that is installed does not fit torch: install the one built for it, or uninstall torchvision"


@contextmanager
def user_code(path: str, action: str, *, hint: str = _DEBUG) -> Iterator[None]:
    """Convert anything that the user's code raises to a `ModelError` with the line in their file.

    Inside the block, modules next to the file can be imported, as if it ran as a script. Its output goes to stderr,
    because stdout is reserved for our result.
    """
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, ModelError, UsageError, FileError):
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(path).resolve()]
        line = f":{frames[-1].lineno}" if frames else ""
        first = _first_cause(error)
        behind = f"; the cause: {type(first).__name__}: {first}" if first is not error else ""
        raise ModelError(
            f"{path}{line}: {action} raised {type(error).__name__}: {error}{behind}",
            hint=_UNFIT if "operator torchvision::" in str(first) else hint,
        ) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def place_in_model(model: nn.Module, loss_fn: Callable[..., Any], error: BaseException) -> str:
    """Return `file:line` of the code of the model or of its loss that raised an error; empty if other code did."""
    names = {type(part).__module__ for part in model.modules()} | {getattr(loss_fn, "__module__", "")}
    modules = set(map(sys.modules.get, names))
    files = {getattr(module, "__file__", None) for module in modules if not _is_of(module, "torch", "planner")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_of(module: ModuleType | None, *packages: str) -> bool:
    return module is not None and module.__name__.partition(".")[0] in packages


def _first_cause(error: BaseException) -> BaseException:
    """Return the original error that caused an import error.

    Packages that import lazily (`transformers`) only report that something could not be imported. Other errors are
    returned unchanged.
    """
    if not isinstance(error, ImportError):
        return error
    seen = {id(error)}
    first: BaseException = error
    while True:
        behind = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
        if behind is None or id(behind) in seen:
            return first
        seen.add(id(behind))
        first = behind
