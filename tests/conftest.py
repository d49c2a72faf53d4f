"""What holds for all tests."""

import os

from hypothesis import settings

# The same examples in every run, so that a failure is the change's. `HYPOTHESIS_PROFILE=default` searches on.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
