"""The emitter: a plan to the files that run it."""

from planner.emit.native import Emitted, decisions_digest, emit_native, is_edited

__all__ = ["Emitted", "decisions_digest", "emit_native", "is_edited"]
