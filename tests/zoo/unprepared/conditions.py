"""Models that change something only under a condition: at the tenth call, from a size on, or once values have grown."""

__all__ = ["MODELS"]

_FOUR = """
def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block(), nn.Linear(D, D))
"""

MODELS = {
    "global_tensor_every_sixth_call": """
SCALE = {"value": torch.ones(())}

class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def forward(self, x):
        self.n += 1
        if self.n % 6 == 0:
            SCALE["value"] = SCALE["value"] * 0.8
        return self.block(x)

class Reads(OneBlock):
    def forward(self, x):
        return self.block(x) * SCALE["value"]

def build_model():
    return nn.Sequential(Writes(), Block(), Reads(), nn.Linear(D, D))
""",
    "global_flag_once_values_are_large": """
SEEN = {"large": False}

class Guard(OneBlock):
    def forward(self, x):
        if x.abs().max() > 3:
            SEEN["large"] = True
        return self.block(x)

class Reads(Guard):
    def forward(self, x):
        return self.block(x) * (0.5 if SEEN["large"] else 1.0)

def build_model():
    return nn.Sequential(Guard(), Block(), Reads(), nn.Linear(D, D))
""",
    "global_phase_after_ten_calls": """
PHASE = "warm"

class Warms(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def forward(self, x):
        global PHASE
        self.n += 1
        if self.n > 10:
            PHASE = "full"
        return self.block(x)

class Reads(Warms):
    def forward(self, x):
        return self.block(x) if PHASE == "full" else x + 0.1 * self.block(x)

def build_model():
    return nn.Sequential(Warms(), Block(), Reads(), nn.Linear(D, D))
""",
    "shared_object_after_ten_calls": """
class Phase:
    def __init__(self):
        self.scale = 1.0

class Sets(nn.Module):
    def __init__(self, phase):
        super().__init__()
        self.block, self.phase, self.n = Block(), phase, 0

    def forward(self, x):
        self.n += 1
        if self.n == 10:
            self.phase.scale = 0.3
        return self.block(x)

class Reads(Sets):
    def forward(self, x):
        return self.block(x) * self.phase.scale

def build_model():
    phase = Phase()
    return nn.Sequential(Sets(phase), Block(), Reads(phase), nn.Linear(D, D))
""",
    "shared_buffer_written_at_outliers": """
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.tensor(2.0))

    def forward(self, x):
        if self.training and x.detach().abs().max() > 3.2:
            self.most.mul_(0.9)
        return x.clamp(-self.most, self.most)

def build_model():
    clip = Clip()
    return nn.Sequential(nn.Linear(D, D), clip, Block(), clip, Block(), clip, nn.Linear(D, D))
""",
    "shared_activation_anneals_late": """
class Anneals(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slope", torch.tensor(0.5))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x):
        self.calls += 1
        if self.calls > 30:
            self.slope *= 0.97
        return torch.where(x > 0, x, x * self.slope)

def build_model():
    act = Anneals()
    return nn.Sequential(nn.Linear(D, D), act, nn.Linear(D, D), act, nn.Linear(D, D), act, nn.Linear(D, D))
""",
    "boundary_gets_narrower_dtype_later": """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def forward(self, x):
        self.n += 1
        x = self.block(x.float())
        return x.bfloat16() if self.n > 12 else x

class Wide(Block):
    def forward(self, x):
        return super().forward(x.float())

def build_model():
    return nn.Sequential(Late(), Wide(), Late(), Wide(), nn.Linear(D, D))
""",
    "sequence_grows_after_warm_up": """
class Crops(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.n = nn.Linear(D, D), 0

    def forward(self, x):
        self.n += 1
        return self.inp(x if self.n > 20 else x[:, :3])

class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)

    def forward(self, x):
        return self.out(x.mean(1))

def build_model():
    return nn.Sequential(Crops(), Block(), Block(), Pools())

def example_batch(n):
    x = torch.randn(n, 6, D)
    return x, x.sum(1).tanh()
""",
    "trims_padding_between_blocks": """
class Trims(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, D, padding_idx=0)

    def forward(self, ids):
        longest = int((ids != 0).sum(1).max())
        return self.emb(ids[:, :longest])

class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)

    def forward(self, x):
        return self.out(x.mean(1))

def build_model():
    return nn.Sequential(Trims(), Block(), Block(), Pools())

def example_batch(n):
    lengths = torch.randint(1, 7, (n, 1))
    return torch.randint(1, 12, (n, 6)) * (torch.arange(6) < lengths), torch.randn(n, D).tanh()
""",
    "loss_drops_its_second_part_later": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.side, self.main, self.out = Block(), Block(), Block(), nn.Linear(D, D)

    def forward(self, x):
        h = self.trunk(x)
        s = self.side(h)
        return self.out(self.main(h)), s

CALLS = [0]

def loss_fn(out, y):
    CALLS[0] += 1
    main, side = out
    return F.mse_loss(main, y) + (0.5 * F.mse_loss(side, y) if CALLS[0] <= 24 else 0)

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.5)
""",
    "losses_alternate_by_step": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.one(x), self.other(x)

def loss_fn(out, y):
    loss_fn.calls += 1
    return F.mse_loss(out[loss_fn.calls // 4 % 2], y)

loss_fn.calls = 0

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.5)
""",
    "expert_without_tokens": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x):
        weight, which = torch.softmax(self.gate(x), -1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (which == n).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + torch.tanh(out)

def build_model():
    m = nn.Sequential(Experts(), Block(), Experts(), nn.Linear(D, D))
    with torch.no_grad():
        m[0].gate.bias.copy_(torch.tensor([0.0, 0.5, -2.5]))
    return m

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.3)
""",
    "block_rests_for_whole_steps": """
class Rests(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.block, self.n = Block(), first

    def forward(self, x):
        self.n += 1
        return x if self.n % 16 >= 8 else self.block(x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Rests(0), Block(), Rests(4), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.3)
""",
    "hook_removes_itself_after_ten_calls": """
def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    for block in (m[0], m[2]):
        warm = {"calls": 0}

        def hook(module, args, out, warm=warm):
            warm["calls"] += 1
            if warm["calls"] == 10:
                warm["handle"].remove()
            return out * 0.3

        warm["handle"] = block.register_forward_hook(hook)
    return m
""",
    "gradient_hook_removes_itself": """
def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    for block in (m[0], m[2]):
        seen, handles = [], []

        def hook(g, seen=seen, handles=handles):
            seen.append(1)
            if len(seen) == 20:
                handles.pop().remove()
            return g * 0.1

        handles.append(block.up.weight.register_hook(hook))
    return m

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.1)
""",
    "backward_hook_scales_a_buffer_late": """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.calls = Block(), []
        self.register_buffer("scale", torch.ones(()))
        self.block.up.weight.register_hook(self.seen)

    def seen(self, g):
        self.calls.append(None)
        if len(self.calls) > 14:
            self.scale = self.scale * 0.98

    def forward(self, x):
        return self.block(x) * self.scale

def build_model():
    return nn.Sequential(Block(), Scaled(), Scaled(), nn.Linear(D, D))
""",
    "prunes_itself_at_the_tenth_call": """
from torch.nn.utils import prune

class Prunes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.n = nn.Linear(D, D), 0

    def forward(self, x):
        self.n += 1
        if self.n == 10:
            prune.l1_unstructured(self.lin, "weight", 0.5)
        return x + torch.tanh(self.lin(x))

def build_model():
    return nn.Sequential(Prunes(), Block(), Prunes(), nn.Linear(D, D))
""",
    "groups_are_added_later": """
class Unfreezes(torch.optim.AdamW):
    def __init__(self, ps):
        ps = list(ps)
        self.rest, self.steps = [ps[:6], ps[6:12]], 0
        super().__init__(ps[12:], lr=1e-2)

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps % 4 == 0 and self.rest:
            self.add_param_group({"params": self.rest.pop(), "lr": 3e-3})

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return Unfreezes(ps)
""",
    "optimizer_halves_all_rates_at_large_gradients": """
class Careful(torch.optim.SGD):
    def step(self, closure=None):
        self.n = getattr(self, "n", 0) + 1
        largest = max(float(p.grad.abs().max()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        if self.n > 4 and largest > 0.05:
            for group in self.param_groups:
                group["lr"] *= 0.8
        super().step(closure)

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return Careful(ps, lr=0.2)
""",
}
