"""Convert errors that a user's code raises to errors that name the line in the user's file and the first cause."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from planner.core.errors import FileError, ModelError, UsageError

_DEBUG = "run the file with python to see the whole traceback, or pass `--debug`"

_UNFIT = "the torchvision that is installed does not fit torch: install the one built for it, or uninstall torchvision"


@contextmanager
def explain_user_errors(path: str, action: str, *, hint: str = _DEBUG) -> Iterator[None]:
    """Convert errors of user code in the `with` block to a `ModelError` with the line in the file.

    Inside the block, modules next to the file can be imported, as in a script. Printed output goes to stderr, because
    stdout is reserved for the command's result.

    Args:
        path: Path of the user's file.
        action: Action that the block performs, for the message.
        hint: Hint of the error.
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


def error_location(model: nn.Module, loss_fn: Callable[..., Any], error: BaseException) -> str:
    """Return `file:line` of the model's or loss's code that raised an error; else an empty text.

    Args:
        model: The user's model.
        loss_fn: The user's loss function.
        error: Error with its traceback.
    """
    names = {type(part).__module__ for part in model.modules()} | {getattr(loss_fn, "__module__", "")}
    modules = set(map(sys.modules.get, names))
    others = [m for m in modules if m is not None and m.__name__.partition(".")[0] not in ("torch", "planner")]
    files = {getattr(module, "__file__", None) for module in others}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _first_cause(error: BaseException) -> BaseException:
    """Return the first cause of an import error, and any other error unchanged.

    Packages that import lazily (`transformers`) report only that an import failed.
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
