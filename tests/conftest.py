"""What holds for all tests."""

import os

from hypothesis import settings

# JAX (the extra `tpu`), where it is installed: eight devices on this machine, and no search for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
for name, value in (
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_ACCELERATOR_TYPE", "v2-8"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
):
    os.environ.setdefault(name, value)
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# The same examples in every run, so that a failure is the change's. `HYPOTHESIS_PROFILE=default` searches on.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
