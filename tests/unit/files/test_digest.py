"""Digests of files: independent of formatting, dependent on every value."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from planner.core.values.profile import BoundaryTensor, MemoryDetail, Profile, WritingTool
from planner.files import digest_of, dump, read_profile, to_plain, write
from tests.support.file_values import full_plan, full_profile


def read_text(text: str, tmp_path: Path, name: str = "profile.yaml") -> Profile:
    """Return the profile that `text` contains."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_profile(str(tmp_path / name))


def reordered(value: Any) -> Any:
    """Return the same content with the keys of every mapping in reverse order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def test_digest_is_a_sha256_of_the_content() -> None:
    digest = digest_of(full_profile())
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert digest == digest_of(full_profile())
    assert digest != digest_of(full_plan())


def test_formatting_does_not_change_the_digest(tmp_path: Path) -> None:
    text = dump(full_profile())
    plain = to_plain(full_profile())
    spellings = {
        "comments.yaml": "# new\n\n" + text.replace("\nlayers:", "   # here too\n\n\nlayers:"),
        "reversed.json": json.dumps(reordered(plain)),
        "packed.json": json.dumps(plain, separators=(",", ":")),
        "indented.json": json.dumps(plain, indent=8),
        "quoted.yaml": text.replace("name: h.0", "name: 'h.0'").replace("optimizer: adamw", 'optimizer: "adamw"'),
        "whole.yaml": text.replace("optimizer_us: 3.5", "optimizer_us: 35e-1"),
    }
    for name, spelling in spellings.items():
        assert spelling != text
        assert digest_of(read_text(spelling, tmp_path, name)) == digest_of(full_profile()), name


def test_writing_a_file_does_not_change_the_digest(tmp_path: Path) -> None:
    for name in ("profile.yaml", "profile.json"):
        write(str(tmp_path / name), full_profile())
        assert digest_of(read_profile(str(tmp_path / name))) == digest_of(full_profile())


def test_default_values_do_not_change_the_digest(tmp_path: Path) -> None:
    plain = to_plain(full_profile())
    without = dict(plain["layers"][0])
    del without["buffer_bytes"]
    zero = {**plain, "layers": [{**without, "buffer_bytes": 0}]}
    left_out = {**plain, "layers": [without]}
    assert digest_of(read_text(json.dumps(zero), tmp_path)) == digest_of(read_text(json.dumps(left_out), tmp_path))


def test_version_of_the_tool_does_not_change_the_digest() -> None:
    other = dataclasses.replace(full_profile(), generator=WritingTool(name="gpipe-plan", version="9.9"))
    assert digest_of(other) == digest_of(full_profile())


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in items for leaf in _leaves(item, (*at, key))]
    return found or [at]


def test_every_value_changes_the_digest(tmp_path: Path) -> None:
    plain = to_plain(dataclasses.replace(full_profile(), generator=None, layers=full_profile().layers[:1]))
    digests = {digest_of(read_text(json.dumps(plain), tmp_path))}
    changed = 0
    for at in _leaves(plain):
        if at in (
            ("schema",),
            ("device", "how"),
            ("optimizer_peak",),
            ("model", "granularity"),
            ("model", "counted_labels"),
        ):  # one of a few words
            continue
        other = json.loads(json.dumps(plain))
        holder = other
        for key in at[:-1]:
            holder = holder[key]
        old = holder[at[-1]]
        holder[at[-1]] = not old if isinstance(old, bool) else old + "x" if isinstance(old, str) else old + 1
        digests.add(digest_of(read_text(json.dumps(other), tmp_path)))
        changed += 1
    assert changed > 60
    assert len(digests) == changed + 1


def test_times_below_a_tenth_of_a_microsecond_change_the_digest(tmp_path: Path) -> None:
    """Plans use every digit that is read, and compiled profiles may have layers of 0.1 us."""
    text = dump(full_profile())
    before = read_text(text.replace("optimizer_us: 3.5", "optimizer_us: 0.1"), tmp_path)
    after = read_text(text.replace("optimizer_us: 3.5", "optimizer_us: 0.14"), tmp_path)
    assert before != after
    assert digest_of(before) != digest_of(after)


def test_order_of_layers_changes_the_digest() -> None:
    profile = full_profile()
    assert digest_of(dataclasses.replace(profile, layers=profile.layers[::-1])) != digest_of(profile)


def test_swapped_fields_change_the_digest() -> None:
    profile = full_profile()
    first = profile.layers[0]
    swapped = dataclasses.replace(first, forward_us=first.backward_us, backward_us=first.forward_us)
    assert digest_of(dataclasses.replace(profile, layers=(swapped,))) != digest_of(
        dataclasses.replace(profile, layers=(first,))
    )
    values = {"internal_bytes": 1, "forward_peak_bytes": 0, "no_grad_peak_bytes": 0}
    peaks = {"first_backward_peak_bytes": 0, "backward_peak_bytes": 0}
    kept, dropped = BoundaryTensor(bytes=4, kept=True), BoundaryTensor(bytes=4, kept=False)
    one = MemoryDetail(**values, **peaks, inputs=(kept,), outputs=(dropped,))
    other = MemoryDetail(**values, **peaks, inputs=(dropped,), outputs=(kept,))
    assert digest_of(one) != digest_of(other)
