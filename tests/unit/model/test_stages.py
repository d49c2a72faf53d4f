"""Any module is a chain: what it hands from layer to layer crosses the boundaries, whatever its shape."""

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
from planner.model.nests import tensors_in
from tests.support.cutting import Compared, compare

WIDTH = 8


class Block(nn.Module):
    """Keeps its input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        """With a residual."""
        return value + self.two(torch.tanh(self.one(value)))


class Blocks(nn.Module):
    """Several of them, for others to build on."""

    def __init__(self, make: Callable[[], nn.Module] = Block, number: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(number))


def values(batch: int) -> Tensor:
    """Inputs of most models here."""
    return torch.randn(batch, 5, WIDTH)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What lies in a cycle stays."""
    gc.disable()
    yield
    gc.enable()


def loss_of(output: Any) -> Tensor:
    """In which every number has its own part."""
    floats = [t for t in tensors_in(output) if t.requires_grad]
    return torch.stack([(t.flatten() * torch.cos(torch.arange(t.numel()))).mean() for t in floats]).sum()


def compared(model: nn.Module, inputs: Callable[[int], Any] = values, **options: Any) -> Compared:
    """Both ways of cutting it, with and without recomputation; the same numbers."""
    for granularity in ("fine", "coarse"):
        for recompute in (True, False):
            result = compare(model, inputs, loss_of, granularity=granularity, recompute=recompute, **options)
            assert result.loss_error < 1e-6
            assert result.gradient_error < 1e-5
    return result


def sent(chain: Chain) -> list[list[tuple[int, ...]]]:
    """Shapes of what crosses each boundary, for three samples."""
    assert chain.outline is not None
    return [[tuple(t.shape) for t in chain.outline.boundary(n, 3)] for n in range(1, len(chain.layers))]


class Skips(Blocks):
    """A little U-Net."""

    def forward(self, value: Tensor) -> Tensor:
        """Down, across, up."""
        first = self.blocks[0](value)
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        return self.blocks[3](third + second) + first  # type: ignore[no-any-return]


def test_a_skip_connection_crosses_every_boundary_on_its_way() -> None:
    """Once each, until it is added to something."""
    result = compared(Skips(), num_stages=4)
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert result.crossing == [1, 2, 2]


class Dictionaries(Blocks):
    """Blocks that take and return dicts, one of whose entries is None."""

    class Entry(Block):
        """Passes a dict on."""

        def forward(self, entries: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            return {"value": super().forward(entries["value"]), "scale": entries["scale"] * 2, "none": None}

    def __init__(self) -> None:
        super().__init__(self.Entry)

    def forward(self, value: Tensor) -> dict[str, Any]:
        """The dict itself."""
        entries: dict[str, Any] = {"value": value, "scale": value.mean(), "none": None}
        for block in self.blocks:
            entries = block(entries)
            assert entries["none"] is None
        return {"last": entries["value"] * entries["scale"]}


def test_dicts_go_from_block_to_block() -> None:
    """What in them is no tensor is remembered."""
    assert compared(Dictionaries()).crossing == [2, 2, 2]


@dataclass
class Answer:
    """As libraries return it."""

    value: Tensor
    extra: Tensor | None = None


class Keywords(Blocks):
    """Takes keyword arguments, some of them None, and returns a dataclass."""

    class Masked(Block):
        """Passes the mask on."""

        def forward(self, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
            added = super().forward(value)
            return (added if mask is None else added * mask[..., None]), mask

    def __init__(self) -> None:
        super().__init__(self.Masked)

    def forward(self, *, words: Tensor, mask: Tensor | None = None, unused: None = None) -> Answer:
        """Integers are passed through every block."""
        value = torch.eye(WIDTH)[words]
        for block in self.blocks:
            value, mask = block(value, mask=mask)
        assert unused is None
        return Answer(value)


def test_keyword_arguments_and_none_reach_every_stage() -> None:
    """The mask is sent once, as the integers that it is."""

    def inputs(batch: int) -> dict[str, Any]:
        mask = torch.arange(5).lt(4).long().expand(batch, 5)
        return {"words": torch.randint(WIDTH, (batch, 5)), "mask": mask, "unused": None}

    result = compared(Keywords(), inputs)
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert sent(result.chain) == [[(3, 5), (3, 5, WIDTH)]] * 3
    without = compared(Keywords(), lambda batch: {"words": torch.randint(WIDTH, (batch, 5))})
    assert without.crossing == [1, 1, 1]


class Translator(nn.Module):
    """Every layer of the decoder reads what the encoder made, and a bias that the first one made."""

    class Layer(Block):
        """Of the decoder."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Linear(WIDTH, 1)

        def forward(  # type: ignore[override]
            self, value: Tensor, state: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, Tensor]:
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
        """Two inputs, of which the second is needed late."""
        for layer in self.encoder:
            source = layer(source)
        bias = None
        for layer in self.decoder:
            target, bias = layer(target, source, bias)
        return target


def test_the_encoder_state_and_a_shared_bias_go_to_every_layer_that_reads_them() -> None:
    """And the second input waits in front of the decoder."""
    result = compared(Translator(), lambda batch: (values(batch), values(batch)))
    assert result.chain.names == ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")
    assert result.crossing == [2, 2, 3, 3]


class InPlace(nn.Module):
    """What is written into is used afterwards, by a skip too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.acts = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        """Linear, activation in place, and so on."""
        kept = []
        for layer, act in zip(self.layers, self.acts, strict=True):
            value = layer(value)
            kept.append(value)
            act(value)  # the result is in `value` as well
        return kept[0] + value


def test_in_place_activations() -> None:
    """The one with the most parameters gives the layer its name; an activation is a layer with it, not one more."""
    result = compared(InPlace())
    assert result.chain.names == ("layers.0", "layers.1", "layers.2")


class PassedOn(Blocks):
    """Blocks that hand a view and the thing itself on."""

    class Handing(Block):
        """Adds a view."""

        def forward(self, value: Tensor, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            return super().forward(value), same, same.view_as(same)

    def __init__(self) -> None:
        super().__init__(self.Handing)

    def forward(self, value: Tensor) -> Tensor:
        """The input goes on beside what is made of it."""
        same, view = value * 2, value
        for block in self.blocks:
            value, same, view = block(value, same)
        return value + same + view


def test_what_is_passed_through_is_sent_once() -> None:
    """The view is another tensor of the same memory."""
    assert max(compared(PassedOn()).crossing) <= 3


class Tied(Blocks):
    """A language model: the same weights first and last; positions are no more than numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Sines of the positions are made by the code around the blocks, and used by all of them."""
        waves = torch.sin(torch.arange(words.shape[1]))[:, None]
        value = self.words(words)
        for block in self.blocks:
            value = block(value + waves)
        return self.head(value)  # type: ignore[no-any-return]


def words(batch: int) -> Tensor:
    """Of a small vocabulary."""
    return torch.randint(16, (batch, 6))


def test_tied_weights_are_found_and_positions_are_not_sent() -> None:
    """Every stage makes the sines again."""
    result = compared(Tied(), words)
    assert result.chain.names == ("words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    assert result.crossing == [1] * 5
    assert tied_parameters(result.chain.layers) == {"words.weight": ("head.weight",), "head.weight": ("words.weight",)}
    assert shared_parameters(result.chain.layers) == [[(0, "words.weight"), (5, "head.weight")]]


class ClassToken(Blocks):
    """Parameters that belong to no module but the model, one of them needed between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Buffer(torch.randn(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """The token goes in front; the scale in between."""
        value = torch.cat([self.token.expand(value.shape[0], -1, -1), value], 1)
        for block in self.blocks:
            value = block(value) * self.scale + self.shift
        return value


def test_parameters_outside_modules_are_held_where_they_are_read() -> None:
    """And are tied where several layers read them; the token is held by the first alone."""
    layers = compared(ClassToken()).chain.layers
    held = [{name for name in layer.parameters_by_name() if not name.startswith("blocks")} for layer in layers]
    assert held == [{"token"}, *[{"scale"}] * 4]
    assert [set(dict(layer.module.named_buffers())) for layer in layers] == [set(), *[{"shift"}] * 4]
    assert tied_parameters(layers) == {"scale": ("blocks.2", "blocks.3", "rest", "blocks.1")}


class Twice(nn.Module):
    """One block, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.ModuleList([Block()])

    def forward(self, value: Tensor) -> Tensor:
        """Three times."""
        value = self.first(value)
        for _ in range(3):
            value = self.shared[0](value)
        return value


def test_a_module_called_several_times_is_several_layers() -> None:
    """With names of their own, and tied."""
    chain = compared(Twice()).chain
    assert chain.names == ("first", "shared.0", "shared.0#2", "shared.0#3")
    assert len(shared_parameters(chain.layers)) == 4


class Normalised(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        """One after the other."""
        for block in self.blocks:
            value = block(value)
        return value


def test_buffers_are_the_models_own() -> None:
    """Running statistics come out as in one piece, and finding the layers does not count as a batch."""
    torch.manual_seed(0)
    model, inputs = Normalised(), torch.randn(6, WIDTH)
    chain = chain_of(model, lambda batch: torch.randn(batch, WIDTH))
    assert int(model.blocks[0][1].num_batches_tracked) == 0  # type: ignore[index]
    value: Any = inputs
    for n in range(len(chain.layers)):
        value = chain.stage(n, n + 1)(value)
    torch.manual_seed(0)
    other = Normalised()
    assert torch.equal(other(inputs), value)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


class Reporting(Blocks):
    """Also returns what every block did."""

    def forward(self, value: Tensor) -> dict[str, Any]:
        """One after the other."""
        all_of_them = []
        for block in self.blocks:
            value = block(value)
            all_of_them.append(value)
        return {"value": value, "blocks": tuple(all_of_them)}


def read(*numbers: int) -> Callable[[Any], Tensor]:
    """A loss of the last value, and of what some blocks did."""
    return lambda output: loss_of([output["value"], *(output["blocks"][n] for n in numbers)])


@pytest.mark.parametrize(
    ("loss", "crossing"),
    [
        (read(), [1, 1, 1]),
        (read(1), [1, 1, 2]),
        (read(0, 1, 2, 3), [1, 2, 3]),
        (lambda output: loss_of(output["value"]) * len(output["blocks"][0]), [1, 1, 1]),
        (lambda output: loss_of(output["value"] + torch.zeros_like(output["blocks"][0])), [1, 1, 1]),
        (lambda output: loss_of(output["value"][output["value"] > 0]), [1, 2, 3]),
        (lambda output: loss_of(output["value"]) * (2 if output["value"].sum() > 0 else 1), [1, 2, 3]),
    ],
    ids=["the last", "and one", "all", "a length", "a shape", "a mask", "a choice"],
)
def test_what_the_loss_does_not_read_is_not_handed_on(loss: Callable[[Any], Tensor], crossing: list[int]) -> None:
    """Where what it reads depends on values, everything is."""
    for recompute in (True, False):
        result = compare(Reporting(), values, loss, num_stages=4, recompute=recompute)
        assert result.crossing == crossing
        assert result.loss_error < 1e-6
        assert result.gradient_error < 1e-5


def test_a_loss_that_fails_is_no_reason_not_to_find_layers() -> None:
    """It is told of where it is needed; everything is handed on."""
    chain = chain_of(Reporting(), values, loss_of=lambda _size: lambda output: output["nothing"])
    assert [len(shapes) for shapes in sent(chain)] == [1, 2, 3]


def test_an_output_that_was_not_handed_on_cannot_be_read() -> None:
    """It has a shape and no numbers; those that are at hand are what they are."""
    model = Reporting()
    chain = chain_of(model, values, loss_of=lambda _size: read())
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
    """Collects from within its blocks, past what they return."""

    def forward(self, value: Tensor) -> dict[str, Any]:
        """As libraries do it with hooks."""
        found: list[Tensor] = []
        hooks = [block.one.register_forward_hook(lambda _m, _i, made: found.append(made)) for block in self.blocks]  # type: ignore[union-attr]
        for block in self.blocks:
            value = block(value)
        for hook in hooks:
            hook.remove()
        return {"value": value, "blocks": tuple(found)}


def test_what_is_collected_from_within_blocks_may_be_left_out() -> None:
    """A stage has none of it from the blocks in front; where the loss reads it, there are no cuts."""
    result = compare(Probing(), values, read(), num_stages=4)
    assert result.crossing == [1, 1, 1]
    assert (result.loss_error, result.gradient_error) < (1e-6, 1e-5)
    output = result.chain.stage(2, 4)(result.chain.stage(0, 2)(values(3)))
    assert [t.shape for t in output["blocks"]] == [(3, 5, 2 * WIDTH)] * 4
    with pytest.raises(ModelError, match=r'output "blocks.3"'):
        output["blocks"][3].sum()
    with pytest.raises(ModelError, match="but is not returned"):
        chain_of(Probing(), values, loss_of=lambda _size: read(0))


class Added(Blocks):
    """Residuals outside of the blocks."""

    def forward(self, value: Tensor) -> Tensor:
        """Each block's input is a sum of what all before it returned."""
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = value + block(value)
        return value


def test_a_sum_between_modules_crosses_in_place_of_what_it_is_made_of() -> None:
    """The stage in front adds, as often as there are blocks."""
    outline = compared(Added(number=5)).chain.outline
    assert outline is not None
    assert [len(values) for values in outline.crossings] == [1, 1, 1, 1]
    assert set(outline.repeated_code_counts) == {(0, 0)}
    assert not outline.note_on_repeated_code


def test_a_stage_keeps_no_sum_when_it_has_run(no_collection: None) -> None:
    """Neither the one that it received nor the one that it sent."""
    chain = chain_of(Added(), values)
    received = chain.stage(0, 2)(values(3))
    sent = chain.stage(2, 3)(received)
    kept = [weakref.ref(tensor) for tensor in (*received, *sent)]
    del received, sent
    assert [tensor() for tensor in kept] == [None, None]


class Positioned(Blocks):
    """Embeds places by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A residual around two blocks."""
        value = self.blocks[0](value) + self.places
        value = value + self.blocks[2](self.blocks[1](value))
        return self.blocks[3](value)  # type: ignore[no-any-return]


def test_a_parameter_that_goes_into_a_sum_is_held_where_that_is_made() -> None:
    """And by no stage behind, which would share it."""
    chain = compared(Positioned()).chain
    assert [layer.name for layer in chain.layers if "places" in layer.parameters_by_name()] == ["blocks.1"]
    assert not tied_parameters(chain.layers)


class ReadAgain(Blocks):
    """What a sum is made of is read behind it, too."""

    def forward(self, value: Tensor) -> Tensor:
        """At the very end."""
        first = self.blocks[0](value)
        second = self.blocks[1](first)
        both = first + second
        third = self.blocks[2](second)
        return self.blocks[3](third) * both + first - second  # type: ignore[no-any-return]


def test_a_sum_of_what_crosses_anyway_is_made_again() -> None:
    """It would make the cut wider."""
    assert compared(ReadAgain(), num_stages=4).crossing == [1, 2, 3]


class Passing(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch returns."""
        return func(*args, **(kwargs or {}))


class Modes(Blocks):
    """Its code adds within modes of torch's, which begin and end behind modules."""

    def forward(self, value: Tensor) -> Tensor:
        """All orders."""
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
        return self.blocks[5](value)  # type: ignore[no-any-return]


def test_a_sum_may_be_made_within_a_mode() -> None:
    """None is left behind."""
    assert compared(Modes(number=6), num_stages=6).crossing == [1, 1, 1, 1, 1]
    assert not _get_current_function_mode_stack()


class Moody(Added):
    """Adds in another way, once it is told to."""

    adds = True

    def forward(self, value: Tensor) -> Tensor:
        """By another function."""
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = value + block(value) if self.adds else block(value).sub(value, alpha=-1)
        return value


def test_code_that_no_longer_makes_a_sum_is_told_of() -> None:
    """In the stage that was to send it, and in the one that has received it."""
    model = Moody()
    chain = chain_of(model, values)
    received = chain.stage(0, 2)(values(3))
    model.adds = False
    for first, given in ((0, values(3)), (2, received)):
        with pytest.raises(ModelError, match="own code did not call `add` between its modules"):
            chain.stage(first, first + 2)(given)
    assert not _get_current_function_mode_stack()


class Concatenated(nn.Module):
    """Each block's input is all that those before it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(max(1, n) * WIDTH, WIDTH) for n in range(5))

    def forward(self, value: Tensor) -> Tensor:
        """As wide as its parts."""
        value = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            value = torch.cat([value, torch.tanh(block(value))], -1)
        return value


def test_what_crosses_in_parts_is_told_of() -> None:
    """A skip connection, which is read as it is, is no part."""
    outline = compared(Concatenated()).chain.outline
    assert outline is not None
    assert [len(values) for values in outline.crossings] == [1, 2, 3, 4]
    assert outline.repeated_code_counts == ((0, 0), (0, 0), (2, 1), (3, 1))
    assert '3 tensors cross the boundary after "blocks.3" only for' in outline.note_on_repeated_code
    skips = compared(Skips()).chain.outline
    assert skips is not None
    assert not skips.note_on_repeated_code


class Stopped(Blocks):
    """A tensor without a gradient, made of one with."""

    def forward(self, value: Tensor) -> Tensor:
        """The second half sees the first as it is, and scaled by what it detached."""
        value = self.blocks[1](self.blocks[0](value))
        fixed = self.blocks[2](value).detach()
        return self.blocks[3](value * fixed)  # type: ignore[no-any-return]


def test_tensors_without_gradients_count() -> None:
    """Nothing of the third block is trained, and still its output is needed."""
    compared(Stopped())


class Asking(Blocks):
    """Python asks for a number of an input, between the blocks."""

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        """The mask is used only if it masks."""
        if mask.all():
            mask = torch.ones_like(mask)
        for block in self.blocks:
            value = block(value) if mask.all() else block(value * mask)
        return value


def test_what_decides_is_there_to_decide() -> None:
    """On every stage, as the number it is."""

    def inputs(batch: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(batch, 5, 1, dtype=torch.int64)
        mask[:, -1] = 0
        return values(batch), mask

    assert compared(Asking(), inputs).crossing == [2, 2, 2]


def test_the_outline_needs_no_weights() -> None:
    """On the meta device it is the same; and there it costs nothing, whatever the size."""
    model = Tied()
    with torch.device("meta"):
        empty = Tied()
        large = Tied()
        large.blocks.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    assert chain_digest(chain_of(empty, words), {}) == chain_digest(chain_of(model, words), {})
    assert chain_digest(chain_of(large, words), {}) != chain_digest(chain_of(model, words), {})


class Drawing(Blocks):
    """Noise between the blocks that all of them get."""

    def forward(self, value: Tensor) -> Tensor:
        """The same noise everywhere."""
        noise = torch.randn_like(value)
        for block in self.blocks:
            value = block(value + noise)
        return value


class Leaking(Blocks):
    """Blocks that leave something behind for those after them."""

    def forward(self, value: Tensor) -> Tensor:
        """By way of a list."""
        left: list[Tensor] = []
        for block in self.blocks:
            value = block(value, left)
        return value

    class Leaving(Block):
        """Reads what was left."""

        def forward(self, value: Tensor, left: list[Tensor]) -> Tensor:  # type: ignore[override]
            left.append(value * 2)
            return super().forward(value) + left[0]


class Overwriting(Blocks):
    """Code that writes into what a block returned, and goes on with what it was made of."""

    def forward(self, value: Tensor) -> Tensor:
        """Sums in place."""
        total = self.blocks[0](value)
        for block in list(self.blocks)[1:]:
            total += block(value)
        return total


def test_only_some_cuts_are_possible() -> None:
    """What is written into crosses as it was returned; where it has been written into there is no cut."""
    assert compared(Overwriting()).chain.names == ("blocks.0", "blocks.1", "blocks.2")


def test_a_block_alone_is_cut_into_its_parts() -> None:
    """Where there is nothing better."""
    assert compared(Block()).chain.names == ("one", "two")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Drawing(), "random numbers are drawn"),
        (Leaking(Leaking.Leaving), "but is not returned"),
        (nn.Linear(WIDTH, WIDTH), "single layer"),
    ],
    ids=["random", "leak", "one layer"],
)
def test_what_cannot_be_cut_says_why(model: nn.Module, told: str) -> None:
    """And where, and what to do."""
    with pytest.raises(ModelError) as refused:
        chain_of(model, values)
    assert told in str(refused.value)
    assert refused.value.hint


def test_a_model_that_fails_is_an_error_of_its_own() -> None:
    """Not a traceback."""
    with pytest.raises(ModelError, match="raised RuntimeError on an example batch of 2"):
        chain_of(Skips(), lambda batch: torch.randn(batch, 3))


class Choosy(Blocks):
    """Takes another way for other data."""

    def forward(self, value: Tensor) -> Tensor:
        """The last two blocks change places."""
        order = (0, 1, 2, 3) if value.sum() < 1e6 else (0, 1, 3, 2)
        for n in order:
            value = self.blocks[n](value)
        return value


def test_another_path_is_noticed() -> None:
    """Instead of a wrong result."""
    chain = chain_of(Choosy(), values)
    with pytest.raises(ModelError, match=r'another path .* "blocks.2" should have been called'):
        chain.stage(0, 4)(values(2) + 1e6)


class Sized(Blocks):
    """Uses more blocks for larger batches."""

    def forward(self, value: Tensor) -> Tensor:
        """As many as there are samples."""
        for block in list(self.blocks)[: value.shape[0]]:
            value = block(value)
        return value


def test_a_path_that_depends_on_the_batch_size_is_refused() -> None:
    """There is no fixed list of layers."""
    with pytest.raises(ModelError, match="for another batch size"):
        chain_of(Sized(), values)


class Chosen(nn.Module):
    """A part for every two samples: how many run, and on what, is another for another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        """A sum with what the parts make."""
        made = torch.zeros_like(value)
        for n in range(0, len(value), 2):
            made[n : n + 2] = self.parts[n // 2 % 4](value[n : n + 2])
        return value + made


class Routed(Blocks):
    """Routes in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Chosen()

    def forward(self, value: Tensor) -> Tensor:
        """One after the other."""
        for block in self.blocks:
            value = block(value)
        return value


def test_only_cuts_that_depend_on_the_data_are_left_out() -> None:
    """Not the whole model: what routes is one layer, of which no cut is made, and behind it all is as ever."""
    chain = chain_of(Routed(), values, granularity="fine")
    assert [layer.name for layer in chain.layers if "1" in layer.name] == ["blocks.1"]
    compared(Routed())


def test_a_stage_of_a_sequential_is_its_layers() -> None:
    """With the parameter names of the model."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    stage = chain_of(model).stage(1, 3)
    assert [name for name, _ in stage.named_parameters()] == ["1.1.weight", "1.1.bias"]
    value = values(2)
    assert torch.equal(stage(model[0](value)), model(value))


class _Measures(nn.Module):
    """Returns what it makes and how long it was: later modules go by that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> tuple[Tensor, int]:
        return self.layer(value).mean(1), value.shape[1]


class _GoesByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Measures()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        value, length = self.first(value)
        for block in self.blocks:
            value = block(value) / length
        return value


def test_a_length_that_later_stages_go_by_must_be_the_recorded_one() -> None:
    """They would divide by the old one; the stage that sees the new one says so."""
    model = _GoesByLength()
    chain = chain_of(model, lambda size: torch.randn(size, 5, 8))
    stage = chain.stage(0, 1)
    stage(torch.randn(3, 5, 8))
    with pytest.raises(ModelError, match=r'"first" returned 4 where it returned 5'):
        stage(torch.randn(3, 4, 8))
