"""Tests of links that are measured one by one, in all commands that use them."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from planner.core.values.cluster import Link
from planner.core.values.links import Links, MeasuredLink
from planner.core.values.profile import Device, Environment
from tests.support.cli import call, write_model
from tests.support.processes import Job
from tests.support.profiles import profile_of

Capsys = pytest.CaptureFixture[str]

FAST_LINK, SLOW_LINK = Link(latency_us=2.0, bytes_per_s=1e9), Link(latency_us=50.0, bytes_per_s=1e8)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a profile of six layers and two links."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    files.write("profile.yaml", profile_of([100.0] * 6, [200.0] * 6, output_bytes=1000, size=2))
    links = Links(
        device=Device(kind="cpu"),
        environment=Environment(torch="2.13.0"),
        backend="gloo",
        boundaries=(
            MeasuredLink(link=FAST_LINK, sample_bytes=(1024, 16777216), sample_us=(3.0, 16779.2)),
            MeasuredLink(link=SLOW_LINK),
        ),
    )
    files.write("links.yaml", links)
    return tmp_path


def test_plans_record_the_measured_links(here: Path, capsys: Capsys) -> None:
    """`check` needs no further file, and recomputes a plan with edited links."""
    options = ("--devices", "3", "--mem", "1GB", "--batch", "16", "--links", "links.yaml")
    done = call(capsys, "solve", *options)
    assert done.code == 0, done.err
    assert "note: 2 measured links\n" in done.err
    plan = files.read_plan("plan.yaml")
    assert plan.inputs.links == (FAST_LINK, SLOW_LINK)
    assert plan.inputs.link == Link()
    (here / "links.yaml").unlink()
    assert call(capsys, "check").code == 0
    files.write("plan.yaml", replace(plan, inputs=replace(plan.inputs, links=(SLOW_LINK, SLOW_LINK))))
    assert "GP203" in call(capsys, "check", "--format", "json").out


def test_fewer_devices_use_the_first_links(here: Path, capsys: Capsys) -> None:
    assert call(capsys, "solve", "--devices", "2", "--mem", "1GB", "--links", "links.yaml").code == 0
    assert files.read_plan("plan.yaml").inputs.links == (FAST_LINK,)
    refused = call(capsys, "solve", "--devices", "4", "--mem", "1GB", "--links", "links.yaml")
    assert refused.code == 2
    assert "2 links between neighbors for 4 devices: 3 are needed" in refused.error


@pytest.mark.parametrize(
    "options",
    [("--schedule", "1f1b"), ("--schedule", "interleaved"), ("--frontier", "--explain"), ("--solver", "milp")],
    ids=" ".join,
)
def test_links_combine_with_other_options(here: Path, capsys: Capsys, options: tuple[str, ...]) -> None:
    asked = ("solve", "--devices", "3", "--mem", "1GB", "--batch", "16", "--links", "links.yaml")
    done = call(capsys, *asked, *options)
    assert done.code == 0, done.err
    assert call(capsys, "check").code == 0


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        (("--nodes", "3x1", "--link", "1GB/s"), True),
        (("--nodes", "2x2", "--link", "1GB/s", "--replicas", "1"), True),
        (("--nodes", "2x2", "--link", "1GB/s", "--inter-link", "1GB/s"), False),
        (("--nodes", "2x2", "--link", "1GB/s", "--replicas", "2"), False),
        (("--nodes", "1x3", "--link", "1GB/s"), False),
        (
            (
                "--nodes",
                "3x1",
            ),
            False,
        ),
        (("--devices", "3", "--link", "1GB/s"), False),
    ],
)
def test_a_note_reports_assumed_links_between_nodes(here, capsys, options, *, is_noted):
    done = call(capsys, "solve", "--mem", "1GB", "--batch", "16", *options)
    assert done.code == 0, done.err
    assert ("note: no `--inter-link`: links between nodes are assumed" in done.err) == is_noted


def test_files_without_links_are_refused(here: Path, capsys: Capsys) -> None:
    asked = ("solve", "--devices", "3", "--mem", "1GB", "--links")
    assert "is a profile, a list of links is needed" in call(capsys, *asked, "profile.yaml").error
    missing = call(capsys, *asked, "nothing.yaml")
    assert (missing.code, "no such file" in missing.error, "profile-links" in missing.err) == (2, True, True)


def test_show_prints_links(here: Path, capsys: Capsys) -> None:
    shown = call(capsys, "show", "links.yaml")
    assert (shown.code, shown.err) == (0, "")
    assert "0 to 1" in shown.out
    assert "1.00 GB/s" in shown.out
    assert "16.0 MiB in 16.8 ms" in shown.out
    assert '"schema": "gpipe-plan/links/v1"' in call(capsys, "show", "links.yaml", "--format", "json").out


def test_links_without_torchrun_prints_the_command(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        done = call(capsys, "profile-links")
        assert done.code == 2
        assert "hint: " in done.err
        assert "torchrun --nproc-per-node 4 -m planner profile-links" in done.err


def test_only_the_first_process_prints_the_error(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, is_shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        for options in (("--device", "tpu"), ("--format", "xml")):
            done = call(capsys, "profile-links", *options)
            assert (done.code, options[1] in done.err) == (2, is_shown)


@pytest.mark.slow
def test_measured_links_are_blocking_and_slower_for_more_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    (tmp_path / "measure.py").write_text("from planner.__main__ import main\nmain()\n")
    with Job(2, ["measure.py", "profile-links", "-o", "measured.yaml", "--device", "cpu"], tmp_path) as job:
        done = job.ended()
    assert done.codes == (0, 0), done.err
    assert done.out.startswith("1 link between neighbors")
    assert "next: gpipe-plan solve --devices 2 --mem 8GB --links measured.yaml\n" in done.err
    links = files.read_links("measured.yaml")
    assert links.backend == "gloo"
    (boundary,) = links.boundaries
    assert boundary.sample_bytes[0] == 1024
    assert boundary.sample_bytes[-1] == 16 * 2**20
    assert boundary.sample_us[-1] > boundary.sample_us[0]
    assert boundary.link.blocking
    assert boundary.link.bytes_per_s > 1e6
    files.write("profile.yaml", profile_of([100.0] * 6, [200.0] * 6, output_bytes=1000))
    assert call(capsys, "solve", "--devices", "2", "--mem", "1GB", "--links", "measured.yaml").code == 0
