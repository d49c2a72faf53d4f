"""Tests of `docs/notebook.ipynb`: its cells run and give the stored outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import no_calibration
from tests.support.docs import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shown_by(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; return the value of its last expression. `names`: variables of earlier cells."""
    tree = ast.parse(cell)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(last, "cell", "eval"), names)


@pytest.mark.slow
def test_cells_run_in_order_without_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    no_calibration(monkeypatch)
    names: dict[str, Any] = {}
    shown = [shown_by("".join(cell["source"]), names) for cell in CELLS]
    stored = [[output["output_type"] for output in cell["outputs"]] for cell in CELLS]
    assert [value is not None for value in shown] == ["execute_result" in types for types in stored]
    assert not any("error" in types for types in stored)
    (html,) = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert "stage" in html
    assert (tmp_path / "explore.html").stat().st_size > 10_000
