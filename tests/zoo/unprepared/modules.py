"""Models with modules of torch that rewrite weights or keep statistics, and with frozen or adapted parts."""

__all__ = ["MODELS"]

MODELS = {
    "spectral_norm_hook": """
def build_model():
    sn = nn.utils.spectral_norm
    return nn.Sequential(sn(nn.Linear(D, D)), nn.Tanh(), sn(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, D))
""",
    "spectral_norm_parametrized": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sn = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList([sn(nn.Linear(D, D)) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x
""",
    "weight_norm_hook": """
def build_model():
    wn = nn.utils.weight_norm
    return nn.Sequential(wn(nn.Linear(D, D)), nn.Tanh(), wn(nn.Linear(D, D)), nn.Tanh(), wn(nn.Linear(D, D)))
""",
    "weight_norm_parametrized_tied": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.a, self.b = Block(), Block()

    def forward(self, x):
        return self.lin(self.b(torch.tanh(self.lin(self.a(x)))))
""",
    "orthogonal": """
def build_model():
    ortho = nn.utils.parametrizations.orthogonal
    return nn.Sequential(ortho(nn.Linear(D, D)), Block(), ortho(nn.Linear(D, D)), Block())
""",
    "pruned": """
from torch.nn.utils import prune

def build_model():
    m = nn.Sequential(*[nn.Linear(D, D) for _ in range(4)])
    for layer in m:
        prune.l1_unstructured(layer, "weight", 0.4)
    return m
""",
    "standardized_weights": """
class WSConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)

def build_model():
    return nn.Sequential(
        WSConv(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        WSConv(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(200, 3),
    )

def example_batch(n):
    return torch.randn(n, 2, 5, 5), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
    "batch_norm": """
def build_model():
    return nn.Sequential(
        nn.Linear(D, D),
        nn.BatchNorm1d(D),
        nn.ReLU(),
        nn.Linear(D, D),
        nn.BatchNorm1d(D),
        nn.Linear(D, D),
    )
""",
    "batch_norm_cumulative": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 4, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(4, momentum=None) for _ in range(3)])

    def forward(self, x):
        for c, n in zip(self.convs, self.norms):
            x = torch.relu(n(c(x)))
        return x

def example_batch(n):
    x = torch.randn(n, 4, 5)
    return x, x.abs()
""",
    "batch_norm_frozen": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.na, self.b, self.nb = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D), nn.BatchNorm1d(D)

    def train(self, mode=True):
        super().train(mode)
        self.na.eval()
        self.nb.eval()
        return self

    def forward(self, x):
        return self.nb(self.b(torch.relu(self.na(self.a(x)))))

def build_model():
    return Net().train()
""",
    "batch_renorm": """
class Renorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("std", torch.ones(D))

    def forward(self, x):
        m, s = x.mean(0), x.std(0) + 1e-2
        r, d = (s / self.std).detach().clamp(0.5, 2), ((m - self.mean) / self.std).detach().clamp(-1, 1)
        self.mean.lerp_(m.detach(), 0.1)
        self.std.lerp_(s.detach(), 0.1)
        return (x - m) / s * r + d

def build_model():
    return nn.Sequential(Block(), Renorm(), Block(), Renorm(), nn.Linear(D, D))
""",
    "instance_norm_tracked": """
def build_model():
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.ReLU(),
        nn.Conv1d(4, 3, 3, padding=1),
    )

def example_batch(n):
    x = torch.randn(n, 3, 6)
    return x, x.flip(2)
""",
    "lora": """
class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.3), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Lora(nn.Linear(D, D)) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def build_optimizer(ps):
    return torch.optim.AdamW([p for p in ps if p.requires_grad], lr=2e-2)
""",
    "lora_on_a_tied_head": """
V = 12

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.body = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(D, 2) * 0.3), nn.Parameter(torch.zeros(2, V))

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.body:
            x = b(x)
        return self.head(x) + x @ self.a @ self.b

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(V, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "frozen_backbone": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(Block(), Block(), nn.Dropout(0.1))
        self.head = nn.Sequential(Block(), nn.Linear(D, D))
        self.backbone.requires_grad_(False).eval()

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)
""",
    "prompt_tuning": """
class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt, self.emb = nn.Parameter(torch.randn(2, D)), nn.Embedding(10, D)
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)]), nn.Linear(D, 3)
        for m in (self.emb, self.layers):
            m.requires_grad_(False)

    def forward(self, ids):
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.emb(ids)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])

def build_model():
    return Prompted()

def example_batch(n):
    return torch.randint(10, (n, 5)), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
    "own_mixed_precision": """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for b in self.blocks:
                x = b(x)
        return self.head(x.float())

def build_model():
    return Mixed()
""",
    "half_of_it_in_bfloat16": """
class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)

def build_model():
    return nn.Sequential(
        Block(),
        Cast(torch.bfloat16),
        Block().bfloat16(),
        Cast(torch.float64),
        Block().double(),
        Cast(torch.float32),
    )
""",
    "quantization_aware": """
class Fake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        return torch.round(x / s).clamp(-8, 7) * s

    @staticmethod
    def backward(ctx, g):
        return g, None

class QLinear(nn.Linear):
    def __init__(self, *a):
        super().__init__(*a)
        self.register_buffer("s", torch.tensor(0.0))

    def forward(self, x):
        now = x.detach().abs().max() / 7 + 1e-6
        self.s.copy_(now if self.s == 0 else 0.9 * self.s + 0.1 * now)
        return F.linear(Fake.apply(x, self.s), Fake.apply(self.weight, self.weight.detach().abs().max() / 7), self.bias)

def build_model():
    return nn.Sequential(QLinear(D, D), nn.Tanh(), QLinear(D, D), nn.Tanh(), QLinear(D, D))
""",
    "prepare_qat": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    m.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(m.train())
""",
    "scripted_blocks": """
def build_model():
    return nn.Sequential(*[torch.jit.script(Block()) for _ in range(3)], nn.Linear(D, D))
""",
    "lazy_layers": """
def build_model():
    m = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(D))
    m(torch.randn(2, D))
    return m
""",
    "lazy_layers_not_run": """
def build_model():
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(D))
""",
    "sparse_embedding": """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, D, sparse=True)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(D, 3)

    def forward(self, ids):
        x = self.bag(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def build_model():
    return Bag()

def example_batch(n):
    return torch.randint(20, (n, 4)), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.1)
""",
    "embedding_max_norm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, D, max_norm=1.0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(D, 20)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def example_batch(n):
    ids = torch.randint(20, (n, 4))
    return ids, ids

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "compiled_part": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), torch.compile(Block(), backend="eager"), nn.Linear(D, D)

    def forward(self, x):
        return self.c(self.b(self.a(x)))
""",
    "normalized_weights_in_forward": """
class Ngpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(4)])

    def forward(self, x):
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))
        for layer in self.layers:
            x = F.normalize(x + layer(x), dim=1)
        return x

def build_model():
    return Ngpt()
""",
}
