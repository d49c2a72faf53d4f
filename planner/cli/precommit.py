"""Pre-commit hook: `gpipe-plan check` for every committed plan.

pre-commit runs `python -I -m planner.cli.precommit ARGS FILES`; its `args` are options of `check`. `-I` prevents
imports from the working directory, which contains the files of the commit. For a committed profile, all plans in the
same folder are checked.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.api.option import option_fields_of, option_name
from planner.api.options.checking import CheckOptions
from planner.cli.main import run

_SUFFIXES = (".yaml", ".json")


def check_files(arguments: Sequence[str]) -> int:
    """Check plans one by one, and return the largest exit code.

    `arguments` are options of `check`, and paths of plans or profiles. For a profile, all plans in the profile's folder
    are checked.
    """
    parser = argparse.ArgumentParser(prog="gpipe-plan check", allow_abbrev=False)
    parser.add_argument("files", nargs="*")
    for keyword in option_fields_of(CheckOptions):
        name = option_name(keyword.name)
        if keyword.command_line_type is bool:
            parser.add_argument(name, dest=name, action="store_const", const=name)
        else:
            parser.add_argument(name, dest=name, type=f"{name}={{}}".format)
    parsed = vars(parser.parse_args(arguments))
    files = parsed.pop("files")
    options = [option for option in parsed.values() if option is not None]
    code = 0
    for plan in dict.fromkeys(plan for path in files for plan in _plans_of(path)):
        print(f"{plan}:", flush=True)
        code = max(code, run(["check", *options, "--", plan]))
    return code


def _plans_of(path: str) -> Iterator[str]:
    stem = Path(path).stem
    if stem.split(".")[-1] != "profile":
        yield path
        return
    for file in sorted(Path(path).parent.iterdir()):
        if file.suffix in _SUFFIXES and file.stem.split(".")[-1] == "plan":
            yield str(file)


if __name__ == "__main__":
    sys.exit(check_files(sys.argv[1:]))
