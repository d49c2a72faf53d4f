"""Models whose users add something to the training loop: schedules, clipping, freezing, averages, variables."""

__all__ = ["MODELS"]

_STACK = """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

"""

_FILES = {
    "warm_restarts_by_fractions": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2)

    def before(self, step, clip): ...

    def after(self, step, loss):
        self.schedule.step(step / 4)
""",
    "one_cycle_with_momentum": """
def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9)

class Loop:
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13)

    def before(self, step, clip): ...

    def after(self, step, loss):
        self.schedule.step()
""",
    "plateau_by_the_loss": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.05)

    def before(self, step, clip): ...

    def after(self, step, loss):
        self.schedule.step(loss)
""",
    "warm_up_then_cosine": """
from torch.optim import lr_scheduler as lrs

class Loop:
    def __init__(self, optimizer, parameters):
        self.schedule = lrs.SequentialLR(
            optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.CosineAnnealingLR(optimizer, 8)], [3]
        )

    def before(self, step, clip): ...

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

class Loop:
    def __init__(self, optimizer, parameters):
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Noam())

    def before(self, step, clip): ...

    def after(self, step, loss):
        self.schedule.step()
""",
    "clips_by_the_norm_of_all_stages": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        clip(0.05)

    def after(self, step, loss): ...
""",
    "clips_by_value": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        nn.utils.clip_grad_value_(self.parameters.values(), 0.01)

    def after(self, step, loss): ...
""",
    "clips_by_the_norm_of_its_parameters": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        nn.utils.clip_grad_norm_(self.parameters.values(), 0.05)

    def after(self, step, loss): ...
""",
    "clips_each_group": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)

    def after(self, step, loss): ...
""",
    "unfreezes_a_planned_frozen_backbone": """
def build_model():
    model = nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))
    model[:4].requires_grad_(False)
    return model

class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss):
        if step == 4:
            for p in self.parameters.values():
                p.requires_grad_(True)
""",
    "freezes_and_unfreezes_the_backbone": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss):
        for name, p in self.parameters.items():
            p.requires_grad_(step > 4 or name.startswith("4."))
""",
    "freezes_the_head_late": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss):
        if step == 4:
            for name, p in self.parameters.items():
                p.requires_grad_(not name.startswith("4."))
""",
    "adds_a_group_late": """
def build_optimizer(ps):
    return torch.optim.AdamW(list(ps)[-2:], lr=1e-2)

class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss):
        if step == 4:
            held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            new = [p for p in self.parameters.values() if id(p) not in held]
            self.optimizer.add_param_group({"params": new, "lr": 1e-3})
""",
    "clamps_and_resets_weights": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip): ...

    def after(self, step, loss):
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.clamp_(-0.2, 0.2)
                if step == 4 and name.startswith("4."):
                    p.zero_()
""",
    "pulls_weights_to_their_average": """
class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters
        self.mean = {name: p.detach().clone() for name, p in parameters.items()}

    def before(self, step, clip): ...

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

class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        global BETA
        BETA = min(1.0, step / 6)

    def after(self, step, loss): ...
""",
    "anneals_a_variable_that_blocks_read": """
T = 1.0

class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.softmax(self.lin(x) / T, -1)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Soft(), Block(), Soft(), nn.Linear(D, D))

class Loop:
    def __init__(self, optimizer, parameters):
        self.optimizer, self.parameters = optimizer, parameters

    def before(self, step, clip):
        global T
        T = 1 / (step + 1)

    def after(self, step, loss): ...
""",
}

MODELS = {name: text if "def build_model" in text else _STACK + text.lstrip() for name, text in _FILES.items()}
