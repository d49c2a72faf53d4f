"""Files to values and back: strict reading, digests, atomic writing. Alone in knowing yaml and pydantic."""

from planner.files.canonical import digest_of, to_plain
from planner.files.reading import (
    json_schema,
    read,
    read_balance,
    read_links,
    read_partial,
    read_plan,
    read_profile,
    read_run,
)
from planner.files.writing import check_writable, dump, write, write_text

__all__ = [
    "check_writable",
    "digest_of",
    "dump",
    "json_schema",
    "read",
    "read_balance",
    "read_links",
    "read_partial",
    "read_plan",
    "read_profile",
    "read_run",
    "to_plain",
    "write",
    "write_text",
]
