"""Errors in files: reported with file, line, key and value, and always as a `FileError`."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import FileError
from planner.core.values.cluster import Link
from planner.files import dump, read, read_balance, read_calibration, read_links, read_plan, read_profile, read_run
from tests.support.file_values import (
    full_balance,
    full_calibration,
    full_links,
    full_partial,
    full_plan,
    full_profile,
    full_run,
    fullest_profile,
)

PROFILE = """\
schema: gpipe-plan/profile/v1
device: {kind: cpu}
micro_batch_sizes: [1, 2]
layers:
- {name: a, parameter_bytes: 10, forward_us: [1, 2], backward_us: [3, 4], output_bytes: [5, 6], saved_bytes: [7, 8]}
- {name: b, parameter_bytes: 20, forward_us: [1, 2], backward_us: [3, 4], output_bytes: [5, 6], saved_bytes: [7, 8]}
"""


def refused(text: str, tmp_path: Path, reader: Callable[[str], object] = read, name: str = "file.yaml") -> FileError:
    """Return the error of reading `text`; check that its message begins with path and, if known, line."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError) as raised:
        reader(str(path))
    error = raised.value
    assert error.path == str(path)
    assert error.exit_code == 2
    place = str(path) if error.line is None else f"{path}:{error.line}"
    assert error.message.startswith(f"{place}: ")
    return error


def test_sample_profile_is_read(tmp_path: Path) -> None:
    """Otherwise, files below might be refused for other reasons."""
    (tmp_path / "p.yaml").write_text(PROFILE)
    assert [layer.name for layer in read_profile(str(tmp_path / "p.yaml")).layers] == ["a", "b"]


# ---- no content at all


@pytest.mark.parametrize(
    ("reader", "makes_it"),
    [
        (read_profile, "gpipe-plan profile MODEL.py"),
        (read_plan, "gpipe-plan solve"),
        (read_run, "--report run.json"),
        (read_balance, "gpipe-plan emit"),
        (read_links, "-m planner profile-links"),
        (read_calibration, "gpipe-plan verify"),
        (read, "gpipe-plan profile MODEL.py"),
    ],
)
def test_missing_files_have_the_command_that_writes_them(reader, makes_it, tmp_path):
    with pytest.raises(FileError, match=r"nothing\.yaml: no such file") as raised:
        reader(str(tmp_path / "nothing.yaml"))
    assert makes_it in raised.value.hint


def test_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a directory"):
        read(str(tmp_path))


@pytest.mark.parametrize("text", ["", "\n", "  \n\t\n"])
def test_empty_files_are_refused(text: str, tmp_path: Path) -> None:
    assert "is empty" in refused(text, tmp_path).message


def test_files_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"schema: \xff\xfe")
    with pytest.raises(FileError, match=r"is not UTF-8 text \(byte 8\)"):
        read(str(path))


def test_standard_input_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"schema: \xff\xfe"), encoding="utf-8"))
    with pytest.raises(FileError, match="UTF-8"):
        read("-")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("schema: [1, 2\n", 2),
        ("schema: gpipe-plan/profile/v1\n  device: {}\n", 2),
        ("a: 'open\n", 2),
        ("a: b: c\n", 1),
        ('{"schema": "gpipe-plan/profile/v1",, }', 1),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    error = refused(text, tmp_path)
    assert "is not YAML" in error.message
    assert error.line == line


@pytest.mark.parametrize(
    "text",
    [
        "just words\n",
        "- a\n- list\n",
        "12\n",
        "# nothing but a comment\n",
        "layers: []\n",
        "null\n",
        "{}\n",
    ],
)
def test_files_without_schema_are_refused(text: str, tmp_path: Path) -> None:
    error = refused(text, tmp_path)
    assert "has no key `schema`" in error.message
    assert "gpipe-plan/profile/v1" in error.message
    wanted = refused(text, tmp_path, read_plan)
    assert "gpipe-plan/plan/v1" in wanted.message
    assert "profile" not in wanted.message.removeprefix(str(wanted.path))


# ---- another schema


@pytest.mark.parametrize("kind", ["profile", "plan", "run", "balance"])
@pytest.mark.parametrize("version", ["v2", "v0", "v10"])
def test_other_major_versions_are_refused_with_the_command_to_replace_the_file(kind, version, tmp_path):
    commands = {
        "profile": "gpipe-plan profile",
        "plan": "gpipe-plan solve",
        "run": "train.py",
        "balance": "gpipe-plan emit",
    }
    readers: dict[str, Callable[[str], object]] = {
        "profile": read_profile,
        "plan": read_plan,
        "run": read_run,
        "balance": read_balance,
    }
    for reader in (read, readers[kind]):
        error = refused(f"# x\nschema: gpipe-plan/{kind}/{version}\n", tmp_path, reader)
        assert f"expected gpipe-plan/{kind}/v1" in error.message
        assert f'"gpipe-plan/{kind}/{version}"' in error.message
        assert error.line == 2
        assert commands[kind] in error.hint


@pytest.mark.parametrize("schema", ["something", "1", "null", "[a, b]", "{a: b}", "gpipe-plan/profile/v1/x", "''"])
def test_foreign_schemas_are_refused(schema: str, tmp_path: Path) -> None:
    for reader in (read, read_profile):
        error = refused(f"schema: {schema}\ndevice: {{kind: cpu}}\n", tmp_path, reader)
        assert "`schema`: expected" in error.message
        assert error.line == 1


@pytest.mark.parametrize(
    ("make", "reader", "said"),
    [
        (full_plan, read_profile, "is a plan, a profile is needed"),
        (full_profile, read_plan, "is a profile, a plan is needed"),
        (full_run, read_balance, "is a run, a balance is needed"),
        (full_balance, read_run, "is a balance, a run is needed"),
        (full_links, read_plan, "is a list of links, a plan is needed"),
    ],
)
def test_other_kinds_of_files_are_refused(make, reader, said, tmp_path):
    assert said in refused(dump(make()), tmp_path, reader).message


# ---- keys


@pytest.mark.parametrize(
    ("old", "new", "key", "line", "meant"),
    [
        ("name: a,", "name: a, tide: [],", "layers[0].tide", 5, "tied"),
        ("name: b,", "name: b, gradient_byte: 4,", "layers[1].gradient_byte", 6, "gradient_bytes"),
        ("device: {kind: cpu}", "device: {kind: cpu, memory: 4}", "device.memory", 2, "memory_bytes"),
        ("device:", "optimiser: adam\ndevice:", "optimiser", 2, "optimizer"),
    ],
)
def test_unknown_keys_get_a_suggestion(  # noqa: PLR0917 - one row of the table
    old: str, new: str, key: str, line: int, meant: str, tmp_path: Path
) -> None:
    assert old in PROFILE
    error = refused(PROFILE.replace(old, new, 1), tmp_path)
    assert f":{line}: `{key}`: unknown key" in error.message
    assert error.hint == f"did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("micro_batch_sizes", "micro_batchsizes", 3),
        ("{name: b, parameter_bytes", "{name: b, parameter_byte", 6),
        ("device: {kind", "device: {kimd", 2),
    ],
)
def test_mistyped_required_keys_get_a_suggestion(old: str, new: str, line: int, tmp_path: Path) -> None:
    """The key is unknown and missing at once, and the error reports both."""
    assert old in PROFILE
    wrong, right = new.rpartition(" ")[2].strip("{"), old.rpartition(" ")[2].strip("{")
    error = refused(PROFILE.replace(old, new, 1), tmp_path)
    assert f"{wrong}`: unknown key" in error.message
    assert f"{right}`: is missing" in error.message
    assert f"did you mean `{right}`?" in error.hint
    assert error.line == line


@pytest.mark.parametrize("key", ["balance", "micro_batches", "forward_us", "total", "name"])
def test_keys_of_other_mappings_are_not_suggested(key: str, tmp_path: Path) -> None:
    error = refused(PROFILE + f"{key}: [1]\n", tmp_path)
    assert f"`{key}`: unknown key" in error.message
    assert error.line == 7
    assert f"did you mean `{key}`?" not in error.hint
    assert error.hint


def test_unknown_keys_without_a_similar_one_get_a_hint(tmp_path: Path) -> None:
    error = refused(PROFILE + "zzzzqqqq: 1\n", tmp_path)
    assert "`zzzzqqqq`: unknown key" in error.message
    assert "gpipe-plan schema" in error.hint


@pytest.mark.parametrize(
    ("text", "key", "first", "second"),
    [
        (PROFILE + "device: {kind: gpu}\n", "device", 2, 7),
        (PROFILE.replace("{kind: cpu}", "\n  kind: cpu\n  name: x\n  kind: gpu"), "device.kind", 3, 5),
        (PROFILE.replace("{name: b,", "{name: b, name: c,"), "layers[1].name", 6, 6),
        ('{"schema": "gpipe-plan/profile/v1",\n"schema": "gpipe-plan/profile/v1"}', "schema", 1, 2),
        (PROFILE + "'device': {kind: gpu}\n", "device", 2, 7),
    ],
)
def test_duplicate_keys_are_refused_with_both_lines(text, key, first, second, tmp_path):
    error = refused(text, tmp_path)
    assert f"`{key}` is defined twice, first in line {first}" in error.message
    assert error.line == second


@pytest.mark.parametrize("key", ["device", "micro_batch_sizes", "layers"])
def test_missing_keys_are_reported(key: str, tmp_path: Path) -> None:
    text = "".join(line for line in PROFILE.splitlines(keepends=True) if not line.startswith((key, "- ")))
    error = refused(text if key == "layers" else PROFILE.replace(f"{key}:", "optimizer:", 1), tmp_path)
    assert f"`{key}`: is missing" in error.message


def test_missing_keys_of_a_layer_have_the_line_of_the_layer(tmp_path: Path) -> None:
    error = refused(PROFILE.replace("name: b, parameter_bytes: 20, ", "name: b, "), tmp_path)
    assert "`layers[1].parameter_bytes`: is missing" in error.message
    assert error.line == 6


def test_several_problems_are_reported_together(tmp_path: Path) -> None:
    text = PROFILE.replace("parameter_bytes: 10", "parameter_bytes: ten").replace(
        "parameter_bytes: 20", "parameter_bytes: -1.5"
    )
    error = refused(text.replace("kind: cpu", "kind: 3"), tmp_path)
    assert error.line == 2
    assert "`device.kind`: expected a string, got 3" in error.message
    assert 'line 5: `layers[0].parameter_bytes`: expected an integer, got "ten"' in error.message
    assert "line 6: `layers[1].parameter_bytes`: expected an integer, got -1.5" in error.message


def test_at_most_six_problems_are_reported(tmp_path: Path) -> None:
    layers = "".join(PROFILE.splitlines(keepends=True)[4:5]).replace("parameter_bytes: 10", "parameter_bytes: x")
    head = "".join(PROFILE.splitlines(keepends=True)[:4])
    error = refused(head + "".join(layers.replace("name: a", f"name: l{n}") for n in range(20)), tmp_path)
    assert error.message.count("expected an integer") == 6
    assert "and 14 more" in error.message


# ---- values


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("parameter_bytes: 10", 'parameter_bytes: "10"', '`layers[0].parameter_bytes`: expected an integer, got "10"'),
        ("parameter_bytes: 10", "parameter_bytes: 1.5", "`layers[0].parameter_bytes`: expected an integer, got 1.5"),
        ("parameter_bytes: 10", "parameter_bytes: 1.0", "`layers[0].parameter_bytes`: expected an integer, got 1.0"),
        (
            "parameter_bytes: 10",
            "parameter_bytes: 7.4GB",
            '`layers[0].parameter_bytes`: expected an integer, got "7.4GB"',
        ),
        ("parameter_bytes: 10", "parameter_bytes: true", "`layers[0].parameter_bytes`: expected an integer, got true"),
        ("parameter_bytes: 10", "parameter_bytes: [1]", "`layers[0].parameter_bytes`: expected an integer, got [1]"),
        ("parameter_bytes: 10", "parameter_bytes: null", "`layers[0].parameter_bytes`: expected an integer, got null"),
        (
            "parameter_bytes: 10",
            "parameter_bytes: 1_000",
            '`layers[0].parameter_bytes`: expected an integer, got "1_000"',
        ),
        ("parameter_bytes: 10", "parameter_bytes: 010", '`layers[0].parameter_bytes`: expected an integer, got "010"'),
        ("parameter_bytes: 10", "parameter_bytes: 12:30:00", "`layers[0].parameter_bytes`: expected an integer"),
        ("parameter_bytes: 10", "parameter_bytes: -10", "`layers[0].parameter_bytes`: must not be negative, got -10"),
        ("forward_us: [1,", "forward_us: ['1',", '`layers[0].forward_us[0]`: expected a number, got "1"'),
        ("forward_us: [1,", "forward_us: [true,", "`layers[0].forward_us[0]`: expected a number, got true"),
        ("forward_us: [1,", "forward_us: [NaN,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [.nan,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [.inf,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [-.inf,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [Infinity,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [1e999,", "`layers[0].forward_us[0]`: expected a number"),
        ("forward_us: [1,", "forward_us: [-0.5,", "`layers[0].forward_us[0]`: must not be negative, got -0.5"),
        ("forward_us: [1,", "forward_us: [1ms,", '`layers[0].forward_us[0]`: expected a number, got "1ms"'),
        ("forward_us: [1, 2]", "forward_us: 1", "`layers[0].forward_us`: expected a list, got 1"),
        ("forward_us: [1, 2]", "forward_us: {a: 1}", "`layers[0].forward_us`: expected a list"),
        (
            "forward_us: [1, 2]",
            "forward_us: [1]",
            "`layers[0].forward_us`: expected 2 values, one per micro-batch size, got 1",
        ),
        (
            "forward_us: [1, 2]",
            "forward_us: [1, 2, 3]",
            "`layers[0].forward_us`: expected 2 values, one per micro-batch size, got 3",
        ),
        ("saved_bytes: [7, 8]", "saved_bytes: []", "`layers[0].saved_bytes`: expected 2 values"),
        ("name: a,", "name: a, forward_peak_bytes: [1],", "`layers[0].forward_peak_bytes`: expected 2 values"),
        ("name: a,", "name: a, detail: [],spread: [0.1],", "`layers[0].spread`: expected 2 values"),
        ("name: b,", "name: a,", '`layers[1].name`: "a" is already layer 0'),
        ("name: a,", "name: 7,", "`layers[0].name`: expected a string, got 7"),
        ("name: a,", "name: [a],", '`layers[0].name`: expected a string, got ["a"]'),
        ("[1, 2]\nlayers", "[]\nlayers", "`micro_batch_sizes`: expected different sizes of at least 1, got []"),
        ("[1, 2]\nlayers", "[2, 2]\nlayers", "`micro_batch_sizes`: expected different sizes of at least 1, got [2, 2]"),
        ("[1, 2]\nlayers", "[0, 2]\nlayers", "`micro_batch_sizes`: expected different sizes of at least 1, got [0, 2]"),
        ("{kind: cpu}", "cpu", '`device`: expected a mapping, got "cpu"'),
        ("{kind: cpu}", "[cpu]", "`device`: expected a mapping"),
    ],
)
def test_wrong_values_are_refused_with_key_and_value(old: str, new: str, said: str, tmp_path: Path) -> None:
    """Nothing is converted: not "12" to 12, 1.5 to 1, or true to 1."""
    assert old in PROFILE
    error = refused(PROFILE.replace(old, new, 1), tmp_path)
    assert said in error.message
    assert error.line is not None


@pytest.mark.parametrize("words", ["often", "seldom"])
def test_invalid_choices_are_reported_with_the_valid_ones(words: str, tmp_path: Path) -> None:
    error = refused(PROFILE.replace("{kind: cpu}", f"{{kind: cpu, how: {words}}}"), tmp_path)
    assert "`device.how`" in error.message
    assert "'measured', 'compiled' or 'estimated'" in error.message
    assert words in error.message


def test_profile_without_layers_is_refused(tmp_path: Path) -> None:
    text = "".join(PROFILE.splitlines(keepends=True)[:3])
    assert "`layers`: a profile needs at least one layer" in refused(text + "layers: []\n", tmp_path).message
    assert "`layers`: expected a list" in refused(text + "layers: {}\n", tmp_path).message


def test_key_without_value_is_not_an_empty_name(tmp_path: Path) -> None:
    error = refused(PROFILE.replace("name: a,", "name: ,"), tmp_path)
    assert "`layers[0].name`" in error.message


def test_tied_bytes_are_at_most_the_parameters(tmp_path: Path) -> None:
    """Otherwise a stage with both layers would have negative memory."""
    error = refused(PROFILE.replace("name: b,", "name: b, tied: [a.weight], tied_bytes: 21,"), tmp_path)
    assert "`layers[1].tied_bytes`" in error.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tensor_parallel: 4", "tensor_parallel: 2", "`widths[0].tensor_parallel`: expected another width, at least 1"),
        ("tensor_parallel: 4", "tensor_parallel: 0", "`widths[0].tensor_parallel`: expected another width, at least 1"),
        ("tensor_parallel: 2", "tensor_parallel: 0", "`tensor_parallel`: must be at least 1"),
        ("fast_round_ratio: 0.95", "fast_round_ratio: 0", "`fast_round_ratio`: must be above 0 and at most 1"),
        ("slow_round_ratio: 1.25", "slow_round_ratio: 0.5", "`slow_round_ratio`: must be at least 1"),
        ("name: h.1", "name: k.1", "`widths[0].layers`: expected the layers of the profile, by name and in order"),
        ("forward_us: [10.1, 40.2]", "forward_us: [10.1]", "`widths[0].layers[0].forward_us`: expected 2 values"),
    ],
)
def test_widths_must_differ_and_have_the_same_layers(old: str, new: str, said: str, tmp_path: Path) -> None:
    """The change is made at the last occurrence in the file."""
    head, tail = dump(fullest_profile()).rsplit(old, 1)
    assert said in refused(head + new + tail, tmp_path).message


@pytest.mark.parametrize("group", ["{layers: [b], bytes: 5}", "{layers: [a], bytes: 9}", "{layers: [], bytes: 5}"])
def test_tied_groups_refer_to_earlier_layers_and_tied_bytes(tmp_path: Path, group: str) -> None:
    tied = f"name: b, tied: [a.weight], tied_bytes: 8, tied_groups: [{group}],"
    assert "`layers[1].tied_groups`" in refused(PROFILE.replace("name: b,", tied), tmp_path).message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("micro_batches: 4", "micro_batches: 3"),
            "`micro_batches`: 3 micro-batches of 2 samples are 6, not the batch of 8",
        ),
        (
            ("micro_batch_size: 2", "micro_batch_size: 4"),
            "`micro_batches`: 4 micro-batches of 4 samples are 16, not the batch of 8",
        ),
        (("micro_batches: 4", "micro_batches: 0"), "`micro_batches`: must be at least 1"),
        (("balance: [", "balance: [1, "), "`stages`: 2 stages, but the balance has 3"),
        (
            ("memory_bytes: [1000000, ", "memory_bytes: ["),
            "`inputs.memory_bytes`: expected 2 memory limits, one per device, got 1",
        ),
        (("devices: 2", "devices: 3"), "`inputs.memory_bytes`: expected 3 memory limits, one per device, got 2"),
        (("recompute: never, forward", "recompute: sometimes, forward"), "`stages[0].recompute`: "),
        (("schedule: gpipe\nmicro", "schedule: zigzag\nmicro"), "`schedule`: "),
        (("batch: 8\n", "batch: eight\n"), '`inputs.batch`: expected an integer, got "eight"'),
        (("latency_us: 5.0", "latency_us: -5.0"), "`inputs.link.latency_us`: must not be negative, got -5.0"),
        (("blocking: true", "blocking: 1"), "`inputs.link.blocking`: expected true or false, got 1"),
    ],
)
def test_contradictory_plans_are_refused(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    text = dump(full_plan())
    assert change[0] in text, text
    error = refused(text.replace(*change, 1), tmp_path, read_plan)
    assert said in error.message
    assert error.line is not None


@pytest.mark.parametrize(
    "change",
    [
        ("balance: [1, 2]", "balance: [1, 1, 1]"),
        ("balance: [1, 2]", "balance: [2, 1]"),
        ("micro_batches: 2", "micro_batches: 3"),
        ("micro_batches: 2", "micro_batches: 0"),
        ("batch: 8", "batch: 0"),
    ],
)
def test_contradictory_balance_configurations_are_refused(change: tuple[str, str], tmp_path: Path) -> None:
    text = dump(full_balance())
    assert change[0] in text
    refused(text.replace(*change, 1), tmp_path, read_balance)


# ---- hostile input


@pytest.mark.parametrize(
    "text",
    [
        "schema: gpipe-plan/profile/v1\ndevice: &a {kind: *a}\n",
        PROFILE.replace("parameter_bytes: 10", "parameter_bytes: !!python/object/apply:os.getcwd []"),
        PROFILE.replace("schema:", "<<: {a: 1}\nschema:"),
        PROFILE + "\x00",
        PROFILE.replace("kind: cpu", 'kind: "\\ud800"'),
        json.dumps({"schema": "gpipe-plan/profile/v1", "layers": {"0": {}}}),
    ],
)
def test_hostile_text_is_refused(text: str, tmp_path: Path) -> None:
    """Circular references, tags, merge keys and characters that are invalid in YAML give a `FileError`."""
    refused(text, tmp_path)


def test_too_large_numbers_are_refused(tmp_path: Path) -> None:
    """They would overflow in the cost model."""
    error = refused(PROFILE.replace("parameter_bytes: 10", "parameter_bytes: 1" + "0" * 400), tmp_path)
    assert "`layers[0].parameter_bytes`" in error.message


@pytest.mark.parametrize(
    ("make", "old", "new", "said"),
    [
        (full_links, "sample_us: [401.0, 402.9]", "sample_us: [401.0]", "`boundaries[0].sample_us`: expected 2 times"),
        (full_links, "latency_us: 400.5", "latency_us: -1", "must not be negative"),
        (full_links, "bytes_per_s: 2100000000.0", "bytes_per_s: fast", "expected a number"),
        (full_links, "backend: gloo", "backend: gloo\nspeed: 1", "unknown key"),
        (
            full_partial,
            "backward_us: [2.5, 2.6]",
            "backward_us: [2.5]",
            "`measurements[0].backward_us`: expected 2 values",
        ),
        (full_calibration, "compute: 1.125", "compute: 0.0", "`compute`: must be from 1e-6 to 1e6"),
        (full_calibration, "step_ratio: 1.031", "step_ratio: 0.0", "`step_ratio`: must be from 1e-6 to 1e6"),
        (full_partial, "forward_us: [1.5, 1.4]", "forward_us: [1.5, nan]", "expected a number"),
    ],
)
def test_links_and_partial_profiles_are_read_strictly(make, old, new, said, tmp_path):
    """With line and key."""
    text = dump(make())
    assert old in text, text
    error = refused(text.replace(old, new, 1), tmp_path)
    assert said in error.message
    assert error.line is not None


def test_links_file_without_links_is_refused(tmp_path: Path) -> None:
    text = dump(full_links())
    assert "at least one link" in refused(text[: text.index("boundaries:")] + "boundaries: []\n", tmp_path).message


def test_plan_with_too_few_links_is_refused(tmp_path: Path) -> None:
    plan = full_plan()
    inputs = replace(plan.inputs, devices=3, memory_bytes=(10**6,) * 3, links=(Link(),))
    assert "expected 2 links" in refused(dump(replace(plan, inputs=inputs)), tmp_path).message
