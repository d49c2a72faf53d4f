"""Models with optimizers of their own: what they look at, how they group parameters, what they keep."""

__all__ = ["MODELS"]

_BODY = """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
"""

_OWN = """
class Own(torch.optim.Optimizer):
    def __init__(self, ps, **options):
        super().__init__(ps, options)

    @torch.no_grad()
    def step(self, closure=None):
        {}

def build_optimizer(ps):
    return Own(ps, {})
"""

MODELS = {
    "clip_in_step": _BODY
    + """
class Clipped(torch.optim.AdamW):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)

def build_optimizer(ps):
    return Clipped(ps, lr=1e-2)
""",
    "clip_value_in_step": _BODY
    + """
class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_value_([p for g in self.param_groups for p in g["params"]], 0.003)
        return super().step(closure)

def build_optimizer(ps):
    return Clipped(ps, lr=0.1)
""",
    "lars": _BODY
    + _OWN.format(
        """for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    trust = p.norm() / (p.grad.norm() + 1e-6) if p.ndim > 1 else 1.0
                    p.add_(p.grad * trust, alpha=-g["lr"])""",
        "lr=0.01",
    ),
    "d_adaptation": _BODY
    + _OWN.format(
        """ps = [p for g in self.param_groups for p in g["params"]]
        self.total = getattr(self, "total", 1e-6) + float(sum(p.grad.pow(2).sum() for p in ps))
        for p in ps:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] / math.sqrt(self.total))""",
        "lr=0.02",
    ),
    "prodigy_like": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x

class Prodigy(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, dict(d=1e-2))

    @torch.no_grad()
    def step(self, closure=None):
        g = self.param_groups[0]
        dot = norm = 0.0
        for p in g["params"]:
            s = self.state[p]
            s.setdefault("x0", p.clone())
            dot += float((p.grad * (s["x0"] - p)).sum())
            norm += float(p.grad.abs().sum())
        g["d"] = max(g["d"], dot / (norm + 1e-9))
        for p in g["params"]:
            p.add_(p.grad.sign(), alpha=-g["d"])

def build_optimizer(ps):
    return Prodigy(ps)
""",
    "layerwise_rates_by_position": _BODY
    + """
def build_optimizer(ps):
    ps = list(ps)
    return torch.optim.AdamW([{"params": [p], "lr": 1e-2 * 0.9 ** (len(ps) - i)} for i, p in enumerate(ps)])
""",
    "head_by_slice": _BODY
    + """
def build_optimizer(ps):
    ps = list(ps)
    return torch.optim.SGD([{"params": ps[:-2], "lr": 1e-3}, {"params": ps[-2:], "lr": 0.1}], momentum=0.9)
""",
    "only_the_head": _BODY
    + """
def build_optimizer(ps):
    return torch.optim.Adam(list(ps)[-2:], lr=1e-2)
""",
    "no_decay_for_vectors": _BODY
    + """
def build_optimizer(ps):
    ps = list(ps)
    return torch.optim.AdamW(
        [
            {"params": [p for p in ps if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
""",
    "lbfgs": _BODY
    + """
def build_optimizer(ps):
    return torch.optim.LBFGS(ps, lr=0.1)
""",
    "sharpness_aware_closure": _BODY
    + """
class SAM(torch.optim.SGD):
    def step(self, closure):
        with torch.no_grad():
            moved = [(p, 0.05 * p.grad) for g in self.param_groups for p in g["params"]]
            for p, e in moved:
                p.add_(e)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        return super().step()

def build_optimizer(ps):
    return SAM(ps, lr=0.1)
""",
    "lookahead": _BODY
    + """
class Lookahead(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g["params"]]
        if not hasattr(self, "slow"):
            self.slow, self.n = {p: p.clone() for p in ps}, 0
        super().step(closure)
        self.n += 1
        if self.n % 3 == 0:
            for p in ps:
                self.slow[p].lerp_(p, 0.5)
                p.copy_(self.slow[p])

def build_optimizer(ps):
    return Lookahead(ps, lr=1e-2)
""",
    "copies_made_at_the_start": _BODY
    + """
class Anchored(torch.optim.SGD):
    def __init__(self, ps, **k):
        super().__init__(ps, **k)
        self.start = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for p, s in self.start.items():
            if p.grad is not None:
                p.grad.add_(p - s, alpha=0.3)
        super().step(closure)

def build_optimizer(ps):
    return Anchored(ps, lr=0.05)
""",
    "muon_and_adam": _BODY
    + """
class Muon(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, dict(lr=0.02))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                if p.ndim == 2:
                    u = p.grad / (p.grad.norm() + 1e-7)
                    for _ in range(4):
                        u = 1.5 * u - 0.5 * u @ u.t() @ u
                    p.sub_(g["lr"] * u)
                else:
                    p.sub_(g["lr"] * p.grad)

def build_optimizer(ps):
    return Muon(ps)
""",
    "schedule_inside_step": _BODY
    + """
class Warm(torch.optim.AdamW):
    def step(self, closure=None):
        self.n = getattr(self, "n", 0) + 1
        for g in self.param_groups:
            g["lr"] = 0.02 * min(self.n / 5, 1 - self.n / 50)
        return super().step(closure)

def build_optimizer(ps):
    return Warm(ps, lr=0.0)
""",
    "langevin_noise": _BODY
    + """
class SGLD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)

def build_optimizer(ps):
    return SGLD(ps, lr=0.05)
""",
    "freezes_the_first_half": _BODY
    + """
def build_optimizer(ps):
    ps = list(ps)
    for p in ps[: len(ps) // 2]:
        p.requires_grad_(False)
    return torch.optim.Adam([p for p in ps if p.requires_grad], lr=1e-2)
""",
    "mean_of_all_rates": _BODY
    + _OWN.format(
        """ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        scale = torch.stack([p.grad.abs().mean() for p in ps]).mean()
        for p in ps:
            p.sub_(0.01 * p.grad / (scale + 1e-8))""",
        "lr=0.01",
    ),
    "adafactor": _BODY
    + """
def build_optimizer(ps):
    return torch.optim.Adafactor(ps, lr=1e-2)
""",
    "weights_averaged_in_step": _BODY
    + """
class Averaged(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                s["ema"] = p.clone() if "ema" not in s else s["ema"].lerp(p, 0.2)
                p.lerp_(s["ema"], 0.1)

def build_optimizer(ps):
    return Averaged(ps, lr=0.05, momentum=0.9, nesterov=True)
""",
    "skips_large_steps": _BODY
    + """
class Guarded(torch.optim.SGD):
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g["params"]]
        if max(float(p.grad.abs().max()) for p in ps) < 0.2:
            super().step(closure)

def build_optimizer(ps):
    return Guarded(ps, lr=0.05)
""",
    "gradient_centralization": _BODY
    + """
class Centered(torch.optim.RMSprop):
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.ndim > 1:
                    p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)

def build_optimizer(ps):
    return Centered(ps, lr=1e-3)
""",
}
