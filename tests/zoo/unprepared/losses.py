"""Models with losses of their own: padding, pairs of samples, weights, several outputs, penalties, state."""

__all__ = ["MODELS"]

_CLASSES = """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, 5))

def example_batch(n):
    return torch.randn(n, D), torch.randint(5, (n,))
"""

_WORDS = """
V = 12

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(V, D), nn.ModuleList([Block(), Block()]), nn.Linear(D, V)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(V, (n, 6))
    y = ids.flip(1).clone()
    for i, m in enumerate(torch.randint(1, 6, (n,))):
        y[i, m:] = -100
    return ids, y
"""

MODELS = {
    "ignore_index": _WORDS
    + """
def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)
""",
    "ignore_index_counted": _WORDS
    + """
def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)

def loss_count(y):
    return (y != -100).sum()
""",
    "labels_inside_the_model": """
V = 12

class Output(dict):
    __getattr__ = dict.get

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(V, D), nn.ModuleList([Block(), Block()]), nn.Linear(D, V)

    def forward(self, input_ids, labels=None):
        x = self.emb(input_ids)
        for b in self.blocks:
            x = b(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(V, (n, 6))
    y = ids.clone()
    for i, m in enumerate(torch.randint(1, 6, (n,))):
        y[i, m:] = -100
    return {"input_ids": ids, "labels": y}, None

def loss_fn(out, _):
    return out["loss"]
""",
    "contrastive_pairs": """
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(Block(), nn.Linear(D, 4)), nn.Sequential(Block(), nn.Linear(D, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        a, b = F.normalize(self.a(x), dim=1), F.normalize(self.b(y), dim=1)
        return self.scale.exp() * a @ b.t()

def build_model():
    return Clip()

def example_batch(n):
    x = torch.randn(n, D)
    return (x, x + 0.1 * torch.randn(n, D)), None

def loss_fn(out, _):
    y = torch.arange(len(out))
    return (F.cross_entropy(out, y) + F.cross_entropy(out.t(), y)) / 2
""",
    "triplets": """
class Triplet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), nn.Linear(D, 4))

    def forward(self, x):
        return self.net(x["anchor"]), self.net(x["positive"]), self.net(x["negative"])

class Wrap(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Triplet()

    def forward(self, anchor, positive, negative):
        return self.inner({"anchor": anchor, "positive": positive, "negative": negative})

def build_model():
    return Wrap()

def example_batch(n):
    return {k: torch.randn(n, D) for k in ("anchor", "positive", "negative")}, None

def loss_fn(out, _):
    return F.triplet_margin_loss(*out)
""",
    "class_weights": _CLASSES
    + """
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0])

def loss_fn(out, y):
    return F.cross_entropy(out, y, weight=WEIGHTS)
""",
    "sum_over_samples": _CLASSES
    + """
def loss_fn(out, y):
    return F.cross_entropy(out, y, reduction="sum") / 10
""",
    "focal_with_smoothing": _CLASSES
    + """
def loss_fn(out, y):
    p = torch.softmax(out, 1).gather(1, y[:, None])
    return ((1 - p) ** 2).mean() * 0.1 + F.cross_entropy(out, y, label_smoothing=0.1)
""",
    "deep_supervision": """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x):
        outs = []
        for b, h in zip(self.blocks, self.heads):
            x = b(x)
            outs.append(h(x))
        return outs

def build_model():
    return Deep()

def loss_fn(out, y):
    return sum(F.mse_loss(o, y) * 0.5**i for i, o in enumerate(reversed(out)))
""",
    "learned_loss_weights": """
class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Sequential(Block(), Block()), nn.Linear(D, D), nn.Linear(D, 5)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.body(x)
        return self.a(h), self.b(h), self.log_vars

def build_model():
    return Multi()

def example_batch(n):
    x = torch.randn(n, D)
    return x, (x.flip(1), torch.randint(5, (n,)))

def loss_fn(out, y):
    a, b, s = out
    parts = torch.stack([F.mse_loss(a, y[0]), F.cross_entropy(b, y[1])])
    return (parts * (-s).exp() + s).sum()
""",
    "penalty_in_forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x, sum(p.abs().sum() for p in self.parameters())

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + 1e-3 * out[1]
""",
    "penalty_in_loss": """
MODEL = None

def build_model():
    global MODEL
    MODEL = nn.Sequential(Block(), Block(), nn.Linear(D, D))
    return MODEL

def loss_fn(out, y):
    return F.mse_loss(out, y) + 1e-3 * sum(p.pow(2).sum() for p in MODEL.parameters())
""",
    "gradient_penalty": """
class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), nn.Linear(D, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        e = self.net(x)
        (g,) = torch.autograd.grad(e.sum(), x, create_graph=True)
        return e, g

def build_model():
    return Energy()

def loss_fn(out, y):
    return out[0].pow(2).mean() + F.mse_loss(out[1], y)
""",
    "stateful_threshold": """
class Robust:
    def __init__(self):
        self.delta = 1.0

    def __call__(self, out, y):
        error = (out - y).detach().abs().mean()
        self.delta = 0.9 * self.delta + 0.1 * float(error)
        return F.huber_loss(out, y, delta=self.delta)

loss_fn = Robust()

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
""",
    "curriculum_in_loss": """
N = 0

def build_model():
    return nn.Sequential(Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    global N
    N += 1
    k = min(D, 1 + N // 4)
    return F.mse_loss(out[:, :k], y[:, :k])
""",
    "curriculum_in_forward": """
class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out, self.n = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D), 0

    def forward(self, x):
        if self.training:
            self.n += 1
        depth = 2 if self.n < 28 else 4
        for b in self.blocks[:depth]:
            x = b(x)
        return self.out(x)

def build_model():
    return Grows()
""",
    "distillation": """
class Distil(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(Block(), nn.Linear(D, 5)).requires_grad_(False)
        self.student = nn.Sequential(Block(), Block(), nn.Linear(D, 5))

    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        return self.student(x), soft

def build_model():
    return Distil()

def loss_fn(out, _):
    return F.kl_div(out[0].log_softmax(1), out[1], reduction="batchmean")
""",
    "dino_center": """
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(D, 6)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x):
        for b in self.student:
            x = b(x)
        out = self.head(x)
        target = ((out - self.center) / 0.5).softmax(1).detach()
        self.center = 0.8 * self.center + 0.2 * out.detach().mean(0)
        return -(target * out.log_softmax(1)).sum(1).mean()

def build_model():
    return Center()

def loss_fn(out, _):
    return out
""",
    "barlow_twins": """
class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(Block(), nn.Linear(D, 6), nn.BatchNorm1d(6, affine=False))

    def forward(self, a, b):
        return self.f(a), self.f(b)

def build_model():
    return Twins()

def example_batch(n):
    x = torch.randn(n, D)
    return (x, x + 0.3 * torch.randn(n, D)), None

def loss_fn(out, _):
    c = out[0].t() @ out[1] / len(out[0])
    return (c - torch.eye(6)).pow(2).sum()
""",
    "ctc": """
class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rnn, self.head = nn.Conv1d(4, D, 3, padding=1), nn.GRU(D, D, batch_first=True), nn.Linear(D, 5)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.rnn(h)[0]).log_softmax(2)

def build_model():
    return Speech()

def example_batch(n):
    return torch.randn(n, 9, 4), {"text": torch.randint(1, 5, (n, 3)), "size": torch.randint(1, 4, (n,))}

def loss_fn(out, y):
    sizes = torch.full((len(out),), out.shape[1])
    return F.ctc_loss(out.transpose(0, 1), y["text"], sizes, y["size"])
""",
    "loss_module_with_parameters": """
class Proxy(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(5, D))

    def forward(self, x, y):
        return F.cross_entropy(F.normalize(x, dim=1) @ F.normalize(self.proxies, dim=1).t(), y)

criterion = Proxy()

def build_model():
    return nn.Sequential(Block(), Block(), nn.Linear(D, D))

def example_batch(n):
    return torch.randn(n, D), torch.randint(5, (n,))

def loss_fn(out, y):
    return criterion(out, y)

def build_optimizer(ps):
    return torch.optim.Adam([*ps, *criterion.parameters()], lr=1e-2)
""",
    "per_sample_losses_weighted": """
def build_model():
    return nn.Sequential(Block(), Block(), nn.Linear(D, D))

def example_batch(n):
    x = torch.randn(n, D)
    return x, (x.flip(1), torch.rand(n))

def loss_fn(out, y):
    each = (out - y[0]).pow(2).mean(1)
    return (each * y[1]).sum() / y[1].sum()

def loss_count(y):
    return y[1].sum()
""",
}
