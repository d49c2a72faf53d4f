"""Models that draw random numbers: of torch, of NumPy, of Python, of generators of their own."""

__all__ = ["MODELS"]

MODELS = {
    "dropout": """
def build_model():
    return nn.Sequential(*[nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(3)], nn.Linear(D, D))
""",
    "stochastic_depth_python": """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])

    def forward(self, x):
        for b in self.blocks:
            if not self.training or random.random() < 0.8:
                x = b(x)
        return x

def build_model():
    return Deep()
""",
    "stochastic_depth_in_block": """
class Drop(Block):
    def forward(self, x):
        keep = float(random.random() < 0.7)
        return x + keep * (super().forward(x) - x)

def build_model():
    return nn.Sequential(Drop(), Drop(), Drop(), nn.Linear(D, D))
""",
    "stochastic_depth_per_sample": """
class Path(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.block, self.p = Block(), p

    def forward(self, x):
        keep = torch.empty(len(x), 1).bernoulli_(1 - self.p) / (1 - self.p)
        return x + keep * (self.block(x) - x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleList([Path(0.1 * i) for i in range(1, 5)])

    def forward(self, x):
        for p in self.paths:
            x = p(x)
        return x
""",
    "numpy_mask": """
class Masked(OneLinear):
    def forward(self, x):
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.8).to(x)
        return torch.tanh(self.lin(x * mask)) + x

def build_model():
    return nn.Sequential(Masked(), Block(), Masked(), nn.Linear(D, D))
""",
    "numpy_spans": """
class SpecAugment(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.body, self.out = nn.Linear(4, D), nn.ModuleList([Block(), Block()]), nn.Linear(D, 4)
        self.mask = nn.Parameter(torch.randn(D))

    def forward(self, x):
        h = self.inp(x)
        starts = np.random.randint(0, x.shape[1] - 2, size=len(x))
        spans = np.zeros(x.shape[:2], dtype=bool)
        for i, s in enumerate(starts):
            spans[i, s : s + 2] = True
        h = torch.where(torch.from_numpy(spans)[..., None], self.mask, h)
        for b in self.body:
            h = b(h)
        return self.out(h)

def build_model():
    return SpecAugment()

def example_batch(n):
    x = torch.randn(n, 7, 4)
    return x, x.clone()
""",
    "batch_of_python_and_numpy": """
def example_batch(n):
    x = torch.from_numpy(np.random.randn(n, D)).float()
    x[:, random.randrange(D)] = 0
    return x, torch.tanh(x.flip(1))

def build_model():
    return nn.Sequential(*(Block() for _ in range(4)))
""",
    "own_torch_generator": """
class Noise(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.g = torch.Generator().manual_seed(seed)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.g)

def build_model():
    return nn.Sequential(Block(), Noise(1), Block(), Noise(2), nn.Linear(D, D))
""",
    "own_numpy_generator": """
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng, self.lin = np.random.default_rng(5), nn.Linear(D, D)

    def forward(self, x):
        return self.lin(x) + 0.1 * torch.from_numpy(self.rng.normal(size=tuple(x.shape))).to(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.c = Block(), Noise(), Block(), nn.Linear(D, D)

    def forward(self, x):
        return self.c(self.b(self.n(self.a(x))))
""",
    "own_python_generator": """
class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.r, self.ways = random.Random(3), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x):
        return x + 0.3 * self.ways[self.r.randrange(3)](x)

def build_model():
    return nn.Sequential(Choice(), Block(), Choice(), Block())
""",
    "vae": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.lv, self.dec = Block(), nn.Linear(D, 3), nn.Linear(D, 3), nn.Linear(3, D)
        self.post = Block()

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.post(self.dec(z)), mu, lv

def build_model():
    return VAE()

def loss_fn(out, y):
    x, mu, lv = out
    return F.mse_loss(x, y) + 0.1 * (mu**2 + lv.exp() - lv - 1).mean()
""",
    "gumbel_codes": """
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.logits, self.table, self.b = Block(), nn.Linear(D, 6), nn.Linear(6, D, bias=False), Block()

    def forward(self, x):
        x = self.a(x)
        return self.b(x + self.table(F.gumbel_softmax(self.logits(x), tau=1.0)))

def build_model():
    return Codes()
""",
    "masked_autoencoder": """
class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.enc = nn.Linear(4, D), nn.ModuleList([Block(), Block()])
        self.mask, self.dec, self.out = nn.Parameter(torch.zeros(D)), Block(), nn.Linear(D, 4)

    def forward(self, x):
        n, t, _ = x.shape
        order = torch.rand(n, t).argsort(1)
        keep = order[:, : t // 2]
        h = self.emb(x).gather(1, keep[..., None].expand(-1, -1, D))
        for b in self.enc:
            h = b(h)
        full = self.mask.expand(n, t, D).scatter(1, keep[..., None].expand(-1, -1, D), h)
        return self.out(self.dec(full))

def build_model():
    return MAE()

def example_batch(n):
    x = torch.randn(n, 6, 4)
    return x, x
""",
    "mixup_in_forward": """
class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(D, D)

    def forward(self, x):
        lam = np.random.beta(0.4, 0.4)
        h = self.a(x)
        h = lam * h + (1 - lam) * h[torch.randperm(len(x))]
        return self.c(self.b(h))

def build_model():
    return Mix()
""",
    "drop_connect": """
class DropConnect(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.1, self.training), self.bias)

def build_model():
    return nn.Sequential(DropConnect(D, D), nn.RReLU(), DropConnect(D, D), nn.AlphaDropout(0.1), DropConnect(D, D))
""",
    "one_mask_for_all_layers": """
class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        mask = torch.bernoulli(torch.full((len(x), D), 0.8)) / 0.8
        for layer in self.layers:
            x = torch.tanh(layer(x * mask)) + x
        return x

def build_model():
    return Variational()
""",
    "seed_set_in_forward": """
class Fixed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.lin, self.seed = nn.Linear(D, D), seed

    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            p = torch.randn(D, D) / D**0.5
        return self.lin(torch.tanh(x @ p)) + x

def build_model():
    return nn.Sequential(Fixed(0), Block(), Fixed(1), nn.Dropout(0.1), nn.Linear(D, D))
""",
    "random_window": """
class Crops(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(3, D, 3, padding=1), nn.Conv1d(D, D, 3, padding=1), nn.Linear(D, 3)

    def forward(self, x):
        s = random.randint(0, 4)
        h = torch.relu(self.a(x.roll(s, 2)))
        return self.c(torch.relu(self.b(h)).mean(2))

def build_model():
    return Crops()

def example_batch(n):
    x = torch.randn(n, 3, 8)
    return x, x.mean(2)
""",
    "imports_functions_of_random": """
from random import randrange, uniform

class Jitter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + uniform(0.9, 1.1) * torch.tanh(self.lin(x.roll(randrange(D), 1)))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Jitter(), Block(), Jitter(), nn.Linear(D, D))
""",
    "noise_changed_in_place": """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        noise = torch.randn_like(x)
        noise += 0.1 * torch.randn(len(x), 1)
        for block in self.blocks:
            x = block(x + noise)
        return x - noise

def build_model():
    return Noisy()
""",
}
