"""The sample models are what their papers describe, and do what a user's `model.py` must do.

Paper sizes are built on the `meta` device: shapes and counts without memory.
"""

import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
NAMES = ("amoebanet_d", "mlp", "resnet", "transformer_lm", "unet")
SEQUENTIAL = tuple(name for name in NAMES if name != "unet")

# Settings of the papers, where the defaults of our files are smaller.
PAPER_TRANSFORMER = {"width": 2048, "feed_forward": 8192, "heads": 32, "vocabulary": 32_000, "tokens": 1024}

# Small settings, for tests that train.
SMALL: dict[str, dict[str, int]] = {
    "amoebanet_d": {"num_layers": 3, "num_filters": 16, "num_classes": 4, "image_size": 33},
    "mlp": {"depth": 4, "width": 64},
    "resnet": {"num_classes": 4, "image_size": 33},
    "transformer_lm": {"layers": 2, "width": 64, "heads": 4, "feed_forward": 128, "vocabulary": 64, "tokens": 32},
    "unet": {"width": 8, "levels": 2, "image_size": 32},
}


@cache
def load(name: str) -> ModuleType:
    """Load a sample file by its path, as gpipe-plan loads a user's model.py."""
    spec = importlib.util.spec_from_file_location(f"sample_{name}", SAMPLE_MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_on_meta(name: str, **settings: float) -> nn.Module:
    """Build a sample model without allocating its parameters."""
    with torch.device("meta"):
        model = load(name).build_model(**settings)
    assert isinstance(model, nn.Module)
    return model


def num_parameters(model: nn.Module) -> int:
    """Count a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def example_batch(name: str, batch_size: int, settings: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Draw an example batch, handing on the settings that the function has by name."""
    draw = load(name).example_batch
    known = inspect.signature(draw).parameters
    inputs, target = draw(batch_size, **{key: value for key, value in settings.items() if key in known})
    return inputs, target


def versions(crossing: Tensor | tuple[Tensor, ...]) -> list[int]:
    """Return the counters that autograd raises whenever a tensor is written in place."""
    tensors = crossing if isinstance(crossing, tuple) else (crossing,)
    return [tensor._version for tensor in tensors]


# Parameter counts and layers of the papers


AMOEBANET = ((18, 208, 81_505_540), (18, 416, 319_024_120), (18, 544, 542_734_840), (36, 544, 1_055_832_376))
AMOEBANET += ((72, 512, 1_844_858_344),)


@pytest.mark.parametrize(
    ("name", "settings", "num_layers", "expected"),
    [
        *(
            pytest.param(
                "transformer_lm",
                {**PAPER_TRANSFORMER, "layers": count},
                count + 2,
                131_108_096 + 50_358_272 * count,
                marks=marks,
            )
            for count, marks in ((3, ()), (13, ()), (103, ()), (415, pytest.mark.slow), (1663, pytest.mark.nightly))
        ),
        *(
            ("amoebanet_d", {"num_layers": count, "num_filters": width, "num_classes": 1000}, count + 6, parameters)
            for count, width, parameters in AMOEBANET
        ),
        *(
            ("resnet", {"depth": depth, "num_classes": 1000, "image_size": 224}, num_blocks + 2, parameters)
            for depth, num_blocks, parameters in ((50, 16, 25_557_032), (101, 33, 44_549_160), (152, 50, 60_192_808))
        ),
        # Its 23 convolutions with their biases.
        ("unet", {"width": 64}, None, 31_030_658),
    ],
)
def test_samples_have_the_published_parameters(name, settings, num_layers, expected):
    """Transformer-L and AmoebaNet-D as in table 1 of the GPipe paper, and ResNet-50, -101 and -152."""
    model = build_on_meta(name, **settings)
    assert num_parameters(model) == expected
    assert num_layers in (None, len(list(model.children())))


def test_mlp_has_the_parameters_its_docstring_states() -> None:
    model = build_on_meta("mlp", depth=3, width=20, features=12, num_classes=5)
    assert num_parameters(model) == (12 * 20 + 20) + 2 * (20 * 20 + 20) + (20 * 5 + 5)
    assert [type(child).__name__ for child in model.children()] == ["Sequential"] * 3 + ["Linear"]


# The contract of a user's model.py


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_default_models_have_finite_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    sample = load(name)
    model = sample.build_model()
    inputs, target = sample.example_batch(2)
    loss = sample.loss_fn(model(inputs), target)
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_samples_except_unet_are_sequentials(name: str) -> None:
    assert isinstance(build_on_meta(name), nn.Sequential)


def test_unet_is_no_sequential() -> None:
    model = build_on_meta("unet")
    assert not isinstance(model, nn.Sequential)
    assert isinstance(model.get_submodule("down"), nn.ModuleList)
    assert isinstance(model.get_submodule("up"), nn.ModuleList)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_mean_over_the_samples(name: str) -> None:
    """So the loss of a mini-batch is the mean over its micro-batches."""
    torch.manual_seed(0)
    sample = load(name)
    # Batch norm ties the samples of a batch together; with fixed statistics only the loss does.
    model = sample.build_model(**SMALL[name]).eval()
    inputs, target = example_batch(name, 4, SMALL[name])
    whole = sample.loss_fn(model(inputs), target)
    halves = [sample.loss_fn(model(i), t) for i, t in zip(inputs.chunk(2), target.chunk(2), strict=True)]
    torch.testing.assert_close(whole, (halves[0] + halves[1]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "resnet" else []) for name in NAMES]
)
def test_loss_falls_by_5_percent_in_12_steps(name: str) -> None:
    torch.manual_seed(0)
    sample = load(name)
    model = sample.build_model(**SMALL[name])
    optimizer = sample.build_optimizer(model.parameters())
    inputs, target = example_batch(name, 4, SMALL[name])
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = sample.loss_fn(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_example_batch_follows_the_global_seed(name: str) -> None:
    """The same seed draws the same batch, so a run in several processes can draw it in each."""
    sample = load(name)
    torch.manual_seed(1)
    first = sample.example_batch(3)
    torch.manual_seed(1)
    second = sample.example_batch(3)
    assert [tensor.shape[0] for tensor in first] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_build_model_and_example_batch_share_defaults(name: str) -> None:
    sample = load(name)
    of_model = inspect.signature(sample.build_model).parameters
    of_batch = inspect.signature(sample.example_batch).parameters
    shared = {key: value.default for key, value in of_batch.items() if key != "batch_size"}
    assert shared == {key: of_model[key].default for key in shared}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_no_layer_overwrites_its_input(name: str) -> None:
    """So any layer may begin a stage or be recomputed."""
    torch.manual_seed(0)
    sample = load(name)
    crossing, _ = sample.example_batch(2)
    for layer in sample.build_model():
        incoming = crossing
        before = versions(incoming)
        crossing = layer(incoming)
        assert versions(incoming) == before


# What is special to one model


def test_amoebanet_cells_return_a_pair() -> None:
    """The pair is the cell's output and the previous layer's output; the last cell returns one tensor."""
    sample = load("amoebanet_d")
    crossing, _ = sample.example_batch(2)
    layers = list(sample.build_model(num_layers=3, num_filters=16).children())
    features = layers[0](crossing)
    assert isinstance(features, Tensor)
    crossing = features
    for cell in layers[1:-2]:
        before = crossing if isinstance(crossing, Tensor) else crossing[0]
        crossing = cell(crossing)
        assert isinstance(crossing, tuple)
        assert crossing[1] is before
    assert isinstance(layers[-2](crossing), Tensor)


@pytest.mark.parametrize(("image_size", "expected"), [(64, (2, 2)), (83, (3, 3)), (224, (7, 7))])
def test_amoebanet_takes_any_image_size(image_size: int, expected: tuple[int, int]) -> None:
    """Sizes shrink to 1/32, rounded up, on all paths."""
    model = build_on_meta("amoebanet_d", num_layers=3, num_filters=16)
    assert isinstance(model, nn.Sequential)
    features = model[:-1](torch.empty(2, 3, image_size, image_size, device="meta"))
    assert features.shape[2:] == expected


def test_transformer_is_causal() -> None:
    torch.manual_seed(0)
    model = load("transformer_lm").build_model(**SMALL["transformer_lm"])
    tokens, _ = example_batch("transformer_lm", 1, SMALL["transformer_lm"])
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 64
    difference = (model(tokens) - model(changed)).abs().amax(dim=2)[0]
    assert difference[:-1].max() < 1e-5
    assert difference[-1] > 1e-3


def test_transformer_targets_are_the_next_tokens() -> None:
    tokens, target = load("transformer_lm").example_batch(8, tokens=50, vocabulary=7)
    assert tokens.shape == target.shape == (8, 50)
    assert tokens.dtype == target.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    assert 0 <= int(tokens.min()) <= int(target.max()) < 7


def test_every_skip_of_the_unet_reaches_the_output() -> None:
    torch.manual_seed(0)
    model = load("unet").build_model(**SMALL["unet"])
    images, _ = example_batch("unet", 1, SMALL["unet"])
    logits = model(images)
    for up in model.up:
        handle = up.register_forward_pre_hook(lambda _, inputs: (inputs[0], torch.zeros_like(inputs[1])))
        assert not torch.allclose(model(images), logits)
        handle.remove()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("amoebanet_d", {"num_layers": 4}, "num_layers 4 must be a positive multiple of 3"),
        ("amoebanet_d", {"num_filters": 12}, "num_filters 12 one of 8"),
        ("amoebanet_d", {"image_size": 32}, "image_size 32 is too small"),
        ("resnet", {"depth": 34}, "depth 34 must be one of"),
        ("transformer_lm", {"width": 100}, "width 100 must be even and divisible by heads 8"),
        ("unet", {"image_size": 40}, "image_size 40 must be divisible by 2.levels = 16"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name).build_model(**settings)


@pytest.mark.parametrize("name", NAMES)
def test_sample_imports_only_torch_and_the_standard_library(name: str) -> None:
    """A user may copy the file."""
    source = (SAMPLE_MODELS / f"{name}.py").read_text(encoding="utf-8")
    imports = [line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) - {"torch"} <= sys.stdlib_module_names
