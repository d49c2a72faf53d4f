"""Kubernetes: a `TrainJob` of Kubeflow Trainer 2.2 and later (trainer.kubeflow.org/v1alpha1).

It stands on the `torch-distributed` runtime that comes with Trainer, whose plugin for torch tells `torchrun` by
variables of the environment how many nodes there are, which of them it is on, and where the first one is. Volumes are
patched into its pods; before 2.2 that field had another name.
"""

import json
from typing import Any, Final

from planner.emit.launch.job import Job, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "trainjob.yaml"
_IMAGE: Final = "registry.example/train:latest"


def kubernetes_file(job: Job) -> EngineFile:
    """The manifest."""
    share = job.largest
    # JSON is YAML; Kubernetes writes quantities as texts.
    requests: dict[str, Any] = {"cpu": str(share.devices * job.cores)}
    limits: dict[str, Any] = {"nvidia.com/gpu": str(share.devices)} if job.uses_gpus else dict(requests)
    use = f"kubectl create -f {shell_word(job.path_of(_FILE))}"
    text = job.file(
        "kubernetes_template.txt",
        scheduler="Kubernetes (Kubeflow Trainer 2.2 or later)",
        option="kubernetes",
        use=use,
        image=json.dumps(_IMAGE),
        args=json.dumps(["--max-restarts=3", job.script, "--checkpoint=/checkpoints", "--resume=auto"]),
        nodes=share.count,
        per_node=share.devices,
        requests=json.dumps({**requests, **limits}),
        limits=json.dumps(limits),
    )
    fewer = [f"numNodes {s.count}, numProcPerNode {s.devices}" for s in job.shares[1:]]
    notes = [*job.notes, f"`image` in {_FILE} is yours to set, and the claim `checkpoints` to make"]
    if fewer:
        notes.append(f"a TrainJob keeps its size: with less left, create it anew with {' or '.join(fewer)}")
    return EngineFile(name=_FILE, text=text, notes=tuple(notes), use=use)
