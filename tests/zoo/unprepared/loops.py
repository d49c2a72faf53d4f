"""Models whose users add something to the training loop: schedules, clipping, freezing, averages, variables."""

__all__ = ["MODELS"]

_CALLBACKS = """
class Callbacks:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss): ...

"""

_STACK = """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

"""

_FILES = {
    "warm_restarts_by_fractions": """
class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2)

    def after(self, step, loss):
        self.schedule.step(step / 4)
""",
    "one_cycle_with_momentum": """
def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9)

class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13)

    def after(self, step, loss):
        self.schedule.step()
""",
    "plateau_by_the_loss": """
class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.05)

    def after(self, step, loss):
        self.schedule.step(loss)
""",
    "warm_up_then_cosine": """
from torch.optim import lr_scheduler as lrs

class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.schedule = lrs.SequentialLR(
            optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.CosineAnnealingLR(optimizer, 8)], [3]
        )

    def after(self, step, loss):
        self.schedule.step()
""",
    "schedule_by_an_object_that_counts": """
class Noam:
    def __init__(self):
        self.calls = 0

    def __call__(self, s):
        self.calls += 1
        return min((s + 1) ** -0.5, (s + 1) * 4**-1.5) + 0.01 * self.calls

class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Noam())

    def after(self, step, loss):
        self.schedule.step()
""",
    "clips_by_the_norm_of_all_stages": """
class Loop(Callbacks):
    def before(self, step, clip):
        clip(0.05)
""",
    "clips_by_value": """
class Loop(Callbacks):
    def before(self, step, clip):
        nn.utils.clip_grad_value_(self.parameters.values(), 0.01)
""",
    "clips_by_the_norm_of_its_parameters": """
class Loop(Callbacks):
    def before(self, step, clip):
        nn.utils.clip_grad_norm_(self.parameters.values(), 0.05)
""",
    "clips_each_group": """
class Loop(Callbacks):
    def before(self, step, clip):
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)
""",
    "unfreezes_a_planned_frozen_backbone": """
def build_model():
    model = nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))
    model[:4].requires_grad_(False)
    return model

class Loop(Callbacks):
    def after(self, step, loss):
        if step == 4:
            for p in self.parameters.values():
                p.requires_grad_(True)
""",
    "freezes_and_unfreezes_the_backbone": """
class Loop(Callbacks):
    def after(self, step, loss):
        for name, p in self.parameters.items():
            p.requires_grad_(step > 4 or name.startswith("4."))
""",
    "freezes_the_head_late": """
class Loop(Callbacks):
    def after(self, step, loss):
        if step == 4:
            for name, p in self.parameters.items():
                p.requires_grad_(not name.startswith("4."))
""",
    "adds_a_group_late": """
def build_optimizer(ps):
    return torch.optim.AdamW(list(ps)[-2:], lr=1e-2)

class Loop(Callbacks):
    def after(self, step, loss):
        if step == 4:
            held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            new = [p for p in self.parameters.values() if id(p) not in held]
            self.optimizer.add_param_group({"params": new, "lr": 1e-3})
""",
    "clamps_and_resets_weights": """
class Loop(Callbacks):
    def after(self, step, loss):
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.clamp_(-0.2, 0.2)
                if step == 4 and name.startswith("4."):
                    p.zero_()
""",
    "pulls_weights_to_their_average": """
class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters
        self.mean = {name: p.detach().clone() for name, p in parameters.items()}

    def after(self, step, loss):
        with torch.no_grad():
            for name, p in self.parameters.items():
                self.mean[name].lerp_(p, 0.3)
                if step % 5 == 4:
                    p.copy_(self.mean[name])
""",
    "ramps_a_variable_that_the_loss_reads": """
BETA = 0.0

def loss_fn(out, y):
    return F.mse_loss(out, y) + BETA * out.pow(2).mean()

class Loop(Callbacks):
    def before(self, step, clip):
        global BETA
        BETA = min(1.0, step / 6)
""",
    "anneals_a_variable_that_blocks_read": """
T = 1.0

class Soft(OneLinear):
    def forward(self, x):
        return x + torch.softmax(self.lin(x) / T, -1)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Soft(), Block(), Soft(), nn.Linear(D, D))

class Loop(Callbacks):
    def before(self, step, clip):
        global T
        T = 1 / (step + 1)
""",
    "clips_by_a_norm_written_by_hand": """
class Loop(Callbacks):
    def before(self, step, clip):
        total = sum(p.grad.norm().item() ** 2 for p in self.parameters.values())
        for p in self.parameters.values():
            p.grad.mul_(min(1.0, 0.05 / (total**0.5 + 1e-6)))
""",
    "divides_by_the_norm_of_all_gradients": """
class Loop(Callbacks):
    def before(self, step, clip):
        norm = torch.cat([p.grad.flatten() for p in self.parameters.values()]).norm()
        for p in self.parameters.values():
            p.grad = p.grad / norm
""",
    "sets_the_rate_by_the_norm_of_weights": """
class Loop(Callbacks):
    def before(self, step, clip):
        norm = sum(float(p.detach().norm()) for p in self.parameters.values())
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + norm)
""",
    "learns_the_rate_from_two_gradients": """
class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters
        self.last = None

    def before(self, step, clip):
        now = [p.grad.clone() for p in self.parameters.values()]
        if self.last is not None:
            self.optimizer.param_groups[0]["lr"] += 1e-3 * float(sum((a * b).sum() for a, b in zip(now, self.last)))
        self.last = now
""",
    "adds_noise_to_gradients": """
class Loop(Callbacks):
    def before(self, step, clip):
        for p in self.parameters.values():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
""",
    "projects_all_weights_on_a_sphere": """
class Loop(Callbacks):
    def after(self, step, loss):
        with torch.no_grad():
            norm = torch.stack([p.norm() for p in self.parameters.values()]).norm()
            for p in self.parameters.values():
                p.mul_(torch.clamp(3.0 / norm, max=1.0))
""",
    "projects_each_row_on_a_sphere": """
class Loop(Callbacks):
    def after(self, step, loss):
        with torch.no_grad():
            for p in self.parameters.values():
                if p.dim() == 2:
                    p.div_(p.norm(dim=1, keepdim=True))
""",
    "clips_each_gradient_by_its_weight": """
class Loop(Callbacks):
    def before(self, step, clip):
        for p in self.parameters.values():
            limit = 0.02 * p.detach().norm().clamp(min=1e-3)
            p.grad.mul_((limit / (p.grad.norm() + 1e-6)).clamp(max=1.0))
""",
    "centralizes_gradients": """
class Loop(Callbacks):
    def before(self, step, clip):
        for p in self.parameters.values():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
""",
    "decays_weights_by_a_pattern": """
import re

class Loop(Callbacks):
    def after(self, step, loss):
        with torch.no_grad():
            for name, p in self.parameters.items():
                if re.search("(up|down).weight$", name):
                    p.mul_(1 - 1e-2)
""",
    "goes_back_to_the_best_weights": """
class Loop(Callbacks):
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters
        self.best = math.inf

    def after(self, step, loss):
        if loss > 1.02 * self.best:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(self.kept[name])
        elif loss < self.best:
            self.best, self.kept = loss, {name: p.detach().clone() for name, p in self.parameters.items()}
""",
    "warms_up_gradients_of_the_first_layer": """
class Loop(Callbacks):
    def before(self, step, clip):
        for name, p in self.parameters.items():
            if name.startswith("0."):
                p.grad.mul_(min(1.0, (step + 1) / 6))
""",
}

MODELS = {
    name: _CALLBACKS + ("" if "def build_model" in text else _STACK) + text.lstrip() for name, text in _FILES.items()
}
