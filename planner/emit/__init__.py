"""The emitter: a plan to the files that run it."""

from planner.emit.native import Emitted, emit_native

__all__ = ["Emitted", "emit_native"]
