"""Models in which samples of a micro-batch depend on each other, so that one sample alone shows little or nothing."""

__all__ = ["MODELS"]

_CONTRASTIVE = """
def example_batch(n):
    return torch.randn(n, D), torch.randn(n, D)

def loss_fn(out, y):
    logits = F.normalize(out, dim=1) @ F.normalize(y, dim=1).t() / 0.2
    return F.cross_entropy(logits, torch.arange(len(out)))
"""

MODELS = {
    "permutation_in_a_global_for_the_loss": """
ORDER = {"of": slice(None)}

class Mix(nn.Module):
    def forward(self, x):
        ORDER["of"] = torch.randperm(len(x))
        return x.lerp(x[ORDER["of"]], 0.3)

def build_model():
    return nn.Sequential(Block(), Mix(), Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    return F.mse_loss(out, y.lerp(y[ORDER["of"]], 0.3))
""",
    "permutation_in_a_global_for_a_block": """
ORDER = [slice(None)]

class Shuffle(nn.Module):
    def forward(self, x):
        ORDER[0] = torch.randperm(len(x))
        return x[ORDER[0]]

class Unshuffle(nn.Module):
    def forward(self, x):
        order = ORDER[0]
        return x if isinstance(order, slice) else x[order.argsort()]

def build_model():
    return nn.Sequential(Block(), Shuffle(), Block(), Block(), Unshuffle(), nn.Linear(D, D))
""",
    "center_of_batches_in_a_global": """
CENTER = {"mean": 0.0}

class Centered(OneBlock):
    def forward(self, x):
        if len(x) > 1:
            CENTER["mean"] = 0.9 * CENTER["mean"] + 0.1 * x.detach().mean(0)
        return self.block(x - CENTER["mean"])

def build_model():
    return nn.Sequential(Centered(), Block(), Centered(), nn.Linear(D, D))
""",
    "contrastive_with_a_global_scale": """
SCALE = {"of": torch.ones(())}

class Scaled(OneBlock):
    def forward(self, x):
        SCALE["of"] = 0.5 * SCALE["of"] + 0.5 * x.detach().abs().mean()
        return self.block(x) * SCALE["of"] + 0.5

def build_model():
    return nn.Sequential(Scaled(), Block(), Scaled(), nn.Linear(D, D))
"""
    + _CONTRASTIVE,
    "contrastive_with_a_class_attribute": """
class Gate(OneBlock):
    last = None

    def forward(self, x):
        y = self.block(x)
        if Gate.last is not None:
            y = y + torch.tanh(3 * Gate.last)
        Gate.last = y.detach().mean(0)
        return y

def build_model():
    return nn.Sequential(*[Gate() for _ in range(4)])
"""
    + _CONTRASTIVE,
    "standardized_by_the_batch": """
class Standard(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()

def build_model():
    return nn.Sequential(nn.Linear(D, D), Standard(), Block(), Standard(), nn.Linear(D, D))
""",
    "attention_over_the_batch": """
class Across(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        h = self.norm(x)[:, None]
        return x + self.attn(h, h, h)[0][:, 0]

def build_model():
    return nn.Sequential(Across(), Block(), Across(), nn.Linear(D, D))
""",
    "memory_bank_of_half_a_batch": """
class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("bank", torch.randn(6, D))

    def forward(self, x):
        near = torch.softmax(self.lin(x) @ self.bank.t(), 1) @ self.bank
        half = len(x) // 2
        if half:
            self.bank = torch.cat([self.bank[half:], x.detach()[:half]])
        return x + near

def build_model():
    return nn.Sequential(Block(), Bank(), Block(), Bank(), nn.Linear(D, D))
""",
    "squeezes_everything": """
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, 1)

    def forward(self, x):
        return self.lin(x).squeeze()

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.pool, self.out = Block(), Block(), Pool(), nn.Linear(D, D)

    def forward(self, x):
        h = self.b(self.a(x))
        w = torch.softmax(self.pool(h), 0)
        return self.out((h.t() * w).t() * len(x))

def build_model():
    return Weighted()
""",
    "hardest_samples_only": """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    each = (out - y).pow(2).mean(1)
    return each.topk(max(1, len(each) // 2)).values.mean()
""",
    "ranking_of_neighbors": """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, 1))

def example_batch(n):
    x = torch.randn(n, D)
    return x, x.sum(1)

def loss_fn(out, y):
    s, t = out[:, 0], y
    return F.softplus(-(s[:-1] - s[1:]) * (t[:-1] - t[1:]).sign()).sum() / max(1, len(s) - 1)
""",
    "experts_with_a_capacity": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList([nn.Linear(D, D) for _ in range(2)])
        self.register_buffer("load", torch.zeros(2))
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x):
        p = torch.softmax(self.gate(x) + self.bias, 1)
        top, room = p.argmax(1), max(1, len(x) // 2)
        y = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            m = (top == i).nonzero().flatten()[:room]
            y = y.index_put((m,), e(x[m]) * p[m, i : i + 1])
            self.load[i] += len(m)
        self.bias -= 0.01 * (self.load - self.load.mean()).sign()
        return x + y

def build_model():
    return nn.Sequential(Experts(), Block(), Experts(), Block(), nn.Linear(D, D))
""",
    "sorts_the_batch_by_length": """
class Sort(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(10, D), nn.GRU(D, D, batch_first=True)
        self.mid, self.out = Block(), nn.Linear(D, 3)

    def forward(self, ids, sizes):
        order = sizes.argsort(descending=True, stable=True)
        packed = nn.utils.rnn.pack_padded_sequence(self.emb(ids[order]), sizes[order], batch_first=True)
        last = self.rnn(packed)[1][-1]
        return self.out(self.mid(last[order.argsort()]))

def build_model():
    return Sort()

def example_batch(n):
    return (torch.randint(10, (n, 6)), torch.randint(1, 7, (n,))), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
}
