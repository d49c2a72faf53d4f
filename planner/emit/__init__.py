"""The emitter: a plan to the files that run it, here or in another engine; and other engines' lists read back."""

import sys

from planner import Verb
from planner.emit.engines import ENGINES, Written, check_engine, emit_engine, write_emitted
from planner.emit.layout import EngineFile
from planner.emit.native import Places, decisions_digest, emit_native
from planner.emit.reading import SUFFIXES, read_balance_list
from planner.emit.signature import is_edited

__all__ = [
    "ENGINES",
    "SUFFIXES",
    "EngineFile",
    "Places",
    "Written",
    "check_engine",
    "decisions_digest",
    "emit_engine",
    "emit_native",
    "is_edited",
    "read_balance_list",
    "write_emitted",
]

sys.modules[__name__].__class__ = Verb
