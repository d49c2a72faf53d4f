"""Round trips of all kinds of files, and determinism of the written bytes."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.core.cost.partition import Partition
from planner.core.judge.verdict import judge
from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Profile, Setting
from planner.files import (
    dump,
    read,
    read_balance,
    read_calibration,
    read_links,
    read_partial,
    read_plan,
    read_profile,
    read_run,
    to_plain,
    write,
)
from planner.solve import Request, solve
from tests.support.chains import chain, layer
from tests.support.file_values import (
    full_balance,
    full_calibration,
    full_links,
    full_partial,
    full_profile,
    full_run,
    fullest_plan,
    fullest_profile,
)
from tests.support.profiles import inputs_of, profile_of

KINDS: list[tuple[Callable[[], Any], Callable[[str], Any]]] = [
    (fullest_profile, read_profile),
    (fullest_plan, read_plan),
    (full_run, read_run),
    (full_balance, read_balance),
    (full_links, read_links),
    (full_calibration, read_calibration),
    (full_partial, read_partial),
]

ODD_NAMES = (
    *("1e9", "1.5", "12", "010", "0x1f", "1_000", "+5", ".5", "5.", "-1", "1e999", ".nan", ".inf", "NaN", "12:30:00"),
    *(
        "no",
        "No",
        "yes",
        "on",
        "off",
        "y",
        "n",
        "true",
        "True",
        "FALSE",
        "null",
        "Null",
        "NULL",
        "~",
        "",
        " ",
        "2026-01-02",
    ),
    *(
        "a: b",
        "a #b",
        "#",
        "- x",
        "-",
        "?",
        ":",
        "[x]",
        "{x}",
        "&a",
        "*a",
        "!x",
        "|",
        ">",
        "%x",
        "@x",
        "`x`",
        "<<",
        "=",
    ),
    *(
        '"',
        "'",
        "\\",
        "a,b",
        "a\nb",
        "a\tb",
        " a",
        "a ",
        "\u00e9",
        "\u5c42.0",
        "\U0001f600",
        "\u2028",
        "\x85",
        "\x07",
        "\ufeff",
    ),
    "x" * 2000,
)


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
@pytest.mark.parametrize(("make", "read_kind"), KINDS)
def test_values_survive_a_round_trip(make, read_kind, suffix, tmp_path):
    path = str(tmp_path / f"file.{suffix}")
    write(path, make())
    assert read_kind(path) == read(path)
    assert type(read(path)) is type(make())
    # A plan's derived figures are rounded; all else is equal as it is.
    assert dump(read(path)) == dump(make())
    if read_kind is read_plan:
        plan = make()
        names = ("h.0", "h.1", "h.2", "h.3", "h.4")
        assert (read_plan(path).inputs, Partition.of(read_plan(path), names)) == (
            plan.inputs,
            Partition.of(plan, names),
        )
    else:
        assert read(path) == make()


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_seed_of_zero_survives_a_round_trip(suffix: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"run.{suffix}")
    for seed in (0, None):
        write(path, dataclasses.replace(full_run(), seed=seed))
        assert read_run(path).seed is seed


@pytest.mark.parametrize(("make", "_read"), KINDS)
def test_round_trip_values_have_no_default_fields(make: Callable[[], Any], _read: object) -> None:
    """A field with its default value would not be tested."""
    value = make()
    required = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) in (None, (), "", 0)]
    assert required == []
    last = full_profile().layers[-1]
    assert to_plain(last).keys() == {f.name for f in dataclasses.fields(last)}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("make", "_read"), KINDS)
def test_equal_values_give_the_same_bytes(make: Callable[[], Any], _read: object, *, as_json: bool) -> None:
    text = dump(make(), as_json=as_json)
    assert text == dump(make(), as_json=as_json)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize(("make", "_read"), KINDS)
def test_reading_and_writing_does_not_change_a_file(make, _read, suffix, tmp_path):
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    write(str(first), make())
    write(str(second), read(str(first)))
    assert first.read_bytes() == second.read_bytes()


def test_schema_is_the_first_key() -> None:
    for make, _ in KINDS:
        assert dump(make()).startswith("schema: gpipe-plan/")
        assert next(iter(json.loads(dump(make(), as_json=True)))) == "schema"


def test_profile_has_one_line_per_layer() -> None:
    """A changed layer is then a one-line diff."""
    lines = dump(full_profile()).splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("- ")] == [f"- {{name: h.{n}" for n in range(3)]
    assert lines[lines.index("layers:") + 1].startswith("- {name: h.0")
    assert len(lines) == lines.index("layers:") + 1 + 3
    longer = dataclasses.replace(
        full_profile(), layers=(*full_profile().layers, dataclasses.replace(full_profile().layers[0], name="last"))
    )
    assert len(dump(longer).splitlines()) == len(lines) + 1


def test_width_has_one_line_per_layer() -> None:
    profile = fullest_profile()
    more = len(dump(profile).splitlines()) - len(dump(dataclasses.replace(profile, widths=())).splitlines())
    assert more == 1 + 2 + len(profile.layers)  # its heading, `tensor_parallel`, `layers`


def test_changed_layer_is_a_one_line_diff() -> None:
    profile = full_profile()
    changed = dataclasses.replace(profile.layers[1], parameter_bytes=4)
    other = dataclasses.replace(profile, layers=(profile.layers[0], changed, profile.layers[2]))
    before, after = dump(profile).splitlines(), dump(other).splitlines()
    assert len(before) == len(after)
    assert [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [len(before) - 2]


def test_plan_has_one_line_per_stage() -> None:
    plan = fullest_plan()
    lines = dump(plan).splitlines()
    stages = lines.index("stages:")
    assert [
        line.startswith(f"- {{index: {k}, ") for k, line in enumerate(lines[stages + 1 : stages + 1 + len(plan.stages)])
    ] == [True] * len(plan.stages)
    assert f"total: {plan.stages[0].memory.total}" in lines[stages + 1]


def test_header_is_a_comment_in_yaml_and_absent_in_json(tmp_path: Path) -> None:
    for name in ("a.yaml", "a.json"):
        write(str(tmp_path / name), full_profile(), header="made by hand\n\nschema: nonsense")
        assert read_profile(str(tmp_path / name)) == full_profile()
    assert (tmp_path / "a.yaml").read_text().startswith("# made by hand\n# \n# schema: nonsense\nschema: ")
    assert (tmp_path / "a.json").read_text().startswith("{\n")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_layers_may_have_any_name(name: str, suffix: str, tmp_path: Path) -> None:
    """Strings that look like numbers, booleans, dates or YAML syntax remain strings."""
    path = str(tmp_path / f"profile.{suffix}")
    profile = chain(layer("other", tied=(name,)), layer(name))
    write(path, profile)
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    "value",
    [True, False, 0, 1, -7, 10**15, 0.1, 1.0, 1e-9, 1e300, 123456789.123456789, "", "true", "1", "1.0", "null", "a: b"],
)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_settings_keep_value_and_type(value: Setting, suffix: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"profile.{suffix}")
    profile = dataclasses.replace(
        full_profile(), model=dataclasses.replace(full_profile().model, settings={"x": value})
    )
    write(path, profile)
    again = read_profile(path).model.settings["x"]
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("time_us", [0.0, 0.1, 12.3, 1e9, 25_000_000_000.0, 1e15])
def test_times_of_a_tenth_of_a_microsecond_survive(time_us: float, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.yaml")
    write(path, profile_of([time_us]))
    assert read_profile(path).layers[0].forward_us == (time_us,)
    assert "12.3," in dump(profile_of([12.1 + 0.2])).replace("]", ",")


def test_numbers_with_exponents_are_read_as_numbers(tmp_path: Path) -> None:
    """PyYAML reads `1e9` and `2.5E+10` as strings."""
    path = tmp_path / "plan.yaml"
    path.write_text(
        dump(fullest_plan()).replace("bytes_per_s: 25000000000.0", "bytes_per_s: 2.5E+10"), encoding="utf-8"
    )
    assert read_plan(str(path)).inputs.link.bytes_per_s == 2.5e10
    profile = tmp_path / "profile.yaml"
    profile.write_text(dump(profile_of([7.0])).replace("forward_us: [7.0]", "forward_us: [1e9]"), encoding="utf-8")
    assert read_profile(str(profile)).layers[0].forward_us == (1e9,)


def test_integers_are_valid_times(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(dump(profile_of([7.0])).replace("forward_us: [7.0]", "forward_us: [7]"), encoding="utf-8")
    assert read_profile(str(path)) == profile_of([7.0])


def test_profile_with_only_required_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(
        """\
# from a table
schema: gpipe-plan/profile/v1
device: {kind: v100}
micro_batch_sizes: [8]
layers:
  - name: conv
    parameter_bytes: 100
    forward_us: [630]
    backward_us: [540.5]
    output_bytes: [10]
    saved_bytes: [20]
  - {name: fc, parameter_bytes: 0, forward_us: [1], backward_us: [2], output_bytes: [0], saved_bytes: [0]}
""",
        encoding="utf-8",
    )
    values = {"parameter_bytes": 100, "output_bytes": 10, "saved_bytes": 20}
    expected = chain(
        layer("conv", forward_us=630.0, backward_us=540.5, **values),
        layer("fc", forward_us=1.0, backward_us=2.0),
        sizes=(8,),
    )
    assert read_profile(str(path)) == dataclasses.replace(expected, device=Device(kind="v100"))


def test_json_and_yaml_of_other_tools_are_read(tmp_path: Path) -> None:
    """Packed or with tabs, with a byte order mark, or with Windows line ends."""
    plain = json.loads(dump(full_profile(), as_json=True))
    texts = {
        "packed.json": json.dumps(plain, separators=(",", ":")),
        "tabs.json": json.dumps(plain, indent="\t"),
        "bom.yaml": "\ufeff" + dump(full_profile()),
        "crlf.yaml": dump(full_profile()).replace("\n", "\r\n"),
        "slash.json": json.dumps(plain).replace("model.py:build", "model\\u002epy:build"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
        assert read_profile(str(tmp_path / name)) == full_profile(), name


def test_json_with_surrogate_pairs_is_read(tmp_path: Path) -> None:
    profile = dataclasses.replace(full_profile(), device=Device(kind="cpu", name="\U0001f600"))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(to_plain(profile), ensure_ascii=True), encoding="utf-8")
    assert "\\ud83d\\ude00" in path.read_text(encoding="utf-8")
    assert read_profile(str(path)) == profile


@pytest.mark.parametrize(
    "options",
    [
        {"link": Link(latency_us=1.25, blocking=True)},
        {"link": Link(latency_us=0.04, bytes_per_s=1e9)},
        {"overhead_us": 0.04},
        {"link": Link(latency_us=5.0, bytes_per_s=25e9), "overhead_us": 0.5, "reserve_bytes": 5},
    ],
)
def test_untouched_plan_has_no_findings_after_a_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    """Requested values are stored exactly, such as `--link 25GB/s,1.25us`."""
    profile = profile_of([10.0, 20.0, 30.0, 10.0], [20.0, 20.0, 20.0, 60.0], output_bytes=1000, saved_bytes=100)
    inputs = inputs_of(2, 64, **options)
    write(str(tmp_path / "plan.yaml"), solve(profile, Request(inputs=inputs)))
    plan = read_plan(str(tmp_path / "plan.yaml"))
    assert plan.inputs == inputs
    assert judge(plan, profile, profile_digest=inputs.profile.digest, strict=True).fits


@pytest.mark.parametrize("loss", [1e-9, 2.0**-24])
def test_small_losses_are_not_rounded_to_zero(loss: float, tmp_path: Path) -> None:
    run = dataclasses.replace(full_run(), losses=(loss, 1.0))
    write(str(tmp_path / "run.json"), run)
    assert read_run(str(tmp_path / "run.json")).losses == pytest.approx((loss, 1.0), rel=1e-6)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["run.json", "run.yaml"])
def test_report_with_infinite_losses_survives_a_round_trip(loss: float, name: str, tmp_path: Path) -> None:
    run = dataclasses.replace(full_run(), losses=(1.5, loss))
    write(str(tmp_path / name), run)
    again = read_run(str(tmp_path / name))
    assert again.losses[0] == 1.5
    assert str(again.losses[1]) == str(loss)


def test_dash_is_standard_input_and_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import io

    write("-", full_profile())
    text = capsys.readouterr().out
    assert text == dump(full_profile())
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert read_profile("-") == full_profile()


def test_large_profiles_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    profile: Profile = profile_of([float(n) for n in range(300)])
    write(str(path), profile)
    assert len(path.read_text().splitlines()) < 310
    assert read_profile(str(path)) == profile
