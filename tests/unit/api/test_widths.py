"""Profiles of several widths: merged from files, and stored next to the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import files
from planner.core.errors import UsageError
from planner.core.values.profile import Device, Environment, LayerProfile, Profile, WidthCosts
from tests.support.profiles import profile_of


def one_width(width: int, **more: Any) -> Profile:
    """Return four layers that `width` GPUs share."""
    alone = profile_of([80.0 / width] * 4, [160.0 / width] * 4, parameter_bytes=80 // width, output_bytes=100)
    return replace(
        alone,
        device=Device(kind="cuda", name="NVIDIA H100 80GB HBM3"),
        tensor_parallel=width,
        **more,
    )


def written(folder: Path, *profiles: Profile) -> list[str]:
    """Write the profiles and return their paths."""
    paths = [str(folder / f"t{n}.yaml") for n, _ in enumerate(profiles)]
    for path, profile in zip(paths, profiles, strict=True):
        files.write(path, profile)
    return paths


def test_profiles_of_several_widths_are_merged_and_stored(tmp_path: Path) -> None:
    paths = written(tmp_path, one_width(4), one_width(1), one_width(2))
    plan = planner.solve(paths, devices=4, mem="1MB", batch=4, output=tmp_path / "best.yaml")
    assert plan.inputs.profile.path == "best-profile.yaml"
    merged = files.read_profile(str(tmp_path / "best-profile.yaml"))
    assert merged == replace(
        one_width(1), widths=tuple(WidthCosts(tensor_parallel=t, layers=one_width(t).layers) for t in (2, 4))
    )
    assert planner.check(tmp_path / "best.yaml").findings == ()
    assert planner.solve(merged, devices=4, mem="1MB", batch=4).predicted == plan.predicted
    assert planner.solve(paths[:1], devices=4, mem="1MB", batch=4).tensor_parallel == 4


def test_merged_profile_overwrites_no_input(tmp_path: Path) -> None:
    paths = written(tmp_path, one_width(1), one_width(2))
    Path(paths[1]).rename(tmp_path / "plan-profile.yaml")
    with pytest.raises(UsageError, match="would overwrite"):
        planner.solve(
            [paths[0], str(tmp_path / "plan-profile.yaml")],
            devices=2,
            mem="1MB",
            batch=4,
            output=tmp_path / "plan.yaml",
        )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (one_width(1), "two of the profiles are for 1 GPU per layer"),
        (replace(one_width(2), layers=one_width(2).layers[:3]), "they differ in their layers"),
        (replace(one_width(2), micro_batch_sizes=(2,)), "they differ in micro-batch sizes"),
        (replace(one_width(2), device=Device(kind="cpu")), "they differ in device"),
        (one_width(2, optimizer="adamw"), "they differ in optimizer"),
        (one_width(2, environment=Environment(dtype="bf16")), "they differ in precision"),
    ],
)
def test_profiles_of_different_models_are_not_merged(other: Profile, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        planner.solve(written(tmp_path, one_width(1), other), devices=2, mem="1MB", batch=4)


@pytest.mark.slow
def test_profiles_of_different_settings_are_not_merged(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"preset": "llama-2-7b", "device": "estimate:h100", "batch_sizes": 1}
    long = planner.profile(**asked, sequence=4096, tensor_parallel=1)
    short = planner.profile(**asked, sequence=1024, tensor_parallel=8)
    with pytest.raises(UsageError, match="they differ in settings"):
        planner.solve(written(tmp_path, long, short), devices=8, batch=8)
    same = planner.profile(**asked, sequence=4096, tensor_parallel=8)
    assert planner.solve(written(tmp_path, long, same), devices=8, batch=8, schedule="gpipe").stages


def test_too_many_replicas_of_groups_are_refused_with_their_gpus() -> None:
    with pytest.raises(UsageError, match="4 replicas with 4 GPUs per layer need 16 GPUs or more, there are 8"):
        planner.solve(one_width(4), devices=8, mem="1MB", batch=4, replicas=4)


def test_sweep_uses_the_widths_that_fit_the_cluster() -> None:
    merged = replace(one_width(1), widths=(WidthCosts(tensor_parallel=8, layers=one_width(8).layers),))
    sweep = planner.sweep(merged, devices=[2, 6, 8], mem="1MB", batch=4)
    assert all(cell.plan is not None for cell in sweep.cells)


def test_sweep_uses_the_requested_width() -> None:
    """Without links, only one GPU per layer can be compared."""
    widths = tuple(WidthCosts(tensor_parallel=t, layers=one_width(t).layers) for t in (2, 4))
    both = replace(one_width(1), widths=widths)
    sizes: dict[str, Any] = {"devices": "4", "mem": "1MB", "batch": 8}
    for asked in (1, 2):
        cells = planner.sweep(both, tensor_parallel=asked, **sizes).cells
        assert [cell.plan and cell.plan.tensor_parallel for cell in cells] == [asked]
    priced = replace(both, widths=tuple(replace(each, layers=_with_sums(each.layers)) for each in widths))
    with pytest.raises(UsageError) as refused:
        planner.sweep(priced, **sizes)
    assert "`--tensor-parallel 1`" in refused.value.hint
    assert planner.sweep(priced, tensor_parallel=1, **sizes).smallest == 0


def _with_sums(layers: tuple[LayerProfile, ...]) -> tuple[LayerProfile, ...]:
    return tuple(replace(layer, collectives=1, collective_bytes=(100,)) for layer in layers)


def test_sweep_over_nodes_uses_the_links_between_nodes() -> None:
    profile = one_width(1)
    asked = {"mem": "1MB", "batch": 4, "link": "1GB/s", "inter_link": "1KB/s,1s", "micro_batches": 4}
    swept = planner.sweep(profile, nodes="1x2,2x2", **asked)
    assert swept.devices == (2, 4)
    assert [cell.plan.inputs.node_devices for cell in swept.cells if cell.plan is not None] == [2, 2]
    alone = planner.solve(profile, nodes="2x2", **asked)
    assert swept.cell(4, 10**6).plan == alone
    for wrong in ({"nodes": "1x2,2x4"}, {"nodes": "1x2", "devices": 2}):
        with pytest.raises(UsageError, match="--nodes"):
            planner.sweep(profile, **{**asked, **wrong})


def test_default_batch_has_a_sample_for_every_device() -> None:
    notes: list[str] = []
    profile = one_width(1)
    largest = max(profile.micro_batch_sizes)
    few, many = (
        planner.solve(profile, devices=n, mem="1MB", replicas="auto", note=notes.append) for n in (1, largest + 1)
    )
    assert (few.inputs.batch, many.inputs.batch) == (largest, 2 * largest)
    assert notes[0].endswith("the largest profiled size")
    assert notes[-1].endswith(f"`--batch {16 * largest} --replicas auto`")
    family = planner.solve_family(profile, devices=f"{largest + 1},1", mem="1MB", replicas="auto")
    assert [plan.inputs.batch for plan in family] == [2 * largest] * 2
