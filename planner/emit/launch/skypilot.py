"""SkyPilot: a task for `sky jobs launch` (docs.skypilot.co, "Task YAML").

A managed job begins anew on other nodes where its own are lost.
"""

import json
from typing import Final

from planner.emit.launch.job import Job, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "sky.yaml"

_OTHER_NAMES: Final = {"a100-40gb": "A100"}
"""What SkyPilot calls otherwise than by our name in capitals."""


def skypilot_file(job: Job) -> EngineFile:
    """The task."""
    share = job.largest
    notes = list(job.notes)
    if job.uses_gpus:
        name = _OTHER_NAMES.get(job.accelerator, job.accelerator.upper())
        if not name:
            name = "H100"
            notes.append(f"which GPUs the plan is for has no name that we know: `accelerators` in {_FILE} is a guess")
        resource, amount = "accelerators", json.dumps(f"{name}:{share.devices}")
    else:
        resource, amount = "cpus", json.dumps(f"{share.devices * job.cores}+")
    if job.script.startswith(("/", "../")):
        notes.append("train.py lies outside of the folder that is copied to the nodes (`workdir`)")
    fewer = [f"--num-nodes {s.count}" for s in job.shares[1:] if s.devices == share.devices]
    if fewer:
        notes.append(f"a task keeps its size: with fewer nodes left, launch it anew with {' or '.join(fewer)}")
    use = f"sky jobs launch {shell_word(job.path_of(_FILE))} --env BUCKET=…"
    text = job.file(
        "skypilot_template.txt",
        scheduler="SkyPilot",
        option="skypilot",
        use=use,
        nodes=share.count,
        resource=resource,
        amount=amount,
        per_node=share.devices,
        script=shell_word(job.script),
    )
    return EngineFile(name=_FILE, text=text, notes=tuple(notes), use=use)
