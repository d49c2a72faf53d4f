"""The names of recomputed layers in plans and balance configurations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import FileError
from planner.emit.native import emit_native
from planner.files import read_balance, read_plan, write
from tests.support.file_values import full_balance, full_plan, full_profile


def changed(value: Any, **stage: Any) -> Any:
    """Return `value` with another last stage."""
    return replace(value, stages=(*value.stages[:-1], replace(value.stages[-1], **stage)))


@pytest.mark.parametrize(("make", "read"), [(full_balance, read_balance), (full_plan, read_plan)])
@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"recompute": "layers", "recomputed": ()}, "`stages[1].recompute`: `layers` needs a list of layers"),
        ({"recompute": "always", "recomputed": ("h.2",)}, "`stages[1].recomputed`: names layers, but the stage's"),
        ({"recompute": "layers", "recomputed": ("h.2", "h.2")}, '`stages[1].recomputed`: names "h.2" twice'),
    ],
)
def test_recompute_layers_and_their_list_require_each_other(make, read, stage, said, tmp_path):
    path = str(tmp_path / "file.yaml")
    write(path, changed(make(), **stage))
    with pytest.raises(FileError) as refused:
        read(path)
    assert said in refused.value.message
    assert refused.value.line is not None


def test_recomputed_layers_must_be_in_the_stage(tmp_path: Path) -> None:
    path = str(tmp_path / "balance.yaml")
    for name, fits in (("h.2", True), ("h.0", False), ("elsewhere", False)):
        balance = changed(full_balance(), recompute="layers", recomputed=(name,))
        write(path, balance)
        if fits:
            assert read_balance(path) == balance
            continue
        with pytest.raises(FileError, match=f'"{name}" is not a layer of this stage'):
            read_balance(path)


def test_recomputed_layers_are_emitted_in_chain_order(tmp_path: Path) -> None:
    plan = full_plan()
    layers = [layer.name for layer in full_profile().layers][-plan.balance[-1] :]
    plan = changed(plan, recompute="layers", recomputed=tuple(reversed(layers)))
    emitted = emit_native(plan, full_profile(), folder=".", profile_folder=".")
    (tmp_path / "balance.yaml").write_text(emitted.balance)
    stages = read_balance(str(tmp_path / "balance.yaml")).stages
    assert [stage.recomputed for stage in stages] == [(), tuple(layers)]
    assert f"recompute {len(layers)} layer" in emitted.script
