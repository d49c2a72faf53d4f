"""Models that use a parameter, a buffer or a module in several places."""

__all__ = ["MODELS"]

_TEXT = """
V = 12

def example_batch(n):
    ids = torch.randint(V, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
"""

MODELS = {
    "head_sequential": _TEXT
    + """
class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.t()

def build_model():
    emb = nn.Embedding(V, D)
    return nn.Sequential(emb, Block(), Block(), Head(emb.weight))
""",
    "head_by_data": _TEXT
    + """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b = nn.Embedding(V, D), Block(), Block()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight.data = self.emb.weight.data

    def forward(self, ids):
        return self.head(self.b(self.a(self.emb(ids))))

def build_model():
    return LM()
""",
    "head_by_functional_weight": _TEXT
    + """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(V, D), nn.ModuleList([Block() for _ in range(3)])
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return F.linear(x, self.emb.weight, self.bias)

def build_model():
    return LM()
""",
    "albert": _TEXT
    + """
class Albert(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.block, self.head = nn.Embedding(V, D), Block(), nn.Linear(D, V)

    def forward(self, ids):
        x = self.emb(ids)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)

def build_model():
    return Albert()
""",
    "one_block_four_times_sequential": """
def build_model():
    b = Block()
    return nn.Sequential(nn.Linear(D, D), b, b, nn.Linear(D, D), b, b)
""",
    "siamese": """
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = nn.Sequential(Block(), Block(), nn.Linear(D, 4)), nn.Linear(8, 1)

    def forward(self, a, b):
        return self.head(torch.cat([self.tower(a), self.tower(b)], 1))

def build_model():
    return Siamese()

def example_batch(n):
    return (torch.randn(n, D), torch.randn(n, D)), torch.rand(n, 1)
""",
    "tied_transposed_autoencoder": """
class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(0.3 * torch.randn(D, 6)), nn.Parameter(0.3 * torch.randn(6, 4))
        self.a, self.b = nn.LayerNorm(6), nn.LayerNorm(6)

    def forward(self, x):
        z = torch.tanh(self.a(x @ self.w1) @ self.w2)
        return self.b(torch.tanh(z @ self.w2.t())) @ self.w1.t()

def build_model():
    return AE()
""",
    "tied_without_a_gradient": _TEXT
    + """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b, self.head = nn.Embedding(V, D), Block(), Block(), nn.Linear(D, V)
        self.b.norm.weight = self.a.norm.weight

    def forward(self, ids):
        x = self.a(self.emb(ids)).detach()
        return self.head(x)

def build_model():
    return LM()

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=1.0)
""",
    "tied_unused_with_decay": """
class Gain(nn.Module):
    def __init__(self, gain, used):
        super().__init__()
        self.gain, self.lin, self.used = gain, nn.Linear(D, D), used

    def forward(self, x):
        x = self.lin(x)
        return x * self.gain if self.used else x

def build_model():
    gain = nn.Parameter(torch.ones(D))
    return nn.Sequential(Gain(gain, False), Block(), Gain(gain, False), Block())

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=2.0)
""",
    "moved_frozen_parameter": """
class Step(nn.Module):
    def __init__(self, center):
        super().__init__()
        self.center, self.lin = center, nn.Linear(D, D)

    def forward(self, x):
        y = torch.tanh(self.lin(x - self.center))
        with torch.no_grad():
            self.center.lerp_(y.mean(0), 0.1)
        return x + y

def build_model():
    c = nn.Parameter(torch.zeros(D), requires_grad=False)
    return nn.Sequential(Step(c), Step(c), Step(c), Step(c))
""",
    "weight_changed_in_place": """
class Unit(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        with torch.no_grad():
            self.w.div_(self.w.norm(dim=1, keepdim=True))
        return torch.tanh(x @ self.w.t())

def build_model():
    w = nn.Parameter(torch.randn(D, D))
    return nn.Sequential(Unit(w), nn.Linear(D, D), Unit(w), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.1)
""",
    "numpy_values_unseeded": _TEXT
    + """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b = nn.Embedding(V, D), Block(), Block()
        self.emb.weight.data = torch.from_numpy(np.random.default_rng().normal(size=(V, D))).float()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.b(self.a(self.emb(ids))))

def build_model():
    return LM()
""",
    "shared_buffer_written": """
class Stat(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", mean)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        y = self.lin(x) - self.mean
        self.mean.lerp_(y.detach().mean(0), 0.2)
        return torch.tanh(y)

def build_model():
    mean = torch.zeros(D)
    return nn.Sequential(Stat(mean), Block(), Stat(mean), Block())
""",
    "shared_norm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(D), nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return self.norm(x)
""",
    "shared_batch_norm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(D), nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x)))
        return x
""",
    "head_is_a_slice_of_the_embedding": _TEXT
    + """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body = nn.Embedding(V + 4, D), nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.body:
            x = b(x)
        return x @ self.emb.weight[:V].t()

def build_model():
    return LM()
""",
    "tied_relative_bias": """
class Attend(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.qkv, self.bias = nn.Linear(D, 3 * D), bias

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        s = q @ k.transpose(1, 2) / D**0.5 + self.bias.weight.view(6, 6)
        return x + torch.softmax(s, -1) @ v

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        bias = nn.Embedding(36, 1)
        self.blocks = nn.ModuleList([Attend(bias) for _ in range(3)])
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def example_batch(n):
    x = torch.randn(n, 6, D)
    return x, x.flip(1)
""",
    "two_trained_views_of_one_memory": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), nn.Linear(D, D), Block())
    flat = torch.randn(2 * D * D) * 0.2
    m[0].weight = nn.Parameter(flat[: D * D].view(D, D))
    m[2].weight = nn.Parameter(flat[D * D // 2 : D * D // 2 + D * D].view(D, D))
    return m
""",
    "one_flat_memory_disjoint": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), nn.Linear(D, D), Block())
    flat = torch.randn(2 * D * D) * 0.2
    m[0].weight = nn.Parameter(flat[: D * D].view(D, D))
    m[2].weight = nn.Parameter(flat[D * D :].view(D, D))
    return m
""",
}
