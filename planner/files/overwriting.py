"""No command writes over what it reads, nor two of its results over each other."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.core.errors import UsageError


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None]) -> None:
    """Refuses outputs that are an input or the same as another output, before anything is computed.

    Args:
        outputs: Paths by the option that names them; None where it was not given, `-` is standard output.
        inputs: What is read; None where there is nothing, `-` is standard input.

    Raises:
        UsageError: Two of them are one file, under whatever names.
    """
    read = [path for path in inputs if path is not None and path != "-"]
    written: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or path == "-":
            continue
        shown = path if option == path else f"{option} {path}"
        for other in read:
            if _is_same(path, other):
                raise UsageError(f"`{shown}` would overwrite {other}, which is read", hint="name another file")
        for other_option, other in written.items():
            if _is_same(path, other) and not _is_device(path):
                raise UsageError(f"`{other_option} {other}` and `{shown}` are one file", hint="name two files")
        written[option] = path


# Private functions


def _is_same(path: str, other: str) -> bool:
    try:
        if Path(path).exists() and Path(other).exists():
            return Path(path).samefile(other) and not _is_device(path)
        return Path(path).resolve() == Path(other).resolve()
    except (OSError, ValueError, RuntimeError):  # neither can be opened, which is told where it is tried
        return False


def _is_device(path: str) -> bool:
    """Whether what is written there replaces nothing: /dev/null, a pipe, a terminal."""
    return Path(path).exists() and not Path(path).is_file()
