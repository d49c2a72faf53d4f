"""Write files: deterministic text, one line per layer and per stage, atomic replacement."""

import json
import math
import os
import re
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from planner.core.errors import FileError
from planner.core.values.printable import escape_unprintable
from planner.files.canonical import to_plain
from planner.files.kinds import kind_in_schema_key
from planner.files.strict_yaml import NUMBER


class _Line(dict[str, Any]):
    """Mapping that is written on one line."""


class _Lines(list[Any]):
    """List that is written with one line per item."""


_COMMAND_MARKER = "##["
"""Start of a command that GitHub's runner recognizes anywhere in a line."""


class _Dumper(yaml.CSafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: _Dumper, text: str) -> yaml.Node:
    # A quoted text keeps a line break in a name on one line, and is no command for a CI runner.
    plain = text.isprintable() and _COMMAND_MARKER not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{NUMBER.pattern})$"), list("-0123456789"))
_Dumper.add_representer(str, _string)
_Dumper.add_representer(_Line, lambda dumper, line: dumper.represent_mapping("tag:yaml.org,2002:map", line, True))
_Dumper.add_representer(_Lines, lambda dumper, lines: dumper.represent_sequence("tag:yaml.org,2002:seq", lines, False))


def json_text(value: Any) -> str:
    """Return deterministic JSON text of a dataclass or plain mapping."""
    return dump(value, as_json=True)


def dump(value: Any, *, as_json: bool = False, header: str = "") -> str:
    """Return a file's text for `value`: JSON, or YAML with a line per layer and per stage.

    Args:
        value: Content of the file, such as a `Plan`; or a plain mapping.
        as_json: True to return JSON instead of YAML.
        header: Comment lines for the top of a YAML file.
    """
    plain = rounded(to_plain(value))
    kind = kind_in_schema_key(plain.get("schema", "")) if isinstance(plain, dict) else ""
    if kind == "run":
        # The losses of a diverged run may be NaN or infinite, which JSON cannot express.
        plain["losses"] = [x if math.isfinite(x) else str(x) for x in value.losses]
    if as_json:
        text = json.dumps(plain, indent=2, allow_nan=False)
        return text.replace("\x7f", r"\u007f").replace(_COMMAND_MARKER, r"#\u0023[") + "\n"
    for key, item in plain.items():
        if kind in ("plan", "balance") and key == "order":
            plain[key] = _Lines(item)
        elif isinstance(item, dict) and not any(isinstance(v, dict) for v in item.values()):
            plain[key] = _Line(item)
        elif isinstance(item, list) and any(isinstance(entry, dict) for entry in item):
            plain[key] = [_with_lines(entry) for entry in item]
        elif isinstance(item, dict):
            plain[key] = {k: _Line(v) if isinstance(v, dict) else v for k, v in item.items()}
    text = _yaml(plain, allow_unicode=True)
    if not text.replace("\n", "").isprintable():
        text = _yaml(plain, allow_unicode=False)
    return "".join(f"# {escape_unprintable(line)}\n" for line in header.splitlines()) + text


def _with_lines(entry: dict[str, Any]) -> dict[str, Any]:
    layers = entry.get("layers")
    if isinstance(layers, list) and any(isinstance(layer, dict) for layer in layers):
        return {**entry, "layers": [_Line(layer) for layer in layers]}
    return _Line(entry)


def _yaml(plain: dict[str, Any], *, allow_unicode: bool) -> str:
    text: str = yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=2**31 - 1, allow_unicode=allow_unicode
    )
    return text.replace(_COMMAND_MARKER, r"#\x23[")  # the text is in double quotes, see `_string`


_UNROUNDED = ("inputs", "device", "settings", "proof")
"""Keys whose values are not rounded: options, device properties, settings and errors of the equivalence check."""


def rounded(value: Any) -> Any:
    """Return nested lists and mappings with floats rounded as they are written to files."""
    if isinstance(value, dict):
        return {key: item if key in _UNROUNDED else _round_to(item, _digits(key)) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _digits(key: str) -> int:
    return 1 if key.endswith("_us") else 6


def _round_to(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        return [_round_to(item, digits) for item in value]
    return rounded(value)


def write(path: str, value: Any, *, header: str = "") -> None:
    """Write `value` to `path`, as JSON if the suffix is `.json`.

    Args:
        path: Path of the file; `-` is standard output.
        value: Content of the file, such as a `Plan`; or a plain mapping.
        header: Comment lines for the top of a YAML file.

    Raises:
        FileError: The file cannot be written; an existing file is unchanged.
    """
    write_text(path, dump(value, as_json=path.endswith(".json"), header=header))


def write_text(path: str, text: str) -> None:
    """Write `text` to `path` atomically, or to standard output for `-`.

    Raises:
        FileError: The file cannot be written; an existing file is unchanged.
    """
    if path == "-":
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise  # the caller handles a pipe that the reader has closed, which is no error
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
            target.write_bytes(data)  # a pipe or a device is written, not replaced
        else:
            _replace(target, data)
    except UnicodeEncodeError as error:
        raise FileError(f"cannot be written: {text[error.start]!r} is not a valid character", path=path) from None
    except OSError as error:
        raise FileError(f"cannot be written: {_reason(error)}", path=path) from None


def check_writable(path: str) -> None:
    """Raise FileError if `path` is a folder, or its folder does not accept files. A missing folder is created."""
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
        raise FileError(f"cannot be written: {_reason(error)}", path=path) from None


def _reason(error: OSError) -> str | None:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "a folder of this path is a file"
    return error.strerror


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure may leave an empty file under the new name
        # A temporary file is private. The result gets the mode of the replaced file, or the default mode.
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        temporary.chmod(mode)
        os.replace(temporary, target)  # noqa: PTH105 - atomic on every system
        sync_folder(target.parent)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a renamed file in it survives a power failure."""
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
