"""Read and write files: strict parsing, digests, atomic writes. Only this package uses yaml and pydantic."""

from planner.files.canonical import digest_of, to_plain
from planner.files.paths import check_outputs, model_path, profile_path, reference_path, relocate_source
from planner.files.reading import (
    json_schema,
    read,
    read_balance,
    read_calibration,
    read_links,
    read_partial,
    read_plain,
    read_plan,
    read_profile,
    read_run,
    read_schedule,
    read_text,
    stage_lines,
)
from planner.files.revisions import read_revision
from planner.files.seal import has_valid_seal, with_seal
from planner.files.validation import parse_json
from planner.files.writing import check_writable, dump, json_text, write, write_text

__all__ = [
    "check_outputs",
    "check_writable",
    "digest_of",
    "dump",
    "has_valid_seal",
    "json_schema",
    "json_text",
    "model_path",
    "parse_json",
    "profile_path",
    "read",
    "read_balance",
    "read_calibration",
    "read_links",
    "read_partial",
    "read_plain",
    "read_plan",
    "read_profile",
    "read_revision",
    "read_run",
    "read_schedule",
    "read_text",
    "reference_path",
    "relocate_source",
    "stage_lines",
    "to_plain",
    "with_seal",
    "write",
    "write_text",
]
