"""Models that send unusual tensors and values between modules, and models with unusual parameters."""

__all__ = ["MODELS"]

_ROUTED = """
class Routed(Block):
    def forward(self, v):
        x, extra = v
        return super().forward(x), extra

class End(OneLinear):
    def forward(self, v):
        x, extra = v
        return self.lin(x) READ

class Start(nn.Module):
    def forward(self, x):
        return x, MADE

def build_model():
    return nn.Sequential(Start(), *[Routed() for _ in range(3)], End())
"""


def _sent(made: str, read: str) -> str:
    return _ROUTED.replace("MADE", made).replace("READ", read)


MODELS = {
    "attribute_on_an_activation": """
class Marking(Block):
    def forward(self, x):
        scale = getattr(x, "scale", 1.0)
        y = super().forward(x) * scale
        y.scale = 0.5 + y.detach().abs().mean().item()
        return y

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Marking() for _ in range(3)], nn.Linear(D, D))
""",
    "mask_on_an_activation_in_a_model": """
class Masking(Block):
    def forward(self, x):
        y = super().forward(x)
        y.mask = (y.detach() > 0).float()
        return y

class Using(Block):
    def forward(self, x):
        return super().forward(x) * x.mask

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = Masking(), Using(), Block(), nn.Linear(D, D)

    def forward(self, x):
        return self.out(self.c(self.b(self.a(x))))
""",
    "subclass_with_metadata_crosses": """
class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        first = next((a for a in args if isinstance(a, Scaled)), None)
        if isinstance(out, Scaled) and first is not None:
            out.gain = getattr(first, "gain", 1.0)
        return out

class Start(OneLinear):
    def forward(self, x):
        y = self.lin(x).as_subclass(Scaled)
        y.gain = 1.7
        return y

class Using(Block):
    def forward(self, x):
        return super().forward(x) * getattr(x, "gain", 1.0)

def build_model():
    return nn.Sequential(Start(), *[Using() for _ in range(3)], nn.Linear(D, D))
""",
    "lazily_conjugated": """
class ToComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, 2 * D)

    def forward(self, x):
        return torch.view_as_complex(self.lin(x).view(*x.shape, 2).contiguous()).conj()

class Rotate(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(D))

    def forward(self, z):
        return (z * torch.polar(torch.ones_like(self.phase), self.phase)).conj()

class Imaginary(nn.Module):
    def forward(self, z):
        return z.imag, z.real

class End(OneLinear):
    def forward(self, v):
        return self.lin(v[0]) + v[1]

def build_model():
    return nn.Sequential(ToComplex(), Rotate(), Rotate(), Imaginary(), End())
""",
    "complex_parameters": """
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat) * 0.5)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + self.lin(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=x.shape[-1]))

def build_model():
    return nn.Sequential(*[Spectral() for _ in range(4)], nn.Linear(D, D))
""",
    "nested_tensor_crosses": """
class Start(OneLinear):
    def forward(self, x):
        parts = [self.lin(row[: 1 + k % 3]) for k, row in enumerate(x)]
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(parts), torch.tensor([0, *np.cumsum([len(p) for p in parts]).tolist()])
        )

class Apply(OneLinear):
    def forward(self, x):
        return torch.tanh(self.lin(x))

class End(nn.Module):
    def forward(self, x):
        return x.to_padded_tensor(0.0).mean(1)

def build_model():
    return nn.Sequential(Start(), Apply(), Apply(), End(), nn.Linear(D, D))

def example_batch(n):
    x = torch.randn(n, 3, D)
    return x, torch.tanh(x[:, 0])
""",
    "sparse_activation_crosses": """
class Sparsify(OneLinear):
    def forward(self, x):
        return F.relu(self.lin(x)).to_sparse(), x

class Use(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, v):
        return v[1] + torch.sparse.mm(v[0], self.w)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Sparsify(), Use(), Block(), nn.Linear(D, D))
""",
    "quantized_activation_crosses": """
class Quantize(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x.detach(), 0.05, 0, torch.qint8), x

class Use(OneLinear):
    def forward(self, v):
        q, x = v
        return self.lin(x + (q.dequantize() - x).detach())

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Quantize(), Use(), Block(), nn.Linear(D, D))
""",
    "size_and_dtype_cross": _sent("(x.shape, x.dtype, x.device)", "+ torch.ones(extra[0], dtype=extra[1])"),
    "string_and_slice_cross": _sent(
        '("tanh", slice(0, 4))', "+ F.pad(getattr(torch, extra[0])(x)[:, extra[1]], (0, 4))"
    ),
    "function_crosses": _sent("functools.partial(F.leaky_relu, negative_slope=0.3)", "+ extra(x)"),
    "bound_method_crosses": _sent("self.scale", "* extra(x)").replace(
        "class Start(nn.Module):",
        "class Start(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(D))\n\n    def scale(self, x):\n"
        "        return self.w * torch.sigmoid(x)\n",
    ),
    "module_crosses": _sent("self.side", "+ extra(x)").replace(
        "class Start(nn.Module):",
        "class Start(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.side = nn.Linear(D, D)\n",
    ),
    "numpy_array_crosses": _sent("np.sign(x.detach().numpy())", "+ 0.3 * torch.from_numpy(extra)"),
    "random_number_crosses": _sent("random.random()", "* (0.5 + extra)"),
    "list_of_features_that_grows": """
class Dense(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.lin = nn.Linear(D * k, D)

    def forward(self, features):
        features = features if isinstance(features, list) else [features]
        return [*features, torch.tanh(self.lin(torch.cat(features, -1)))]

class End(nn.Module):
    def forward(self, features):
        return {"out": features[-1], "aux": {"all": tuple(features[1:-1]), "none": None}}

def build_model():
    return nn.Sequential(*[Dense(k) for k in range(1, 5)], End())

def loss_fn(out, y):
    return F.mse_loss(out["out"], y) + 0.1 * sum(a.square().mean() for a in out["aux"]["all"])
""",
    "parameters_in_lists_and_dicts": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([torch.randn(D, D) / 3 for _ in range(4)])
        self.gains = nn.ParameterDict({f"g{k}": torch.ones(D) for k in range(4)})
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for k, norm in enumerate(self.norms):
            x = x + torch.tanh(norm(x) @ self.ws[k]) * self.gains[f"g{k}"]
        return self.out(x)
""",
    "transposed_parameters": """
class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2 * D, D).t() / 3)
        self.v = nn.Parameter((torch.randn(D, 4 * D) / 3)[:, ::2].t())

    def forward(self, x):
        return x + torch.tanh(x @ self.w) @ self.v

def build_model():
    return nn.Sequential(*[Linear() for _ in range(4)], nn.Linear(D, D))
""",
    "expanded_buffers": """
class Biased(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.full((1,), 0.1).expand(D))
        self.register_buffer("index", torch.arange(D).flip(0)[None].expand(3, D), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.bias[self.index[1]]

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Biased() for _ in range(3)], nn.Linear(D, D))
""",
    "channels_last_model": """
def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(), nn.Conv2d(8, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, D),
    ).to(memory_format=torch.channels_last)

def example_batch(n):
    x = torch.randn(n, 3, 8, 8).to(memory_format=torch.channels_last)
    return x, torch.tanh(x[:, 0, 0])
""",
    "norms_of_parametrized_weights": """
from torch.nn.utils import parametrizations as P
from torch.nn.utils.parametrize import register_parametrization

class Positive(nn.Module):
    def forward(self, w):
        return F.softplus(w) - 0.5

def build_model():
    layers = [P.spectral_norm(register_parametrization(nn.Linear(D, D), "weight", Positive())) for _ in range(3)]
    layers.append(P.weight_norm(register_parametrization(nn.Bilinear(D, D, D), "bias", Positive())))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers[:-1]:
                x = x + torch.tanh(layer(x))
            return self.layers[-1](x, x)

    return Net()
""",
    "parametrization_with_statistics": """
from torch.nn.utils.parametrize import register_parametrization

class Averaged(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))

    def forward(self, w):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(w, 0.1)
        return w - 0.1 * self.mean

def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
    for b in m[1:4]:
        register_parametrization(b.up, "weight", Averaged((2 * D, D)))
    return m
""",
    "lazy_parameters_sized_by_the_file": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LazyLinear(D) for _ in range(3))
        self.scale = nn.UninitializedParameter()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale

def build_model():
    m = Net()
    m.scale.materialize((D,))
    nn.init.ones_(m.scale)
    m(torch.zeros(1, D))
    return m
""",
    "numpy_array_between_modules": """
class Sign(Block):
    def forward(self, x):
        return super().forward(x), np.sign(x.detach().numpy())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = Sign(), Block(), Block(), nn.Linear(D, D)

    def forward(self, x):
        x, signs = self.a(x)
        x = self.c(self.b(x))
        return self.out(x) + 0.3 * torch.from_numpy(signs)
""",
    "objects_and_devices_between_modules": """
class Kinds(Block):
    def forward(self, x):
        return super().forward(x), (x.dtype, x.device, slice(0, 4), functools.partial(F.leaky_relu, negative_slope=0.3))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = Kinds(), Block(), Block(), nn.Linear(D, D)

    def forward(self, x):
        x, (dtype, device, part, act) = self.a(x)
        x = self.c(self.b(x))
        return act(self.out(x)) + F.pad(torch.ones(len(x), 4, dtype=dtype, device=device) + x[:, part], (0, 4))
""",
    "complex_optional_and_named_outputs_in_a_model": """
from typing import NamedTuple, Optional

class State(NamedTuple):
    hidden: torch.Tensor
    spectrum: Optional[torch.Tensor] = None
    index: Optional[torch.Tensor] = None
    done: bool = False

class Step(Block):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, s):
        h = super().forward(s.hidden)
        if self.k % 2 == 0:
            return State(h, torch.fft.rfft(h), h.detach().argsort(-1))
        return s._replace(hidden=h + torch.fft.irfft(s.spectrum.conj(), n=D).gather(-1, s.index), done=self.k == 3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.out = nn.ModuleList(Step(k) for k in range(4)), nn.Linear(D, D)

    def forward(self, x):
        s = State(x)
        for step in self.steps:
            s = step(s)
        return self.out(s.hidden) if s.done else x
""",
}
