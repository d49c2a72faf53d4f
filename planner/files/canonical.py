"""The plain content of a value, and its digest."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

from planner.core.values.profile import BoundaryTensor, MemoryDetail, ProgramMemory, SplitMemory
from planner.core.values.proof import Proof

_SPARE = frozenset({BoundaryTensor, MemoryDetail, ProgramMemory, Proof, SplitMemory})
"""Classes of which every field that holds its default is left out: a profile has thousands of them."""

# What came to the files later than the rest stays out of those that do not use it: they keep their bytes and digests.
_SPARE_FIELDS: dict[str, frozenset[str]] = {
    "Balance": frozenset({"chunks", "placement", "replicas"}),
    "BoundaryRun": frozenset({"replica"}),
    "Device": frozenset({"reserve_bytes"}),
    "FrontierPoint": frozenset({"replicas"}),
    "Inputs": frozenset({"any_order", "chunks", "compute", "min_micro_batch", "node_devices", "replicas"}),
    "LayerProfile": frozenset({"cast_bytes", "idle_bytes", "optimizer_boundary_peak_bytes", "rewritten_bytes"}),
    "Model": frozenset({"batch_norm"}),
    "Plan": frozenset({"chunks", "placement", "replicas"}),
    "ProfileReference": frozenset({"how"}),
    "RunReport": frozenset({"batch"}),
    "Stage": frozenset({"backward_weight_us"}),
    "StageMemory": frozenset({"casts"}),
    "StageRun": frozenset({"backward_input_us", "backward_weight_us", "core_share", "outside_bytes", "replica"}),
}
"""Fields of other classes, by the names of these, that are left out where they hold their default."""


def to_plain(value: Any) -> Any:
    """Dataclasses to plain dicts and lists.

    A field that has a default is left out where it holds nothing (None, or an empty text, list or mapping). Some are
    left out where they hold any other default, too: see `_SPARE` and `_SPARE_FIELDS`.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in _ATOMS else to_plain(item) for item in value]
    if kind is dict:
        return {key: to_plain(item) for key, item in value.items()}
    if is_dataclass(kind):
        values = ((name, getattr(value, name), left_out) for name, left_out in _fields_of(kind))
        return {name: to_plain(item) for name, item, left_out in values if left_out is None or not left_out(item)}
    return value


_ATOMS = frozenset({int, float, str, bool, type(None)})


@cache
def _fields_of(kind: type) -> tuple[tuple[str, Callable[[Any], bool] | None], ...]:
    """Names of the fields, and when one is left out: None for never. A profile has a hundred thousand of them."""
    return tuple((field.name, _left_out(field, kind)) for field in fields(kind))


def _left_out(field: "Field[Any]", kind: type) -> Callable[[Any], bool] | None:
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    if kind in _SPARE or field.name in _SPARE_FIELDS.get(kind.__name__, ()):
        default = field.default
        return lambda value: bool(value == default)
    return lambda value: value is None or value in ("", (), {})


def digest_of(value: Any, *, leave_out: tuple[str, ...] = ("generator",)) -> str:
    """`sha256:…` over the canonical JSON of `value`: unchanged by formatting, changed by any number in it."""
    plain = to_plain(value)
    if isinstance(plain, dict):
        plain = {key: item for key, item in plain.items() if key not in leave_out}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
