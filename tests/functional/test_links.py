"""Links measured one by one: measure, look, plan, check."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from planner.core.values.cluster import Link
from planner.core.values.links import Links, MeasuredLink
from planner.core.values.profile import Device, Environment
from tests.support.cli import call, environment, write_model
from tests.support.profiles import profile_of

Capsys = pytest.CaptureFixture[str]

FAST_LINK, SLOW_LINK = Link(latency_us=2.0, bytes_per_s=1e9), Link(latency_us=50.0, bytes_per_s=1e8)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a profile of six layers and two links."""
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


def test_measured_links_are_planned_with_and_checked(here: Path, capsys: Capsys) -> None:
    """The plan holds them, so that `check` needs no further file; an edited one is recomputed."""
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
    """Two devices are joined by the first; four have too few links."""
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
def test_links_go_with_every_question(here: Path, capsys: Capsys, options: tuple[str, ...]) -> None:
    """And the plan is confirmed by `check`."""
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
def test_links_between_nodes_are_assumed_aloud(
    here: Path, capsys: Capsys, options: tuple[str, ...], *, is_noted: bool
) -> None:
    """Where a pipeline leaves its node, over links of which only those within a node are known."""
    done = call(capsys, "solve", "--mem", "1GB", "--batch", "16", *options)
    assert done.code == 0, done.err
    assert ("note: no `--inter-link`: links between nodes are assumed" in done.err) == is_noted


def test_another_file_is_no_list_of_links(here: Path, capsys: Capsys) -> None:
    """Nor is one that is not there, which has to be made by another command."""
    asked = ("solve", "--devices", "3", "--mem", "1GB", "--links")
    assert "is a profile, a list of links is needed" in call(capsys, *asked, "profile.yaml").error
    missing = call(capsys, *asked, "nothing.yaml")
    assert (missing.code, "no such file" in missing.error, "profile-links" in missing.err) == (2, True, True)


def test_links_are_shown(here: Path, capsys: Capsys) -> None:
    """A row for each; as JSON the file itself."""
    shown = call(capsys, "show", "links.yaml")
    assert (shown.code, shown.err) == (0, "")
    assert "0 to 1" in shown.out
    assert "1.00 GB/s" in shown.out
    assert "16.0 MiB in 16.8 ms" in shown.out
    assert '"schema": "gpipe-plan/links/v1"' in call(capsys, "show", "links.yaml", "--format", "json").out


def test_alone_it_says_how_to_start_it(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, and with a single process."""
    for settings in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        done = call(capsys, "profile-links")
        assert done.code == 2
        assert "hint: " in done.err
        assert "torchrun --nproc-per-node 4 -m planner profile-links" in done.err


def test_only_the_first_process_tells_what_is_wrong(
    here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them end, before anything is measured."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        for options in (("--device", "tpu"), ("--format", "xml")):
            done = call(capsys, "profile-links", *options)
            assert (done.code, options[1] in done.err) == (2, told)


@pytest.mark.slow
def test_links_between_two_processes_are_measured(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One link, blocking as gloo's are, slower for more bytes; `solve` reads it."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "planner",
         "profile-links", "-o", "measured.yaml", "--device", "cpu"],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 link between neighbors")
    assert "next: gpipe-plan solve --devices 2 --mem 8GB --links measured.yaml\n" in done.stderr
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
