"""Files to values: a strict reader, types, checks of meaning; errors name file, line and key."""

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar, cast

from planner.core.cost.calibration import CALIBRATION_SCHEMA, Calibration
from planner.core.errors import FileError
from planner.core.values.balance import BALANCE_SCHEMA, Balance
from planner.core.values.links import LINKS_SCHEMA, Links
from planner.core.values.partial import PARTIAL_SCHEMA, Partial
from planner.core.values.plan import PLAN_SCHEMA, Plan
from planner.core.values.profile import PROFILE_SCHEMA, Profile
from planner.core.values.run_report import RUN_SCHEMA, RunReport
from planner.files.bounds import MAX_BYTES
from planner.files.checks import problems_of
from planner.files.strict_yaml import Document
from planner.files.validation import schema_of, validated

Value = Profile | Plan | RunReport | Balance | Links | Calibration | Partial
_T = TypeVar("_T", bound=Value)


class _Kind(NamedTuple):
    schema: str
    of: type[Value]
    made_by: str


_KINDS: Mapping[str, _Kind] = {
    "profile": _Kind(PROFILE_SCHEMA, Profile, "gpipe-plan profile MODEL.py"),
    "plan": _Kind(PLAN_SCHEMA, Plan, "gpipe-plan solve"),
    "run": _Kind(RUN_SCHEMA, RunReport, "torchrun … train.py --report run.json"),
    "balance": _Kind(BALANCE_SCHEMA, Balance, "gpipe-plan emit"),
    "links": _Kind(LINKS_SCHEMA, Links, "torchrun --nproc-per-node K -m planner profile-links"),
    "calibration": _Kind(CALIBRATION_SCHEMA, Calibration, "gpipe-plan verify"),
    "partial": _Kind(PARTIAL_SCHEMA, Partial, "gpipe-plan profile MODEL.py"),
}
"""Every kind of file, by the word in the middle of its schema."""


def read(path: str, wanted: str | None = None, text: str | None = None) -> Value:
    """The value in the file at `path` (`-` is standard input), by its `schema` key.

    It may be of any kind, unless one is `wanted`. Where its `text` was read before, `path` only names it.

    Raises:
        FileError: Missing, unreadable, invalid or of another kind; names the line and key where known.
    """
    document = Document.parse(path, read_text(path, _made_by(path, wanted)) if text is None else text)
    kind = _kind_of(document, wanted)
    if kind == "run" and isinstance(losses := document.content.get("losses"), list):
        document.content["losses"] = [float(x) if x in ("nan", "inf", "-inf") else x for x in losses]
    plain = json.dumps(document.content)
    value = validated(_KINDS[kind].of, plain, document)
    problems = list(problems_of(value, every_number=_ODD_NUMBER.search(plain) is not None))
    if problems:
        raise document.refuse(problems)
    return value


_ODD_NUMBER = re.compile(r"[:,\[] -?\d[\d.]*[eE]|[:,\[] ?-|\d{18}|Infinity|NaN")
"""What a number looks like that may be negative or very large. Most files have none, and are spared a look at each."""


def _read_as(of: type[_T], path: str, text: str | None = None) -> _T:
    """The value of class `of` in a file; arguments and errors are those of `read`."""
    wanted = next(word for word, kind in _KINDS.items() if kind.of is of)
    return cast("_T", read(path, wanted, text))


read_profile = partial(_read_as, Profile)
read_plan = partial(_read_as, Plan)
read_balance = partial(_read_as, Balance)
read_run = partial(_read_as, RunReport)
read_links = partial(_read_as, Links)
read_calibration = partial(_read_as, Calibration)
read_partial = partial(_read_as, Partial)


def stage_lines(path: str) -> tuple[int, ...]:
    """The line of every stage in the plan in `path`, from 1; none where it cannot be read again."""
    if not is_replayable(path):
        return ()
    document = Document.parse(path, read_text(path, _made_by(path, "plan")))
    return tuple(document.line_of(("stages", k)) or 1 for k in range(len(document.content["stages"])))


def is_replayable(path: str) -> bool:
    """Whether a file can be read twice, and has a folder: neither standard input nor another pipe, as of `<(…)`."""
    return path != "-" and (Path(path).is_file() or not Path(path).exists())


def _made_by(path: str, wanted: str | None) -> str:
    # What is not there is told by its name: `plan.yaml` would be a plan, any other a profile, with which all begins.
    return _KINDS[wanted or (Path(path).stem if Path(path).stem in _KINDS else "profile")].made_by


def read_text(path: str, made_by: str) -> str:
    """The text of a file that the command `made_by` makes; `-` is standard input.

    Raises:
        FileError: There is no such file, it cannot be read, or it is too large for one of ours.
    """
    try:
        if path == "-":
            if sys.stdin is None:
                raise FileError("standard input is closed", path=path)
            return _bounded(sys.stdin, path)
        with Path(path).open(encoding="utf-8") as file:
            return _bounded(file, path)
    except FileNotFoundError:
        hint = f"make it with `{made_by}`, or name another"
        raise FileError("no such file", path=path, hint=hint) from None
    except IsADirectoryError:
        raise FileError("is a directory, not a file", path=path) from None
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8 text (byte {error.start})", path=path) from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", path=path) from None
    except ValueError:  # a path with a character that no path has
        raise FileError("is no path of a file", path=path) from None


def _bounded(file: TextIO, path: str) -> str:
    pieces, count = [], 0
    while piece := file.read(2**20):
        pieces.append(piece)
        count += len(piece)
        if count > MAX_BYTES:
            raise FileError(f"has more than {MAX_BYTES} characters, which no file of gpipe-plan has", path=path)
    return "".join(pieces)


def _kind_of(document: Document, wanted: str | None) -> str:
    """The file's kind, if we can read it and it is the wanted one."""
    schemas = [kind.schema for kind in _KINDS.values()]
    if not isinstance(document.content, dict) or "schema" not in document.content:
        expected = _KINDS[wanted].schema if wanted else " or ".join(f"`{schema}`" for schema in schemas)
        message = f"has no key `schema` (expected {expected}): not a file of gpipe-plan"
        raise FileError(message, path=document.path, line=1)
    schema = document.content["schema"]
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    parts = schema.split("/")
    kind = parts[1] if len(parts) == 3 else schema
    if schema not in schemas:
        meant = wanted or (kind if kind in _KINDS else None)
        expected = _KINDS[meant].schema if meant else " or ".join(schemas)
        raise FileError(
            f"`schema`: expected {expected}, got {json.dumps(schema)}",
            path=document.path,
            line=document.line_of(("schema",)),
            hint=f"write the file anew with this version: `{_KINDS[meant or 'profile'].made_by}`",
        )
    if wanted not in (None, kind):
        called = {"links": "list of links", "partial": "partial profile"}
        message = f"is a {called.get(kind, kind)}, a {called.get(wanted, wanted)} is needed"
        raise FileError(message, path=document.path, line=document.line_of(("schema",)))
    return kind


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file, such as `profile`."""
    schema = schema_of(_KINDS[kind].of)
    # The dataclass has a default for it, the file must not.
    schema["required"] = ["schema", *schema["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
