"""Launcher for Ray: a script for Ray Train V2 (docs.ray.io, "Ray Train").

Ray starts the processes, creates the process group, and numbers ranks node by node. The script chooses the number of
processes at every start. It does not use Ray's elastic mode, because most numbers of processes have no plan.
"""

from typing import Final

from planner.emit.launch.job import LaunchJob, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "train_ray.py"


def ray_file(job: LaunchJob) -> EngineFile:
    """Return the Python script that starts a training job on Ray."""
    use = f"python {shell_word(job.path_of(_FILE))}"
    text = job.launcher_text(
        "ray_template.txt",
        scheduler="Ray (Ray Train V2)",
        launch="ray",
        submit_command=use,
        sizes=repr(tuple(size.num_processes for size in job.cluster_sizes)),
        use_gpu=job.uses_gpus,
        cores=job.cores_per_process,
    )
    return EngineFile(name=_FILE, text=text, notes=job.notes, use=use)
