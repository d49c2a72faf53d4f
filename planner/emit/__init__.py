"""Emitters: write the files that run a plan with the bundled executor or another engine.

Each engine has its own module. `engines` has the table of engines, and `reading` reads cuts from files of engines.
"""

from typing import TYPE_CHECKING

from planner import lazy_attributes

if TYPE_CHECKING:
    from planner.emit.engines import ENGINES, EmitResult, check_engine, engine_file, format_names, write_engine_files
    from planner.emit.layout import EngineFile
    from planner.emit.native import InputPaths, decisions_digest, emit_native
    from planner.emit.reading import SUFFIXES, read_balance_list
    from planner.emit.signature import is_edited

__all__ = [
    "ENGINES",
    "SUFFIXES",
    "EmitResult",
    "EngineFile",
    "InputPaths",
    "check_engine",
    "decisions_digest",
    "emit_native",
    "engine_file",
    "format_names",
    "is_edited",
    "read_balance_list",
    "write_engine_files",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(
            ("ENGINES", "EmitResult", "check_engine", "engine_file", "format_names", "write_engine_files"), "engines"
        ),
        **dict.fromkeys(("InputPaths", "decisions_digest", "emit_native"), "native"),
        **dict.fromkeys(("SUFFIXES", "read_balance_list"), "reading"),
        "EngineFile": "layout",
        "is_edited": "signature",
    },
)
