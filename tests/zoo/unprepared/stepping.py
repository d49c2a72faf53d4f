"""Models with unusual optimizers."""

__all__ = ["MODELS"]

_MODEL = """
def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
"""


def _with(optimizer: str) -> str:
    return f"{optimizer}\n{_MODEL}"


MODELS = {
    "counts_steps_in_the_class": _with("""
class Warm(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        Warm.steps += 1
        for g in self.param_groups:
            g["lr"] = 0.05 * min(1.0, Warm.steps / 5)
        return super().step(closure)

def build_optimizer(ps):
    return Warm(ps, lr=0.05)
"""),
    "counts_parameters_in_the_class": _with("""
class Warm(torch.optim.Optimizer):
    updates = 0

    def __init__(self, ps):
        super().__init__(ps, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    Warm.updates += 1
                    p.sub_(p.grad, alpha=g["lr"] / (1 + 0.01 * Warm.updates))

def build_optimizer(ps):
    return Warm(ps)
"""),
    "state_shared_by_groups": _with("""
class Momentum(torch.optim.Optimizer):
    def __init__(self, ps):
        ps = list(ps)
        super().__init__([{"params": ps[::2]}, {"params": ps[1::2]}], {"lr": 0.05})
        self.state["shared"]["step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["shared"]["step"] += 1
        rate = 0.05 / self.state["shared"]["step"] ** 0.5
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(m.mul_(0.9).add_(p.grad), alpha=rate)

def build_optimizer(ps):
    return Momentum(ps)
"""),
    "rate_by_the_number_of_parameters": _with("""
def build_optimizer(ps):
    ps = list(ps)
    return torch.optim.SGD(ps, lr=1.0 / len(ps), momentum=0.9)
"""),
    "rate_by_the_number_of_elements_in_step": _with("""
class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        count = sum(p.numel() for g in self.param_groups for p in g["params"])
        for g in self.param_groups:
            g["lr"] = 1.0 / count ** 0.5
        return super().step(closure)

def build_optimizer(ps):
    return Scaled(ps, lr=0.05)
"""),
    "steps_one_group_each_time": _with("""
class Alternate(torch.optim.Optimizer):
    def __init__(self, ps):
        ps = list(ps)
        super().__init__([{"params": ps[: len(ps) // 2]}, {"params": ps[len(ps) // 2 :]}], {"lr": 0.05})
        self.turn = 0

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[self.turn % 2]
        self.turn += 1
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"])

def build_optimizer(ps):
    return Alternate(ps)
"""),
    "stacks_parameters_of_equal_shape": _with("""
class Stacked(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            shapes = {}
            for p in g["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for same in shapes.values():
                grads = torch.stack([p.grad for p in same])
                flat = grads.flatten(1)
                grads = (flat / (flat.norm(dim=1, keepdim=True) + 1e-8)).view_as(grads)
                for p, d in zip(same, grads):
                    p.sub_(d, alpha=g["lr"])

def build_optimizer(ps):
    return Stacked(ps)
"""),
    "compares_parameters_of_equal_shape": _with("""
class Decorrelated(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            shapes = {}
            for p in g["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for same in shapes.values():
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.sub_(p.grad - 0.2 * mean, alpha=g["lr"])

def build_optimizer(ps):
    return Decorrelated(ps)
"""),
    "shampoo_with_an_interval": _with("""
class Shampoo(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s, grad = self.state[p], p.grad
                s["t"] = s.get("t", 0) + 1
                if grad.ndim == 2:
                    left = s.setdefault("l", 1e-2 * torch.eye(len(p)))
                    left.add_(grad @ grad.t())
                    if s["t"] % 3 == 1:
                        w, v = torch.linalg.eigh(left.double())
                        s["root"] = (v * w.clamp(min=1e-8) ** -0.25 @ v.t()).float()
                    grad = s["root"] @ grad
                p.sub_(grad, alpha=g["lr"])

def build_optimizer(ps):
    return Shampoo(ps)
"""),
    "loads_its_state_when_built": _with("""
def build_optimizer(ps):
    o = torch.optim.Adam(ps, lr=1e-2)
    for g in o.param_groups:
        for p in g["params"]:
            o.state[p] = {
                "step": torch.tensor(10.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.full_like(p, 1e-3),
            }
    return o
"""),
    "average_returned_every_fifth_step": _with("""
class Averaged(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                if p.grad is None:
                    continue
                s.setdefault("mean", p.clone()).lerp_(p, 0.3)
                if int(s["step"]) % 5 == 0:
                    p.copy_(s["mean"])

def build_optimizer(ps):
    return Averaged(ps, lr=1e-2)
"""),
    "noise_of_an_own_generator": _with("""
class Noisy(torch.optim.SGD):
    def __init__(self, ps):
        super().__init__(ps, lr=0.05)
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn(p.shape, generator=self.generator), alpha=0.01)
        return super().step(closure)

def build_optimizer(ps):
    return Noisy(ps)
"""),
    "wraps_a_sharded_optimizer_by_size": _with("""
class Ranked(torch.optim.Optimizer):
    def __init__(self, ps):
        ps = sorted(ps, key=lambda p: -p.numel())
        super().__init__(ps, {"lr": 1e-2})
        self.inner = [torch.optim.Adam(ps[:4], lr=1e-2), torch.optim.SGD(ps[4:], lr=0.05, momentum=0.9)]

    def step(self, closure=None):
        for o in self.inner:
            o.step()

def build_optimizer(ps):
    return Ranked(ps)
"""),
    "closure_is_called_if_given": _with("""
class Evaluating(torch.optim.RMSprop):
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss

def build_optimizer(ps):
    return Evaluating(ps, lr=1e-3, centered=True, momentum=0.5)
"""),
    "rates_by_the_norm_of_first_gradients": _with("""
class Calibrated(torch.optim.SGD):
    def __init__(self, ps):
        super().__init__(ps, lr=0.05)
        self.first = {}

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for k, p in enumerate(g["params"]):
                if p.grad is not None:
                    p.grad.div_(self.first.setdefault(k, p.grad.norm().clone()) + 1e-3)
        return super().step(closure)

def build_optimizer(ps):
    return Calibrated(ps)
"""),
    "rates_by_the_loss_of_the_file": _with("""
LOSSES = []

def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    LOSSES.append(loss.item())
    return loss

class Plateau(torch.optim.SGD):
    def step(self, closure=None):
        for g in self.param_groups:
            g["lr"] = 0.05 * min(1.0, sum(LOSSES[-4:]) / 4)
        return super().step(closure)

def build_optimizer(ps):
    return Plateau(ps, lr=0.05)
"""),
    "asgd_rprop_and_nadam": _with("""
class Three(torch.optim.Optimizer):
    def __init__(self, ps):
        ps = list(ps)
        super().__init__(ps, {"lr": 1e-2})
        self.parts = [torch.optim.ASGD(ps[::3], lr=1e-2), torch.optim.Rprop(ps[1::3], lr=1e-3)]
        self.parts.append(torch.optim.NAdam(ps[2::3], lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1))

    def step(self, closure=None):
        for o in self.parts:
            o.step()

def build_optimizer(ps):
    return Three(ps)
"""),
}
