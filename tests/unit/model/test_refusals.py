"""Models that cannot be trained as a pipeline are refused with a hint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planner.core.errors import ModelError, UsageError
from planner.core.values.profile import Profile
from planner.executor.build.building import build_structure, keep_only
from planner.executor.equivalence.check import check_equivalence
from planner.executor.run.parts import count_samples
from planner.executor.run.shapes import chain_shapes
from planner.model.chain import chain_of
from planner.model.load import Batch, load_model
from planner.profile.profiler import profile_model
from planner.profile.structure import find_chain
from planner.profile.task import ProfilerOptions
from tests.support.cli import FAST, call
from tests.support.measure import loaded_model, profile_of_model

WIDTH = 8


class Blocks(nn.Module):
    """Linear layers, for models below."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))


class ByChance(Blocks):
    """Skips each layer with probability one half."""

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                value = value + torch.tanh(block(value))
        return value


def test_layers_skipped_at_random_are_refused_with_their_reason() -> None:
    with pytest.raises(ModelError, match="the model took another path") as refused:
        profile_of_model(loaded_model(ByChance(), WIDTH), sizes=(1, 2, 3))
    assert "switch off what skips layers by chance" in refused.value.hint


class Curriculum(Blocks):
    """Uses its last blocks after the first forward calls."""

    num_blocks = 4

    def forward(self, value: Tensor) -> Tensor:
        for block in list(self.blocks)[: self.num_blocks]:
            value = torch.tanh(block(value))
        return value


def test_a_changed_path_during_training_is_refused_by_the_last_stage() -> None:
    model = Curriculum()
    chain = chain_of(model, lambda size: torch.randn(size, WIDTH))
    last = chain.stage(len(chain.layers) - 1, len(chain.layers))
    model.num_blocks = 6
    elsewhere = set(model.blocks[4:].parameters())
    keep_only(model, lambda tensor: None if tensor in elsewhere else tensor, torch.device("cpu"))
    with pytest.raises(ModelError, match=r'took another path than when it was profiled: .* "blocks.5') as refused:
        last((torch.randn(2, WIDTH),))
    assert "each phase of a curriculum" in refused.value.hint


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_are_refused() -> None:
    blocks = [torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    with pytest.raises(ModelError, match=r'"0" is a TorchScript module') as refused:
        chain_of(nn.Sequential(*blocks))
    assert "leave the module as plain Python" in refused.value.hint


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ModelError, match=r"compiled as a whole by `torch.compile`") as refused:
        chain_of(torch.compile(Curriculum(), backend="eager"), lambda size: torch.randn(size, WIDTH))
    assert "compile its blocks" in refused.value.hint


def test_a_model_whose_backbone_is_compiled_gets_a_hint() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), backend="eager")

        def forward(self, value: Tensor) -> Any:
            return self.backbone(value)

    with pytest.raises(ModelError, match="cannot be cut") as refused:
        chain_of(Wrapper(), lambda size: torch.randn(size, WIDTH))
    assert 'compile the blocks of "backbone"' in refused.value.hint


def test_a_forward_that_takes_a_dict_as_one_argument_gets_a_hint_on_keyword_arguments() -> None:
    class TakesDict(Blocks):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    with pytest.raises(ModelError, match=r"unexpected keyword argument 'x'") as refused:
        profile_of_model(loaded_model(TakesDict, lambda size: {"x": torch.randn(size, WIDTH)}))
    assert "a dict of inputs is passed as keyword arguments" in refused.value.hint


class FunctionalGradients(Blocks):
    """Differentiates by `torch.func`, which torch's hooks on saved tensors do not allow."""

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = value + torch.vmap(torch.func.grad(lambda x, block=block: torch.tanh(block(x)).sum()))(value)
        return value


@pytest.mark.parametrize(
    "build", [FunctionalGradients, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionalGradients())]
)
def test_derivatives_by_torch_func_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"calls `torch.func.grad`") as refused:
        profile_of_model(loaded_model(build, WIDTH))
    assert "`torch.autograd.grad(…, create_graph=True)`" in refused.value.hint


class Ragged(nn.Module):
    """Works on a nested tensor, and returns one unless `pad` is set."""

    def __init__(self, *, pad: bool) -> None:
        super().__init__()
        self.linear, self.pad = nn.Linear(WIDTH, WIDTH), pad

    def forward(self, value: Tensor) -> Tensor:
        rows = list(value.unsqueeze(1).unbind()) if not value.is_nested else value.unbind()
        nested = self.linear(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        return torch.nested.to_padded_tensor(nested, 0.0).squeeze(1) if self.pad else nested


def model_of_blocks(*blocks: nn.Module) -> Blocks:
    """Return a model of these blocks."""
    model = Curriculum()
    model.blocks = nn.ModuleList(blocks)
    return model


def test_nested_tensors_may_not_cross_boundaries() -> None:
    inputs = torch.randn(2, WIDTH)
    chain = chain_of(model_of_blocks(*(Ragged(pad=True) for _ in range(3))), lambda size: torch.randn(size, WIDTH))
    assert len(chain.layers) == 3
    crossing = nn.Sequential(Ragged(pad=False), Ragged(pad=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ModelError, match=r"a layer passes on a tensor of torch\.jagged") as refused:
        chain_shapes(build_structure(loaded_model(crossing, WIDTH)), inputs)
    assert "to_padded_tensor" in refused.value.hint


class Sparse(nn.Module):
    """Returns a sparse tensor."""

    def forward(self, value: Tensor) -> Tensor:
        return value.relu().to_sparse()


class Dense(nn.Module):
    """Takes a sparse tensor."""

    def forward(self, value: Tensor) -> Tensor:
        return value.to_dense()


def test_sparse_tensors_may_not_cross_boundaries() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sparse(), Dense(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ModelError, match=r"a layer passes on a tensor of torch\.sparse_coo") as refused:
        chain_shapes(build_structure(loaded_model(model, WIDTH)), torch.randn(2, WIDTH))
    assert "to_dense" in refused.value.hint


class Array(nn.Module):
    """Returns an array of NumPy as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Any]:
        return self.linear(value), np.sign(value.detach().numpy())


class ReadsArray(nn.Module):
    """Reads an array of NumPy."""

    def forward(self, values: tuple[Tensor, Any]) -> Tensor:
        return values[0] + torch.from_numpy(values[1])


class ArrayBetweenModules(Blocks):
    """Uses an array of its first module after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.array = Array()

    def forward(self, value: Tensor) -> Tensor:
        value, signs = self.array(value)
        for block in self.blocks:
            value = block(value)
        return value + torch.from_numpy(signs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (ArrayBetweenModules, '"array" returned array'),
        (lambda: nn.Sequential(Array(), ReadsArray(), nn.Linear(WIDTH, WIDTH)), "a layer returned array"),
    ],
)
def test_arrays_may_not_cross_boundaries(build: Callable[[], nn.Module], message: str) -> None:
    loaded = loaded_model(build, WIDTH)
    with pytest.raises(ModelError, match=message) as refused:
        check_equivalence(loaded, budget_s=30.0).raise_if_failed()
    assert "only tensors are sent to the next stages" in str(refused.value)


class Chooses(nn.Module):
    """Returns a module or function with its result."""

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(WIDTH, WIDTH), choose
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Any]:
        return self.linear(value), self.choose(self)


class Calls(nn.Module):
    """Calls the function that it receives."""

    def forward(self, values: tuple[Tensor, Any]) -> Tensor:
        return values[1](values[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choose", "kind"),
    [
        pytest.param(lambda module: module.other, "Linear", marks=pytest.mark.nightly),
        (lambda _module: lambda value: value.tanh(), "function"),
    ],
)
def test_objects_between_layers_of_a_sequential_are_named_by_their_type(choose, kind):
    """The texts of two objects are equal, or differ only in addresses."""
    blocks = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chooses(choose), Calls(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    checked = check_equivalence(loaded_model(blocks, WIDTH), budget_s=30.0)
    (warning,) = (text for text in checked.warnings if 'after "1"' in text)
    assert f'a layer returned an object of type "{kind}", and not the one that it returned for' in warning


class ChecksRange(nn.Linear):
    """Refuses inputs that are not normalized."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if float(input.detach().min()) >= 0:
            raise ValueError("inputs must have a mean of 0")
        return super().forward(input)


def test_stages_that_no_rank_could_build_are_refused_at_profile(tmp_path: Path, capsys: Any) -> None:
    """Ranks find shapes on random values, so each rank would end when it starts."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from tests.unit.model.test_refusals import ChecksRange\n"
        "def build_model(): return torch.nn.Sequential(torch.nn.Identity(), ChecksRange(8, 8), torch.nn.Linear(8, 8))\n"
        "def example_batch(size): return torch.randn(size, 8), torch.zeros(size, 8)\n"
        "def loss_fn(output, target): return (output - target).square().mean()\n"
    )
    options = (*FAST, "--proof-budget", "0s", "-o", str(tmp_path / "profile.yaml"))
    ran = call(capsys, "profile", str(tmp_path / "model.py"), *options)
    assert (ran.code, 'layer "1" (ChecksRange) does not run on random values' in ran.err) == (2, True)
    assert "output shapes must depend only on input shapes" in ran.err


class Packed(nn.Module):
    """Recurrent layers on packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


def test_boundary_shapes_that_depend_on_the_data_are_refused() -> None:
    """A packed sequence has as many rows as all its words."""

    def inputs(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 5, WIDTH), torch.tensor([5, 4, 2, 1][:size])

    with pytest.raises(ModelError, match=r"shape \[9, 8\] for 2 samples and \[12, 8\] for 4: it depends") as refused:
        chain_of(Packed(), inputs)
    assert "`pack_padded_sequence`" in refused.value.hint


class OverwritesNormalized(Blocks):
    """Overwrites the input that the norm saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value)
        for block in self.blocks:
            value += block(value)
        return value


class OverwritesExp(nn.Module):
    """Overwrites the result that `exp` saved."""

    def forward(self, value: Tensor) -> Tensor:
        value = torch.exp(value)
        value += 1.0
        return value


class OverwritesParameter(Blocks):
    """Overwrites a parameter."""

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
            block.bias += 1.0
        return value


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (OverwritesNormalized, r'layer "blocks\.\d'),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), OverwritesExp(), nn.Linear(WIDTH, WIDTH)), 'layer "1"'),
        (OverwritesParameter, "the model's own code"),
    ],
)
def test_in_place_writes_that_torch_refuses_are_reported_with_their_layer(build, where):
    with pytest.raises(ModelError, match=rf"{where}.* writes in place where torch's backward does not") as refused:
        profile_of_model(loaded_model(build, WIDTH))
    assert "`x = x + y` in place of `x += y`" in refused.value.hint


SEQUENCE_FIRST = """
import torch
model = torch.nn.Linear(4, 4)
def example_batch(batch_size): return torch.randn(7, batch_size, 4), torch.randn(7, batch_size, 4)
"""


def test_sequence_first_batches_are_refused(tmp_path: Path) -> None:
    """In the example batch, and where a training batch is split."""
    path = tmp_path / "model.py"
    path.write_text(SEQUENCE_FIRST)
    with pytest.raises(ModelError, match=r"shape \[7, 2, 4\], expected 2 samples in its first") as refused:
        load_model(str(path)).example_batch(2)
    assert "`batch_first=True`" in refused.value.hint
    batch: tuple[Any, Any] = torch.randn(7, 2, 4), torch.randn(2)
    with pytest.raises(UsageError, match="2 and 7 samples") as uneven:
        count_samples(Batch(*batch))
    assert "`batch_first=True`" in uneven.value.hint


class Shrinking(nn.Module):
    """Reduces images to a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
        )

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value.flatten(1)


def profile_shrinking(sizes: tuple[int, ...], *, auto: bool, warned: list[str]) -> Profile:
    """Profile `Shrinking` at these micro-batch sizes; with `auto`, sizes that are too small are left out."""
    options = ProfilerOptions(micro_batch_sizes=sizes, repeats=2, time_budget_s=0.0, skip_failing_sizes=auto)
    loaded = loaded_model(Shrinking, lambda size: torch.randn(size, 4, 8, 8))
    return profile_model(loaded, options, warn=warned.append)


def test_automatic_sizes_too_small_for_batch_normalization_are_left_out() -> None:
    """One value per channel has no variance."""
    warned: list[str] = []
    assert profile_shrinking((1, 2, 4), auto=True, warned=warned).micro_batch_sizes == (2, 4)
    assert len(warned) == 1
    assert warned[0].startswith('micro-batch size 1 is left out: layer "blocks.2')
    assert "more than one value per channel" in warned[0]


@pytest.mark.parametrize(("sizes", "auto"), [((1, 2), False), ((1,), True)])
def test_requested_sizes_too_small_for_batch_normalization_are_refused(sizes: tuple[int, ...], *, auto: bool) -> None:
    """So is the only automatic size."""
    with pytest.raises(ModelError, match=r'layer "blocks.2.* batch normalization needs more than one') as refused:
        profile_shrinking(sizes, auto=auto, warned=[])
    assert "take larger micro-batches" in refused.value.hint


def test_layers_of_models_that_need_two_samples_are_found_without_weights() -> None:
    loaded = loaded_model(Shrinking, lambda size: torch.randn(size, 4, 8, 8))
    assert find_chain(loaded, torch.device("cpu"))[1]


class Hooked(nn.Linear):
    """Clips the gradient of an activation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        value = super().forward(input)
        value.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return torch.tanh(value)


def test_hooks_on_activations_are_refused_with_a_hint_to_a_condition() -> None:
    """A forward without gradients cannot register them."""
    loaded = loaded_model(lambda: nn.Sequential(Hooked(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(ModelError, match='layer "0" registers a hook on an activation') as refused:
        profile_of_model(loaded)
    assert "if h.requires_grad" in refused.value.hint


class NotOnCpu(nn.Linear):
    """Calls a function that has no implementation for CPUs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        raise NotImplementedError("FlexAttention does not support backward on CPU.")


class Loops(nn.Linear):
    """Calls a higher-order operator."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        def is_large(value: Tensor) -> Tensor:
            return value.norm() > 1

        def smaller(value: Tensor) -> tuple[Tensor]:
            return (0.5 * value,)

        with torch.no_grad():
            (value,) = while_loop(is_large, smaller, (input.detach().clone(),))
        return super().forward(value)


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        (NotOnCpu, "does not run on the CPU", "x.device.type"),
        (Loops, "higher-order operator while_loop", "Python loop"),
    ],
)
def test_functions_that_cannot_be_recorded_are_refused_with_a_hint(kind: type[nn.Linear], message: str, hint: str):
    loaded = loaded_model(lambda: nn.Sequential(kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(ModelError, match=message) as refused:
        profile_of_model(loaded)
    assert hint in refused.value.hint


class Scatters(nn.Module):
    """Writes results of a layer, which have 16 bits under autocast, into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = value.scatter(1, torch.zeros_like(value, dtype=torch.long), layer(value))
        return value


def test_dtypes_that_differ_under_autocast_are_explained() -> None:
    loaded = replace(loaded_model(Scatters, WIDTH), precision="bf16-mixed")
    with pytest.raises(ModelError, match=r"scatter.*dtype") as refused:
        find_chain(loaded, torch.device("cpu"))
    assert "cast where dtypes must agree" in refused.value.hint
