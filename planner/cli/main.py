"""`gpipe-plan`: the commands put together, and every way to end mapped to its exit code."""

import io
import sys
import traceback
from collections.abc import Collection
from importlib import import_module
from typing import Annotated, TextIO, cast

import typer
from typer.exceptions import TyperException

from planner import __version__
from planner.__main__ import main
from planner.cli.console import Closed, Console, forget
from planner.cli.help import Commands, Sectioned, misused
from planner.core.errors import ExitCode, PlannerError

__all__ = ["app_for", "main", "run"]  # `main` for scripts that an earlier version installed

_HELP = """Plan pipeline-parallel training: where to cut a model into stages, and into how many micro-batches a batch.

\b
  gpipe-plan profile model.py             measure every layer: profile.yaml
  gpipe-plan solve --devices 8 --mem 8GB  find the fastest plan: plan.yaml
  gpipe-plan emit                         what runs it: balance.yaml, train.py
  gpipe-plan check                        does it still fit? exit code 0 or 1
  gpipe-plan verify                       does it run so? calibration.yaml
  gpipe-plan show FILE                    a profile, a plan or a run report
  gpipe-plan explore                      a report with handles: explore.html
  gpipe-plan compare A.yaml B.yaml        plans beside each other
  gpipe-plan sweep --devices 1,2,4 …      the smallest cluster that trains it
  gpipe-plan export CHECKPOINT            one state dict of it: model.pt

\b
  torchrun … -m planner profile-links     measure the links: links.yaml
"""

_COMMANDS = (
    *("profile", "profile-links", "solve", "emit", "check", "verify", "explain", "show", "explore", "compare"),
    *("sweep", "export", "schema"),
)
"""Each a function in the module of its name, with an underscore for the dash."""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if wanted:
        from planner.core.extras import absent_from, command_for

        absent = absent_from("train")
        packages = (name for name in ("torch", "numpy", "fvcore", "typer", "rich") if name not in absent)
        versions = ", ".join(f"{name} {_version_of(name)}" for name in packages)
        typer.echo(f"gpipe-plan {__version__} (python {sys.version.split()[0]}, {versions})")
        if absent:
            typer.echo(f"without {', '.join(absent)}: {command_for('train')}")
        raise typer.Exit


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it was not installed as packages are
        return "of unknown version"


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


def app_for(arguments: list[str]) -> typer.Typer:
    """The application as far as `arguments` need it: importing every command takes longer than most of them run."""
    # Plain text: rich's boxes wrap messages, and colour help even into a pipe on CI machines.
    app = typer.Typer(
        name="gpipe-plan",
        cls=Commands,
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in _needed(arguments[0]):
        python_name = name.replace("-", "_")
        app.command(name, cls=Sectioned)(getattr(import_module(f"planner.cli.{python_name}"), python_name))
    return app


def _needed(word: str) -> Collection[str]:
    """The commands that a command line which begins with `word` may run, or tell of."""
    if word == "--version":
        return ()
    return (word,) if word in _COMMANDS else _COMMANDS


def run(arguments: list[str]) -> int:
    """Runs one command line and says its exit code; prints errors to stderr, never a traceback without `--debug`."""
    console = Console()
    if sys.stdout is None:
        sys.stdout = cast("TextIO", Closed())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    if not arguments:
        arguments = ["--help"]
    try:
        code = _code_of(arguments)
    except PlannerError as error:
        code = _code_after(console, error, error.exit_code)
        _debug(arguments)
    except TyperException as error:
        console.error(misused(error, arguments[0] if arguments[0] in _COMMANDS else ""))
        code = ExitCode.ERROR
    except (SystemExit, BrokenPipeError):
        # typer leaves this way when the reader of its help went away: the answer was given all the same.
        forget(sys.stdout)
        code = ExitCode.OK
    except (KeyboardInterrupt, typer.Abort):
        console.interrupted()
        code = ExitCode.INTERRUPTED
    except Exception as error:
        code = _code_after(console, _explained(error), ExitCode.ERROR)
        _debug(arguments)
    return int(code or 0)


def _code_of(arguments: list[str]) -> int | None:
    code: int | None = app_for(arguments)(arguments, prog_name="gpipe-plan", standalone_mode=False)
    if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C within a command
        raise KeyboardInterrupt
    return code


def _code_after(console: Console, error: PlannerError, code: int) -> int:
    if _is_interrupt(error):
        console.interrupted()
        return ExitCode.INTERRUPTED
    if isinstance(error.__cause__, OSError):
        forget(sys.stdout)  # it may be full: what could not be written would fail once more at exit
    console.error(error)
    return code


def _is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C is behind it: in the middle of an import it comes out as whatever the module makes of it."""
    seen: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if seen is None or isinstance(seen, KeyboardInterrupt):
            break
        seen = seen.__cause__ or seen.__context__
    return isinstance(seen, KeyboardInterrupt)


_LONGEST_CHAIN = 50


def _explained(error: Exception) -> PlannerError:
    """What to tell of an error that nobody raised on purpose."""
    explained: PlannerError
    if isinstance(error, MemoryError):
        explained = PlannerError(
            "this machine has not enough memory for that", hint="ask for less, or close other programs"
        )
    elif isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        explained = PlannerError(f"the operating system refuses: {error.strerror}{place}")
    else:
        explained = PlannerError(
            f"this is a bug in gpipe-plan: {type(error).__name__}: {error}",
            hint="run again with `--debug` and report the traceback",
        )
    explained.__cause__ = error
    return explained


def _debug(arguments: list[str]) -> None:
    if "--debug" in arguments:
        traceback.print_exc()
