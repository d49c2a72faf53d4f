"""Files to values: a strict reader, types, checks of meaning; errors name file, line and key."""

import json
import re
import sys
from pathlib import Path
from typing import Any, TextIO, cast

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

__all__ = [
    "is_replayable",
    "json_schema",
    "read",
    "read_balance",
    "read_calibration",
    "read_links",
    "read_partial",
    "read_plan",
    "read_profile",
    "read_run",
    "stage_lines",
]

Value = Profile | Plan | RunReport | Balance | Links | Calibration | Partial

_TYPES: dict[str, type[Value]] = {
    PROFILE_SCHEMA: Profile,
    PLAN_SCHEMA: Plan,
    RUN_SCHEMA: RunReport,
    BALANCE_SCHEMA: Balance,
    LINKS_SCHEMA: Links,
    CALIBRATION_SCHEMA: Calibration,
    PARTIAL_SCHEMA: Partial,
}
_MADE_BY = {
    "profile": "gpipe-plan profile MODEL.py",
    "plan": "gpipe-plan solve",
    "run": "torchrun … train.py --report run.json",
    "balance": "gpipe-plan emit",
    "links": "torchrun --nproc-per-node K -m planner profile-links",
    "calibration": "gpipe-plan verify",
    "partial": "gpipe-plan profile MODEL.py",
}


def read(path: str) -> Value:
    """The profile, plan or run report in `path` (`-` is standard input), by its `schema` key.

    Raises:
        FileError: Missing, unreadable, or invalid; names the line and key where known.
    """
    return _read(path, None)


def read_profile(path: str, text: str | None = None) -> Profile:
    """The profile in `path`, or in `text`, which is then only called `path`; raises as `read`."""
    return cast("Profile", _read(path, PROFILE_SCHEMA, text))


def read_plan(path: str, text: str | None = None) -> Plan:
    """The plan in `path`, or in `text`, which is then only called `path`; raises as `read`."""
    return cast("Plan", _read(path, PLAN_SCHEMA, text))


def read_balance(path: str) -> Balance:
    """The balance configuration in `path`; raises as `read`."""
    return cast("Balance", _read(path, BALANCE_SCHEMA))


def read_run(path: str) -> RunReport:
    """The run report in `path`; raises as `read`."""
    return cast("RunReport", _read(path, RUN_SCHEMA))


def read_links(path: str) -> Links:
    """The measured links in `path`; raises as `read`."""
    return cast("Links", _read(path, LINKS_SCHEMA))


def read_calibration(path: str) -> Calibration:
    """The calibration in `path`; raises as `read`."""
    return cast("Calibration", _read(path, CALIBRATION_SCHEMA))


def read_partial(path: str) -> Partial:
    """The interrupted profile in `path`; raises as `read`."""
    return cast("Partial", _read(path, PARTIAL_SCHEMA))


def _read(path: str, wanted: str | None, text: str | None = None) -> Value:
    document = Document.parse(path, _read_text(path, wanted) if text is None else text)
    schema = _schema(document, wanted)
    if schema == RUN_SCHEMA:
        _read_losses(document.content)
    plain = json.dumps(document.content)
    value = validated(_TYPES[schema], plain, document)
    problems = list(problems_of(value, every_number=_ODD_NUMBER.search(plain) is not None))
    if problems:
        raise document.refuse(problems)
    return value


_ODD_NUMBER = re.compile(r"[:,\[] -?\d[\d.]*[eE]|[:,\[] ?-|\d{18}|Infinity|NaN")
"""What a number looks like that may be negative or very large. Most files have none, and are spared a look at each."""


def stage_lines(path: str) -> tuple[int, ...]:
    """The line of every stage in the plan in `path`, from 1; none where it cannot be read again."""
    if not is_replayable(path):
        return ()
    document = Document.parse(path, _read_text(path, PLAN_SCHEMA))
    return tuple(document.line_of(("stages", k)) or 1 for k in range(len(document.content["stages"])))


def is_replayable(path: str) -> bool:
    """Whether a file can be read twice, and has a folder: neither standard input nor another pipe, as of `<(…)`."""
    return path != "-" and (Path(path).is_file() or not Path(path).exists())


def _kind_by_name(path: str) -> str:
    """What a file that is not there would be: `plan.yaml` a plan, `anything.yaml` a profile, with which all begins."""
    return Path(path).stem if Path(path).stem in _MADE_BY else "profile"


def _read_text(path: str, wanted: str | None) -> str:
    kind = _kind_by_name(path) if wanted is None else _kind(wanted)
    try:
        if path == "-":
            if sys.stdin is None:
                raise FileError("standard input is closed", path=path)
            return _bounded(sys.stdin, path)
        with Path(path).open(encoding="utf-8") as file:
            return _bounded(file, path)
    except FileNotFoundError:
        raise FileError("no such file", path=path, hint=f"make it with `{_MADE_BY[kind]}`, or name another") from None
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


def _read_losses(content: dict[str, Any]) -> None:
    losses = content.get("losses")
    if isinstance(losses, list):
        content["losses"] = [float(x) if x in ("nan", "inf", "-inf") else x for x in losses]


def _schema(document: Document, wanted: str | None) -> str:
    """The file's schema, if we can read it and it is the wanted one."""
    if not isinstance(document.content, dict) or "schema" not in document.content:
        expected = wanted or " or ".join(f"`{name}`" for name in _TYPES)
        raise FileError(
            f"has no key `schema` (expected {expected}): not a file of gpipe-plan", path=document.path, line=1
        )
    schema = document.content["schema"]
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    if wanted is not None and schema in _TYPES and schema != wanted:
        raise FileError(
            f"is a {_called(schema)}, a {_called(wanted)} is needed",
            path=document.path,
            line=document.line_of(("schema",)),
        )
    if schema not in _TYPES:
        same_kind = [name for name in _TYPES if _kind(name) == _kind(schema)]
        expected = wanted or (same_kind[0] if same_kind else " or ".join(_TYPES))
        rewrite = _MADE_BY.get(_kind(expected), "gpipe-plan profile MODEL.py")
        raise FileError(
            f"`schema`: expected {expected}, got {json.dumps(schema)}",
            path=document.path,
            line=document.line_of(("schema",)),
            hint=f"write the file anew with this version: `{rewrite}`",
        )
    return schema


def _kind(schema: str) -> str:
    parts = schema.split("/")
    return parts[1] if len(parts) == 3 else schema


def _called(schema: str) -> str:
    return {"links": "list of links", "partial": "partial profile"}.get(_kind(schema), _kind(schema))


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file, such as `profile`."""
    by_kind = {_kind(schema): value for schema, value in _TYPES.items()}
    schema = schema_of(by_kind[kind])
    # The dataclass has a default for it, the file must not.
    schema["required"] = ["schema", *schema["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
