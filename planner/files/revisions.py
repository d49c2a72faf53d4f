"""A file as it was at a revision of the git repository that it lies in."""

import subprocess
from pathlib import Path

from planner.core.errors import FileError


def at_revision(path: str, revision: str) -> str:
    """The text of `path` as committed at `revision`, such as `main` or `HEAD~1`.

    Raises:
        FileError: No git, no repository, no such revision, or no such file in it.
    """
    file = Path(path)
    called = f"git:{revision}:{path}"
    if not revision:  # git would take the staged file
        raise FileError("no revision is named", path=called, hint="name one: `git:main`")
    # `./` makes git take the path from the folder that it runs in, wherever the repository begins.
    command = ["git", "show", "--end-of-options", f"{revision}:./{file.name}"]
    try:
        process = subprocess.run(command, cwd=file.parent, capture_output=True, check=False)  # noqa: S603 - no shell
    except FileNotFoundError:
        raise FileError("git, or the folder of the file, is not there", path=called) from None
    except OSError as error:
        raise FileError(f"git could not be run: {error.strerror}", path=called) from None
    if process.returncode:
        said = process.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        hint = "in CI the checkout may hold one commit alone: `fetch-depth: 0` of actions/checkout fetches the others"
        raise FileError(f"git says: {said}", path=called, hint=hint)
    try:
        return process.stdout.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8 text (byte {error.start})", path=called) from None
