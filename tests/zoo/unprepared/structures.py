"""Models whose inputs, outputs and ways through them are out of the ordinary."""

__all__ = ["MODELS"]

MODELS = {
    "u_net": """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.mid = nn.Conv1d(2, 4, 3, 1, 1), nn.Conv1d(4, 8, 3, 2, 1), nn.Conv1d(8, 8, 3, 1, 1)
        self.u2, self.u1 = nn.ConvTranspose1d(16, 4, 4, 2, 1), nn.Conv1d(8, 2, 3, 1, 1)

    def forward(self, x):
        a = torch.relu(self.d1(x))
        b = torch.relu(self.d2(a))
        m = torch.relu(self.mid(b))
        u = torch.relu(self.u2(torch.cat([m, b], 1)))
        return self.u1(torch.cat([u, a], 1))

def build_model():
    return UNet()

def example_batch(n):
    x = torch.randn(n, 2, 8)
    return x, x.flip(2)
""",
    "experts_with_auxiliary_loss": """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x):
        p = self.gate(x).softmax(1)
        top = p.argmax(1)
        y = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            m = (top == i).nonzero().flatten()
            y = y.index_add(0, m, e(x[m]) * p[m, i : i + 1])
        balance = (F.one_hot(top, 3).float().mean(0) * p.mean(0)).sum() * 3
        return x + y, balance

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moes, self.out = Block(), nn.ModuleList([MoE(), MoE()]), nn.Linear(D, D)

    def forward(self, x):
        x, aux = self.inp(x), 0.0
        for m in self.moes:
            x, a = m(x)
            aux = aux + a
        return {"y": self.out(x), "aux": aux}

def loss_fn(out, y):
    return F.mse_loss(out["y"], y) + 0.01 * out["aux"]
""",
    "experts_auxiliary_attribute": """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.aux = nn.Linear(D, 2), nn.ModuleList([nn.Linear(D, D) for _ in range(2)]), None

    def forward(self, x):
        p = self.gate(x).softmax(1)
        self.aux = p.mean(0).pow(2).sum()
        return x + sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MoE(), Block(), MoE(), nn.Linear(D, D)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, sum(m.aux for m in self.layers if isinstance(m, MoE))

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + 0.1 * out[1]
""",
    "dict_inputs_dataclass_outputs": """
@dataclass
class Out:
    mean: torch.Tensor
    log_scale: torch.Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.num, self.cat = nn.Linear(4, D), nn.Embedding(5, D)
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(D, 2)

    def forward(self, numbers, category):
        x = self.num(numbers) + self.cat(category)
        for b in self.blocks:
            x = b(x)
        m, s = self.out(x).unbind(1)
        return Out(m, s)

def example_batch(n):
    return {"numbers": torch.randn(n, 4), "category": torch.randint(5, (n,))}, torch.randn(n)

def loss_fn(out, y):
    return (out.log_scale + 0.5 * ((y - out.mean) / out.log_scale.exp()) ** 2).mean()
""",
    "dataclass_between_blocks": """
@dataclass
class State:
    x: torch.Tensor
    memory: torch.Tensor
    depth: int

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.w = Block(), nn.Linear(D, D)

    def forward(self, s):
        m = torch.tanh(s.memory + self.w(s.x))
        return State(self.block(s.x) + m / (s.depth + 1), m, s.depth + 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.ModuleList([Cell() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        s = State(x, torch.zeros_like(x), 0)
        for c in self.cells:
            s = c(s)
        return self.out(s.x)
""",
    "named_tuples_sequential": """
Pair = namedtuple("Pair", "x y")

class Split(OneLinear):
    def forward(self, x):
        return Pair(self.lin(x), torch.tanh(x))

class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, p):
        return Pair(p.x + torch.tanh(self.a(p.y)), p.y + torch.tanh(self.b(p.x)))

class Join(nn.Module):
    def forward(self, p):
        return p.x * p.y

def build_model():
    return nn.Sequential(Split(), Cross(), Cross(), Join(), nn.Linear(D, D))
""",
    "checkpointed_blocks": """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.drop = nn.ModuleList([Block() for _ in range(4)]), nn.Dropout(0.1)

    def forward(self, x):
        for b in self.blocks:
            x = self.drop(checkpoint(b, x, use_reentrant=False))
        return x
""",
    "custom_functions": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = Block(), nn.Linear(D, D), Block(), nn.Linear(D, D)

    def forward(self, x):
        h = self.b(Sign.apply(self.a(x)))
        return self.c(h), self.d(Reverse.apply(h, 0.3))

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + F.mse_loss(out[1], -y)
""",
    "lstm_packed": """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(10, D, padding_idx=0), nn.LSTM(D, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(D, 10)

    def forward(self, ids):
        return self.head(self.lstm(self.emb(ids))[0])

def build_model():
    return Tagger()

def example_batch(n):
    ids = torch.randint(1, 10, (n, 6))
    ids[:, 4:] = 0
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.transpose(1, 2), y, ignore_index=0)
""",
    "hyper_network": """
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, D * D)
        self.post = Block()

    def forward(self, x):
        for w in self.make(self.code).view(3, D, D):
            x = x + torch.tanh(x @ w)
        return self.post(x)

def build_model():
    return Hyper()
""",
    "early_exit": """
class Exits(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.gates = nn.ModuleList([Block() for _ in range(3)]), nn.ModuleList(
            [nn.Linear(D, 1) for _ in range(3)]
        )

    def forward(self, x):
        out, left = torch.zeros_like(x), torch.ones(len(x), 1)
        for b, g in zip(self.blocks, self.gates):
            x = b(x)
            p = torch.sigmoid(g(x))
            out, left = out + left * p * x, left * (1 - p)
        return out + left * x

def build_model():
    return Exits()
""",
    "masks_and_integers_cross": """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(D, 2, batch_first=True), nn.LayerNorm(D)

    def forward(self, x, pad):
        return x + self.attn(self.norm(x), x, x, key_padding_mask=pad, need_weights=False)[0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, D)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(D, 3)

    def forward(self, ids, sizes):
        pad = torch.arange(ids.shape[1])[None] >= sizes[:, None]
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, pad)
        keep = (~pad)[..., None].to(x)
        return self.head((x * keep).sum(1) / sizes[:, None])

def example_batch(n):
    return (torch.randint(10, (n, 6)), torch.randint(1, 7, (n,))), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
    "in_place_everywhere": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        x = x * 1
        for layer in self.layers:
            y = layer(x)
            y += x
            y[:, 0] *= 0.5
            x = F.silu(y, inplace=True) if layer is self.layers[-1] else torch.tanh(y)
        return x
""",
    "sequential_in_place": """
def build_model():
    return nn.Sequential(
        nn.Linear(D, D),
        nn.ReLU(inplace=True),
        nn.Linear(D, D),
        nn.Dropout(0.1, inplace=True),
        nn.SiLU(inplace=True),
        nn.Linear(D, D),
    )
""",
    "complex_spectrum": """
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat) * 0.5)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=D)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Spectral(), Spectral(), Spectral()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
    "complex_crosses": """
class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.cfloat) * 0.3)

    def forward(self, z):
        return z + torch.tanh((z @ self.w).real)

class Into(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)

class Back(OneLinear):
    def forward(self, z):
        return self.lin(torch.fft.irfft(z, n=D))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Into(), Wave(), Wave(), Back())
""",
    "vmap_ensemble": """
class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = Block()
        self.w, self.b = nn.Parameter(0.3 * torch.randn(4, D, D)), nn.Parameter(torch.zeros(4, D))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        h = self.inp(x)
        y = torch.vmap(lambda w, b: torch.tanh(h @ w + b))(self.w, self.b)
        return self.out(y.mean(0))

def build_model():
    return Ensemble()
""",
    "functional_call_inner_step": """
class Maml(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre, self.fast, self.post = Block(), nn.Linear(D, D), Block()

    def forward(self, x):
        h = self.pre(x)
        ps = dict(self.fast.named_parameters())
        inner = (torch.func.functional_call(self.fast, ps, h) - h).pow(2).mean()
        gs = torch.autograd.grad(inner, list(ps.values()), create_graph=True)
        ps = {k: p - 0.1 * g for (k, p), g in zip(ps.items(), gs)}
        return self.post(torch.func.functional_call(self.fast, ps, h))

def build_model():
    return Maml()
""",
    "sparse_adjacency": """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        i = torch.arange(6)
        adj = torch.sparse_coo_tensor(torch.stack([i, (i + 1) % 6]), torch.ones(6), (6, 6)).coalesce()
        self.register_buffer("adj", adj)
        self.a, self.b, self.c = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 3)

    def mix(self, h):
        n = len(h)
        return torch.sparse.mm(self.adj, h.transpose(0, 1).reshape(6, -1)).view(6, n, -1).transpose(0, 1)

    def forward(self, x):
        h = torch.relu(self.a(self.mix(x)))
        return self.c(torch.relu(self.b(self.mix(h))))

def build_model():
    return Graph()

def example_batch(n):
    x = torch.randn(n, 6, 3)
    return x, x.roll(1, 1)
""",
    "fixed_point_iteration": """
class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.f, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.f.weight.data *= 0.3

    def forward(self, x):
        u = self.inp(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(50):
                new = torch.tanh(self.f(z) + u)
                if (new - z).abs().max() < 1e-4:
                    break
                z = new
        return self.out(torch.tanh(self.f(z) + u))

def build_model():
    return Equilibrium()
""",
    "skip_list": """
class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D * (i + 1), D) for i in range(4)])

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(torch.cat(seen, 1))))
        return seen[-1]

def build_model():
    return Dense()
""",
}
