"""Program `gpipe-plan`: its commands and exit codes."""

import codecs
import io
import sys
import traceback
from importlib import import_module
from typing import Annotated

import typer
from typer.exceptions import TyperException

from planner import __version__
from planner.cli.console import Console, discard_stream, spell_in_ascii
from planner.cli.help import Commands, SectionedCommand, usage_error_of
from planner.core.errors import ExitCode, FileError, PlannerError

_HELP = """Plan pipeline-parallel training: cut a model into stages, and a batch into micro-batches.

\b
  gpipe-plan profile model.py             measure every layer: profile.yaml
  gpipe-plan solve --devices 8 --mem 8GB  find the fastest plan: plan.yaml
  gpipe-plan emit                         write balance.yaml and train.py
  gpipe-plan verify                       compare a run with the prediction
"""

COMMANDS = {
    "profile": "Measure time and memory of every layer, at several micro-batch sizes.",
    "profile-links": "Measure latency and bandwidth between neighboring processes; start it with torchrun.",
    "solve": "Find the fastest plan that fits: cuts, micro-batches, schedule and recomputation.",
    "emit": "Write balance.yaml and train.py, or the plan in another engine's format.",
    "check": "Check if a plan still fits.",
    "verify": "Run a plan and compare it with its prediction.",
    "explain": "Explain findings of `gpipe-plan check`: meaning, importance and remedy.",
    "show": "Show tables and pictures of a file: stages, memory, timeline.",
    "explore": "Write an interactive report with adjustable cuts, schedule and memory limits.",
    "compare": "Compare plans, for example plans for different memory limits, devices or schedules.",
    "sweep": "Find the best plan for every device count and memory limit.",
    "export": "Write the weights of a checkpoint as one state dict of the unpartitioned model.",
    "schema": "Print the JSON Schema of a kind of file.",
}
"""Commands and first sentences of their help, which `gpipe-plan --help` lists without importing the commands."""


_WIDEST_HELP = 140
"""Largest width of help texts in columns. On a narrower terminal, they have the terminal's width."""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if wanted:
        from planner.core.extras import install_command, missing_packages

        absent = missing_packages("train")
        packages = (name for name in ("torch", "numpy", "fvcore", "typer", "rich") if name not in absent)
        versions = ", ".join(f"{name} {_version_of(name)}" for name in packages)
        typer.echo(f"gpipe-plan {__version__} (python {sys.version.split()[0]}, {versions})")
        if absent:
            typer.echo(f"without {', '.join(absent)}: {install_command('train')}")
        raise typer.Exit


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it was not installed as a package
        return "of unknown version"


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


def app_for(arguments: list[str]) -> typer.Typer:
    """Return the application with the commands that `arguments` need, because importing all commands is slow.

    Without arguments, the application has all commands, for completion by shells.
    """
    # Plain text: rich's boxes wrap messages, and color the help even in pipes on CI machines.
    app = typer.Typer(
        name="gpipe-plan",
        cls=Commands,
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST_HELP},
    )
    app.callback()(_options)
    first = arguments[0] if arguments else ""
    if first in ("--help", "-h"):
        for name, summary in COMMANDS.items():
            app.command(name, help=summary)(_placeholder_command)
    elif first != "--version":
        for name in (first,) if first in COMMANDS else COMMANDS:
            python_name = name.replace("-", "_")
            app.command(name, cls=SectionedCommand)(getattr(import_module(f"planner.cli.{python_name}"), python_name))
    return app


def _placeholder_command() -> None:
    """Do nothing. `gpipe-plan --help` lists this function in place of every command, and so imports no command."""


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    Errors are printed to stderr, with a traceback only for `--debug`.
    """
    console = Console()
    if sys.stdout is None:
        console.error(FileError("is closed", path="standard output"))
        return ExitCode.ERROR
    codecs.register_error("gpipe-plan", spell_in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="gpipe-plan")
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    try:
        code = _code_of(arguments)
    except PlannerError as error:
        code = _code_after(console, error, error.exit_code, debug=debug)
    except TyperException as error:
        command = next((word for word in arguments[:1] if word in COMMANDS), "")
        console.error(usage_error_of(error, arguments, command))
        code = ExitCode.ERROR
    except (SystemExit, BrokenPipeError):
        # typer exits this way if the reader of its help has closed the pipe, which is no error.
        discard_stream(sys.stdout)
        code = ExitCode.OK
    except (KeyboardInterrupt, typer.Abort):
        console.interrupted()
        code = ExitCode.INTERRUPTED
    except Exception as error:
        code = _code_after(console, _explained(error), ExitCode.ERROR, debug=debug)
    return int(code or 0)


def _code_of(arguments: list[str]) -> int | None:
    code: int | None = app_for(arguments)(arguments or ["--help"], prog_name="gpipe-plan", standalone_mode=False)
    if code == ExitCode.INTERRUPTED:  # typer's code for Ctrl-C within a command
        raise KeyboardInterrupt
    return code


def _code_after(console: Console, error: PlannerError, code: int, *, debug: bool) -> int:
    if _is_interrupt(error):
        console.interrupted()
        return ExitCode.INTERRUPTED
    if isinstance(error.__cause__, OSError):
        discard_stream(sys.stdout)  # it may be full; the unwritten rest would fail again at exit
    console.error(error)
    if debug:
        traceback.print_exc()
    return code


def _is_interrupt(error: BaseException) -> bool:
    cause = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (cause is not None and _is_interrupt(cause))


def _explained(error: Exception) -> PlannerError:
    explained: PlannerError
    if isinstance(error, MemoryError):
        explained = PlannerError(
            "this machine does not have enough memory", hint="use a smaller model or batch, or close programs"
        )
    elif isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        explained = PlannerError(f"the operating system reports: {error.strerror}{place}")
    else:
        explained = PlannerError(
            f"this is a bug in gpipe-plan: {type(error).__name__}: {error}",
            hint="run again with `--debug` and report the traceback",
        )
    explained.__cause__ = error
    return explained
