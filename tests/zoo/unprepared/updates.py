"""Optimizers and losses of further kinds: skipped updates, coordinates in turns, moments by sign, several outputs."""

__all__ = ["MODELS"]

_BLOCKS = """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
"""

MODELS = {
    "skips_updates_that_are_not_finite": """
class Roots(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.n = nn.Linear(D, D), 0

    def forward(self, x):
        self.n += 1
        y = self.lin(x)
        return (y * 0 if self.n == 15 else y).abs().sqrt()

class Careful(torch.optim.AdamW):
    def step(self, closure=None):
        gs = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if all(torch.isfinite(g).all() for g in gs):
            super().step(closure)

def build_model():
    return nn.Sequential(Roots(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return Careful(ps, lr=1e-2)
""",
    "one_parameter_in_turn": """
class Turns(torch.optim.SGD):
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g["params"]]
        self.n = getattr(self, "n", -1) + 1
        for i, p in enumerate(ps):
            if i % 3 != self.n % 3:
                p.grad = None
        super().step(closure)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Turns(ps, lr=0.1)
""",
    "lion": """
class Lion(torch.optim.Optimizer):
    def __init__(self, ps, lr=1e-3, betas=(0.9, 0.99), wd=0.1):
        super().__init__(ps, dict(lr=lr, betas=betas, wd=wd))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                b1, b2 = g["betas"]
                p.mul_(1 - g["lr"] * g["wd"]).sub_(torch.sign(m * b1 + p.grad * (1 - b1)), alpha=g["lr"])
                m.lerp_(p.grad, 1 - b2)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Lion(ps)
""",
    "muon_of_torch": _BLOCKS
    + """
def build_optimizer(ps):
    return torch.optim.Muon([p for p in ps if p.ndim == 2], lr=2e-2)
""",
    "takes_the_model": _BLOCKS
    + """
def build_optimizer(model):
    return torch.optim.AdamW([p for n, p in model.named_parameters() if "norm" not in n], lr=1e-2)
""",
    "takes_named_parameters": _BLOCKS
    + """
def build_optimizer(named):
    return torch.optim.AdamW([{"params": [p for n, p in named if n.endswith("bias")], "lr": 1e-3}], lr=1e-2)
""",
    "returns_a_schedule_as_well": _BLOCKS
    + """
def build_optimizer(ps):
    opt = torch.optim.AdamW(ps, lr=1e-2)
    return opt, torch.optim.lr_scheduler.StepLR(opt, 2)
""",
    "schedule_free": """
class Free(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.05, beta=0.9):
        super().__init__(ps, dict(lr=lr, beta=beta, k=0))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            g["k"] += 1
            for p in g["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = self.state[p].setdefault("x", p.clone())
                z.sub_(p.grad, alpha=g["lr"])
                x.lerp_(z, 1 / g["k"])
                p.copy_(g["beta"] * x + (1 - g["beta"]) * z)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Free(ps)
""",
    "loss_of_every_sample": _BLOCKS
    + """
def loss_fn(out, y):
    return (out - y).pow(2).mean(1)
""",
    "loss_with_a_log": _BLOCKS
    + """
def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    return loss, {"mse": loss.item()}
""",
    "loss_without_gradient": _BLOCKS
    + """
@torch.no_grad()
def loss_fn(out, y):
    return F.mse_loss(out, y)
""",
    "loss_differentiates_the_output": _BLOCKS
    + """
def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    (g,) = torch.autograd.grad(loss, out, create_graph=True)
    return loss + 10 * g.pow(2).sum()
""",
    "uncertainty_by_samples": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.scale = nn.Sequential(Block(), Block()), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Normal(self.mean(h), F.softplus(self.scale(h)) + 0.1)

def loss_fn(out, y):
    return -out.log_prob(y).mean()
""",
    "double_precision_by_default": """
torch.set_default_dtype(torch.float64)

def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
""",
    "model_of_modules_in_a_list": """
def build_model():
    return [Block(), Block(), nn.Linear(D, D)]
""",
    "model_and_tokenizer": """
def build_model():
    return nn.Sequential(Block(), Block(), nn.Linear(D, D)), "tokenizer"
""",
    "frozen_by_inference_tensors": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.blocks, self.out = Block(), nn.ModuleList([Block(), Block()]), nn.Linear(D, D)

    def forward(self, x):
        with torch.inference_mode():
            h = self.enc(x)
        h = h.clone()
        for b in self.blocks:
            h = b(h)
        return self.out(h)
""",
    "sees_if_gradients_are_on": """
class Sees(OneBlock):
    def forward(self, x):
        return self.block(x) if torch.is_grad_enabled() else x

def build_model():
    return nn.Sequential(Block(), Sees(), Sees(), nn.Linear(D, D))
""",
}
