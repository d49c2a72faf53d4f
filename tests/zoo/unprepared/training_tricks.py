"""Models that change how they are trained from within: freezing, warm-up, averaging, penalties, clipping."""

__all__ = ["MODELS"]

MODELS = {
    "unfreezes_gradually": """
class Gradual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head, self.n = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D), 0
        self.blocks.requires_grad_(False)

    def forward(self, x):
        self.n += 1
        if self.n == 16:
            self.blocks.requires_grad_(True)
        for b in self.blocks:
            x = b(x)
        return self.head(x)

def build_model():
    return Gradual()
""",
    "detaches_every_other_time": """
class Alternates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.even = Block(), Block(), nn.Linear(D, D), True

    def forward(self, x):
        h = self.b(self.a(x))
        self.even = not self.even
        return self.c(h.detach() if self.even else h)

def build_model():
    return Alternates()
""",
    "weights_clamped_in_forward": """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.clamp_(-0.2, 0.2)
            x = F.leaky_relu(layer(x))
        return x

def build_model():
    return Critic()
""",
    "weight_noise_taken_back": """
class Noisy(OneLinear):
    def forward(self, x):
        w = self.lin.weight + 0.02 * torch.randn_like(self.lin.weight)
        return x + torch.tanh(F.linear(x, w, self.lin.bias))

def build_model():
    return nn.Sequential(*[Noisy() for _ in range(4)])
""",
    "moving_average_evaluated": """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), nn.Linear(D, D))
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def forward(self, x):
        if self.training:
            self.average.update_parameters(self.net)
        return self.net(x)

def build_model():
    return Averaged()
""",
    "target_network_by_count": """
class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.n = nn.Sequential(Block(), nn.Linear(D, D)), 0
        self.target, self.out = copy.deepcopy(self.online).requires_grad_(False), nn.Linear(D, D)

    def forward(self, x):
        self.n += 1
        if self.n % 8 == 0:
            self.target.load_state_dict(self.online.state_dict())
        with torch.no_grad():
            t = self.target(x)
        return self.out(self.online(x)) + 0.1 * t

def build_model():
    return Target()
""",
    "switches_dropout_off": """
class Schedule(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.drop, self.calls = nn.ModuleList([Block() for _ in range(3)]), nn.Dropout(0.5), 0

    def forward(self, x):
        self.calls += 1
        self.drop.p = 0.5 * 0.9**self.calls
        for b in self.blocks:
            x = self.drop(b(x))
        return x

def build_model():
    return Schedule()
""",
    "reads_its_own_gradient": """
class Reads(OneLinear):
    def forward(self, x):
        g = self.lin.weight.grad
        scale = 1.0 if g is None else 1 / (1 + float(g.norm()))
        return x + scale * torch.tanh(self.lin(x))

def build_model():
    return nn.Sequential(Reads(), Block(), Reads(), Block())
""",
    "growing_width": """
class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.active = nn.Linear(D, D), 2
        self.register_buffer("mask", torch.zeros(D))

    def forward(self, x):
        self.mask[: self.active] = 1
        self.active = min(D, self.active + 1)
        return x + torch.tanh(self.lin(x)) * self.mask

def build_model():
    return nn.Sequential(Grows(), Block(), Grows(), nn.Linear(D, D))
""",
    "reversible_halves": """
class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(D // 2, D // 2), nn.Linear(D // 2, D // 2)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        a = a + torch.tanh(self.f(b))
        b = b + torch.tanh(self.g(a))
        return torch.cat([b, a], 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([Coupling() for _ in range(4)])

    def forward(self, x):
        log = x.new_zeros(len(x))
        for s in self.steps:
            x = s(x)
            log = log + x.pow(2).mean(1)
        return x, log

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + 0.01 * out[1].mean()
""",
    "attention_with_memory_tokens": """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.register_buffer("memory", torch.zeros(3, D), persistent=False)

    def forward(self, x):
        seen = torch.cat([x, self.memory.expand(len(x), -1, -1)], 1)
        k, v = self.kv(seen).chunk(2, -1)
        y = torch.softmax(self.q(x) @ k.transpose(1, 2) / D**0.5, -1) @ v
        self.memory = torch.cat([self.memory[1:], y.detach().mean((0, 1))[None]])
        return x + self.out(y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Memory(), Memory(), Memory()]), nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def example_batch(n):
    x = torch.randn(n, 4, D)
    return x, x.flip(1)
""",
    "loss_scaled_by_depth_of_call": """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        for b in self.blocks:
            x = b(x)
        return self.out(x), 1 / self.seen.float().sqrt()

def build_model():
    return Counted()

def loss_fn(out, y):
    return F.mse_loss(out[0], y) * out[1]
""",
}
