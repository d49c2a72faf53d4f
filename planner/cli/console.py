"""Results to stdout, everything else to stderr."""

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from planner.core.errors import FileError, PlannerError
from planner.core.values.printable import printable, printable_lines

if TYPE_CHECKING:
    from planner.show.terminal.style import Style

_NOTE_EVERY_S = 10

_Progress = Callable[[str, int, int], None]
"""(item, done, total); a total of 0 is not known yet."""


class Console:
    """What a command says.

    Args:
        quiet: Leave out notes and the next command; results, warnings and errors remain.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def result(self, text: str) -> None:
        """The answer, on stdout. A reader that went away (`| head`) is no error: the answer stands."""
        try:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            forget(sys.stdout)
        except OSError as error:
            forget(sys.stdout)
            raise FileError(f"cannot be written: {error.strerror}", path="standard output") from None

    def interrupted(self) -> None:
        self._say("interrupted")

    def note(self, text: str) -> None:
        """Something to know; left out with `--quiet`."""
        if not self._quiet:
            self._say(text)

    def next(self, command: str) -> None:
        """The command that usually follows."""
        self.note(f"next: {command}")

    def warning(self, text: str) -> None:
        """Something that may be wrong."""
        self._say(f"warning: {text}")

    def error(self, error: PlannerError) -> None:
        """What went wrong and what to do."""
        text = f"error: {error.message}"
        if isinstance(error, FileError):
            # `plan.yaml:17: error: …` is what editors and people look for.
            place = error.path if error.line is None else f"{error.path}:{error.line}"
            text = f"{place}: error: {error.message.removeprefix(place + ': ')}"
        self._say(text, hint=error.hint)

    def _say(self, text: str, *, hint: str = "") -> None:
        shown = printable_lines(text) + (f"\n\n{printable_lines(f'hint: {hint}')}" if hint else "")
        if sys.stderr is None:
            return  # closed; `print` would take standard output instead
        try:
            print(shown, file=sys.stderr, flush=True)
        except OSError:
            forget(sys.stderr)

    @contextmanager
    def progress(self, what: str) -> Iterator[_Progress]:
        """Show a bar on a terminal, else a line every ten seconds; yields what to call with (item, done, total)."""
        if self._quiet or not sys.stderr.isatty():
            self.note(f"{what} …")
            yield self._noting(what)
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.fields[what]}", markup=False),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[item]}", markup=False),
        )
        with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
            task = bar.add_task("", what=what, item="", total=None)
            yield lambda item, done, total: bar.update(task, item=printable(item), completed=done, total=total or None)

    def _noting(self, what: str) -> _Progress:
        """Return what notes the progress in a line, at most every ten seconds."""
        last_s = time.monotonic()

        def note(item: str, done: int, total: int) -> None:
            nonlocal last_s
            if not item or time.monotonic() - last_s < _NOTE_EVERY_S:
                return
            last_s = time.monotonic()
            self.note(f"{what}: {item}" + (f" ({done} of {total})" if total else ""))

        return note

    @contextmanager
    def later_progress(self, what: str) -> Iterator[_Progress]:
        """Yields what begins the bar or line of `progress` at its first call: what is said before stands above it."""
        with ExitStack() as begun:
            shown: list[_Progress] = []

            def show(item: str, done: int, total: int) -> None:
                if not shown:
                    shown.append(begun.enter_context(self.progress(what)))
                shown[0](item, done, total)

            yield show


def forget(stream: TextIO) -> None:
    """Sends what is left for a stream whose reader went away to nowhere: Python would complain of it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Closed(io.TextIOBase):
    """A standard stream that was closed before we began: whatever is written is refused."""

    def write(self, text: str, /) -> int:  # noqa: ARG002 - as in the base class
        """Raises what writing to a closed descriptor raises."""
        raise OSError(errno.EBADF, "it is closed")


def style_for_stdout() -> "Style":
    """How to draw on this process's standard output."""
    from planner.show.terminal.style import style_for

    return style_for(sys.stdout)
