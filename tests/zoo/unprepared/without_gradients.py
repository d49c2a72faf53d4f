"""Models with layers that get no gradients, but change state in each forward."""

__all__ = ["MODELS"]

MODELS = {
    "running_mean_and_deviation_of_numpy": """
class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape, "float64"), np.ones(shape, "float64"), 1e-4
    def update(self, x):
        m, v, n = x.mean(0), x.var(0), len(x)
        d, total = m - self.mean, self.count + n
        self.mean = self.mean + d * n / total
        self.var = (self.var * self.count + v * n + d**2 * self.count * n / total) / total
        self.count = total

class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.rms = RunningMeanStd(D)
    def forward(self, x):
        if self.training:
            self.rms.update(x.detach().numpy())
        mean = torch.as_tensor(self.rms.mean, dtype=x.dtype)
        std = torch.as_tensor(self.rms.var, dtype=x.dtype).sqrt()
        return ((x - mean) / (std + 1e-5)).clamp(-5, 5)

def build_model():
    return nn.Sequential(Normalize(), nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))
""",
    "frozen_encoder_keeps_a_history": """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.history = Block(), []
        for p in self.parameters():
            p.requires_grad_(False)
    @torch.no_grad()
    def forward(self, x):
        h = self.enc(x)
        self.history.append(float(h.abs().mean()))
        return h / (sum(self.history[-5:]) / len(self.history[-5:]))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g, self.b = Frozen(), Frozen(), nn.ModuleList([Block() for _ in range(3)])
        self.o = nn.Linear(D, D)
    def forward(self, x):
        x = self.g(self.f(x))
        for b in self.b:
            x = b(x)
        return self.o(x)
""",
    "reward_scaling_by_a_deque": """
from collections import deque

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = deque(maxlen=6)
    def forward(self, x):
        self.last.append(x.detach().std().item())
        return x / (float(np.mean(self.last)) + 1e-3)

def build_model():
    return nn.Sequential(Scale(), nn.Linear(D, D), Block(), nn.Linear(D, D))
""",
    "forward_forward_layers": """
class FF(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.opt = None
        for p in self.lin.parameters():
            p.local = True
    def forward(self, x):
        if self.opt is None:
            self.opt = torch.optim.Adam(self.lin.parameters(), lr=0.01)
        x = x / (x.norm(dim=1, keepdim=True) + 1e-4)
        if self.training:
            with torch.enable_grad():
                good = F.relu(self.lin(x.detach())).pow(2).mean(1)
                bad = F.relu(self.lin(x.detach()[:, torch.randperm(D)])).pow(2).mean(1)
                loss = F.softplus(torch.cat([0.5 - good, bad - 0.5])).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
        return F.relu(self.lin(x)).detach()

def build_model():
    return nn.Sequential(FF(), FF(), FF(), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.AdamW([p for p in ps if not hasattr(p, "local")], lr=1e-2)
""",
}
