"""Launch files of clusters: read by the scheduler's tools, or compared with its published format."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from planner import emit, files
from planner.core.errors import FileError, UsageError
from planner.core.values.nodes import Nodes
from planner.core.values.plan import Inputs, Plan, ProfileReference
from planner.core.values.profile import Device, Model, Profile
from planner.emit.launch import LAUNCHERS, make_launch_job
from planner.emit.native import emit_native
from planner.solve import Request, solve
from tests.support.processes import wait_for
from tests.support.profiles import profile_of

HOSTILE = 'it\'s a "$(touch x)"\n@folder/train.py'
"""Path that breaks files in which it is not quoted."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Return eight equal layers, profiled on a GPU."""
    by_hand = profile_of([10.0] * 8, [20.0] * 8, size=2)
    device = Device(kind="cuda", name="NVIDIA A100-SXM4-40GB")
    return replace(by_hand, device=device, model=Model(source="model.py:build_model"))


def plan_of(
    profile: Profile, stages: int, *, replicas: int = 1, chunks: int = 1, batch: int = 8, node: int = 0
) -> Plan:
    """Return a plan with equal stages."""
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest=files.digest_of(profile)),
        devices=stages // chunks * replicas,
        memory_bytes=(10**9,) * (stages // chunks * replicas),
        batch=batch,
        replicas=replicas,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        node_devices=node,
    )
    return solve(profile, Request(inputs=inputs, balance=(8 // stages,) * stages, micro_batches=batch // 2 // replicas))


def written(profile: Profile, name: str, script: str = "out/train.py", nodes: Nodes | None = None) -> str:
    """Return the scheduler's file for plans of four, two and one processes."""
    plans = [plan_of(profile, stages) for stages in (4, 2, 1)]
    emitted = emit_native(plans[0], profile, folder=".", profile_folder=".", smaller=plans[1:])
    nodes = nodes or Nodes(count=2, devices=2)
    return LAUNCHERS[name](make_launch_job(emitted.plans, plans[0].inputs, script=script, nodes=nodes)).text


# Nodes


def crossing(profile: Profile, plan: Plan, nodes: Nodes | None) -> list[str]:
    """Return stages and ranks of the cuts between nodes."""
    emitted = emit_native(plan, profile, folder=".", profile_folder=".")
    job = make_launch_job(emitted.plans, plan.inputs, script="train.py", nodes=nodes)
    return [cut.partition(", ")[2] for cut in job.cuts_between_nodes]


def test_cuts_between_nodes_are_listed(profile: Profile) -> None:
    """A loop of stages also has the link back; replicas on their own nodes have no cuts between nodes."""
    four = plan_of(profile, 4)
    assert crossing(profile, four, None) == []
    assert crossing(profile, four, Nodes(count=2, devices=2)) == ["stage 1 to 2 (rank 1 to 2)"]
    assert len(crossing(profile, four, Nodes(count=4, devices=1))) == 3
    assert crossing(profile, plan_of(profile, 4, node=2), None) == ["stage 1 to 2 (rank 1 to 2)"]
    loop = crossing(profile, plan_of(profile, 4, chunks=2), Nodes(count=2, devices=1))
    assert loop == [f"stage {s} to {s + 1} (rank {s % 2} to {(s + 1) % 2})" for s in range(3)]
    replicas = plan_of(profile, 2, replicas=2)
    assert crossing(profile, replicas, Nodes(count=2, devices=2)) == []
    assert crossing(profile, replicas, Nodes(count=4, devices=1)) == ["stage 0 to 1 (rank 0 to 1, 2 to 3)"]


def test_processes_are_divided_evenly_among_nodes(profile: Profile) -> None:
    """Uneven numbers are refused, and a note lists links that the plan did not consider."""
    four = plan_of(profile, 4)
    emitted = emit_native(four, profile, folder=".", profile_folder=".")

    def job(nodes: str, plan: Plan = four) -> Any:
        count, devices = map(int, nodes.split("x"))
        there = Nodes(count=count, devices=devices)
        return make_launch_job(emitted.plans, plan.inputs, script="train.py", nodes=there)

    shares = {nodes: str(job(nodes).largest) for nodes in ("1x8", "4x2", "2x3", "4x1")}
    assert shares == {"1x8": "1x4", "4x2": "2x2", "2x3": "2x2", "4x1": "4x1"}
    for nodes in ("3x1", "1x3"):
        with pytest.raises(UsageError, match="4 processes cannot be shared evenly by nodes of"):
            job(nodes)
    assert "`solve --nodes 2x2 --inter-link …`" in job("2x2").notes[0]
    assert job("2x2", plan_of(profile, 4, node=2)).notes == ()
    assert "for nodes of 3 devices, but 2 per node are used" in job("2x2", plan_of(profile, 4, node=3)).notes[0]
    assert job("1x4").notes == ()


# SLURM

SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+(-\d+)?",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"\d+",
    "time": r"\d\d:\d\d:\d\d",
    "requeue": "",
    "signal": r"B:USR1@\d+",
    "open-mode": "append|truncate",
    "output": r"\S+",
}
"""Options of sbatch 22.05 that we write, with patterns of their values from the manual page."""

STUBS = {
    "srun": 'shift 5; "$@"',
    "torchrun": 'printf "%s\\0" "$@" > torchrun; while [ ! -e told ]; do sleep 0.02; done; exit $(cat told)',
    "scancel": 'echo "$@" > scancel; echo 1 > code; mv code told; sleep 0.2',  # the step ends first
    "scontrol": '[ "$1" = show ] && echo node7 || echo "$@" > scontrol',
}
"""Stubs of the programs that the script calls; the file `told` ends the step with an exit code."""


def started(folder: Path, text: str, **environment: str) -> "subprocess.Popen[bytes]":
    """Start the batch script on one of the two nodes that it requests; return the process once its step runs."""
    (folder / "bin").mkdir()
    for name, body in STUBS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "train.sbatch").write_text(text)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "4"}
    slurm |= {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node7"}
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **slurm, **environment}
    job = subprocess.Popen(["bash", "train.sbatch", "--steps", "9"], cwd=folder, env=env)
    wait_for(lambda: (folder / "torchrun").exists() and (folder / "torchrun").read_text())
    return job


def test_batch_script_is_valid_for_sbatch(profile: Profile) -> None:
    """Directives must come before the first command."""
    text = written(profile, "slurm")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    head = text.partition("\n\n")[0].splitlines()
    options = [line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH")]
    assert [line for line in text.splitlines() if "#SBATCH" in line] == [f"#SBATCH --{option}" for option in options]
    for name, _, value in (option.partition("=") for option in options):
        assert re.fullmatch(SBATCH[name], value), name
    assert {"nodes=1-2", "gpus-per-node=2", "cpus-per-task=4", "requeue"} <= set(options)
    assert "# Cuts between nodes: after layers.3, stage 1 to 2 (rank 1 to 2)." in head
    assert "(balance-2.yaml)" in text


@pytest.mark.parametrize(("told", "ends"), [("before the limit", 1), ("cancelled", 143), ("done", 0)])
def test_job_is_requeued_before_its_time_limit(profile: Profile, tmp_path: Path, told: str, ends: int) -> None:
    """It runs the plan for the remaining node. Canceled and finished jobs are not requeued."""
    job = started(tmp_path, written(profile, "slurm"), CHECKPOINTS="/scratch/run 1")
    words = (tmp_path / "torchrun").read_text().split("\0")
    assert words[:6] == ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"]
    assert words[6:12] == ["--node-rank", "0", "--master-addr", "node7", "--master-port", "20077"]
    assert words[12:-1] == ["out/train.py", "--checkpoint", "/scratch/run 1", "--resume", "auto", "--steps", "9"]
    if told == "before the limit":
        job.send_signal(signal.SIGUSR1)
    else:
        job.send_signal(signal.SIGTERM)  # as SLURM sends it to the step, too
        (tmp_path / "told").write_text(str(ends))
    assert job.wait(10) == ends
    assert (tmp_path / "scontrol").exists() == (told == "before the limit")
    if told == "before the limit":
        assert (tmp_path / "scancel").read_text() == "--signal=TERM 77\n"
        assert (tmp_path / "scontrol").read_text() == "requeue 77\n"


# Kubernetes

POD = "spec.runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[].template.spec.template.spec"
TRAIN_JOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata.name": r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "spec.runtimeRef.name": ".{1,253}",
    "spec.trainer.image": ".{1,500}",
    "spec.trainer.command[]": str,
    "spec.trainer.args[]": str,
    "spec.trainer.numNodes": int,
    "spec.trainer.numProcPerNode": int,
    "spec.trainer.resourcesPerNode.requests.cpu": r"\d+",
    "spec.trainer.resourcesPerNode.requests.nvidia.com/gpu": r"\d+",
    "spec.trainer.resourcesPerNode.limits.cpu": r"\d+",
    "spec.trainer.resourcesPerNode.limits.nvidia.com/gpu": r"\d+",
    "spec.runtimePatches[].manager": ".{1,253}",
    "spec.runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[].name": "node",
    f"{POD}.volumes[].name": str,
    f"{POD}.volumes[].persistentVolumeClaim.claimName": str,
    f"{POD}.volumes[].emptyDir.medium": "Memory",
    f"{POD}.containers[].name": "node",
    f"{POD}.containers[].volumeMounts[].name": str,
    f"{POD}.containers[].volumeMounts[].mountPath": "/.*",
}
"""Fields of a TrainJob that we write, and what they hold by the CRD of Kubeflow Trainer 2.2.1 and 2.3.0.

Source: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml; the names are those of its runtime `torch-distributed`.
"""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a document with its path; list items share a path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, f"{path}[]")
    else:
        yield path, value


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_manifest_has_only_published_fields(profile: Profile, kind: str) -> None:
    on_device = replace(profile, device=replace(profile.device, kind=kind))
    document = yaml.safe_load(written(on_device, "kubernetes"))
    for path, value in leaves(document):
        expected = TRAIN_JOB[path]
        fits = re.fullmatch(expected, value) if isinstance(expected, str) else isinstance(value, expected)
        assert fits, (path, value)


def test_manifest_starts_the_planned_processes(profile: Profile) -> None:
    job = yaml.safe_load(written(profile, "kubernetes"))["spec"]["trainer"]
    assert (job["numNodes"], job["numProcPerNode"], job["resourcesPerNode"]["limits"]) == (
        2,
        2,
        {"nvidia.com/gpu": "2"},
    )
    assert job["args"] == ["--max-restarts=3", "out/train.py", "--checkpoint=/checkpoints", "--resume=auto"]


# Ray


def test_ray_script_runs_the_largest_plan_for_the_remaining_devices(profile, tmp_path, monkeypatch, capsys):
    (tmp_path / "train_ray.py").write_text(written(profile, "ray"))
    (tmp_path / "train.py").write_text("import sys\ndef main():\n    print(*sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_ray.py", "--steps", "9"])
    asked = stand_in_for_ray(monkeypatch, devices=[4, 3])
    spec = importlib.util.spec_from_file_location("train_ray", "train_ray.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.WAIT_S = 0
    script.main()
    assert [scaling["num_workers"] for scaling in asked] == [4, 2]
    assert asked[0]["use_gpu"]
    assert capsys.readouterr().out.endswith("\n--checkpoint checkpoints --resume auto --steps 9\n")


def stand_in_for_ray(monkeypatch: pytest.MonkeyPatch, devices: list[int]) -> list[dict[str, Any]]:
    """Replace the modules of ray; return the recorded requests. A node fails when `devices` changes."""
    asked: list[dict[str, Any]] = []

    class TrainingFailedError(Exception):
        pass

    class TorchTrainer:
        def __init__(self, train: Any, *, train_loop_config: Any, scaling_config: Any, run_config: Any) -> None:
            asked.append(scaling_config)
            self.train, self.given = train, train_loop_config

        def fit(self) -> None:
            devices.pop(0)
            if devices:
                raise TrainingFailedError
            self.train(self.given)

    ray, train, of_torch = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    vars(ray).update(init=lambda: None, cluster_resources=lambda: {"GPU": float(devices[0])}, train=train)
    vars(train).update(RunConfig=SimpleNamespace, ScalingConfig=dict, TrainingFailedError=TrainingFailedError)
    vars(of_torch).update(TorchTrainer=TorchTrainer)
    for module in (ray, train, of_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    return asked


# All of them


@pytest.mark.parametrize("name", LAUNCHERS)
def test_hostile_paths_are_escaped_in_launch_files(profile: Profile, name: str, tmp_path: Path) -> None:
    text = written(profile, name, script=HOSTILE)
    if name == "ray":
        compile(text, "train_ray.py", "exec")
    elif name == "kubernetes":
        assert HOSTILE in yaml.safe_load(text)["spec"]["trainer"]["args"]
    else:
        (tmp_path / "told").write_text("0")
        assert started(tmp_path, text).wait(10) == 0
        assert HOSTILE in (tmp_path / "torchrun").read_text().split("\0")
    assert not (tmp_path / "x").exists()


def test_contradicting_launch_options_are_refused(profile, tmp_path, monkeypatch):
    """An edited file is kept."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", profile)
    profile = files.read_profile("profile.yaml")
    plan = plan_of(profile, 4)
    for options, message in (
        ({"launch": "pbs"}, "unknown `--launch pbs`"),
        ({"nodes": "2x2"}, "`--nodes 2x2` needs `--launch`"),
        ({"launch": "slurm", "nodes": "2x"}, "expected nodes times devices"),
        ({"launch": "slurm", "nodes": "1x3"}, "4 processes cannot be shared evenly"),
        ({"launch": "ray", "engine": "torch"}, "`--launch` needs the bundled executor's train.py"),
        ({"smaller": [plan_of(profile, 2)], "engine": "torch"}, "not `--format torch`"),
        ({"smaller": [plan]}, "a plan for 4 processes is not smaller than the plan for 4"),
        ({"smaller": [plan_of(profile, 2, batch=16)]}, "training would differ"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            emit(plan, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.yaml"]
    paths = emit(plan, launch="slurm", smaller=[plan_of(profile, 2)])
    assert [path.name for path in paths] == ["balance.yaml", "balance-2.yaml", "train.sbatch", "train.py"]
    assert files.read_balance("balance.yaml").smaller == (2,)
    assert "another plan and continues from the same checkpoints: 2 (balance-2.yaml)" in Path("train.py").read_text()
    script = Path("train.sbatch")
    script.write_text(script.read_text().replace("24:00:00", "48:00:00"))
    with pytest.raises(FileError, match="was edited"):
        emit(plan, launch="slurm")
