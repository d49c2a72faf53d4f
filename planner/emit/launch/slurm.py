"""SLURM: a batch script for `sbatch` (slurm.schedmd.com/sbatch.html), as of 22.05 and later.

Its directives end with the first line that is no comment; variables in them are not replaced. `srun` has to be told how
many cores a task has, from 22.05 on. A directive with tasks per node would make SLURM give the fewest of a range of
nodes (22.05.8 does): `srun` is told that, too.
"""

from typing import Final

from planner.emit.launch.job import Job, shell_word
from planner.emit.layout import EngineFile

_FILE: Final = "train.sbatch"


def slurm_file(job: Job) -> EngineFile:
    """The batch script."""
    fewest = min(share.count for share in job.shares)
    resources = [f"#SBATCH --cpus-per-task={job.largest.devices * job.cores}"]
    if job.uses_gpus:
        resources.append(f"#SBATCH --gpus-per-node={job.largest.devices}")
    use = f"sbatch {shell_word(job.path_of(_FILE))}"
    text = job.file(
        "slurm_template.txt",
        scheduler="SLURM",
        option="slurm",
        use=use,
        name="train",
        nodes=job.largest.count if fewest == job.largest.count else f"{fewest}-{job.largest.count}",
        resources="\n".join(resources),
        plans=" ".join(map(str, job.shares)),
        there="SLURM_GPUS_ON_NODE" if job.uses_gpus else "SLURM_CPUS_ON_NODE",
        script=_in_single_quotes(shell_word(job.script)),
    )
    return EngineFile(name=_FILE, text=text, notes=job.notes, use=use)


def _in_single_quotes(words: str) -> str:
    """Shell words as they stand within single quotes, which a shell takes off before another reads them."""
    return words.replace("'", "'\\''")
