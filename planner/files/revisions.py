"""Read files as they were at a revision of their git repository."""

import subprocess
from pathlib import Path

from planner.core.errors import FileError


def read_revision(path: str, revision: str) -> str:
    """Return the text of the file `path` at a git revision, such as `main` or `HEAD~1`.

    Raises:
        FileError: git, the repository, the revision or the file in the revision does not exist.
    """
    file = Path(path)
    called = f"git:{revision}:{path}"
    if not revision:  # with an empty revision, git would read the staged file
        raise FileError("the revision is missing", path=called, hint="name one: `git:main`")
    # With `./` git resolves the path from its working folder, not from the root of the repository.
    command = ["git", "show", "--end-of-options", f"{revision}:./{file.name}"]
    try:
        process = subprocess.run(command, cwd=file.parent, capture_output=True, check=False)  # noqa: S603 - no shell
    except FileNotFoundError:
        raise FileError("git or the folder of the file does not exist", path=called) from None
    except OSError as error:
        raise FileError(f"git could not be run: {error.strerror}", path=called) from None
    if process.returncode:
        said = process.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        hint = "a CI checkout may have only one commit: `fetch-depth: 0` of actions/checkout fetches all"
        if said.startswith("not a git repository"):
            hint = "name a file instead: `--against other.yaml`"
        raise FileError(f"git says: {said}", path=called, hint=hint)
    try:
        return process.stdout.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8 text (byte {error.start})", path=called) from None
