"""Models whose state changes what they compute only after many forwards, later than a short check trains."""

__all__ = ["MODELS"]

_FOUR = """
def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
"""

_LATE = """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, {} = nn.Linear(D, D), {}

    def forward(self, x):
        {}
        return x + torch.tanh(self.lin(x)) * (1.0 if n <= 20 else 0.2)
"""

MODELS = {
    "dict_counter": _LATE.format("self.stats", '{"calls": 0}', 'self.stats["calls"] += 1; n = self.stats["calls"]')
    + _FOUR,
    "numpy_counter": _LATE.format("self.calls", "np.zeros(1, dtype=int)", "self.calls += 1; n = int(self.calls[0])")
    + _FOUR,
    "deque_length": _LATE.format(
        "self.past", "__import__('collections').deque(maxlen=50)", "self.past.append(1.0); n = len(self.past)"
    )
    + _FOUR,
    "iterator": _LATE.format("self.numbers", "iter(range(1, 10**6))", "n = next(self.numbers)") + _FOUR,
    "object_counter": """
class Clock:
    def __init__(self):
        self.ticks = 0
"""
    + _LATE.format("self.clock", "Clock()", "self.clock.ticks += 1; n = self.clock.ticks")
    + _FOUR,
    "object_shared": """
class Clock:
    def __init__(self):
        self.ticks = 0

class Late(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.lin, self.clock = nn.Linear(D, D), clock

    def forward(self, x):
        self.clock.ticks += 1
        return x + torch.tanh(self.lin(x)) * (1.0 if self.clock.ticks <= 40 else 0.2)

def build_model():
    clock = Clock()
    return nn.Sequential(Late(clock), Block(), Late(clock), Block())
""",
    "object_shared_in_a_model": """
class Clock:
    def __init__(self):
        self.ticks = 0

class Late(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.lin, self.clock = nn.Linear(D, D), clock

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * (1.0 if self.clock.ticks <= 20 else 0.2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.blocks = nn.ModuleList([Late(self.clock) for _ in range(4)])

    def forward(self, x):
        self.clock.ticks += 1
        for b in self.blocks:
            x = b(x)
        return x
""",
    "global_dict": """
STATE = {"calls": 0}

class Late(OneLinear):
    def forward(self, x):
        STATE["calls"] += 1
        return x + torch.tanh(self.lin(x)) * (1.0 if STATE["calls"] <= 40 else 0.2)
"""
    + _FOUR,
    "closure_cell": """
class Late(nn.Module):
    def __init__(self, tick):
        super().__init__()
        self.lin, self.tick = nn.Linear(D, D), tick

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * (1.0 if self.tick() <= 40 else 0.2)

def make_tick():
    n = 0
    def tick():
        nonlocal n
        n += 1
        return n
    return tick

def build_model():
    tick = make_tick()
    return nn.Sequential(Late(tick), Block(), Late(tick), Block())
""",
    "function_attribute": """
def tick():
    tick.n = getattr(tick, "n", 0) + 1
    return tick.n

class Late(OneLinear):
    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * (1.0 if tick() <= 40 else 0.2)
"""
    + _FOUR,
    "class_list": """
class Late(OneLinear):
    seen = []

    def forward(self, x):
        self.seen.append(float(x.detach().mean()))
        return x + torch.tanh(self.lin(x)) * (1.0 if len(self.seen) <= 40 else 0.2)
"""
    + _FOUR,
    "backward_hook_counts": """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.backwards = nn.Linear(D, D), []
        self.register_full_backward_hook(lambda m, gi, go: m.backwards.append(1))

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * (1.0 if len(self.backwards) <= 20 else 0.2)
"""
    + _FOUR,
    "hook_clips_after_warm_up": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(4)])
    calls = []

    def clip(g):
        calls.append(1)
        return g.clamp(-1e-3, 1e-3) if len(calls) > 300 else g

    for p in m.parameters():
        p.register_hook(clip)
    return m
""",
    "optimizer_clips_after_warm_up": """
class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        self.n = getattr(self, "n", 0) + 1
        if self.n > 5:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return Clipped(ps, lr=0.1, momentum=0.9)
""",
    "optimizer_clips_when_large": """
class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return Clipped(ps, lr=0.3, momentum=0.9)

def loss_fn(out, y):
    return F.mse_loss(out, 4 * y)
""",
    "loss_keeps_state_in_a_dict": """
EMA = {"loss": None}

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    EMA["loss"] = loss.item() if EMA["loss"] is None else 0.9 * EMA["loss"] + 0.1 * loss.item()
    return loss / EMA["loss"]
""",
}
