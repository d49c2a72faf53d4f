"""Losses of several parts, labels of other kinds, and optimizers written by hand."""

__all__ = ["MODELS"]

MODELS = {
    "tagged_parameters_in_groups": """
class Tagged(nn.Parameter):
    def __new__(cls, data, tag="x"):
        p = super().__new__(cls, data)
        p.tag = tag
        return p

class Lin(nn.Module):
    def __init__(self, tag):
        super().__init__()
        self.w = Tagged(torch.randn(D, D) * 0.2, tag=tag)
    def forward(self, x):
        return x + torch.tanh(x @ self.w) * (2.0 if self.w.tag == "big" else 1.0)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Lin("big"), Lin("small"), Lin("big"), nn.Linear(D, D))

def build_optimizer(ps):
    ps = list(ps)
    return torch.optim.SGD(
        [
            {"params": [p for p in ps if getattr(p, "tag", "") == "big"], "lr": 0.1},
            {"params": [p for p in ps if getattr(p, "tag", "") != "big"]},
        ],
        lr=0.01,
    )
""",
    "shampoo_by_hand": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

class Shampoo(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.05):
        super().__init__(ps, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                m = p.grad.reshape(p.shape[0], -1)
                if not s:
                    s["l"], s["r"], s["n"] = torch.eye(len(m)) * 1e-2, torch.eye(m.shape[1]) * 1e-2, 0
                s["l"] += m @ m.T
                s["r"] += m.T @ m
                s["n"] += 1
                if s["n"] % 3 == 1:
                    def root(a):
                        e, v = torch.linalg.eigh(a)
                        return v @ (e.clamp(min=1e-6) ** -0.25).diag() @ v.T
                    s["il"], s["ir"] = root(s["l"]), root(s["r"])
                p.sub_((s["il"] @ m @ s["ir"]).view_as(p), alpha=g["lr"])

def build_optimizer(ps):
    return Shampoo(ps)
""",
    "loss_scaled_by_hand": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    return F.mse_loss(out, y) * 128

class Unscale(torch.optim.AdamW):
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.grad.div_(128)
        return super().step(closure)

def build_optimizer(ps):
    return Unscale(ps, lr=1e-2)
""",
    "weighted_samples_counted": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

def example_batch(n):
    x = torch.randn(n, D)
    return x, (torch.tanh(x), torch.rand(n))

def loss_fn(out, t):
    y, w = t
    return ((out - y).pow(2).mean(-1) * w).sum() / w.sum()

def loss_count(t):
    return t[1].sum()
""",
    "list_in_training_tensor_in_evaluation": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.b = nn.Linear(D, D), nn.ModuleList([Block() for _ in range(3)])
        self.h = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
    def forward(self, x):
        outs, x = [], self.i(x)
        for b, h in zip(self.b, self.h):
            x = b(x)
            outs.append(h(x))
        return outs if self.training else outs[-1]

def loss_fn(outs, y):
    if not isinstance(outs, (list, tuple)):
        return F.mse_loss(outs, y)
    return sum(0.5 ** (len(outs) - 1 - k) * F.mse_loss(o, y) for k, o in enumerate(outs))
""",
    "several_heads_with_an_optional_target": """
def example_batch(n):
    return torch.randn(n, D), {"a": torch.randint(3, (n,)), "b": torch.randn(n, 2), "c": None}

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, 3), nn.Linear(D, 2), nn.Linear(D, 1)
    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x), "c": self.c(x)}

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Heads())

def loss_fn(out, y):
    loss = F.cross_entropy(out["a"], y["a"], weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    for k in ("b", "c"):
        if y[k] is not None:
            loss = loss + F.smooth_l1_loss(out[k], y[k])
    return loss
""",
    "mixup_in_the_loss": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

def loss_fn(out, y):
    lam = torch.distributions.Beta(0.4, 0.4).sample()
    i = torch.randperm(len(y))
    return lam * F.mse_loss(out, y) + (1 - lam) * F.mse_loss(out, y[i])
""",
    "sequence_first": """
L = 6

def example_batch(n):
    x = torch.randn(L, n, D)
    return x, torch.tanh(x.flip(2))

def build_model():
    return nn.Sequential(
        nn.Linear(D, D), *[nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0) for _ in range(3)], nn.Linear(D, D)
    )
""",
    "own_loss_ignores_label_zero": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(1, V, (n, L))
    y = x.roll(1, 1).clone()
    for k in range(n):
        y[k, int(torch.randint(2, L, ())) :] = 0
    return {"input_ids": x, "labels": y}, None

@dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.b, self.h = nn.Embedding(V, D), nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, V)
    def forward(self, input_ids, labels=None):
        h = self.e(input_ids)
        for b in self.b:
            h = b(h)
        z = self.h(h)
        return Out(F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=0), z)

def loss_fn(out, y):
    return out.loss
""",
    "relative_step_by_hand": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

class Ada(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, dict(eps=1e-3))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                s["t"] = s.get("t", 0) + 1
                s["v"] = s.get("v", torch.zeros_like(p)).mul_(0.9).add_(p.grad**2, alpha=0.1)
                u = p.grad / (s["v"].sqrt() + 1e-8)
                u /= max(1.0, float(u.pow(2).mean().sqrt()))
                p.sub_(max(g["eps"], float(p.pow(2).mean().sqrt())) * min(1e-2, s["t"] ** -0.5) * u)

def build_optimizer(ps):
    return Ada(ps)
""",
    "step_count_in_one_parameter": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

class Odd(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, dict(lr=0.05))
    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]["params"][0]
        n = self.state[first]["n"] = self.state[first].get("n", 0) + 1
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=g["lr"] / n)

def build_optimizer(ps):
    return Odd(ps)
""",
    "loss_keeps_a_class_prior": """
PRIOR = torch.ones(3) / 3

def example_batch(n):
    return torch.randn(n, D), torch.randint(3, (n,))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, 3))

def loss_fn(out, y):
    PRIOR.mul_(0.9).add_(F.one_hot(y, 3).float().mean(0), alpha=0.1)
    return F.cross_entropy(out + PRIOR.log(), y)
""",
    "policy_gradient_with_a_baseline": """
def example_batch(n):
    return torch.randn(n, D), torch.randint(4, (n,))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.p, self.v = nn.Sequential(nn.Linear(D, D), Block(), Block()), nn.Linear(D, 4), nn.Linear(D, 1)
    def forward(self, x):
        h = self.t(x)
        d = torch.distributions.Categorical(logits=self.p(h))
        a = d.sample()
        return d.log_prob(a), a, self.v(h).squeeze(-1), d.entropy()

def loss_fn(out, y):
    lp, a, v, e = out
    r = (a == y).float()
    return (-(r - v.detach()) * lp).mean() + F.mse_loss(v, r) - 0.01 * e.mean()
""",
    "loss_pops_from_its_targets": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(D, D)
    def forward(self, x):
        x = self.blocks(x)
        return {"out": self.head(x), "features": x}
def example_batch(n):
    x = torch.randn(n, D)
    return x, {"y": torch.tanh(x.flip(1)), "weight": torch.rand(n, 1)}
def loss_fn(o, y):
    weight, features = y.pop("weight"), o.pop("features")
    return (weight * (o["out"] - y["y"]) ** 2).mean() + 0.1 * features.pow(2).mean()
""",
}
