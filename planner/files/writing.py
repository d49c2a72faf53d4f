"""Values to files: deterministic text, one line per layer and per stage, written all at once or not at all."""

import json
import math
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from planner.core.errors import FileError
from planner.core.values.printable import spelled_out
from planner.files.canonical import to_plain
from planner.files.kinds import word_of
from planner.files.strict_yaml import StrictLoader


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


class _Lines(list[Any]):
    """A list that is written with an item to a line."""


_OLD_COMMAND = "##["
"""What GitHub's runner obeys anywhere in a line."""


class _Dumper(yaml.CSafeDumper):
    """Writes what `StrictLoader` reads; strings that it would take for numbers are quoted."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        key: yaml.CSafeDumper.yaml_implicit_resolvers.get(key, []) + StrictLoader.yaml_implicit_resolvers.get(key, [])
        for key in {*yaml.CSafeDumper.yaml_implicit_resolvers, *StrictLoader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: _Dumper, text: str) -> yaml.Node:
    # A line break in a name must not break the line that the name stands in, nor may a runner take it for a command.
    plain = text.isprintable() and _OLD_COMMAND not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _string)
_Dumper.add_representer(_Line, lambda dumper, line: dumper.represent_mapping("tag:yaml.org,2002:map", line, True))
_Dumper.add_representer(_Lines, lambda dumper, lines: dumper.represent_sequence("tag:yaml.org,2002:seq", lines, False))


def json_text(value: Any) -> str:
    """Deterministic text of `value` as JSON."""
    return dump(value, as_json=True)


def dump(value: Any, *, as_json: bool = False, header: str = "") -> str:
    """Deterministic text of `value`: YAML with a line per layer and per stage, or JSON."""
    plain = _rounded(to_plain(value))
    kind = word_of(plain.get("schema", "")) if isinstance(plain, dict) else ""
    if kind == "run":
        # A run that diverged reports losses that JSON has no number for.
        plain["losses"] = [x if math.isfinite(x) else str(x) for x in value.losses]
    if as_json:
        text = json.dumps(plain, indent=2, allow_nan=False)
        return text.replace("\x7f", r"\u007f").replace(_OLD_COMMAND, r"#\u0023[") + "\n"
    for key, item in plain.items():
        if kind in ("plan", "balance") and key == "order":
            plain[key] = _Lines(item)
        elif isinstance(item, dict) and not any(isinstance(v, dict) for v in item.values()):
            plain[key] = _Line(item)
        elif isinstance(item, list) and any(isinstance(entry, dict) for entry in item):
            plain[key] = [_Line(entry) for entry in item]
        elif isinstance(item, dict):
            plain[key] = {k: _Line(v) if isinstance(v, dict) else v for k, v in item.items()}
    text = _yaml(plain, allow_unicode=True)
    if not text.replace("\n", "").isprintable():
        text = _yaml(plain, allow_unicode=False)
    return "".join(f"# {spelled_out(line)}\n" for line in header.splitlines()) + text


def _yaml(plain: dict[str, Any], *, allow_unicode: bool) -> str:
    text: str = yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=2**31 - 1, allow_unicode=allow_unicode
    )
    return text.replace(_OLD_COMMAND, r"#\x23[")  # within double quotes, as `_string` has it


_ASKED = ("inputs", "device", "settings", "proof")
"""What was asked for, what a link can do, and how small a difference was, is written as it is."""


def _rounded(value: Any) -> Any:
    """Times to 0.1 us and figures of a plan to six digits behind the point: sums end in ...99999 otherwise."""
    if isinstance(value, dict):
        return {key: item if key in _ASKED else _round_to(item, _digits(key)) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _digits(key: str) -> int:
    return 1 if key.endswith("_us") else 6


def _round_to(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        return [_round_to(item, digits) for item in value]
    return _rounded(value)


def write(path: str, value: Any, *, header: str = "") -> None:
    """Writes `value` to `path` (`-` is standard output), as JSON if the suffix says so.

    Raises:
        FileError: The file cannot be written; what stood there before is untouched.
    """
    write_text(path, dump(value, as_json=path.endswith(".json"), header=header))


def write_text(path: str, text: str) -> None:
    """Writes `text` to `path` all at once, or not at all; raises as `write`."""
    if path == "-":
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise  # the reader went away, which is no error
        except OSError as error:
            raise FileError(f"cannot be written: {error.strerror}", path="standard output") from None
        return
    target = Path(path)
    try:
        data = text.encode()
        if target.is_dir():
            raise FileError("is a directory, cannot write a file there", path=path)
        if target.is_symlink():
            target = target.resolve()
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a pipe or a device: there is nothing to replace
        else:
            _replace(target, data)
    except UnicodeEncodeError as error:
        raise FileError(f"cannot be written: {text[error.start]!r} is not a character", path=path) from None
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}", path=path) from None


def check_writable(path: str) -> None:
    """Refuses a path that `write_text` could not write to, before time is spent on its content; raises as `write`."""
    target = Path(path)
    try:
        if path == "-" or (target.exists() and not target.is_dir()):
            return
        if target.is_dir():
            raise FileError("is a directory, cannot write a file there", path=path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}", path=path) from None


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave the new name with nothing behind it
        # A temporary file is private; what it replaces keeps its mode, or was never there.
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        temporary.chmod(mode)
        os.replace(temporary, target)  # noqa: PTH105 - all at once, on every system
        sync_folder(target.parent)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power failure, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
