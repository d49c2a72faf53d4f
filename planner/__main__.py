"""`python -m planner` is the command `gpipe-plan`: as little as there must be before Ctrl-C is one line."""

import gc
import os
import signal
import sys
from typing import Any, NoReturn


def main() -> NoReturn:
    """The console script; Ctrl-C ends it with one line and exit code 130, also while modules are imported."""
    signal.signal(signal.SIGINT, _leave)
    from planner.cli.main import run  # noqa: PLC0415 - takes time, in which people press Ctrl-C, too

    try:
        # From here on there may be something to put in order first.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
        signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    if "torch" not in sys.modules:
        # All that is left goes with the process: the collector need not look at each of it once more. Beside torch it
        # has to: triton, which comes with some releases, complains at the end of what it finds left.
        gc.freeze()
    sys.exit(code)


def _leave(*_: Any) -> NoReturn:
    # An exception would come out of whatever module is half imported, as anything.
    if sys.stderr is not None:
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
