"""Ray: a script for Ray Train V2 (docs.ray.io, "Ray Train"), whose `TorchTrainer` starts the processes.

It makes their process group, too, and numbers ranks node by node. How many processes there are is decided at every
start: the elastic mode of Ray itself would take any number between two, for most of which there is no plan.
"""

from typing import Final

from planner.emit.launch.job import Job, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "train_ray.py"


def ray_file(job: Job) -> EngineFile:
    """The script."""
    use = f"python {shell_word(job.path_of(_FILE))}"
    text = job.file(
        "ray_template.txt",
        scheduler="Ray (Ray Train V2)",
        option="ray",
        use=use,
        sizes=repr(tuple(share.num_processes for share in job.shares)),
        use_gpu=job.uses_gpus,
        cores=job.cores,
    )
    return EngineFile(name=_FILE, text=text, notes=job.notes, use=use)
