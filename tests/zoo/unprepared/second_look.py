"""Models of the other kinds, written after these had been tried: rarer ways to share, toggle, draw and return."""

__all__ = ["MODELS"]

_BLOCKS = """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
"""

MODELS = {
    "optimizer_of_a_global_model": """
NETS = []

def build_model():
    NETS[:] = [nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))]
    return NETS[0]

def build_optimizer(ps):
    net = NETS[0]
    return torch.optim.AdamW([
        {"params": net[:2].parameters(), "lr": 1e-3},
        {"params": net[2:].parameters(), "lr": 3e-2},
    ])
""",
    "optimizer_groups_by_identity": """
NETS = []

def build_model():
    NETS[:] = [nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))]
    return NETS[0]

def build_optimizer(ps):
    ps = list(ps)
    linear = {id(p) for m in NETS[0].modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    return torch.optim.AdamW([
        {"params": [p for p in ps if id(p) in linear], "weight_decay": 0.5, "lr": 1e-2},
        {"params": [p for p in ps if id(p) not in linear], "weight_decay": 0.0, "lr": 3e-2},
    ])
""",
    "optimizer_hook_clips": _BLOCKS
    + """
def build_optimizer(ps):
    ps = list(ps)
    opt = torch.optim.AdamW(ps, lr=1e-2)
    opt.register_step_pre_hook(lambda o, a, k: nn.utils.clip_grad_norm_(ps, 0.05) and None)
    return opt
""",
    "scheduler_by_step_hook": _BLOCKS
    + """
def build_optimizer(ps):
    opt = torch.optim.SGD(ps, lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=4)
    opt.register_step_post_hook(lambda o, a, k: rates.step())
    return opt
""",
    "optimizer_freezes_in_turns": """
class Turns(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.n = getattr(self, "n", 0) + 1
        for i, p in enumerate(p for g in self.param_groups for p in g["params"]):
            p.requires_grad_((self.n // 3 + i) % 2 == 0)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Turns(ps, lr=0.05)
""",
    "optimizer_freezes_the_first_stage_late": """
class Late(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.n = getattr(self, "n", 0) + 1
        if self.n == 5:
            for p in self.param_groups[0]["params"]:
                p.requires_grad_(False)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    ps = list(ps)
    return Late([{"params": ps[:8]}, {"params": ps[8:]}], lr=0.05)
""",
    "two_optimizers_in_one": _BLOCKS
    + """
class Both(torch.optim.Optimizer):
    def __init__(self, ps):
        ps = list(ps)
        super().__init__(ps, {})
        self.parts = [
            torch.optim.SGD([p for p in ps if p.ndim > 1], lr=0.05, momentum=0.9),
            torch.optim.Adam([p for p in ps if p.ndim < 2], lr=1e-2),
        ]

    def step(self, closure=None):
        for part in self.parts:
            part.step()

def build_optimizer(ps):
    return Both(ps)
""",
    "optimizer_is_no_optimizer": _BLOCKS
    + """
class Plain:
    def __init__(self, ps):
        self.ps = list(ps)

    def zero_grad(self):
        for p in self.ps:
            p.grad = None

    def step(self):
        with torch.no_grad():
            for p in self.ps:
                p -= 0.05 * p.grad

def build_optimizer(ps):
    return Plain(ps)
""",
    "accumulates_over_two_steps": """
class Every(torch.optim.SGD):
    def step(self, closure=None):
        self.n = getattr(self, "n", 0) + 1
        if self.n % 2 == 0:
            super().step(closure)

    def zero_grad(self, set_to_none=True):
        if getattr(self, "n", 0) % 2 == 0:
            super().zero_grad(set_to_none)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Every(ps, lr=0.05)
""",
    "shared_generator_of_dropouts": """
class Drop(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.block, self.g = Block(), g

    def forward(self, x):
        return self.block(x) * (torch.rand(x.shape, generator=self.g) < 0.8) / 0.8

def build_model():
    g = torch.Generator().manual_seed(0)
    return nn.Sequential(Drop(g), Drop(g), Drop(g), nn.Linear(D, D))
""",
    "shared_numpy_generator": """
class Drop(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.block, self.rng = Block(), rng

    def forward(self, x):
        return self.block(x) * torch.from_numpy(self.rng.random(tuple(x.shape)) < 0.8).to(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rng = np.random.RandomState(4)
        self.blocks = nn.ModuleList([Drop(rng) for _ in range(4)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x
""",
    "tied_across_three_with_a_transpose": """
class In(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return torch.tanh(x @ self.w)

class Out(In):
    def forward(self, x):
        return torch.tanh(x @ self.w.t())

def build_model():
    w = nn.Parameter(torch.randn(D, D) / 3)
    return nn.Sequential(In(w), Block(), Out(w), Block(), In(w))
""",
    "buffer_is_a_view_of_another": """
class Stat(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", mean)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        y = self.lin(x)
        y = torch.cat([y[:, : len(self.mean)] - self.mean, y[:, len(self.mean) :]], 1)
        self.mean.lerp_(x.detach().mean(0)[: len(self.mean)], 0.2)
        return torch.tanh(y)

def build_model():
    mean = torch.zeros(D)
    return nn.Sequential(Stat(mean), Block(), Stat(mean[:4]), Block())
""",
    "buffer_is_a_view_of_a_parameter": """
class Use(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.block = Block()
        self.register_buffer("first", first)

    def forward(self, x):
        return self.block(x) + 0.1 * self.first

def build_model():
    lin = nn.Linear(D, D)
    return nn.Sequential(lin, Block(), Use(lin.weight.data[0]), nn.Linear(D, D))
""",
    "attribute_is_the_weight_of_another": """
class Pull(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.lin, self.other = nn.Linear(D, D), [other]

    def forward(self, x):
        return torch.tanh(self.lin(x)) + 0.3 * F.linear(x, self.other[0].weight.detach())

def build_model():
    first = nn.Linear(D, D)
    return nn.Sequential(first, Block(), Pull(first), nn.Linear(D, D))
""",
    "parametrization_shared": """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.ones(D, 1))

    def forward(self, w):
        return w * self.s

def build_model():
    m = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    scale = Scale()
    for i in (0, 2, 4):
        nn.utils.parametrize.register_parametrization(m[i], "weight", scale)
    return m
""",
    "parametrization_cached": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        with nn.utils.parametrize.cached():
            for b in self.blocks:
                x = b(torch.tanh(self.lin(x)))
        return x
""",
    "ema_updated_by_an_optimizer_hook": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x):
        for b in self.body:
            x = b(x)
        return self.head(x) + 0.2 * self.slow(x)

NETS = []

def build_model():
    NETS[:] = [Net()]
    return NETS[0]

def build_optimizer(ps):
    opt = torch.optim.AdamW(ps, lr=1e-2)

    def average(*_):
        with torch.no_grad():
            for s, p in zip(NETS[0].slow.parameters(), NETS[0].head.parameters()):
                s.lerp_(p, 0.2)

    opt.register_step_post_hook(average)
    return opt
""",
    "hook_writes_a_buffer_of_another_block": """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("gate", torch.ones(D))

    def forward(self, x):
        return x + self.gate * torch.tanh(self.lin(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Gated() for _ in range(4)])
        last = self.blocks[3]
        def average(m, a, out):
            last.gate.lerp_(out.detach().abs().mean(0), 0.1)

        self.blocks[0].register_forward_hook(average)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x
""",
    "next_block_reads_an_attribute_of_the_former": """
class Chained(nn.Module):
    def __init__(self, former):
        super().__init__()
        self.lin, self.former, self.mean = nn.Linear(D, D), [former], torch.zeros(D)

    def forward(self, x):
        y = torch.tanh(self.lin(x))
        if self.former[0] is not None:
            y = y - 0.5 * self.former[0].mean
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return x + y

def build_model():
    blocks = [Chained(None)]
    for _ in range(3):
        blocks.append(Chained(blocks[-1]))
    return nn.Sequential(*blocks)
""",
    "toggles_requires_grad_in_forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.critic, self.out = nn.Sequential(Block(), Block()), Block(), nn.Linear(D, D)

    def forward(self, x):
        self.critic.requires_grad_(False)
        fake = self.critic(self.gen(x))
        self.critic.requires_grad_(True)
        real = self.critic(x)
        return self.out(fake) + real
""",
    "toggles_requires_grad_by_count": """
class Phase(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.n = nn.Linear(D, D), 0

    def forward(self, x):
        self.n += 1
        self.lin.weight.requires_grad_(self.n <= 20)
        return x + torch.tanh(self.lin(x))

def build_model():
    return nn.Sequential(Phase(), Block(), Phase(), Block())
""",
    "training_dependent_counter_detaches": """
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def forward(self, x):
        if self.training:
            self.n += 1
        y = self.block(x)
        return x + (y - x).detach() if self.n % 9 == 0 else y

def build_model():
    return nn.Sequential(Sometimes(), Block(), Sometimes(), nn.Linear(D, D))
""",
    "evaluates_itself_in_forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3)])
        self.head = nn.Linear(D, D)

    def run(self, x):
        for b in self.body:
            x = b(x)
        return self.head(x)

    def forward(self, x):
        self.eval()
        with torch.no_grad():
            soft = self.run(x)
        self.train()
        return self.run(x) + 0.1 * soft
""",
    "parameter_created_in_forward": """
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = None
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        if self.gain is None:
            self.gain = nn.Parameter(torch.ones(x.shape[-1]))
        return x + self.gain * torch.tanh(self.lin(x))

def build_model():
    m = nn.Sequential(Lazy(), Block(), Lazy(), Block())
    m(torch.zeros(2, D))
    return m
""",
    "parameter_created_in_the_first_forward": """
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_parameter("gain", None)

    def forward(self, x):
        if self.gain is None:
            self.gain = nn.Parameter(torch.ones(x.shape[-1]))
        return x + self.gain * torch.tanh(self.lin(x))

def build_model():
    return nn.Sequential(Lazy(), Block(), Lazy(), Block())
""",
    "checkpoint_reentrant_with_dropout": """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(4)])
        self.inp = nn.Linear(D, D)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=True)
        return x
""",
    "checkpoint_sequential_over_a_counter": """
from torch.utils.checkpoint import checkpoint_sequential

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.body = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, x):
        return checkpoint_sequential(self.body, 2, self.inp(x), use_reentrant=False)
""",
    "func_grad_in_a_block": """
class Step(OneLinear):
    def forward(self, x):
        energy = lambda v: torch.tanh(F.linear(v, self.lin.weight, self.lin.bias)).pow(2).sum()
        return x - 0.1 * torch.func.vmap(torch.func.grad(energy))(x)

def build_model():
    return nn.Sequential(Step(), Block(), Step(), nn.Linear(D, D))
""",
    "func_jvp_in_a_model": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.a(x)
        y, t = torch.func.jvp(lambda v: torch.tanh(self.b.up(v)), (h,), (torch.ones_like(h),))
        return self.c(torch.cat([self.b.down(y), t[:, :D]], 1))
""",
    "supervised_contrastive": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.project = nn.Sequential(Block(), Block(), Block()), nn.Linear(D, 4)

    def forward(self, x):
        return F.normalize(self.project(self.body(x)), dim=1)

def example_batch(n):
    return torch.randn(n, D), torch.randint(3, (n,))

def loss_fn(z, y):
    s = (z @ z.t()) / 0.5
    same = (y[:, None] == y[None]).float().fill_diagonal_(0)
    logp = s - torch.logsumexp(s, 1, keepdim=True)
    return -(same * logp).sum() / same.sum().clamp(min=1)
""",
    "loss_draws_random_numbers": _BLOCKS
    + """
def loss_fn(out, y):
    keep = torch.rand(out.shape[1]) < 0.7
    return ((out - y) ** 2 * keep).mean() + 0.01 * random.random() * out.pow(2).mean()
""",
    "loss_from_attributes_of_modules": """
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.gate, self.balance = Block(), nn.Linear(D, 2), None

    def forward(self, x):
        w = torch.softmax(self.gate(x), 1)
        self.balance = w.mean(0).pow(2).sum()
        return x + w[:, :1] * self.block(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x):
        for e in self.experts:
            x = e(x)
        return {"out": x, "aux": sum(m.balance for m in self.modules() if isinstance(m, Expert))}

def loss_fn(out, y):
    return F.mse_loss(out["out"], y) + 0.1 * out["aux"]
""",
    "loss_object_with_the_model": """
NETS = []

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm = Block(), None

    def forward(self, x):
        x = self.block(x)
        self.norm = float(x.detach().pow(2).mean())
        return x

def build_model():
    NETS[:] = [nn.Sequential(Expert(), Expert(), Expert(), nn.Linear(D, D))]
    return NETS[0]

def loss_fn(out, y):
    return F.mse_loss(out, y) * (1 + NETS[0][0].norm)
""",
}
