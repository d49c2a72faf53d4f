"""Tests of the weights of micro-batches: labels among the inputs, losses that are no mean, losses of parameters."""

from pathlib import Path

import pytest
import torch

from planner.core.errors import ModelError, UsageError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.profile import CountedLabels, Model
from planner.executor.build.building import build_structure
from planner.executor.build.loss_check import check_loss
from planner.executor.equivalence.check import check_equivalence
from planner.files import write
from planner.model.label_counts import label_count
from planner.model.load import LoadedModel, load_model
from tests.support.ranks import run_ranks

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"

LABELED = f"""{HEAD}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, words, labels):
        logits = self.head(self.body(self.embed(words)).relu())
        return {{"logits": logits, "loss": LOSS}}


def build_model():
    return Model()


def example_batch(size):
    words = torch.randint(0, 20, (size, 10))
    masked = torch.arange(10) >= torch.randint(2, 10, (size, 1))
    return {{"words": words, "labels": words.masked_fill(masked, -100)}}, None


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""
MEAN_OVER_LABELS = "F.cross_entropy(logits.flatten(0, 1), labels.flatten())"
MEAN_OVER_SHIFTED_LABELS = "F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())"
MEAN_OVER_SAMPLES = "F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction='none').mean()"

PLAIN = f"""{HEAD}
W = torch.tensor([1.0, 3.0, 0.5, 1.0])


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))


def example_batch(size):
    return torch.randn(size, 4), torch.arange(size) % 4


def loss_fn(output, target):
    return LOSS
"""


def load_with_loss(folder: Path, text: str, loss: str = "") -> LoadedModel:
    """Load a model file with this text and this loss."""
    path = folder / "model.py"
    path.write_text(text.replace("LOSS", loss))
    return load_model(str(path))


@pytest.mark.parametrize(
    ("loss", "labels"), [(MEAN_OVER_LABELS, "all"), (MEAN_OVER_SHIFTED_LABELS, "shifted"), (MEAN_OVER_SAMPLES, "")]
)
def test_labels_that_a_loss_averages_over_are_found_and_noted(tmp_path: Path, loss: str, labels: CountedLabels) -> None:
    checked = check_loss(load_with_loss(tmp_path, LABELED, loss))
    assert (checked.loaded.counted_labels, checked.warnings) == (labels, ())
    assert len(checked.notes) == bool(labels)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [(f"{MEAN_OVER_LABELS} + logits[:, 0, 0].mean()", "all"), (f"{MEAN_OVER_LABELS[:-1]}, reduction='sum')", "")],
)
def test_a_loss_that_is_no_mean_gets_the_closest_weights(tmp_path: Path, loss: str, labels: CountedLabels) -> None:
    """Classes that transformers does not know have the loss function of language models, which shifts labels."""
    text = LABELED.replace(
        "return Model()", "model = Model()\n    model.loss_function = ForCausalLMLoss\n    return model"
    )
    checked = check_loss(load_with_loss(tmp_path, f"{text}\n\ndef ForCausalLMLoss(): ...\n", loss))
    assert checked.loaded.counted_labels == labels
    assert "the loss is not a mean over samples" in checked.warnings[0]


def test_a_loss_that_ignores_another_label_is_warned_about(tmp_path: Path) -> None:
    """A loss that ignores the label 0 raises an error for -100, so the check cannot mask labels."""
    text = LABELED.replace("masked, -100", "masked, 0")
    loss = MEAN_OVER_LABELS.replace("labels.flatten()", "labels.flatten(), ignore_index=0")
    checked = check_loss(load_with_loss(tmp_path, text, loss))
    assert not checked.notes
    assert "the loss is not a mean over samples" in checked.warnings[0]


@pytest.mark.slow
def test_labels_of_transformers_follow_their_loss_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models that are too large to run."""
    pytest.importorskip("transformers")
    text = f"""{HEAD}
from transformers import GPT2Config, GPT2LMHeadModel


def build_model():
    sizes = {{"vocab_size": 30, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def example_batch(size):
    words = torch.randint(0, 30, (size, 8))
    return {{"input_ids": words, "labels": words}}, None
"""
    loaded = load_with_loss(tmp_path, text)
    assert check_loss(loaded).loaded.counted_labels == "shifted"
    monkeypatch.setattr("planner.executor.build.loss_check._MOST_BYTES", 0)
    assert check_loss(loaded).loaded.counted_labels == "shifted"


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(output, target, reduction='sum')",
        "F.cross_entropy(output, target, weight=W)",
        "F.cross_entropy(output @ output.T, torch.arange(len(output)))",
    ],
)
def test_losses_that_are_no_mean_are_warned_about(tmp_path: Path, loss: str) -> None:
    """Sums, class weights, and losses that compare samples."""
    (warning,) = check_loss(load_with_loss(tmp_path, PLAIN, loss)).warnings
    assert "the loss is not a mean over samples" in warning
    assert "loss_count" in warning


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        ("F.cross_entropy(output, target)", ""),
        ("F.cross_entropy(output, target, weight=W)", "\n\ndef loss_count(target):\n    return W[target].sum()\n"),
        ("F.cross_entropy(output + torch.randn_like(output), target)", ""),
        ("F.cross_entropy(F.dropout(output), target)", ""),
        ("F.layer_norm(output, (4,)).mean()", ""),
    ],
)
def test_losses_that_are_a_mean_are_not_warned_about(tmp_path: Path, loss: str, more: str) -> None:
    """Also with batch normalization, dropout, random losses, and `loss_count`."""
    assert check_loss(load_with_loss(tmp_path, PLAIN + more, loss)).warnings == ()


@pytest.mark.parametrize(("finished", "logged"), [(True, False), (False, False), (False, True)])
def test_a_loss_that_reads_parameters_is_refused(tmp_path: Path, *, finished: bool, logged: bool) -> None:
    """Other stages would lose that part of their gradients."""
    text = PLAIN.replace("LOSS", "F.cross_entropy(output, target) + sum(p.square().sum() for p in made.parameters())")
    if logged:
        text = text.replace("    return F.cross", "    print(output.mean().item())\n    return F.cross")
    if finished:
        text = text.replace("def build_model():\n    return", "made =") + "\n\ndef build_model():\n    return made\n"
    else:
        text = text.replace("    return nn.Seq", "    global made\n    made = nn.Seq").replace(
            "4))\n", "4))\n    return made\n", 1
        )
    with pytest.raises(ModelError, match=r'parameters of the model \("0\.weight" and 5 others\)') as refused:
        check_loss(load_with_loss(tmp_path, text))
    assert "weight_decay" in refused.value.hint


def test_a_loss_of_each_sample_is_refused_before_the_equivalence_check(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"returned \[4\], expected a scalar"):
        check_loss(load_with_loss(tmp_path, PLAIN, "F.cross_entropy(output, target, reduction='none')"))


def test_a_loss_that_forward_leaves_in_an_attribute_is_refused(tmp_path: Path) -> None:
    """As in llama2.c, whose training loop reads `model.last_loss`: the loss has no parameter as operand."""
    text = (
        PLAIN.partition("def build_model")[0]
        + """
class Net(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.last_loss = y.square().mean()
        return y


def build_model():
    global made
    made = Net(4, 4)
    return made


def example_batch(size):
    return torch.randn(size, 4), torch.arange(size) % 4


def loss_fn(output, target):
    return made.last_loss
"""
    )
    with pytest.raises(ModelError, match="reads a tensor that `forward` computes but does not return") as refused:
        check_loss(load_with_loss(tmp_path, text))
    assert "return logits, loss" in refused.value.hint


def test_a_loss_that_differentiates_the_model_is_refused(tmp_path: Path) -> None:
    """As that of SIREN, for gradients of images. The message named `forward`, which differentiates nothing."""
    text = (
        PLAIN.partition("def build_model")[0]
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        return self.second(self.first(x).tanh()), x


def build_model():
    return Net()


def example_batch(size):
    return torch.randn(size, 4), torch.arange(size) % 4


def loss_fn(output, target):
    (slope,) = torch.autograd.grad(output[0].sum(), output[OF], create_graph=True)
    return F.cross_entropy(output[0], target) + slope.square().mean()
"""
    )
    with pytest.raises(ModelError, match="`loss_fn` differentiates the model"):
        check_loss(load_with_loss(tmp_path, text.replace("OF", "1")))
    loaded = check_loss(load_with_loss(tmp_path, text.replace("OF", "0"))).loaded
    assert build_structure(loaded).names == ("first", "second")


def test_the_loss_check_does_not_change_a_finished_model(tmp_path: Path) -> None:
    text = PLAIN.replace("def build_model():\n    return", "model =")
    loaded = load_with_loss(tmp_path, text, "F.cross_entropy(output, target)")
    model = loaded.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    check_loss(loaded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_learned_weights_of_losses_are_in_the_layer_that_returns_them(tmp_path: Path) -> None:
    """No operator reads them, because `forward` returns them."""
    text = LABELED.replace('"loss": LOSS', '"scale": self.scale').replace("words, labels", "words")
    text = text.replace("__init__()\n", "__init__()\n        self.scale = nn.Parameter(torch.zeros(2))\n", 1)
    text = text.replace(", None\n", '["words"], words\n')
    text += """

def loss_fn(output, target):
    loss = F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    return (output["scale"].exp() * loss + output["scale"]).sum()
"""
    loaded = load_with_loss(tmp_path, text)
    assert "scale" in build_structure(loaded).layers[-1].parameters_by_name()
    proof = check_equivalence(loaded, budget_s=20.0).proof
    assert (proof.cuts, proof.gradients) == (2, 6)


CLASSIFIER = """
import torch
from torch import nn


def ForCausalLMLoss():
    pass


class Classifier(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.cross_entropy(x, labels)}


def build_model():
    return Classifier()


def example_batch(size):
    return {"x": torch.randn(size, 8), "labels": torch.randint(8, (size,))}, None


def loss_fn(output, target):
    return output["loss"]
"""


def test_one_label_per_sample_is_never_shifted(tmp_path: Path) -> None:
    """A micro-batch of one sample would have no labels."""
    path = tmp_path / "model.py"
    path.write_text(CLASSIFIER)
    loaded = check_loss(load_model(str(path))).loaded
    assert loaded.counted_labels == "all"
    assert label_count(loaded.example_batch(1).inputs, loaded.counted_labels) == 1


def test_labels_on_the_meta_device_are_refused() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, 2, 3]])
    assert label_count({"labels": labels}, "all") == 4
    assert label_count({"labels": labels}, "shifted") == 3
    with pytest.raises(UsageError, match="meta device"):
        label_count({"labels": labels.to("meta")}, "all")


TRAIN = """
import sys

import torch

from planner.executor import Pipeline
from planner.model.seeding import example_mini_batch

pipeline = Pipeline("balance.yaml", seed=3)
loaded = pipeline.model
optimizer = pipeline.optimizer(loaded.build_optimizer)
for inputs, targets in pipeline.batches(2):
    with pipeline.step(inputs, targets):
        optimizer.step()
        optimizer.zero_grad()
evaluated = pipeline.evaluate(*pipeline.own_part(*pipeline.example_batch(5)))
torch.manual_seed(3)
model = loaded.build()
optimizer, losses = loaded.build_optimizer(model.parameters()), []
for step in range(2):
    loss = model(**example_mini_batch(loaded, 8, seed=3, step=step).inputs)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
expected = dict(model.named_parameters())
for name, parameter in pipeline.named_parameters():
    assert torch.allclose(parameter, expected[name], atol=1e-6), name
assert torch.allclose(torch.tensor(pipeline.losses), torch.tensor(losses), atol=1e-5)
assert abs(evaluated - float(model(**pipeline.example_batch(5).inputs)["loss"])) < 1e-5
pipeline.close()
"""


@pytest.mark.slow
def test_own_losses_average_over_all_labels_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Two stages and two replicas train and evaluate."""
    loaded = load_with_loss(tmp_path, LABELED, MEAN_OVER_SHIFTED_LABELS)
    names = build_structure(loaded).names
    parts = (names[:1], names[1:])
    balance = Balance(
        plan_digest="sha256:plan",
        model=Model(source="model.py:build_model", counted_labels=check_loss(loaded).loaded.counted_labels),
        schedule="gpipe",
        batch=8,
        micro_batches=2,
        replicas=2,
        balance=tuple(map(len, parts)),
        stages=tuple(StageBalance(index=n, recompute="never", layers=part) for n, part in enumerate(parts)),
    )
    write(str(tmp_path / "balance.yaml"), balance)
    (tmp_path / "train.py").write_text(TRAIN)
    run_ranks(4, ["train.py"], tmp_path)


@pytest.mark.slow
def test_tensors_of_an_object_in_the_output_are_no_parameters(tmp_path: Path) -> None:
    """An autoencoder returns the object of its posterior; the parameters behind it are read through the output."""
    text = """
import torch
from torch import nn


class Posterior:
    def __init__(self, value):
        self.mean = value.clamp(-1, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, value):
        posterior = Posterior(self.encoder(value))
        return self.decoder(posterior.mean), posterior


def build_model():
    return Net()


def example_batch(batch_size):
    return torch.randn(batch_size, 4), torch.randn(batch_size, 4)


def loss_fn(output, target):
    return (output[0] - target).square().mean() + output[1].mean.square().mean()
"""
    loaded = load_with_loss(tmp_path, text)
    assert check_loss(loaded).warnings == ()
    assert check_equivalence(loaded, budget_s=20.0).proof.gradients == 6
