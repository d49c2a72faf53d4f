"""Read files: strict parsing, type checks and semantic checks. Errors name file, line and key."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from planner.core.errors import FileError, UsageError
from planner.core.schedule import ListedSchedule, check_orders, orders_from_csv
from planner.files.checks import find_problems
from planner.files.core_schemas import core_schema_of
from planner.files.kinds import KINDS, kind_in_schema_key
from planner.files.strict_yaml import Document
from planner.files.validation import validate_content

if TYPE_CHECKING:
    from planner.core.values.balance import Balance
    from planner.core.values.calibration import Calibration
    from planner.core.values.links import Links
    from planner.core.values.partial import PartialProfile
    from planner.core.values.plan import Plan
    from planner.core.values.profile import Profile
    from planner.core.values.run_report import RunReport
    from planner.files.kinds import Value

MAX_BYTES = 2**28
"""Largest accepted length of a file, in characters. A profile of ten thousand layers has about 30 million."""

_T_co = TypeVar("_T_co", covariant=True)


def read(path: str, required_kind: str | None = None, text: str | None = None) -> "Value":
    """Return the content of a file as the dataclass that its key `schema` names.

    Args:
        path: Path of the file; `-` is standard input.
        required_kind: Kind that the file must have, such as `plan`; None for any kind.
        text: Content of the file if the caller has already read it; `path` is then used only in messages.

    Raises:
        FileError: The file is missing, unreadable, invalid or of another kind.
    """
    made_by = _made_by(path, required_kind)
    try:
        document = Document.parse(path, read_text(path, made_by) if text is None else text)
        kind = _kind_of(document, required_kind)
    except FileError as error:
        error.hint = error.hint or f"make it with `{made_by}`, or name another file"
        raise
    if kind == "run" and isinstance(losses := document.content.get("losses"), list):
        document.content["losses"] = [float(x) if x in ("nan", "inf", "-inf") else x for x in losses]
    plain = json.dumps(document.content)
    value = validate_content(KINDS[kind].value_class, plain, document)
    problems = list(find_problems(value))
    if problems:
        raise document.error_for(problems)
    return value


def read_plain(path: str) -> Any:
    """Read another tool's YAML or JSON file and return its content as plain values.

    Raises:
        FileError: The file is missing, unreadable or invalid.
    """
    return Document.parse(path, read_text(path, _made_by(path, None))).content


class _FileReader(Protocol[_T_co]):
    def __call__(self, path: str, text: str | None = None) -> _T_co: ...


def _read_as(required_kind: str, path: str, text: str | None = None) -> Any:
    return read(path, required_kind, text)


read_profile: "_FileReader[Profile]" = partial(_read_as, "profile")
read_plan: "_FileReader[Plan]" = partial(_read_as, "plan")
read_balance: "_FileReader[Balance]" = partial(_read_as, "balance")
read_run: "_FileReader[RunReport]" = partial(_read_as, "run")
read_links: "_FileReader[Links]" = partial(_read_as, "links")
read_calibration: "_FileReader[Calibration]" = partial(_read_as, "calibration")
read_partial: "_FileReader[PartialProfile]" = partial(_read_as, "partial")


def read_schedule(path: str) -> ListedSchedule:
    """Read a schedule in torch's compute-only CSV format, and check that it can run.

    Stages must be placed on devices in a loop or a V.

    Raises:
        FileError: The file cannot be read, a cell is not an action, or the action orders are invalid.
    """
    text = read_text(path, "gpipe-plan emit --format csv")
    try:
        rows = orders_from_csv(text)
    except UsageError as error:
        raise FileError(error.message, path=path, hint=error.hint) from None
    schedule = ListedSchedule(rows)
    num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    try:
        check_orders(rows, num_micro_batches)
        num_stages = len({action.stage for row in rows for action in row})
        schedule.actions(len(rows), num_micro_batches, num_stages // len(rows))
        _ = schedule.placement
    except UsageError as error:
        raise FileError(error.message, path=path, hint=f"{error.hint}; row 1 is device 0") from None
    return schedule


def stage_lines(path: str) -> tuple[int, ...]:
    """Return the line number of each stage in a plan's file; empty for standard input and pipes."""
    if not can_be_read_again(path):
        return ()
    document = Document.parse(path, read_text(path, _made_by(path, "plan")))
    return tuple(document.line_of(("stages", k)) or 1 for k in range(len(document.content["stages"])))


def can_be_read_again(path: str) -> bool:
    """Return True if `path` can be read twice; False for standard input and pipes."""
    try:
        return path != "-" and (Path(path).is_file() or not Path(path).exists())
    except OSError:  # an invalid path is reported when the file is opened
        return True


def _made_by(path: str, required_kind: str | None) -> str:
    # The name of a missing file suggests its kind: `plan.yaml` is a plan; a name without a kind counts as a profile.
    return KINDS[required_kind or (Path(path).stem if Path(path).stem in KINDS else "profile")].made_by


def read_text(path: str, made_by: str) -> str:
    """Return the text of a file, or of standard input if `path` is `-`.

    `made_by` is the command that makes such a file, for the hint of an error.

    Raises:
        FileError: The file does not exist, cannot be read, or is too large.
    """
    try:
        if path == "-":
            if sys.stdin is None:
                raise FileError("standard input is closed", path=path)
            return _bounded(sys.stdin, path)
        with Path(path).open(encoding="utf-8") as file:
            return _bounded(file, path)
    except FileNotFoundError:
        hint = f"make it with `{made_by}`, or name another file"
        raise FileError("no such file", path=path, hint=hint) from None
    except IsADirectoryError:
        raise FileError("is a directory, not a file", path=path, hint="name a file in it") from None
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8 text (byte {error.start})", path=path) from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", path=path) from None
    except ValueError:  # a character that is invalid in paths
        raise FileError("is not a valid path", path=path) from None


def _bounded(file: TextIO, path: str) -> str:
    pieces, count = [], 0
    while piece := file.read(2**20):
        pieces.append(piece)
        count += len(piece)
        if count > MAX_BYTES:
            raise FileError(f"has more than {MAX_BYTES} characters, the limit for files of gpipe-plan", path=path)
    return "".join(pieces)


def _kind_of(document: Document, required_kind: str | None) -> str:
    if not isinstance(document.content, dict) or "schema" not in document.content:
        message = f"has no key `schema` (expected {_expected(required_kind, quote='`')}): not a file of gpipe-plan"
        raise FileError(message, path=document.path, line=1)
    schema = document.content["schema"]
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    kind = kind_in_schema_key(schema) or schema
    if kind not in KINDS or schema != KINDS[kind].schema:
        meant = required_kind or (kind if kind in KINDS else None)
        raise FileError(
            f"`schema`: expected {_expected(meant)}, got {json.dumps(schema)}",
            path=document.path,
            line=document.line_of(("schema",)),
            hint=f"write the file again with this version: `{KINDS[meant or 'profile'].made_by}`",
        )
    if required_kind not in (None, kind):
        called = {"links": "list of links", "partial": "partial profile"}
        message = f"is a {called.get(kind, kind)}, a {called.get(required_kind, required_kind)} is needed"
        raise FileError(message, path=document.path, line=document.line_of(("schema",)))
    return kind


def _expected(kind: str | None, quote: str = "") -> str:
    return KINDS[kind].schema if kind else " or ".join(f"{quote}{each.schema}{quote}" for each in KINDS.values())


def json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of file, such as `profile`."""
    from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415 - slow to import, and rarely needed

    schema = GenerateJsonSchema().generate(core_schema_of(KINDS[kind].value_class))
    # Unknown keys are forbidden, which some versions of pydantic leave out.
    classes = {name: {"additionalProperties": False, **of} for name, of in schema.pop("$defs").items()}
    # The dataclass has a default for `schema`, but the key is required in a file.
    schema["required"].insert(0, "schema")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": classes, "additionalProperties": False}
    return {**head, **schema}
