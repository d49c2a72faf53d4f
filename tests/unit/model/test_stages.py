"""Layers of any module: tensors passed between them cross the boundaries."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from planner.core.errors import ModelError
from planner.model.chain import Chain, chain_digest, chain_of, shared_parameters, tied_parameters
from tests.support.cutting import compare, compare_all_ways
from tests.support.cutting import sequences as values
from tests.zoo.real_model import loss_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.two(torch.tanh(self.one(value)))


class Blocks(nn.Module):
    """Several blocks, for models below."""

    def __init__(self, make: Callable[[], nn.Module] = Block, number: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(number))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, so that tensors in cycles stay alive."""
    gc.disable()
    yield
    gc.enable()


def sent_shapes(chain: Chain) -> list[list[tuple[int, ...]]]:
    """Return the shapes of tensors that cross each boundary, for three samples."""
    return [[tuple(t.shape) for t in chain.outline.meta_inputs(n, 3)] for n in range(1, len(chain.layers))]


class Skips(Blocks):
    """A small U-Net."""

    def forward(self, value: Tensor) -> Tensor:
        first = self.blocks[0](value)
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        return self.blocks[3](third + second) + first


def test_skip_connections_cross_every_boundary_once() -> None:
    result = compare_all_ways(Skips(), num_stages=4)
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert result.crossing == [1, 2, 2]


class Dictionaries(Blocks):
    """Blocks take and return dicts with an entry that is None."""

    class Entry(Block):
        def forward(self, entries: dict[str, Any]) -> dict[str, Any]:
            return {"value": super().forward(entries["value"]), "scale": entries["scale"] * 2, "none": None}

    def __init__(self) -> None:
        super().__init__(self.Entry)

    def forward(self, value: Tensor) -> dict[str, Any]:
        entries: dict[str, Any] = {"value": value, "scale": value.mean(), "none": None}
        for block in self.blocks:
            entries = block(entries)
            assert entries["none"] is None
        return {"last": entries["value"] * entries["scale"]}


def test_dicts_cross_boundaries() -> None:
    assert compare_all_ways(Dictionaries()).crossing == [2, 2, 2]


@dataclass
class ModelOutput:
    """A user's output dataclass."""

    value: Tensor
    extra: Tensor | None = None


class Keywords(Blocks):
    """Takes keyword arguments, some of them None, and returns a dataclass."""

    class Masked(Block):
        def forward(self, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            added = super().forward(value)
            return (added if mask is None else added * mask[..., None]), mask

    def __init__(self) -> None:
        super().__init__(self.Masked)

    def forward(self, *, words: Tensor, mask: Tensor | None = None, unused: None = None) -> ModelOutput:
        value = torch.eye(WIDTH)[words]
        for block in self.blocks:
            value, mask = block(value, mask=mask)
        assert unused is None
        return ModelOutput(value)


def test_keyword_arguments_and_none_reach_every_stage() -> None:
    """The mask is sent once, as integers."""

    def inputs(batch: int) -> dict[str, Any]:
        mask = torch.arange(5).lt(4).long().expand(batch, 5)
        return {"words": torch.randint(WIDTH, (batch, 5)), "mask": mask, "unused": None}

    result = compare_all_ways(Keywords(), inputs)
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert sent_shapes(result.chain) == [[(3, 5), (3, 5, WIDTH)]] * 3
    without = compare_all_ways(Keywords(), lambda batch: {"words": torch.randint(WIDTH, (batch, 5))})
    assert without.crossing == [1, 1, 1]


class Translator(nn.Module):
    """Every decoder layer reads the encoder's state, and a bias that the first one computes."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Linear(WIDTH, 1)

        def forward(self, value: Tensor, state: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            bias = self.bias(state) if bias is None else bias
            return super().forward(value) + state.mean(1, keepdim=True) + bias, bias

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        first, *others = (self.Layer() for _ in range(3))
        self.decoder = nn.ModuleList([first, *others])
        for layer in others:
            del layer.bias

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.encoder:
            source = layer(source)
        bias = None
        for layer in self.decoder:
            target, bias = layer(target, source, bias)
        return target


def test_encoder_state_and_shared_bias_reach_every_decoder_layer() -> None:
    result = compare_all_ways(Translator(), lambda batch: (values(batch), values(batch)))
    assert result.chain.names == ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")
    assert result.crossing == [2, 2, 3, 3]


class InPlace(nn.Module):
    """Skips read tensors that an activation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.acts = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        kept = []
        for layer, act in zip(self.layers, self.acts, strict=True):
            value = layer(value)
            kept.append(value)
            act(value)  # the result is in `value` as well
        return kept[0] + value


def test_in_place_activations_belong_to_the_layer_before() -> None:
    result = compare_all_ways(InPlace())
    assert result.chain.names == ("layers.0", "layers.1", "layers.2")


class PassesThrough(Blocks):
    """Blocks return their input and a view of it."""

    class Handing(Block):
        def forward(self, value: Tensor, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(value), same, same.view_as(same)

    def __init__(self) -> None:
        super().__init__(self.Handing)

    def forward(self, value: Tensor) -> Tensor:
        same, view = value * 2, value
        for block in self.blocks:
            value, same, view = block(value, same)
        return value + same + view


def test_passed_through_tensors_are_sent_once() -> None:
    assert max(compare_all_ways(PassesThrough()).crossing) <= 3


class Tied(Blocks):
    """A language model with tied weights and sines of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        waves = torch.sin(torch.arange(words.shape[1]))[:, None]
        value = self.words(words)
        for block in self.blocks:
            value = block(value + waves)
        return self.head(value)


def words(batch: int) -> Tensor:
    return torch.randint(16, (batch, 6))


def test_tied_weights_are_found_and_positions_are_not_sent() -> None:
    """Every stage computes the sines."""
    result = compare_all_ways(Tied(), words)
    assert result.chain.names == ("words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    assert result.crossing == [1] * 5
    assert tied_parameters(result.chain.layers) == {"words.weight": ("head.weight",), "head.weight": ("words.weight",)}
    assert shared_parameters(result.chain.layers) == [[(0, "words.weight"), (5, "head.weight")]]


class ClassToken(Blocks):
    """Parameters of the model itself, one of them read between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Buffer(torch.randn(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = torch.cat([self.token.expand(value.shape[0], -1, -1), value], 1)
        for block in self.blocks:
            value = block(value) * self.scale + self.shift
        return value


def test_parameters_of_no_submodule_are_held_by_layers_that_read_them() -> None:
    """They are tied if several layers read them."""
    layers = compare_all_ways(ClassToken()).chain.layers
    held = [{name for name in layer.parameters_by_name() if not name.startswith("blocks")} for layer in layers]
    assert held == [{"token"}, *[{"scale"}] * 4]
    assert [set(dict(layer.module.named_buffers())) for layer in layers] == [set(), *[{"shift"}] * 4]
    assert tied_parameters(layers) == {"scale": ("blocks.2", "blocks.3", "rest", "blocks.1")}


class CallsThreeTimes(nn.Module):
    """Calls one block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.ModuleList([Block()])

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for _ in range(3):
            value = self.shared[0](value)
        return value


def test_a_module_called_several_times_is_several_tied_layers() -> None:
    chain = compare_all_ways(CallsThreeTimes()).chain
    assert chain.names == ("first", "shared.0", "shared.0#2", "shared.0#3")
    assert len(shared_parameters(chain.layers)) == 4


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def test_running_statistics_of_stages_equal_the_models() -> None:
    """Finding the layers does not count as a batch."""
    torch.manual_seed(0)
    model, inputs = Normalized(), torch.randn(6, WIDTH)
    chain = chain_of(model, lambda batch: torch.randn(batch, WIDTH))
    assert int(model.blocks[0][1].num_batches_tracked) == 0
    value: Any = inputs
    for n in range(len(chain.layers)):
        value = chain.stage(n, n + 1)(value)
    torch.manual_seed(0)
    other = Normalized()
    assert torch.equal(other(inputs), value)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


class ReturnsAllBlocks(Blocks):
    """Also returns the outputs of all blocks."""

    def forward(self, value: Tensor) -> dict[str, Any]:
        all_of_them = []
        for block in self.blocks:
            value = block(value)
            all_of_them.append(value)
        return {"value": value, "blocks": tuple(all_of_them)}


def loss_of_blocks(*numbers: int) -> Callable[[Any], Tensor]:
    """Return a loss of the last value and of the outputs of some blocks."""
    return lambda output: loss_of([output["value"], *(output["blocks"][n] for n in numbers)])


class UnusedHead(Blocks):
    """Runs a head of two blocks between its other blocks, and returns its result, which a loss may ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleList(Block() for _ in range(2))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        value = self.blocks[1](self.blocks[0](value))
        pooled = self.head[1](self.head[0](value))
        return self.blocks[2](value), pooled


def test_a_head_without_effect_on_the_loss_is_not_cut() -> None:
    """Its parameters get no gradient, but the stage after a cut would return a gradient of zeros."""
    used = chain_of(UnusedHead(), values, loss_of=lambda _: loss_of)
    assert used.names == ("blocks.0", "blocks.1", "head.0", "head.1", "blocks.2")
    unused = chain_of(UnusedHead(), values, loss_of=lambda _: lambda output: loss_of(output[0]))
    assert [modules for modules in unused.outline.modules if len(modules) > 1] == [("head.0", "head.1")]
    assert unused.names == ("blocks.0", "blocks.1", "head.0", "blocks.2")
    assert not unused.outline.note_on_missing_cuts


class Policy(Blocks):
    """Returns a distribution, whose `log_prob` checks the values that it gets."""

    def forward(self, value: Tensor) -> torch.distributions.Distribution:
        for block in self.blocks:
            value = block(value)
        return torch.distributions.Normal(value, 1.0)


def test_a_model_that_returns_a_distribution_is_cut() -> None:
    chain = chain_of(Policy(), values, loss_of=lambda _: lambda output: -output.log_prob(torch.zeros(())).mean())
    assert chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.mark.parametrize(
    ("loss", "crossing"),
    [
        (loss_of_blocks(), [1, 1, 1]),
        (loss_of_blocks(1), [1, 1, 2]),
        (loss_of_blocks(0, 1, 2, 3), [1, 2, 3]),
        (lambda output: loss_of(output["value"]) * len(output["blocks"][0]), [1, 1, 1]),
        (lambda output: loss_of(output["value"] + torch.zeros_like(output["blocks"][0])), [1, 1, 1]),
        (lambda output: loss_of(output["value"][output["value"] > 0]), [1, 2, 3]),
        (lambda output: loss_of(output["value"]) * (2 if output["value"].sum() > 0 else 1), [1, 2, 3]),
    ],
    ids=["last output", "one more", "all outputs", "a length", "a shape", "a mask", "a branch"],
)
def test_outputs_that_the_loss_does_not_read_are_not_sent(loss: Callable[[Any], Tensor], crossing: list[int]) -> None:
    """If it depends on values which outputs the loss reads, all are sent."""
    for recompute in (True, False):
        result = compare(ReturnsAllBlocks(), values, loss, num_stages=4, recompute=recompute)
        assert result.crossing == crossing
        assert result.loss_error < 1e-6
        assert result.gradient_error < 1e-5


def test_layers_are_found_if_the_loss_fails() -> None:
    """All outputs are sent."""
    chain = chain_of(ReturnsAllBlocks(), values, loss_of=lambda _size: lambda output: output["nothing"])
    assert [len(shapes) for shapes in sent_shapes(chain)] == [1, 2, 3]


def test_reading_an_unsent_output_is_refused() -> None:
    """It has a shape and no values."""
    model = ReturnsAllBlocks()
    chain = chain_of(model, values, loss_of=lambda _size: loss_of_blocks())
    inputs = values(3)
    output = chain.stage(2, 4)(chain.stage(0, 2)(inputs))
    whole = model(inputs)
    assert [t.shape for t in output["blocks"]] == [t.shape for t in whole["blocks"]]
    assert all(torch.equal(output["blocks"][n], whole["blocks"][n]) for n in (1, 2, 3))
    assert torch.equal(chain.stage(0, 4)(inputs)["blocks"][0], whole["blocks"][0])
    for work in (torch.sum, torch.clone, lambda t: t + 1, lambda t: torch.stack([t, t]), lambda t: float(t[0, 0, 0])):
        with pytest.raises(ModelError, match=r'reads the model\'s output "blocks.0"'):
            work(output["blocks"][0])


class Probing(Blocks):
    """Collects tensors from within its blocks by hooks."""

    def forward(self, value: Tensor) -> dict[str, Any]:
        found: list[Tensor] = []
        hooks = [block.one.register_forward_hook(lambda _m, _i, made: found.append(made)) for block in self.blocks]
        for block in self.blocks:
            value = block(value)
        for hook in hooks:
            hook.remove()
        return {"value": value, "blocks": tuple(found)}


def test_outputs_collected_by_hooks_need_not_be_sent() -> None:
    """If the loss reads them, there are no cuts."""
    result = compare(Probing(), values, loss_of_blocks(), num_stages=4)
    assert result.crossing == [1, 1, 1]
    assert (result.loss_error, result.gradient_error) < (1e-6, 1e-5)
    output = result.chain.stage(2, 4)(result.chain.stage(0, 2)(values(3)))
    assert [t.shape for t in output["blocks"]] == [(3, 5, 2 * WIDTH)] * 4
    with pytest.raises(ModelError, match=r'output "blocks.3"'):
        output["blocks"][3].sum()
    with pytest.raises(ModelError, match="but is not returned"):
        chain_of(Probing(), values, loss_of=lambda _size: loss_of_blocks(0))


class Added(Blocks):
    """Residuals outside of the blocks."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = value + block(value)
        return value


def test_a_sum_between_modules_is_sent_instead_of_its_terms() -> None:
    outline = compare_all_ways(Added(number=5)).chain.outline
    assert [len(values) for values in outline.crossings] == [1, 1, 1, 1]
    assert set(outline.repeated_code_counts) == {(0, 0)}
    assert not outline.note_on_repeated_code


class NormalizedFirst(Blocks):
    """Residuals outside of the blocks, which get the normalized value."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = value + block(nn.functional.layer_norm(value, (WIDTH,)).mul(0.5))
        return value


def test_a_sum_is_sent_if_only_blocks_read_what_else_is_computed_from_its_terms() -> None:
    outline = compare_all_ways(NormalizedFirst(number=5)).chain.outline
    assert [len(values) for values in outline.crossings] == [1, 1, 1, 1]


class Schedule(nn.Module):
    """Writes its state into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self) -> Tensor:
        self.calls.fill_(5)  # the same in each forward, because the comparison runs several
        return (self.calls / 20).clamp(max=1.0)


class WarmsUp(Blocks):
    """All blocks read the result of a schedule."""

    def __init__(self) -> None:
        super().__init__(number=3)
        self.schedule = Schedule()

    def forward(self, value: Tensor) -> Tensor:
        weight = self.schedule()
        for block in self.blocks:
            value = value + weight * block(value)
        return value


def test_the_result_of_a_module_that_changes_a_buffer_is_sent() -> None:
    result = compare_all_ways(WarmsUp())
    assert [len(values) for values in result.chain.outline.crossings] == [2, 2]


class Decides(Blocks):
    """Reads the values of each sum in its own code."""

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = value + (block(value) if float(value.sum()) < 1e9 else value)
        return value


def test_a_sum_whose_terms_decide_is_not_sent_alone() -> None:
    outline = compare_all_ways(Decides(number=3)).chain.outline
    assert len(outline.crossings[-1]) > 1


def test_a_stage_releases_received_and_sent_sums(no_collection: None) -> None:
    chain = chain_of(Added(), values)
    received = chain.stage(0, 2)(values(3))
    sent_shapes = chain.stage(2, 3)(received)
    kept = [weakref.ref(tensor) for tensor in (*received, *sent_shapes)]
    del received, sent_shapes
    assert [tensor() for tensor in kept] == [None, None]


class Positioned(Blocks):
    """Adds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value) + self.places
        value = value + self.blocks[2](self.blocks[1](value))
        return self.blocks[3](value)


def test_a_parameter_in_a_sum_is_held_by_the_stage_that_adds() -> None:
    """Later stages would share it."""
    chain = compare_all_ways(Positioned()).chain
    assert [layer.name for layer in chain.layers if "places" in layer.parameters_by_name()] == ["blocks.1"]
    assert not tied_parameters(chain.layers)


class ReadAgain(Blocks):
    """Reads the terms of a sum after the sum."""

    def forward(self, value: Tensor) -> Tensor:
        first = self.blocks[0](value)
        second = self.blocks[1](first)
        both = first + second
        third = self.blocks[2](second)
        return self.blocks[3](third) * both + first - second


def test_a_sum_of_sent_tensors_is_computed_again() -> None:
    """Sending it would make the cut wider."""
    assert compare_all_ways(ReadAgain(), num_stages=4).crossing == [1, 2, 3]


class Passing(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of torch's function."""
        return func(*args, **(kwargs or {}))


class Modes(Blocks):
    """Adds within modes of torch that begin and end after modules."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value)
        with Passing():
            made = self.blocks[1](value)
        value = value + made
        with torch.device("cpu"):
            value = value + self.blocks[2](value)
        with Passing():
            value = value + self.blocks[3](value)
        made = self.blocks[4](value)
        with torch.device("cpu"), Passing():
            value = value + made
        return self.blocks[5](value)


def test_sums_within_torch_function_modes_are_sent() -> None:
    """No mode stays active."""
    assert compare_all_ways(Modes(number=6), num_stages=6).crossing == [1, 1, 1, 1, 1]
    assert not _get_current_function_mode_stack()


class ChangesItsCode(Added):
    """Adds in another way if `adds` is False."""

    adds = True

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = value + block(value) if self.adds else block(value).sub(value, alpha=-1)
        return value


def test_code_that_stops_adding_is_refused() -> None:
    """By the stage that sends the sum, and by the one that has received it."""
    model = ChangesItsCode()
    chain = chain_of(model, values)
    received = chain.stage(0, 2)(values(3))
    model.adds = False
    for first, given in ((0, values(3)), (2, received)):
        with pytest.raises(ModelError, match="own code did not call `add` between its modules"):
            chain.stage(first, first + 2)(given)
    assert not _get_current_function_mode_stack()


class Concatenated(nn.Module):
    """Each block reads the outputs of all earlier blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(max(1, n) * WIDTH, WIDTH) for n in range(5))

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = torch.cat([value, torch.tanh(block(value))], -1)
        return value


def test_concatenations_sent_in_parts_are_noted() -> None:
    """A skip connection is no such part."""
    outline = compare_all_ways(Concatenated()).chain.outline
    assert [len(values) for values in outline.crossings] == [1, 2, 3, 4]
    assert outline.repeated_code_counts == ((0, 0), (0, 0), (2, 1), (3, 1))
    assert '3 tensors cross the boundary after "blocks.3" only for' in outline.note_on_repeated_code
    skips = compare_all_ways(Skips()).chain.outline
    assert not skips.note_on_repeated_code


class Stopped(Blocks):
    """Uses a detached output."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[1](self.blocks[0](value))
        fixed = self.blocks[2](value).detach()
        return self.blocks[3](value * fixed)


def test_detached_tensors_cross_boundaries() -> None:
    compare_all_ways(Stopped())


class BranchesOnInput(Blocks):
    """Branches on a value of an input, between the blocks."""

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        if mask.all():
            mask = torch.ones_like(mask)
        for block in self.blocks:
            value = block(value) if mask.all() else block(value * mask)
        return value


def test_values_that_python_branches_on_are_sent() -> None:
    def inputs(batch: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(batch, 5, 1, dtype=torch.int64)
        mask[:, -1] = 0
        return values(batch), mask

    assert compare_all_ways(BranchesOnInput(), inputs).crossing == [2, 2, 2]


def test_layers_are_the_same_on_the_meta_device() -> None:
    model = Tied()
    with torch.device("meta"):
        empty = Tied()
        large = Tied()
        large.blocks.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    assert chain_digest(chain_of(empty, words), {}) == chain_digest(chain_of(model, words), {})
    assert chain_digest(chain_of(large, words), {}) != chain_digest(chain_of(model, words), {})


class Drawing(Blocks):
    """Draws noise, which all blocks read, into a tensor that depends on the input."""

    def forward(self, value: Tensor) -> Tensor:
        noise = value.clone().normal_()
        for block in self.blocks:
            value = block(value + noise)
        return value + noise


class Leaking(Blocks):
    """Blocks pass tensors to later ones in a list."""

    def forward(self, value: Tensor) -> Tensor:
        left: list[Tensor] = []
        for block in self.blocks:
            value = block(value, left)
        return value

    class Leaving(Block):
        def forward(self, value: Tensor, left: list[Tensor]) -> Tensor:
            left.append(value * 2)
            return super().forward(value) + left[0]


class Overwriting(Blocks):
    """Adds in place to the output of a block."""

    def forward(self, value: Tensor) -> Tensor:
        total = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            total += block(value)
        return total


def test_no_cut_lies_where_a_sent_tensor_was_overwritten() -> None:
    assert compare_all_ways(Overwriting()).chain.names == ("blocks.0", "blocks.1", "blocks.2")


def test_a_single_block_is_cut_into_its_modules() -> None:
    assert compare_all_ways(Block()).chain.names == ("one", "two")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Drawing(), "random numbers are drawn"),
        (Leaking(Leaking.Leaving), "but is not returned"),
        (nn.Linear(WIDTH, WIDTH), "single layer"),
    ],
    ids=["random", "leak", "one layer"],
)
def test_models_without_cuts_are_refused_with_reason_and_hint(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        chain_of(model, values)
    assert message in str(refused.value)
    assert refused.value.hint


def test_cuts_that_the_check_removed_are_named_if_none_is_left() -> None:
    with pytest.raises(ModelError, match="cannot be cut: the stages after one do not train as the model does"):
        chain_of(Block(), values, uncut=("one",))


def test_a_failing_forward_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="raised RuntimeError on an example batch of 2"):
        chain_of(Skips(), lambda batch: torch.randn(batch, 3))


class Choosy(Blocks):
    """Swaps its last blocks for other data."""

    def forward(self, value: Tensor) -> Tensor:
        order = (0, 1, 2, 3) if value.sum() < 1e6 else (0, 1, 3, 2)
        for n in order:
            value = self.blocks[n](value)
        return value


def test_another_order_of_modules_is_refused() -> None:
    chain = chain_of(Choosy(), values)
    with pytest.raises(ModelError, match=r'another path .* "blocks.2" should have been called'):
        chain.stage(0, 4)(values(2) + 1e6)


class Sized(Blocks):
    """Runs as many blocks as there are samples."""

    def forward(self, value: Tensor) -> Tensor:
        for block in list(self.blocks)[: value.shape[0]]:
            value = block(value)
        return value


def test_a_path_that_depends_on_the_batch_size_is_refused() -> None:
    with pytest.raises(ModelError, match="for another batch size"):
        chain_of(Sized(), values)


class Chosen(nn.Module):
    """Runs one part for every two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        made = torch.zeros_like(value)
        for n in range(0, len(value), 2):
            made[n : n + 2] = self.parts[n // 2 % 4](value[n : n + 2])
        return value + made


class Routed(Blocks):
    """Routes samples in its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Chosen()

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def test_modules_that_route_data_are_one_layer() -> None:
    chain = chain_of(Routed(), values, granularity="fine")
    assert [layer.name for layer in chain.layers if "1" in layer.name] == ["blocks.1"]
    compare_all_ways(Routed())


def test_a_stage_of_a_sequential_runs_its_layers() -> None:
    """Parameter names are those of the model."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    stage = chain_of(model).stage(1, 3)
    assert [name for name, _ in stage.named_parameters()] == ["1.1.weight", "1.1.bias"]
    value = values(2)
    assert torch.equal(stage(model[0](value)), model(value))


class _ReturnsLength(nn.Module):
    """Returns its output and the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> tuple[Tensor, int]:
        return self.layer(value).mean(1), value.shape[1]


class _DividesByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _ReturnsLength()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        value, length = self.first(value)
        for block in self.blocks:
            value = block(value) / length
        return value


def test_a_returned_length_must_equal_the_recorded_one() -> None:
    """Later stages would compute with the recorded one."""
    model = _DividesByLength()
    chain = chain_of(model, lambda size: torch.randn(size, 5, 8))
    stage = chain.stage(0, 1)
    stage(torch.randn(3, 5, 8))
    with pytest.raises(ModelError, match=r'"first" returned 4 where it returned 5'):
        stage(torch.randn(3, 4, 8))
