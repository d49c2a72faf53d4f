"""Models whose modules keep state from one forward to the next: buffers, plain attributes, counters, caches."""

__all__ = ["MODELS"]

MODELS = {
    "running_scale_attribute": """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(D, D), torch.ones(())

    def forward(self, x):
        x = self.lin(x) / self.scale
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
        return torch.tanh(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Scaled(), Block(), Scaled(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
    "running_scale_sequential": """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(D, D), torch.ones(())

    def forward(self, x):
        x = self.lin(x) / self.scale
        self.scale = 0.9 * self.scale + 0.1 * x.detach().pow(2).mean().sqrt()
        return torch.tanh(x)

def build_model():
    return nn.Sequential(Block(), Scaled(), Scaled(), Block())
""",
    "truncated_bptt": """
class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Linear(D, D), nn.GRUCell(D, D), nn.Linear(D, D)
        self.hidden = None

    def forward(self, x):
        h = torch.zeros_like(x) if self.hidden is None else self.hidden.detach()
        self.hidden = self.rnn(torch.tanh(self.emb(x)), h)
        return self.out(self.hidden)

def build_model():
    return Carried()
""",
    "truncated_bptt_buffer": """
class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid, self.rnn, self.out = nn.Linear(D, D), Block(), nn.GRUCell(D, D), nn.Linear(D, D)
        self.register_buffer("hidden", torch.zeros(D))

    def forward(self, x):
        h = self.rnn(self.mid(torch.tanh(self.emb(x))), self.hidden.expand_as(x))
        self.hidden = h.detach().mean(0)
        return self.out(h)

def build_model():
    return Carried()
""",
    "carried_rnn_blocks": """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(D, D)
        self.register_buffer("h", torch.zeros(1, D))

    def forward(self, x):
        y = self.cell(x, self.h.expand(len(x), -1))
        self.h = y.detach().mean(0, keepdim=True)
        return x + y

def build_model():
    return nn.Sequential(*[Cell() for _ in range(4)], nn.Linear(D, D))
""",
    "teacher_ema_in_forward": """
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(Block(), Block())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(2 * D, D)

    def forward(self, x):
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                t.lerp_(s, 0.1)
            soft = self.teacher(x)
        return self.head(torch.cat([self.student(x), soft], 1))

def build_model():
    return Mean()
""",
    "moco_queue": """
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleList([Block() for _ in range(3)])
        self.register_buffer("queue", F.normalize(torch.randn(16, D), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        for b in self.enc:
            x = b(x)
        q = F.normalize(x, dim=1)
        logits = q @ self.queue.clone().t()
        p = int(self.ptr)
        self.queue[p : p + len(x)] = q.detach()
        self.ptr[0] = (p + len(x)) % 16
        return logits

def build_model():
    return Queue()

def example_batch(n):
    return torch.randn(n, D), torch.randint(16, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out / 0.5, y)
""",
    "vector_quantizer": """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(12, D))
        self.register_buffer("sizes", torch.ones(12))

    def forward(self, x):
        i = torch.cdist(x.detach(), self.codes).argmin(1)
        q = self.codes[i]
        if self.training:
            hot = F.one_hot(i, 12).to(x)
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes += 0.1 * (hot.t() @ (x.detach() - q)) / self.sizes.clamp(min=1)[:, None]
        return x + (q - x).detach()

class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = Block(), VQ(), nn.Sequential(Block(), nn.Linear(D, D))

    def forward(self, x):
        return self.dec(self.vq(self.enc(x)))

def build_model():
    return AE()
""",
    "counter_top_of_forward": """
class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(D, D)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        w = min(1.0, self.calls / 20)
        x = self.a(x)
        return self.c(x + w * self.b(x))

def build_model():
    return Warm()
""",
    "counter_in_a_module_for_all_blocks": """
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self):
        self.n += self.training
        return (self.n / 20).clamp(max=1.0)

class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter, self.stem = Counter(), nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        w = self.counter().item()
        x = self.stem(x)
        for b in self.blocks:
            x = x + w * b(x)
        return x

def build_model():
    return Warm()
""",
    "counter_in_blocks": """
class Fading(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.lin, self.i, self.n = nn.Linear(D, D), i, 0

    def forward(self, x):
        self.n += 1
        return x + self.lin(x) / (self.i + math.sqrt(self.n))

def build_model():
    return nn.Sequential(*[Fading(i + 1) for i in range(4)])
""",
    "temperature_schedule": """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.experts = nn.Linear(D, 3), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x):
        w = torch.softmax(self.score(x) / self.temperature, 1)
        self.temperature = (0.97 * self.temperature).clamp(min=0.5)
        return x + sum(w[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gates, self.last = Block(), nn.ModuleList([Gate(), Gate()]), nn.Linear(D, D)

    def forward(self, x):
        x = self.first(x)
        for g in self.gates:
            x = x + 0.5 * g(x)
        return self.last(x)
""",
    "list_of_earlier_means": """
class History(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.past = nn.Linear(D, D), []

    def forward(self, x):
        y = torch.tanh(self.lin(x))
        if self.past:
            y = y - 0.1 * torch.stack(self.past[-3:]).mean(0)
        self.past.append(y.detach().mean(0))
        return y

def build_model():
    return nn.Sequential(Block(), History(), Block(), History(), nn.Linear(D, D))
""",
    "actnorm_data_init": """
class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc, self.logs = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.logs.copy_(-(x.std(0) + 1e-3).log())
                self.ready.fill_(True)
        return (x + self.loc) * self.logs.exp()

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([m for _ in range(3) for m in (ActNorm(), nn.Linear(D, D))])

    def forward(self, x):
        for s in self.steps:
            x = s(x)
        return x

def build_model():
    return Flow()
""",
    "first_call_flag": """
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out, self.mean = nn.ModuleList([Block(), Block()]), nn.Linear(D, D), None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        x = x - self.mean
        for b in self.body:
            x = b(x)
        return self.out(x)

def build_model():
    return Lazy()
""",
    "rotary_cache_by_length": """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache, self.q, self.v = {}, nn.Linear(D, D), nn.Linear(D, D)

    def table(self, t):
        if t not in self.cache:
            a = torch.arange(t)[:, None] / 10 ** (torch.arange(D // 2) / D)
            self.cache[t] = torch.cat([a.cos(), a.sin()], 1)
        return self.cache[t]

    def forward(self, x):
        q = self.q(x) * self.table(x.shape[1])
        return x + torch.softmax(q @ q.transpose(1, 2), 2) @ self.v(x)

def build_model():
    return nn.Sequential(nn.Embedding(16, D), Rotary(), Rotary(), Rotary(), nn.Linear(D, 16))

def example_batch(n):
    ids = torch.randint(16, (n, 6))
    return ids, ids.roll(-1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
}
