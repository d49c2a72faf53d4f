"""`gpipe-plan`: the commands put together, and every way to end mapped to its exit code."""

import io
import sys
import traceback
from importlib import import_module
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from planner import __version__
from planner.cli.console import Console, forget
from planner.core.errors import ExitCode, PlannerError

__all__ = ["app_for", "main", "run"]

_HELP = """Plan pipeline-parallel training: where to cut a model into stages, and into how many micro-batches a batch.

\b
  gpipe-plan profile model.py                 measure every layer         -> profile.yaml
  gpipe-plan solve --devices 8 --mem 8GB      find the fastest plan       -> plan.yaml
  gpipe-plan emit                             write what runs it          -> balance.yaml, train.py
  gpipe-plan check                            does the plan still fit?    (for CI: exit code 0 or 1)
  gpipe-plan verify                           does it run as predicted?   -> calibration.yaml, for solve --calibration
  gpipe-plan show FILE                        look at a profile, a plan or a run report
  gpipe-plan compare A.yaml B.yaml            plans beside each other
  gpipe-plan sweep --devices 1,2,4 --mem 80GB what is the smallest cluster that trains this?
  gpipe-plan export CHECKPOINT                what train.py saved, as one state dict -> model.pt

\b
  torchrun … -m planner profile-links         measure the links between the devices -> links.yaml, for solve --links
"""

_COMMANDS = (
    *("profile", "profile-links", "solve", "emit", "check", "verify", "explain", "show", "compare", "sweep", "export"),
    "schema",
)
"""Each a function in the module of its name, with an underscore for the dash."""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if wanted:
        from importlib import metadata  # noqa: PLC0415 - a tenth of the time that `check` takes

        packages = ("torch", "numpy", "fvcore", "typer", "rich")
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
        typer.echo(f"gpipe-plan {__version__} (python {sys.version.split()[0]}, {versions})")
        raise typer.Exit


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
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in arguments[:1] if arguments[0] in _COMMANDS else _COMMANDS:
        python_name = name.replace("-", "_")
        app.command(name)(getattr(import_module(f"planner.cli.{python_name}"), python_name))
    return app


def run(arguments: list[str]) -> int:
    """Runs one command line and says its exit code; prints errors to stderr, never a traceback without `--debug`."""
    console = Console(quiet=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    if not arguments:
        arguments = ["--help"]
    try:
        code = app_for(arguments)(arguments, prog_name="gpipe-plan", standalone_mode=False)
    except PlannerError as error:
        console.error(error)
        code = error.exit_code
        _debug(arguments)
    except TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        console.error(PlannerError(_plain(message), hint="see `gpipe-plan --help`"))
        code = ExitCode.ERROR
    except (SystemExit, BrokenPipeError):
        # typer leaves this way when the reader of its help went away: the answer was given all the same.
        forget(sys.stdout)
        code = ExitCode.OK
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except Exception as error:
        console.error(
            PlannerError(
                f"this is a bug in gpipe-plan: {type(error).__name__}: {error}",
                hint="run again with `--debug` and report the traceback",
            )
        )
        code = ExitCode.ERROR
        _debug(arguments)
    return int(code or 0)


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def _debug(arguments: list[str]) -> None:
    if "--debug" in arguments:
        traceback.print_exc()


def _plain(message: str) -> str:
    # typer's sentences begin with a capital and end with a full stop; ours do not.
    return message[:1].lower() + message[1:].rstrip(".")
