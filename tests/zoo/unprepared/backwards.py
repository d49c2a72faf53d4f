"""Models whose backward runs their own code: autograd functions that reuse memory, and hooks that read attributes."""

__all__ = ["MODELS"]

MODELS = {
    "overwrites_its_result_in_backward": """
class InPlaceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, slope):
        m, s = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=False) + 1e-5
        z = (x - m) / s
        out = F.leaky_relu(z * w + b, slope)
        ctx.slope = slope
        ctx.save_for_backward(out, w, b, s)
        return out

    @staticmethod
    def backward(ctx, g):
        out, w, b, s = ctx.saved_tensors
        g = torch.where(out > 0, g, g * ctx.slope)
        # reuse the memory of the activation, as inplace_abn does
        z = out.data
        z.copy_((torch.where(z > 0, z, z / ctx.slope) - b) / w)
        gz = g * w
        gx = (gz - gz.mean(-1, keepdim=True) - z * (gz * z).mean(-1, keepdim=True)) / s
        return gx, (g * z).sum(0), g.sum(0), None

class ABN(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
    def forward(self, x):
        return InPlaceNorm.apply(x, self.w, self.b, 0.1)

class B(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.abn, self.down = nn.Linear(D, 2 * D), ABN(2 * D), nn.Linear(2 * D, D)
    def forward(self, x):
        return x + self.down(self.abn(self.up(x)))

def build_model():
    return nn.Sequential(nn.Linear(D, D), B(), B(), B(), nn.Linear(D, D))
""",
    "frees_its_result_in_backward": """
class Inv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, *ps):
        ctx.f = f
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            y = torch.cat([a, b + f(a)], -1)
        ctx.y, ctx.ps = y.detach(), ps
        return y

    @staticmethod
    def backward(ctx, g):
        y, f = ctx.y, ctx.f
        with torch.no_grad():
            a, b = y.chunk(2, -1)
            x = torch.cat([a, b - f(a)], -1)
        y.untyped_storage().resize_(0)
        del ctx.y
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            a, b = x.chunk(2, -1)
            out = torch.cat([a, b + f(a)], -1)
        gs = torch.autograd.grad(out, (x, *ctx.ps), g)
        return gs[0], None, *gs[1:]

class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.mix = nn.Sequential(nn.Linear(D // 2, D), nn.Tanh(), nn.Linear(D, D // 2)), nn.Linear(D, D)
    def forward(self, x):
        return torch.tanh(self.mix(Inv.apply(x, self.f, *self.f.parameters())))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Coupling(), Coupling(), Coupling(), nn.Linear(D, D))
""",
    "reads_an_attribute_in_backward": """
class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        owner.scale = float(x.detach().abs().max()) / 7 + 1e-6
        ctx.owner = owner
        ctx.save_for_backward(x)
        return (x / owner.scale).round() * owner.scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 4 * ctx.owner.scale), None

class Q(OneLinear):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
    def forward(self, x):
        return x + FakeQuant.apply(self.lin(x), self)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Q(), Q(), Q(), nn.Linear(D, D))
""",
    "deep_equilibrium_with_a_hook": """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u, self.n = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        with torch.no_grad():
            self.w.weight.mul_(0.3)
    def forward(self, z, x):
        return torch.tanh(self.w(z) + self.u(x))

def solve(f, z, tol=1e-7, most=60):
    for _ in range(most):
        n = f(z)
        if (n - z).norm() < tol * (1 + n.norm()):
            return n
        z = n
    return z

class Deq(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = Cell()
    def forward(self, x):
        with torch.no_grad():
            z = solve(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        if z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.f(z0, x)
            def hook(g):
                if self.hook is not None:
                    self.hook.remove()
                    self.hook = None
                return solve(lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + g, g)
            self.hook = z.register_hook(hook)
        return z

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.d1, self.b, self.d2, self.o = nn.Linear(D, D), Deq(), Block(), Deq(), nn.Linear(D, D)
    def forward(self, x):
        return self.o(self.d2(self.b(self.d1(self.i(x)))))
""",
}
