"""Loading of a model.py: entries, settings, batches, losses, optimizers, inputs, and errors with file and line."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import FileError, ModelError, UsageError
from planner.core.values.profile import Setting
from planner.model.inputs import input_tensor, tokens_of_sample
from planner.model.load import Batch, LoadedModel, load_model, to_device
from planner.model.optimizers import OPTIMIZERS, optimizer_builder
from tests.support.cli import BUILD, EXAMPLE, HEAD, LOSS, MODEL, write_model


def load(
    folder: Path,
    text: str,
    entry: str = "",
    *,
    optimizer: str | None = None,
    inputs: tuple[str, ...] = (),
    **settings: str,
) -> LoadedModel:
    """Write a model file and load it; settings are given as text."""
    path = write_model(folder, text)
    return load_model(f"{path}{entry}", settings=settings, inputs=inputs, optimizer=optimizer)


# Entries

NET = "class Net(nn.Sequential):\n    def __init__(self, width=8): super().__init__(nn.Linear(8, width))\n"


@pytest.mark.parametrize(
    ("text", "entry", "name", "layers"),
    [
        pytest.param(BUILD, "", "build_model", 5, id="build_model"),
        pytest.param("model = nn.Sequential(nn.Linear(8, 4))\n", "", "model", 1, id="finished"),
        pytest.param(NET, "", "Net", 1, id="only-class"),
        pytest.param(BUILD + "model = nn.Sequential(nn.ReLU())\n", "", "build_model", 5, id="build_model-first"),
        pytest.param("model = nn.Sequential(nn.ReLU(), nn.ReLU())\n" + NET, "", "model", 2, id="model-before-class"),
        pytest.param(
            BUILD + "def other(): return nn.Sequential(nn.ReLU())\n", ":other", "other", 1, id="named-function"
        ),
        pytest.param(BUILD + NET, ":Net", "Net", 1, id="named-class"),
        pytest.param(BUILD + "tiny = nn.Sequential(nn.ReLU())\n", ":tiny", "tiny", 1, id="named-model"),
        pytest.param(
            NET + "class Block(nn.Module):\n    def __init__(self, width): super().__init__()\n",
            "",
            "Net",
            1,
            id="class-with-required-argument-is-no-entry",
        ),
        pytest.param(
            NET + "class Block(nn.Module):\n    def __init__(self, *, width): super().__init__()\n",
            "",
            "Net",
            1,
            id="class-with-required-keyword-is-no-entry",
        ),
        pytest.param("from torch.nn import ReLU, Tanh\n" + NET, "", "Net", 1, id="imported-classes-are-no-entries"),
    ],
)
def test_the_entry_is_the_named_or_first_candidate(tmp_path, text, entry, name, layers):
    """Candidates: `build_model`, `model`, then the file's only class that needs no arguments."""
    loaded = load(tmp_path, HEAD + text + EXAMPLE, entry)
    assert loaded.source == f"{tmp_path / 'model.py'}:{name}"
    assert len(list(loaded.build().children())) == layers


def test_a_finished_model_is_not_copied(tmp_path: Path) -> None:
    """A function builds a new model each time."""
    finished = load(tmp_path, HEAD + "model = nn.Sequential(nn.Linear(8, 4))\n" + EXAMPLE)
    assert finished.build() is finished.build()
    built = load(tmp_path, MODEL + "# other\n")
    assert built.build() is not built.build()


@pytest.mark.parametrize(
    ("text", "entry", "message"),
    [
        ("", "", "no model"),
        ("class A(nn.ReLU): pass\nclass B(nn.ReLU): pass\n", "", "2 modules that could be the model (`A`, `B`)"),
        ("class Block(nn.Module):\n    def __init__(self, width): super().__init__()\n", "", "no model"),
        (BUILD, ":nothing", "has no `nothing`"),
        ("model = 3\n", "", "`model`"),
        ("import math as build_model\n", "", "`build_model`"),
    ],
    ids=["empty", "two-classes", "needs-arguments", "no-such-name", "no-module", "not-callable"],
)
def test_files_without_an_entry_are_refused(tmp_path: Path, text: str, entry: str, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        load(tmp_path, HEAD + text + EXAMPLE, entry).build()
    assert message in str(refused.value)
    assert "model.py" in str(refused.value)


def test_a_changed_file_is_loaded_again(tmp_path: Path) -> None:
    """Python's cache would miss a change within a second that keeps the file's length."""
    for width in (16, 24):
        path = write_model(tmp_path, MODEL.replace("width: int = 16", f"width: int = {width}"))
        os.utime(path, (1e9, 1e9))
        loaded = load_model(str(path), settings={}, inputs=(), optimizer=None)
        assert next(iter(loaded.build().parameters())).shape[0] == width
    assert not (tmp_path / "__pycache__").exists()


def test_modules_next_to_the_file_are_importable(tmp_path: Path) -> None:
    """At the top of the file and inside its functions."""
    (tmp_path / "parts_of_mine.py").write_text(HEAD + "def part(): return nn.Linear(8, 4)\n")
    top = HEAD + "from parts_of_mine import part\ndef build_model(): return nn.Sequential(part())\n" + EXAMPLE
    before = list(sys.path)
    try:
        assert len(list(load(tmp_path, top).build().children())) == 1
        assert sys.path == before
        sys.modules.pop("parts_of_mine")
        inside = HEAD + "def build_model():\n    from parts_of_mine import part\n    return nn.Sequential(part())\n"
        assert len(list(load(tmp_path, inside + EXAMPLE).build().children())) == 1
    finally:
        sys.modules.pop("parts_of_mine", None)


def test_a_file_may_extend_sys_path(tmp_path: Path) -> None:
    """Our own entry is removed again."""
    before = list(sys.path)
    try:
        load(tmp_path, "import sys\nsys.path.insert(0, '/somewhere/else')\n" + MODEL)
        assert "/somewhere/else" in sys.path
        assert str(tmp_path) not in sys.path
    finally:
        sys.path[:] = before


# Settings

TYPED = "def build_model(a: int, b: float = 1, c: bool = False, d: str = 'x', e=3, f=0.5, g=True, h='y'):\n"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a", "7", 7),
        ("b", "7", 7.0),
        ("b", "1e-3", 0.001),
        ("c", "true", True),
        ("c", "False", False),
        ("d", "7", "7"),
        ("d", "", ""),
        ("e", "7", 7),
        ("f", "7", 7.0),
        ("g", "false", False),
        ("h", "a=b", "a=b"),
    ],
)
def test_settings_are_typed_by_the_signature(tmp_path: Path, name: str, text: str, value: Setting) -> None:
    body = TYPED + "    return nn.Sequential(nn.Linear(8, 4))\n"
    settings = load(tmp_path, HEAD + body + EXAMPLE, **{name: text}).settings
    assert settings == {name: value}
    assert type(settings[name]) is type(value)


@pytest.mark.parametrize(
    ("signature", "future"),
    [("width: int", True), ("width: int = 3", True), ("width: int | None = None", False), ("width: 'int'", False)],
)
def test_textual_and_optional_annotations_type_settings(tmp_path: Path, signature: str, *, future: bool) -> None:
    head = ("from __future__ import annotations\n" if future else "") + HEAD
    text = f"{head}def build_model({signature}): return nn.Sequential(nn.Linear(8, width))\n{EXAMPLE}"
    assert load(tmp_path, text, width="24").settings == {"width": 24}


def test_build_model_may_take_any_keyword_setting(tmp_path: Path) -> None:
    text = "def build_model(**settings): return nn.Sequential(nn.Linear(8, int(settings['width'])))\n"
    assert int(load(tmp_path, HEAD + text + EXAMPLE, width="24").settings["width"]) == 24


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a", "1.5", "an integer"),
        ("a", "wide", "an integer"),
        ("b", "wide", "a number"),
        ("c", "yes", "true or false"),
        ("g", "1", "true or false"),
        ("z", "1", "no setting `z`"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, name: str, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(tmp_path, HEAD + TYPED + "    return None\n" + EXAMPLE, **{name: text})
    assert expected in str(refused.value)
    assert name in str(refused.value)
    if name == "z":
        assert "`a`, `b`" in refused.value.hint


def test_a_builder_without_settings_says_so(tmp_path: Path) -> None:
    text = "def build_model(): return nn.Sequential(nn.Linear(8, 4))\n"
    with pytest.raises(UsageError) as refused:
        load(tmp_path, HEAD + text + EXAMPLE, width="24")
    assert refused.value.hint.endswith("build_model takes no settings: leave `--set` out")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_settings_must_be_finite(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="--set b="):
        load(tmp_path, HEAD + TYPED + "    return None\n" + EXAMPLE, b=text)


def test_settings_reach_build_model_and_example_batch(tmp_path: Path) -> None:
    text = """
def build_model(*, width: int = 8, depth: int = 1): return nn.Sequential(*[nn.Linear(width, width)] * depth)
def example_batch(batch_size, *, width: int = 8): return torch.randn(batch_size, width), None
"""
    loaded = load(tmp_path, HEAD + text, width="5", depth="3")
    inputs = loaded.example_batch(2).inputs
    assert inputs.shape == (2, 5)
    assert loaded.build()(inputs).shape == (2, 5)
    assert len(loaded.build()) == 3


# Batches and losses


def test_functions_of_the_file_are_used(tmp_path: Path) -> None:
    own = """
def build_optimizer(parameters): return torch.optim.SGD(parameters, lr=0.5)
def train_batches(batch_size): return [example_batch(batch_size)]
"""
    loaded = load(tmp_path, MODEL + own)
    assert loaded.notes == ()
    assert float(loaded.loss_fn(torch.zeros(2, 4), torch.ones(2, 4))) == 1.0
    optimizer = loaded.build_optimizer([nn.Parameter(torch.zeros(1))])
    assert (loaded.optimizer_name, optimizer.defaults["lr"]) == ("build_optimizer", 0.5)
    ((inputs, _),) = loaded.train_batches(3)
    assert inputs.shape == (3, 8)
    assert loaded.example_batch(3).num_samples == 3


def test_what_build_optimizer_must_return_is_said(tmp_path: Path) -> None:
    loaded = load(tmp_path, MODEL + "def build_optimizer(parameters): return [torch.optim.SGD(parameters, lr=0.5)]\n")
    with pytest.raises(ModelError, match="`build_optimizer` returned list, not an optimizer") as refused:
        loaded.build_optimizer([nn.Parameter(torch.zeros(1))])
    assert refused.value.hint == "return a `torch.optim.Optimizer`; derive a class of your own from it"


def test_a_named_optimizer_overrides_build_optimizer(tmp_path: Path) -> None:
    text = MODEL + "def build_optimizer(parameters): return torch.optim.SGD(parameters, lr=0.5)\n"
    loaded = load(tmp_path, text, optimizer="adam")
    assert loaded.optimizer_name == "adam"
    assert isinstance(loaded.build_optimizer([nn.Parameter(torch.zeros(1))]), torch.optim.Adam)


def test_without_a_loss_the_mean_of_the_output_is_trained_and_noted(tmp_path: Path) -> None:
    loaded = load(tmp_path, HEAD + BUILD + EXAMPLE)
    assert loaded.notes == ()
    output = (torch.full((2, 3), 1.0), {"x": torch.full((5,), 2.0)}, torch.tensor([7]))
    assert float(loaded.loss_fn(output, None)) == 1.5
    assert len(loaded.notes) == 1
    assert "no `loss_fn" in loaded.notes[0]
    assert "the mean" in loaded.notes[0]
    with pytest.raises(ModelError, match="no floating-point tensor"):
        load(tmp_path, HEAD + BUILD + EXAMPLE).loss_fn(torch.tensor([7]), None)


def test_adamw_is_the_default_optimizer(tmp_path: Path) -> None:
    assert load(tmp_path, MODEL).optimizer_name == "adamw"


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_named_optimizer_steps(name: str) -> None:
    build, called = optimizer_builder(None, name)
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = build(iter([parameter]))
    parameter.sum().backward()
    optimizer.step()
    assert called == name
    assert not torch.equal(parameter, torch.ones(3, 3))


def test_an_example_batch_may_be_a_list_of_two(tmp_path: Path) -> None:
    """`default_collate` returns such lists."""
    path = tmp_path / "model.py"
    batch = "def example_batch(n):\n    return [{'input': torch.zeros(n, 2)}, torch.ones(n)]\n"
    path.write_text(f"import torch\nmodel = torch.nn.Linear(2, 2)\n{batch}")
    inputs, targets = load_model(str(path)).example_batch(3)
    assert (inputs["input"].shape, targets.shape) == ((3, 2), (3,))


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown optimizer `magic`") as refused:
        optimizer_builder(None, "magic")
    assert all(name in refused.value.hint for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("torch.randn(batch_size, 8)", "returned Tensor"),
        ("(1, 2, 3)", "a tuple of 3"),
        ("[torch.randn(batch_size, 8)]", "a list of 1"),
        ("{'x': torch.randn(batch_size, 8)}", "return `inputs, None` if `forward` takes the targets as well"),
        ("(torch.randn(9, batch_size), None)", "expected 2 samples in its first dimension (put the samples first"),
        ("(torch.randn(4 * batch_size, 8), None)", "return `x.unflatten(0, (-1, 4))`, and call the model with"),
        ("(torch.randn(batch_size, 8), torch.tensor(1.0))", "expected 2 samples"),
        ("(torch.randn(batch_size, 8), {'y': torch.zeros(1, 1)})", "[1, 1]"),
        ("(torch.randn(batch_size, 8), UserDict(y=torch.zeros(batch_size)))", "a UserDict, which cannot be cut into"),
        ("(SimpleNamespace(of=SimpleNamespace(x=torch.zeros(batch_size, 8))), None)", "a SimpleNamespace, which"),
        ("(torch.randn(batch_size, 8), ['cat'] * batch_size)", "a list of 2 values of type str, one per sample"),
        ("({'x': torch.randn(batch_size, 8), 'y': (torch.zeros(batch_size), [1] * batch_size)}, None)", "type int"),
        ("(torch.randn(batch_size, 8), np.zeros((batch_size, 3)))", "a NumPy array of shape [2, 3], one per sample"),
        ("(torch.randn(batch_size, 8), [torch.zeros(5)] * batch_size)", "a list of 2 values of type Tensor, one per"),
        ("({'x': [{'box': torch.zeros(5, 4)}] * batch_size}, None)", "type dict, one per sample; only tensors are cut"),
        ("tuple(zip(*[(torch.zeros(3, 8), {'y': torch.zeros(5)})] * batch_size))", "(pad tensors of different sizes"),
        ("((torch.zeros(8, batch_size), torch.zeros(8, batch_size)), None)", "a tensor of shape [8, 2], expected 2"),
        ("1 / 0", "`example_batch(2)` raised ZeroDivisionError"),
    ],
)
def test_a_wrong_example_batch_is_refused(tmp_path: Path, returned: str, expected: str) -> None:
    imports = "import numpy as np\nfrom collections import UserDict\nfrom types import SimpleNamespace\n"
    text = f"{HEAD}{imports}{BUILD}\ndef example_batch(batch_size):\n    return {returned}\n{LOSS}"
    loaded = load(tmp_path, text)
    with pytest.raises(ModelError) as refused:
        loaded.example_batch(2)
    assert expected in f"{refused.value} ({refused.value.hint})"


def test_inputs_may_be_nested(tmp_path: Path) -> None:
    text = (
        "def example_batch(n): return {'a': torch.zeros(n, 2), 'b': (torch.ones(n), 3), 'c': [0] * 6}, torch.zeros(n)\n"
    )
    batch = load(tmp_path, HEAD + BUILD + text).example_batch(6)
    assert batch.num_samples == 6
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved, Batch)
    assert moved.inputs["a"].is_meta
    assert moved.inputs["b"][1] == 3


# --input


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("8", (5, 8), torch.float32),
        ("3x4x2", (5, 3, 4, 2), torch.float32),
        ("8:float64", (5, 8), torch.float64),
        ("8:bfloat16", (5, 8), torch.bfloat16),
        ("8:int64:100", (5, 8), torch.int64),
        ("2x3:int32", (5, 2, 3), torch.int32),
        ("8:bool", (5, 8), torch.bool),
    ],
)
def test_input_option_gives_shape_and_dtype(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = input_tensor(text, 5)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)


def test_integer_inputs_stay_below_their_bound() -> None:
    assert set(input_tensor("1000:int64:3", 4).flatten().tolist()) == {0, 1, 2}
    assert set(input_tensor("1000:int64", 4).flatten().tolist()) == {0, 1}
    assert input_tensor("1000", 4).std() > 0.5


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "3x", "a", "-1", "3x-1", "8:", "8:floaty", "8:int64:x", "8:int64:", "8:int64:0", "8:int64:-1"),
        *("8:complex64", "8:float32:1:1", "8:nn"),
    ],
)
def test_a_wrong_input_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        input_tensor(text, 2)
    assert f"`--input {text}`" in str(refused.value)


def test_several_inputs_form_a_tuple(tmp_path: Path) -> None:
    one = load(tmp_path, HEAD + BUILD, inputs=("8",))
    assert isinstance(one.example_batch(3).inputs, Tensor)
    two = load(tmp_path, HEAD + BUILD, inputs=("8", "2:int64:9"))
    batch = two.example_batch(3)
    assert [tuple(t.shape) for t in batch.inputs] == [(3, 8), (3, 2)]
    assert batch.targets is None
    assert two.inputs == ("8", "2:int64:9")


@pytest.mark.parametrize("inputs", [("x",), ("8", "x")])
def test_wrong_inputs_are_refused_while_loading(tmp_path: Path, inputs: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="--input x"):
        load(tmp_path, HEAD + BUILD, inputs=inputs)


# Blame


def test_errors_of_the_file_name_its_line(tmp_path: Path) -> None:
    """The cause is kept for `--debug`."""
    text = MODEL + "def deep():\n    return nn.Linear('a', 3)\ndef build_model():\n    return deep()\n"
    loaded = load(tmp_path, text)
    with pytest.raises(ModelError) as refused:
        loaded.build()
    line = text.splitlines().index("    return nn.Linear('a', 3)") + 1
    assert str(refused.value).startswith(f"{tmp_path / 'model.py'}:{line}: `build_model()` raised TypeError: ")
    assert isinstance(refused.value.__cause__, TypeError)


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "import sys; sys.exit('no')", "assert False, 'never'"])
def test_exits_and_errors_of_the_file_become_model_errors(tmp_path: Path, statement: str) -> None:
    """`sys.exit` would end the command with the user's exit code."""
    with pytest.raises(ModelError, match="importing it raised"):
        load(tmp_path, statement + "\n")


def test_keyboard_interrupts_are_not_caught(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, "raise KeyboardInterrupt\n")


def test_a_path_that_is_no_python_file_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    for name in ("missing.py", ".", "notes.txt"):
        with pytest.raises(FileError):
            load_model(str(tmp_path / name))


def test_files_with_dataclasses_load_twice(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: 'int' = 8\n" + MODEL
    assert load(tmp_path, text).build() is not None
    assert load(tmp_path, text + "# again\n").build() is not None


def test_token_ids_are_integers_of_shape_samples_times_tokens() -> None:
    def made(text: str) -> Tensor:
        return input_tensor(text, 2)

    assert tokens_of_sample(made("1024:int64:32000")) == 1024
    assert tokens_of_sample({"input_ids": made("12:int32"), "labels": made("14:int64"), "mask": made("20:bool")}) == 14
    assert tokens_of_sample((made("3x224x224"), made("16"), made("8x8:int64"), made("1:int64")[:, 0])) == 0
