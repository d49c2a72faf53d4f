"""Tests of loading weights of the whole model from every kind of file."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from planner.core.errors import FileError, UsageError
from planner.executor.keep.weights import canonical_names, export_weights, load_weights
from tests.support.cli import call
from tests.support.stored import write_checkpoint


class Tied(nn.Module):
    """One weight under two names, and two buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.fixture
def model() -> nn.Module:
    """Return a model with known values."""
    torch.manual_seed(0)
    return Tied()


def other(model: nn.Module) -> tuple[dict[str, Tensor], nn.Module]:
    """Return the last stage's tensors of another instance."""
    torch.manual_seed(1)
    fresh = Tied()
    return {"head.weight": fresh.head.weight, "norm.running_mean": fresh.norm.running_mean.add_(7.0)}, fresh


def test_names_are_those_of_the_state_dict(model: nn.Module) -> None:
    names = canonical_names(model)
    assert list(names) == list(model.state_dict())
    assert names["head.weight"] == "embedding.weight"
    assert {name for name, first in names.items() if name != first} == {"head.weight"}
    with torch.device("meta"):
        assert canonical_names(Tied()) == names


def test_hooks_on_the_state_dict_neither_rename_nor_remove_tensors(model: nn.Module) -> None:
    """A checkpoint without a tensor would be resumed with its initial values."""
    before = canonical_names(model)
    model.register_state_dict_post_hook(lambda _module, state, prefix, _meta: state.pop(f"{prefix}embedding.weight"))
    model.norm.register_state_dict_post_hook(
        lambda _module, state, prefix, _meta: state.update({"other": state.pop(f"{prefix}weight")})
    )
    assert canonical_names(model) == before


@pytest.mark.parametrize("kind", ["file", "nested", "safetensors", "checkpoint"])
def test_a_stage_loads_its_weights_from_any_kind_of_file(model: nn.Module, kind: str, tmp_path: Path) -> None:
    state: dict[str, Any] = dict(model.state_dict())
    path = str(tmp_path / "weights.pt")
    if kind == "file":
        torch.save(state, path)
    elif kind == "nested":
        torch.save({"step": 3, "model": state}, path)
    elif kind == "safetensors":
        path = str(tmp_path / "weights.safetensors")
        save_file({name: t for name, t in state.items() if name != "embedding.weight"}, path)
    else:
        del state["head.weight"]
        first = {name: state.pop(name) for name in list(state)[:2]}
        path = write_checkpoint(tmp_path / "folder", first, state, tied={"head.weight": "embedding.weight"})
    tensors, fresh = other(model)
    load_weights(path, tensors, canonical_names(fresh))
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)


def test_an_export_is_loaded_if_a_hook_expects_other_names(model: nn.Module, tmp_path: Path) -> None:
    """An export has the names of the parameters, and not those that a hook makes of them."""
    path = str(tmp_path / "weights.pt")
    torch.save(model.state_dict(), path)
    tensors, fresh = other(model)
    fresh.norm.register_load_state_dict_pre_hook(
        lambda _module, state, prefix, *_: state.update({f"{prefix}weight": state.pop(f"{prefix}scale")})
    )
    load_weights(path, tensors, canonical_names(fresh), fresh)
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_wrong_names_and_shapes_are_reported_before_loading(model: nn.Module, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.pt")
    state = dict(model.state_dict())
    tensors, fresh = other(model)
    names, before = canonical_names(fresh), tensors["head.weight"].clone()
    torch.save({name: t for name, t in state.items() if "weight" not in name} | {"more": torch.ones(1)}, path)
    with pytest.raises(UsageError) as raised:
        load_weights(path, tensors, names)
    assert raised.value.message == (
        f'{path} does not fit the model: it lacks "embedding.weight", "norm.weight" and holds "more", '
        "which the model lacks"
    )
    torch.save(state | {"embedding.weight": torch.ones(6, 3), "head.weight": torch.ones(6, 3)}, path)
    with pytest.raises(
        UsageError, match=r'"(head|embedding).weight" has shape \[6, 3\] in the file, \[5, 3\] in the model'
    ):
        load_weights(path, tensors, names)
    assert torch.equal(tensors["head.weight"], before)


@pytest.mark.parametrize("content", [b"", b"no weights", "a list", "nothing"])
def test_files_without_weights_are_refused_by_name(content: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "a list":
        torch.save([1], path)
    with pytest.raises(FileError) as raised:
        load_weights(str(path), {}, {})
    assert str(path) in raised.value.message
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="is no checkpoint"):
        load_weights(str(tmp_path / "empty"), {}, {})


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_printed_command_loads_an_export(suffix, model, tmp_path, capsys):
    state, path = dict(model.state_dict()), tmp_path / f"model{suffix}"
    del state["head.weight"]
    folder = write_checkpoint(tmp_path / "folder", state, tied={"head.weight": "embedding.weight"})
    done = call(capsys, "export", folder, "-o", str(path))
    loaded = Tied()
    exec(done.err.split("`")[1], {"model": loaded, "torch": torch, "safetensors": safetensors})
    assert torch.equal(loaded.head.weight, model.state_dict()["embedding.weight"])


def test_exports_are_written_completely_or_not_at_all(model, tmp_path, monkeypatch):
    state, path = dict(model.state_dict()), str(tmp_path / "model.pt")
    del state["head.weight"]
    folder = write_checkpoint(tmp_path / "folder", state, tied={"head.weight": "embedding.weight"})
    assert export_weights(folder, path) == len(model.state_dict())
    exported = torch.load(path, weights_only=True)
    assert exported["head.weight"].data_ptr() == exported["embedding.weight"].data_ptr()
    Tied().load_state_dict(torch.load(path, weights_only=True))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(FileError, match="No space left on device"):
        export_weights(folder, str(tmp_path / "other.pt"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "model.pt"]


@pytest.mark.parametrize("kind", ["file", "safetensors", "folder"])
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int8, '"0.weight" is int8 in the file, float32 in the model'),
        (torch.bool, '"0.weight" is bool in the file, float32 in the model'),
        (torch.complex64, '"0.weight" is complex64 in the file, float32 in the model'),
        (torch.float8_e4m3fn, '"0.weight" is float8_e4m3fn in the file, float32 in the model'),
    ],
)
def test_quantized_boolean_and_complex_weights_are_refused(kind, dtype, message, tmp_path):
    path = saved({"0.weight": torch.ones(2, 3).to(dtype)}, kind, tmp_path)
    with pytest.raises(UsageError, match=message):
        load_into_linear(path)


@pytest.mark.parametrize("kind", ["file", "safetensors", "folder"])
def test_casts_between_floating_point_types_are_reported(kind: str, tmp_path: Path) -> None:
    """The caller prints them."""
    weight = torch.rand(2, 3, dtype=torch.float64)
    loaded, casts = load_into_linear(saved({"0.weight": weight}, kind, tmp_path))
    assert torch.equal(loaded, weight.float())
    assert casts == ("float64 to float32",)
    assert load_into_linear(saved({"0.weight": loaded}, kind, tmp_path / "same"))[1] == ()


@pytest.mark.parametrize("kind", ["file", "safetensors", "folder"])
def test_nan_and_overflowing_weights_are_refused(kind: str, tmp_path: Path) -> None:
    weight = torch.ones(2, 3)
    weight[0, 0] = torch.nan
    with pytest.raises(UsageError, match=r'"0\.weight" contains NaN'):
        load_into_linear(saved({"0.weight": weight}, kind, tmp_path / "nan"))
    large = torch.full((2, 3), 1e300, dtype=torch.float64)
    with pytest.raises(UsageError, match=r'"0\.weight" has numbers beyond the range of float32'):
        load_into_linear(saved({"0.weight": large}, kind, tmp_path / "large"))
    infinite = torch.full((2, 3), -torch.inf)
    assert torch.equal(load_into_linear(saved({"0.weight": infinite}, kind, tmp_path / "infinite"))[0], infinite)


def saved(state: dict[str, Tensor], kind: str, folder: Path) -> str:
    """Save a state dict in a kind of file."""
    folder.mkdir(exist_ok=True)
    path = str(folder / "weights")
    if kind == "folder":
        return write_checkpoint(folder / "weights", state)
    if kind == "safetensors":
        path += ".safetensors"
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def load_into_linear(path: str) -> tuple[Tensor, tuple[str, ...]]:
    """Load a file into a linear layer; return its weight and the casts."""
    weight = torch.zeros(2, 3)
    casts = load_weights(path, {"0.weight": weight}, {"0.weight": "0.weight"})
    return weight, casts
