"""Output of commands: results to stdout, everything else to stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final, TextIO

from planner.core.errors import FileError, PlannerError
from planner.core.values.printable import printable, printable_lines

if TYPE_CHECKING:
    from planner.show.terminal.style import Style

_NOTE_EVERY_S = 10

_Progress = Callable[[str, int, int], None]
"""Progress callback with the arguments task, done, total; a total of 0 means that the total is not known yet."""


_ASCII: Final = str.maketrans("·→±\u00d7…≤≥◀─├┼│░▒▓█═▁▂▃▄▅▆▇▀▚▌", ".>~x~<><-++|,=%#~_,~:+*&'x!")


def spell_in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace unencodable characters by similar ASCII characters or escapes (error handler for `codecs`)."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace").decode(), error.end


class Console:
    """Output of a command."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def result(self, text: str) -> None:
        """Print the command's result to stdout. A closed pipe (`| head`) is not an error."""
        try:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stream(sys.stdout)
        except OSError as error:
            discard_stream(sys.stdout)
            raise FileError(f"cannot be written: {error.strerror}", path="standard output") from None

    def interrupted(self) -> None:
        self._say("interrupted")

    def note(self, text: str) -> None:
        """Print a note to stderr, unless `--quiet` is given."""
        if not self._quiet:
            self._say(text)

    def warning(self, text: str) -> None:
        """Print a warning to stderr."""
        self._say(f"warning: {text}")

    def error(self, error: PlannerError) -> None:
        """Print an error and its hint to stderr."""
        text = f"error: {error.message}"
        if isinstance(error, FileError):
            # Editors recognize `plan.yaml:17: error: …`.
            place = error.path if error.line is None else f"{error.path}:{error.line}"
            message = error.message.removeprefix(place + ": ")
            place = place.replace("-", "standard input", 1) if error.path == "-" else place
            text = f"{place}: error: {message}"
        self._say(text, hint=error.hint)

    def _say(self, text: str, *, hint: str = "") -> None:
        shown = printable_lines(text) + (f"\n\n{printable_lines(f'hint: {hint}')}" if hint else "")
        if sys.stderr is None:
            return  # stderr is closed; `print` would use stdout instead
        try:
            print(shown, file=sys.stderr, flush=True)
        except OSError:
            discard_stream(sys.stderr)

    @contextmanager
    def progress(self, title: str, *, announces: bool = True) -> Iterator[_Progress]:
        """Yield a progress callback, which shows a bar on a terminal, else prints a line every ten seconds.

        Without a terminal, the first call prints `title` if `announces` is true.
        """
        with ExitStack() as begun:
            shown: list[_Progress] = []

            def show(item: str, done: int, total: int) -> None:
                if not shown:
                    shown.append(self._begin(title, begun, announces=announces))
                shown[0](item, done, total)

            yield show

    def _begin(self, title: str, begun: ExitStack, *, announces: bool) -> _Progress:
        if self._quiet or not sys.stderr.isatty():
            if announces:
                self.note(f"{title} …")
            return self._noting(title)
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[item]}", markup=False),
        )
        bar = begun.enter_context(Progress(*columns, console=RichConsole(stderr=True), transient=True))
        task = bar.add_task("", title=title, item="", total=None)
        return lambda item, done, total: bar.update(task, item=printable(item), completed=done, total=total or None)

    def _noting(self, title: str) -> _Progress:
        last_s = time.monotonic()

        def note(item: str, done: int, total: int) -> None:
            nonlocal last_s
            if not item or time.monotonic() - last_s < _NOTE_EVERY_S:
                return
            last_s = time.monotonic()
            self.note(f"{title}: {item}" + (f" ({done} of {total})" if total else ""))

        return note


def discard_stream(stream: TextIO) -> None:
    """Discard the unwritten text of a stream whose reader has closed it. Otherwise Python reports an error at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def style_for_stdout() -> "Style":
    """Return the style for standard output."""
    from planner.show.terminal.style import style_for

    return style_for(sys.stdout)
