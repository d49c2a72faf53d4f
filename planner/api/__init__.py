"""The commands as functions: `planner.profile`, `planner.solve`, `planner.emit`, `planner.check`, and others.

Options have the same names and defaults as on the command line. An option is a string as on the command line ("8GB",
"25GB/s,5us") or a Python value (bytes, numbers, lists, a `Link`). Profiles and plans may be objects or file paths.
Functions print nothing. A profile or plan is written to a file only if `output` names the file. All errors are defined
in `planner.core.errors`.

The package `planner` imports the module of a function when the function is first used, so that the command line starts
fast.
"""

from planner.api.notebooks import enable_notebook_display
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

enable_notebook_display(Plan)
enable_notebook_display(Profile)
