"""Models with state outside of modules: module-level variables, class attributes, closures, caches."""

__all__ = ["MODELS"]

MODELS = {
    "count_in_blocks": """
CALLS = 0

class Counted(OneLinear):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return x + self.lin(x) / math.sqrt(CALLS)

def build_model():
    return nn.Sequential(*[Counted() for _ in range(4)])
""",
    "count_in_shared_memory": """
import multiprocessing

class B(nn.Module):
    def __init__(self, v):
        super().__init__()
        self.v, self.l = v, nn.Linear(D, D)
    def forward(self, x):
        self.v.value += 1
        return x + torch.tanh(self.l(x)) * (1.0 if self.v.value < 168 else 0.3)

def build_model():
    v = multiprocessing.Value("i", 0)
    return nn.Sequential(*[B(v) for _ in range(4)])
""",
    "count_in_one_layer": """
STEP = 0

class First(OneLinear):
    def forward(self, x):
        global STEP
        STEP += 1
        return self.lin(x) * min(1.0, 0.1 + STEP / 30)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = First(), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for b in self.rest:
            x = b(x)
        return x
""",
    "count_read_by_last_layer": """
CONFIG = {"step": 0}

class First(nn.Linear):
    def forward(self, x):
        CONFIG["step"] += 1
        return super().forward(x)

class Last(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + 1 / (1 + CONFIG["step"]))

def build_model():
    return nn.Sequential(First(D, D), Block(), Block(), Last(D, D))
""",
    "auxiliary_losses_in_a_list": """
AUX = []

class Noisy(OneLinear):
    def forward(self, x):
        y = self.lin(x)
        AUX.append(y.pow(2).mean())
        return x + torch.tanh(y)

def build_model():
    return nn.Sequential(Noisy(), Noisy(), Noisy(), nn.Linear(D, D))

def loss_fn(out, y):
    aux = sum(AUX)
    AUX.clear()
    return F.mse_loss(out, y) + 0.1 * aux
""",
    "auxiliary_losses_non_sequential": """
AUX = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
            AUX.append(x.abs().mean())
        return x

def loss_fn(out, y):
    total = F.mse_loss(out, y) + 0.05 * torch.stack(AUX).sum()
    AUX.clear()
    return total
""",
    "activations_by_name": """
SEEN = {}

class Keeps(Block):
    def forward(self, x):
        SEEN["skip"] = x
        return super().forward(x)

class Reads(Block):
    def forward(self, x):
        return super().forward(x) + 0.5 * SEEN["skip"]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = Keeps(), Block(), Reads(), nn.Linear(D, D)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))
""",
    "class_attribute_count": """
class Anneal(OneLinear):
    seen = 0

    def forward(self, x):
        Anneal.seen += len(x)
        return x + self.lin(x) * (1 + 0.5 ** (Anneal.seen / 50))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Anneal() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
    "closure_count_in_one_layer": """
def decaying():
    n = 0

    def apply(x):
        nonlocal n
        n += 1
        return x * (1 + 1 / n)

    return apply

class Decays(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(D, D), decaying()

    def forward(self, x):
        return torch.tanh(self.act(self.lin(x)))

def build_model():
    return nn.Sequential(Block(), Decays(), Block(), Decays())
""",
    "closure_count_shared": """
def build_model():
    n = [0]

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(D, D)

        def forward(self, x):
            n[0] += 1
            return x + self.lin(x) / n[0] ** 0.25

    return nn.Sequential(*[Shared() for _ in range(5)])
""",
    "mutable_default": """
class Window(OneLinear):
    def forward(self, x, past=[]):
        y = self.lin(x)
        past.append(float(y.detach().mean()))
        return x + y - sum(past[-4:]) / 4

def build_model():
    return nn.Sequential(Window(), Block(), Window(), Block())
""",
    "lru_cache_table": """
@functools.lru_cache
def table(t):
    p = torch.arange(t)[:, None] / 10.0 ** (torch.arange(D) / D)
    return p.sin()

class Positions(nn.Module):
    def forward(self, x):
        return x + table(x.shape[1])

def build_model():
    return nn.Sequential(nn.Embedding(10, D), Positions(), Block(), Positions(), Block(), nn.Linear(D, 10))

def example_batch(n):
    ids = torch.randint(10, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.transpose(1, 2), y)
""",
    "global_generator": """
G = torch.Generator().manual_seed(7)

class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=G)

def build_model():
    return nn.Sequential(Block(), Noise(), Block(), Noise(), nn.Linear(D, D))
""",
    "phase_flag_set_by_loss": """
PHASE = {"warm": True}
SEEN = []

class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(D, D)

    def forward(self, x):
        x = self.a(x)
        if not PHASE["warm"]:
            x = self.b(x)
        return self.c(x)

def build_model():
    return Switch()

def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    SEEN.append(float(loss.detach()))
    PHASE["warm"] = len(SEEN) < 12
    return loss
""",
}
