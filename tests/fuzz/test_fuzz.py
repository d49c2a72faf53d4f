"""Damaged files of every kind and broken command lines get an error message, within limits of time and memory.

Inputs are the same in each run. `FUZZ_INPUTS=100000 pytest tests/fuzz` tries more, `FUZZ_FIRST=100000` others.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support import fuzz

INPUTS = int(os.environ.get("FUZZ_INPUTS", "150"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_broken_input_gets_an_error_message() -> None:
    """An input fails if it causes a traceback or an internal error, or takes ten seconds or a gigabyte."""
    assert fuzz.campaign(INPUTS, first=FIRST) == (INPUTS, [])


def test_fuzzer_detects_each_kind_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(what: str) -> str | None:
        def run(_arguments: list[str]) -> int:
            if what == "raises":
                raise ValueError(what)
            if what == "hangs":
                raise fuzz.TooLongError
            sys.stderr.write("error: this is a bug in gpipe-plan" if what == "bug" else "")
            return 3 if what == "code" else 2

        monkeypatch.setattr(fuzz, "run", run)
        return fuzz.fuzz(1, tmp_path)

    for what, message in (("raises", "ValueError"), ("hangs", "no answer"), ("bug", "bug"), ("code", "exit code 3")):
        assert message in (broken(what) or ""), what
    assert "without an error" in (broken("silent") or "")
