"""Models with unusual loss functions, generators, and blocks of published models."""

__all__ = ["MODELS"]

_MODEL = """
def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
"""


def _trained_with(loss: str) -> str:
    return f"{_MODEL}\n{loss}"


MODELS = {
    "loss_writes_into_the_output": _trained_with("""
def loss_fn(out, y):
    out.sub_(y)
    loss = out.square_().mean()
    loss *= 0.5
    return loss
"""),
    "loss_writes_into_the_targets": _trained_with("""
def loss_fn(out, y):
    y.mul_(0.9).add_(0.1)
    return F.mse_loss(out, y)
"""),
    "loss_calls_backward": _trained_with("""
def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    loss.backward(retain_graph=True)
    return loss
"""),
    "loss_returns_a_tuple_of_losses": _trained_with("""
def loss_fn(out, y):
    return F.mse_loss(out, y), F.l1_loss(out, y)
"""),
    "loss_returns_a_dict": _trained_with("""
def loss_fn(out, y):
    return {"mse": F.mse_loss(out, y), "l1": F.l1_loss(out, y)}
"""),
    "memory_of_past_outputs": _trained_with("""
class CrossBatch(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.register_buffer("memory", torch.zeros(size, D))
        self.at = 0

    def forward(self, out, y):
        similarity = F.normalize(out, dim=-1) @ F.normalize(self.memory + 1e-6, dim=-1).t()
        loss = F.mse_loss(out, y) + 0.1 * similarity.clamp(min=0).mean()
        with torch.no_grad():
            for row in out:
                self.memory[self.at % len(self.memory)] = row
                self.at += 1
        return loss

criterion = CrossBatch()

def loss_fn(out, y):
    return criterion(out, y)
"""),
    "class_weights_of_the_batch": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, 3))

def example_batch(n):
    return torch.randn(n, D), torch.randint(0, 3, (n,))

def loss_fn(out, y):
    counts = torch.bincount(y, minlength=3).float()
    return F.cross_entropy(out, y, weight=1 / (counts + 1))
""",
    "loss_clips_the_gradient_of_the_output": _trained_with("""
def loss_fn(out, y):
    if out.requires_grad:
        out.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return F.mse_loss(out, y)
"""),
    "loss_scales_by_its_running_mean": _trained_with("""
RUNNING = torch.ones(())

def loss_fn(out, y):
    loss = F.huber_loss(out, y)
    RUNNING.lerp_(loss.detach(), 0.1)
    return loss / RUNNING.clone()
"""),
    "loss_reads_an_attribute_of_the_output": """
class Head(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y.penalty = 0.01 * x.square().mean()
        return y

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], Head(D, D))

def loss_fn(out, y):
    return F.mse_loss(out, y) + out.penalty
""",
    "legacy_numpy_generator_in_blocks": """
class Noisy(Block):
    def __init__(self, k):
        super().__init__()
        self.random = np.random.RandomState(k)

    def forward(self, x):
        keep = torch.from_numpy(self.random.binomial(1, 0.8, x.shape[-1]).astype(np.float32))
        return super().forward(x) * keep / 0.8

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Noisy(k) for k in range(3)], nn.Linear(D, D))
""",
    "generator_spawned_per_block": """
class Noisy(Block):
    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def forward(self, x):
        return super().forward(x) + 0.1 * torch.from_numpy(self.rng.standard_normal(x.shape[-1]).astype(np.float32))

def build_model():
    children = np.random.default_rng(7).spawn(4)
    return nn.Sequential(*[Noisy(rng) for rng in children], nn.Linear(D, D))
""",
    "locked_dropout_for_four_calls": """
class Locked(Block):
    def __init__(self):
        super().__init__()
        self.mask, self.age = None, 0

    def forward(self, x):
        if self.mask is None or self.age % 4 == 0:
            self.mask = torch.bernoulli(torch.full((x.shape[-1],), 0.8)) / 0.8
        self.age += 1
        return super().forward(x * self.mask)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Locked() for _ in range(3)], nn.Linear(D, D))
""",
    "drop_block_and_alpha_dropout": """
class DropBlock(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        seeds = (torch.rand_like(x[:, :1]) < 0.05).float()
        mask = 1 - F.max_pool2d(seeds, 3, 1, 1)
        return x * mask * mask.numel() / mask.sum().clamp(min=1)

def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), DropBlock(), nn.SELU(), nn.FeatureAlphaDropout(0.2), nn.Conv2d(8, 8, 3),
        DropBlock(), nn.AlphaDropout(0.2), nn.Flatten(), nn.Linear(128, D),
    )

def example_batch(n):
    x = torch.randn(n, 3, 6, 6)
    return x, torch.tanh(x.flatten(1)[:, :D])
""",
    "adaptive_computation_time": """
class Ponder(Block):
    def __init__(self):
        super().__init__()
        self.halt = nn.Linear(D, 1)

    def forward(self, x):
        left, out, n = torch.ones(len(x), 1), torch.zeros_like(x), 0
        while n < 6 and float(left.max()) > 0.1:
            x = super().forward(x)
            p = torch.sigmoid(self.halt(x)) * left
            out, left, n = out + p * x, left - p, n + 1
        return out + left * x

def build_model():
    return nn.Sequential(nn.Linear(D, D), Ponder(), Ponder(), nn.Linear(D, D))
""",
    "expert_choice_with_loads_in_a_dict": """
class Experts(nn.Module):
    def __init__(self, loads, name):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.loads, self.name = loads, name

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        bias = self.loads.get(self.name, torch.zeros(3))
        best = (scores.detach() - bias).argmax(-1)
        self.loads[self.name] = 0.9 * bias + 0.1 * torch.bincount(best, minlength=3) / len(x)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (best == k).nonzero()[:, 0]
            out = out.index_add(0, rows, scores[rows, k, None] * expert(x[rows]))
        return x + out

def build_model():
    loads = {}
    return nn.Sequential(nn.Linear(D, D), *[Experts(loads, f"e{k}") for k in range(3)], nn.Linear(D, D))
""",
    "neural_ode_and_flow": """
class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D + 1, 16), nn.Tanh(), nn.Linear(16, D))

    def forward(self, t, x):
        return self.net(torch.cat([x, t.expand(len(x), 1)], -1))

class ODE(nn.Module):
    def __init__(self, steps=4):
        super().__init__()
        self.field, self.steps = Field(), steps

    def forward(self, x):
        h = 1 / self.steps
        for k in range(self.steps):
            t = torch.tensor([k * h])
            a = self.field(t, x)
            b = self.field(t + h / 2, x + h / 2 * a)
            c = self.field(t + h / 2, x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.field(t + h, x + h * c))
        return x

class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip, self.net = flip, nn.Sequential(nn.Linear(D // 2, 16), nn.Tanh(), nn.Linear(16, D))

    def forward(self, x, logdet):
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        s, t = self.net(a).chunk(2, -1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], -1), logdet + s.sum(-1)

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.ode, self.couplings = ODE(), nn.ModuleList(Coupling(k % 2 == 1) for k in range(4))

    def forward(self, x):
        x, logdet = self.ode(x), torch.zeros(len(x))
        for coupling in self.couplings:
            x, logdet = coupling(x, logdet)
        return x, logdet

def build_model():
    return Flow()

def loss_fn(out, y):
    return (0.5 * out[0].square().sum(-1) - out[1]).mean()
""",
    "teacher_is_a_copy_with_own_schedule": """
class SelfDistilled(Block):
    def __init__(self):
        super().__init__()
        self.teacher, self.decay = copy.deepcopy(self.up).requires_grad_(False), 0.5

    def forward(self, x):
        with torch.no_grad():
            for a, b in zip(self.teacher.parameters(), self.up.parameters()):
                a.lerp_(b, 1 - self.decay)
            self.decay = min(0.99, self.decay + 0.01)
            target = torch.tanh(self.teacher(self.norm(x)))
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.down(y + 0.1 * (target - y))

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[SelfDistilled() for _ in range(3)], nn.Linear(D, D))
""",
    "copies_share_an_attribute": """
class Shared(Block):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __deepcopy__(self, memo):
        other = Shared(self.log)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x):
        y = super().forward(x)
        self.log.append(y.detach().mean().item())
        return y * (1 + 0.1 * math.tanh(sum(self.log[-3:])))

def build_model():
    block = Shared([])
    return nn.Sequential(nn.Linear(D, D), *[copy.deepcopy(block) for _ in range(3)], nn.Linear(D, D))
""",
    "jacobian_and_ensemble_by_func": """
from torch.func import functional_call, jacrev, stack_module_state, vmap

class Regular(Block):
    def forward(self, x):
        y = super().forward(x)
        jacobian = vmap(jacrev(super().forward))(x)
        return y / (1 + 0.01 * jacobian.square().sum((1, 2)).sqrt()[:, None])

def build_model():
    return nn.Sequential(nn.Linear(D, D), Regular(), Block(), Regular(), nn.Linear(D, D))
""",
    "cond_of_torch": """
class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + torch.where((x.mean() > 0), torch.tanh(self.a(x)), torch.sin(self.b(x)))

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Chosen() for _ in range(3)], nn.Linear(D, D))
""",
    "compiled_blocks_with_checkpoints": """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(4)), nn.Linear(D, D)
        self.blocks[1].forward = torch.compile(self.blocks[1].forward, backend="eager")

    def forward(self, x):
        for k, b in enumerate(self.blocks):
            x = checkpoint(b, x, use_reentrant=k % 2 == 0) if x.requires_grad else b(x)
        return self.out(x)
""",
    "masked_words_and_next_sentence": """
def ForCausalLMLoss(logits, labels):
    raise NotImplementedError

class Pretraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_function = ForCausalLMLoss  # as in classes that transformers does not know
        self.emb, self.blocks = nn.Embedding(12, D), nn.ModuleList(Block() for _ in range(3))
        self.words, self.order = nn.Linear(D, 12), nn.Linear(D, 2)

    def forward(self, input_ids, labels, next_sentence_label):
        x = self.emb(input_ids)
        for b in self.blocks:
            x = b(x)
        words = F.cross_entropy(self.words(x).flatten(0, 1), labels.flatten())
        return {"loss": words + 0.1 * F.cross_entropy(self.order(x[:, 0]), next_sentence_label)}

def build_model():
    return Pretraining()

def example_batch(n):
    ids = torch.randint(12, (n, 6))
    labels = ids.masked_fill(torch.rand(n, 6) < 0.6, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "labels": labels, "next_sentence_label": torch.randint(2, (n,))}, None

def loss_fn(out, y):
    return out["loss"]
""",
}
