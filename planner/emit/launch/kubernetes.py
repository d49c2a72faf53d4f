"""Launcher for Kubernetes: a `TrainJob` of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1).

The job uses Trainer's `torch-distributed` runtime. The runtime's torch plugin sets the environment variables of
`torchrun`: the number of nodes, the node's index, and the address of the first node. The job needs Trainer 2.2 or
later, because earlier releases lack the field `runtimePatches`.
"""

import json
from typing import Any, Final

from planner.emit.launch.job import LaunchJob, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "trainjob.yaml"
_IMAGE: Final = "registry.example/train:latest"


def kubernetes_file(job: LaunchJob) -> EngineFile:
    """Return the manifest of the `TrainJob` for a training job."""
    size = job.largest
    # JSON is valid YAML. Kubernetes expects quantities as text.
    requests: dict[str, Any] = {"cpu": str(size.devices * job.cores_per_process)}
    limits: dict[str, Any] = {"nvidia.com/gpu": str(size.devices)} if job.uses_gpus else dict(requests)
    use = f"kubectl create -f {shell_word(job.path_of(_FILE))}"
    text = job.launcher_text(
        "kubernetes_template.txt",
        scheduler="Kubernetes (Kubeflow Trainer 2.2 or later)",
        launch="kubernetes",
        submit_command=use,
        image=json.dumps(_IMAGE),
        args=json.dumps(["--max-restarts=3", job.script, "--checkpoint=/checkpoints", "--resume=auto"]),
        nodes=size.count,
        per_node=size.devices,
        requests=json.dumps({**requests, **limits}),
        limits=json.dumps(limits),
    )
    fewer = [f"numNodes {s.count}, numProcPerNode {s.devices}" for s in job.cluster_sizes[1:]]
    notes = [*job.notes, f"set `image` in {_FILE}, and create the claim `checkpoints`"]
    if fewer:
        notes.append(f"a TrainJob has a fixed size: with fewer nodes, create it again with {' or '.join(fewer)}")
    return EngineFile(name=_FILE, text=text, notes=tuple(notes), use=use)
