"""Launcher for SLURM: a batch script for `sbatch` (slurm.schedmd.com/sbatch.html), version 22.05 or later.

SLURM reads directives up to the first line that is not a comment, and does not expand variables in directives. Since
22.05, `srun` needs the number of cores per task. The script passes the tasks per node to `srun`. With a directive for
the tasks per node, SLURM 22.05.8 always allocated the fewest nodes of a range such as `--nodes=2-4`.
"""

from typing import Final

from planner.emit.launch.job import LaunchJob, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "train.sbatch"


def slurm_file(job: LaunchJob) -> EngineFile:
    """Return the SLURM batch script of a training job."""
    fewest = min(size.count for size in job.cluster_sizes)
    resources = [f"#SBATCH --cpus-per-task={job.largest.devices * job.cores_per_process}"]
    if job.uses_gpus:
        resources.append(f"#SBATCH --gpus-per-node={job.largest.devices}")
    use = f"sbatch {shell_word(job.path_of(_FILE))}"
    text = job.launcher_text(
        "slurm_template.txt",
        scheduler="SLURM",
        launch="slurm",
        submit_command=use,
        name="train",
        nodes=job.largest.count if fewest == job.largest.count else f"{fewest}-{job.largest.count}",
        resources="\n".join(resources),
        plans=" ".join(map(str, job.cluster_sizes)),
        there="SLURM_GPUS_ON_NODE" if job.uses_gpus else "SLURM_CPUS_ON_NODE",
        script=shell_word(job.script).replace("'", "'\\''"),  # the template has it inside single quotes
    )
    return EngineFile(name=_FILE, text=text, notes=job.notes, use=use)
