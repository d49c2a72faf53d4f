"""Run under torchrun: emitted scripts one after the other, where gpipe-plan cannot be imported.

torchrun --nproc-per-node K standalone_worker.py STEPS script.py …
"""

import runpy
import sys
from functools import partial

import torch.distributed as dist

for name in ("planner", "fvcore", "yaml", "pydantic"):
    sys.modules[name] = None  # type: ignore[assignment]  # whoever imports it fails

steps, *scripts = sys.argv[1:]
store, rank, world = next(dist.rendezvous("env://"))  # type: ignore[no-untyped-call]
join = dist.init_process_group
for script in scripts:
    if rank == 0:
        sys.stdout.write(f"script {script}\n")
        sys.stdout.flush()
    # torchrun's store serves one group; with a prefix each script has its own.
    own = dist.PrefixStore(script, store)
    dist.init_process_group = partial(join, store=own, rank=rank, world_size=world)
    sys.argv = [script, "--steps", steps, "--seed", "3"]
    runpy.run_path(script, run_name="__main__")
