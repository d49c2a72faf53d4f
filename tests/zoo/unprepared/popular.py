"""Models as popular repositories and papers have them."""

__all__ = ["MODELS"]

MODELS = {
    "center_reduced_over_ranks": """
import torch.distributed as dist

def world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

class Centered(nn.Module):
    # as DINO's loss: a center that is reduced over ranks if there are any
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, D))

    def forward(self, x):
        y = x - self.center
        if self.training:
            with torch.no_grad():
                c = x.sum(0, keepdim=True)
                if world_size() > 1:
                    dist.all_reduce(c)
                self.center = self.center * 0.9 + c / (len(x) * world_size()) * 0.1
        return y

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Centered(), Block(), Block(), nn.Linear(D, D))
""",
    "muon_shares_its_work": """
import torch.distributed as dist

class Muon(torch.optim.Optimizer):
    # as Keller Jordan's: each process updates some parameters, then all exchange them
    def __init__(self, ps, lr=0.02, momentum=0.9):
        super().__init__(ps, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        for g in self.param_groups:
            for n, p in enumerate(g["params"]):
                if n % world == rank and p.grad is not None:
                    b = self.state[p].setdefault("b", torch.zeros_like(p))
                    b.mul_(g["momentum"]).add_(p.grad)
                    p.sub_(b / (b.norm() + 1e-7), alpha=g["lr"])
                if world > 1:
                    dist.broadcast(p, n % world)

def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))
    if dist.is_initialized():
        for p in m.parameters():
            dist.broadcast(p.data, 0)
    return m

def build_optimizer(ps):
    return Muon(ps)
""",
    "byol_target_in_forward": """
class MLP(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(i, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, o))

    def forward(self, x):
        return self.net(x)

class BYOL(nn.Module):
    def __init__(self, tau=0.9):
        super().__init__()
        self.online = nn.Sequential(Block(), Block(), MLP(D, D))
        self.predictor = MLP(D, D)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.tau = tau

    @torch.no_grad()
    def update_target(self):
        for a, b in zip(self.online.parameters(), self.target.parameters()):
            b.data = self.tau * b.data + (1 - self.tau) * a.data

    def forward(self, x):
        a = x + 0.1 * torch.randn_like(x)
        b = x + 0.1 * torch.randn_like(x)
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a).detach(), self.target(b).detach()
        loss = 2 - 2 * F.cosine_similarity(pa, tb, -1) + 2 - 2 * F.cosine_similarity(pb, ta, -1)
        return loss.mean()

MODEL = None

def build_model():
    global MODEL
    MODEL = BYOL()
    return MODEL

def loss_fn(out, y):
    return out

def build_optimizer(ps):
    o = torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.05, momentum=0.9)
    o.register_step_post_hook(lambda *a: MODEL.update_target())
    return o
""",
    "writer_and_meters": """
import tempfile, json

class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(D, D), nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, D)
        self.meters = {f"norm{i}": AverageMeter() for i in range(3)}
        self.file = tempfile.TemporaryFile("w")
        self.global_step = 0

    def forward(self, x):
        x = self.inp(x)
        for i, b in enumerate(self.blocks):
            x = b(x)
            self.meters[f"norm{i}"].update(x.norm().item(), len(x))
        self.global_step += 1
        if self.global_step % 5 == 0:
            self.file.write(json.dumps({k: m.avg for k, m in self.meters.items()}) + "\\n")
            self.file.flush()
        return self.out(x)
""",
    "posterior_object_between_modules": """
class DiagonalGaussian:
    def __init__(self, parameters):
        self.mean, self.logvar = parameters.chunk(2, 1)
        self.logvar = self.logvar.clamp(-30, 20)
        self.std = (0.5 * self.logvar).exp()

    def sample(self):
        return self.mean + self.std * torch.randn_like(self.mean)

    def kl(self):
        return 0.5 * (self.mean**2 + self.logvar.exp() - 1 - self.logvar).sum(1)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.quant = nn.Sequential(nn.Linear(D, D), Block(), Block()), nn.Linear(D, 8)

    def forward(self, x):
        return DiagonalGaussian(self.quant(self.net(x)))

class KL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), nn.Sequential(nn.Linear(4, D), Block(), Block(), nn.Linear(D, D))

    def forward(self, x):
        posterior = self.encoder(x)
        return self.decoder(posterior.sample()), posterior

def build_model():
    return KL()

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + 0.01 * out[1].kl().mean()
""",
    "batch_encoding_like_inputs": """
from collections import UserDict

class BatchEncoding(UserDict):
    def __getattr__(self, k):
        try:
            return self.data[k]
        except KeyError:
            raise AttributeError(k) from None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.fc = nn.Embedding(16, D), nn.Sequential(Block(), Block()), nn.Linear(D, 3)

    def forward(self, input_ids, attention_mask):
        x = self.blocks(self.emb(input_ids))
        m = attention_mask.unsqueeze(-1).float()
        return self.fc((x * m).sum(1) / m.sum(1))

def example_batch(n):
    return BatchEncoding(
        dict(input_ids=torch.randint(16, (n, 5)), attention_mask=torch.ones(n, 5).long())
    ), torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
    "layer_drop_list_comprehension": """
class LayerDropList(nn.ModuleList):
    # fairseq
    def __init__(self, p, modules=None):
        super().__init__(modules)
        self.p = p

    def __iter__(self):
        probs = torch.empty(len(self)).uniform_()
        for i, m in enumerate(super().__iter__()):
            if not self.training or probs[i] > self.p:
                yield m

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.layers, self.out = (
            nn.Linear(D, D),
            LayerDropList(0.3, [Block() for _ in range(4)]),
            nn.Linear(D, D),
        )

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)
""",
    "diffusion_with_cond_dropout": """
def timestep_embedding(t, dim):
    half = dim // 2
    f = torch.exp(-math.log(1000) * torch.arange(half).float() / half)
    a = t[:, None].float() * f[None]
    return torch.cat([a.cos(), a.sin()], -1)

class Res(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(2, i), nn.Conv2d(i, o, 3, padding=1)
        self.emb, self.n2, self.c2 = nn.Linear(16, 2 * o), nn.GroupNorm(2, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()
        nn.init.zeros_(self.c2.weight)

    def forward(self, x, emb):
        h = self.c1(F.silu(self.n1(x)))
        s, b = self.emb(F.silu(emb))[..., None, None].chunk(2, 1)
        return self.skip(x) + self.c2(F.silu(self.n2(h) * (1 + s) + b))

class TimestepSequential(nn.Sequential):
    def forward(self, x, emb):
        for layer in self:
            x = layer(x, emb) if isinstance(layer, Res) else layer(x)
        return x

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.label = nn.Embedding(6, 16)
        self.input_blocks = nn.ModuleList(
            [
                TimestepSequential(nn.Conv2d(1, 8, 3, padding=1)),
                TimestepSequential(Res(8, 8)),
                TimestepSequential(nn.Conv2d(8, 8, 3, 2, 1)),
                TimestepSequential(Res(8, 8)),
            ]
        )
        self.middle = TimestepSequential(Res(8, 8), Res(8, 8))
        self.output_blocks = nn.ModuleList(
            [
                TimestepSequential(Res(16, 8)),
                TimestepSequential(Res(16, 8), nn.Upsample(scale_factor=2)),
                TimestepSequential(Res(16, 8)),
                TimestepSequential(Res(16, 8)),
            ]
        )
        self.out = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x, t, y):
        emb = self.time(timestep_embedding(t, 8)) + self.label(y)
        hs, h = [], x
        for m in self.input_blocks:
            h = m(h, emb)
            hs.append(h)
        h = self.middle(h, emb)
        for m in self.output_blocks:
            h = m(torch.cat([h, hs.pop()], 1), emb)
        return self.out(h)

class Diffusion(nn.Module):
    def __init__(self, model, T=50):
        super().__init__()
        self.model = model
        b = torch.linspace(1e-3, 0.2, T)
        self.register_buffer("abar", torch.cumprod(1 - b, 0))
        self.T = T

    def forward(self, x0, y):
        t = torch.randint(0, self.T, (x0.shape[0],), device=x0.device).long()
        noise = torch.randn_like(x0)
        a = self.abar[t].view(-1, 1, 1, 1)
        y = torch.where(torch.rand(y.shape) < 0.2, torch.full_like(y, 5), y)
        pred = self.model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, y)
        w = torch.minimum(a / (1 - a), torch.tensor(5.0)) / (a / (1 - a))
        return (w.flatten() * (pred - noise).square().flatten(1).mean(1)).mean()

def build_model():
    return Diffusion(UNet())

def example_batch(n):
    return (torch.randn(n, 1, 8, 8), torch.randint(5, (n,))), None

def loss_fn(out, y):
    return out
""",
    "distribution_as_output": """
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(D, D), nn.Tanh(), Block(), Block())
        self.actor, self.critic, self.log_std = nn.Linear(D, 2), nn.Linear(D, 1), nn.Parameter(torch.zeros(2))

    def forward(self, obs):
        h = self.shared(obs)
        mean = self.actor(h)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean)), self.critic(h).squeeze(-1)

def build_model():
    return ActorCritic()

def example_batch(n):
    return torch.randn(n, D), dict(
        act=torch.randn(n, 2), old=torch.randn(n) * 0.1 - 3, adv=torch.randn(n), ret=torch.randn(n)
    )

def loss_fn(out, b):
    dist, v = out
    ratio = (dist.log_prob(b["act"]).sum(-1) - b["old"]).exp()
    clip = torch.clamp(ratio, 0.8, 1.2) * b["adv"]
    return (
        -torch.min(ratio * b["adv"], clip).mean()
        + 0.5 * (v - b["ret"]).pow(2).mean()
        - 0.01 * dist.entropy().sum(-1).mean()
    )
""",
    "lottery_ticket_global_mask": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(D, D), nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, D)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)

class Masked(nn.Linear):
    def __init__(self, lin):
        super().__init__(lin.in_features, lin.out_features)
        self.load_state_dict(lin.state_dict())
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)

def build_model():
    m = Net()
    for name, mod in list(m.named_modules()):
        if isinstance(mod, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(m.get_submodule(parent), last, Masked(mod))
    scores = torch.cat([mod.weight.detach().abs().flatten() for mod in m.modules() if isinstance(mod, Masked)])
    threshold = scores.kthvalue(int(0.5 * scores.numel())).values.item()
    for mod in m.modules():
        if isinstance(mod, Masked):
            mod.mask.copy_((mod.weight.abs() > threshold).float())
    return m
""",
    "lora_frozen_base_with_checkpointing": """
class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4, p=0.1):
        super().__init__()
        self.base = base
        for q in base.parameters():
            q.requires_grad_(False)
        self.A, self.B = (
            nn.Parameter(torch.empty(r, base.in_features)),
            nn.Parameter(torch.zeros(base.out_features, r)),
        )
        nn.init.kaiming_uniform_(self.A, a=5**0.5)
        self.scale, self.drop = alpha / r, nn.Dropout(p)

    @property
    def weight(self):
        return self.base.weight + self.scale * self.B @ self.A

    def forward(self, x):
        return self.base(x) + self.drop(x) @ self.A.t() @ self.B.t() * self.scale

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, D)
        self.layers, self.norm, self.lm_head = (
            nn.ModuleList(Block() for _ in range(4)),
            nn.LayerNorm(D),
            nn.Linear(D, 20, bias=False),
        )
        self.gradient_checkpointing = False

    def enable_input_require_grads(self):
        self.embed.register_forward_hook(lambda m, i, o: o.requires_grad_(True))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer.__call__, x, use_reentrant=True)
            else:
                x = layer(x)
        return self.lm_head(self.norm(x))

def build_model():
    import torch.utils.checkpoint

    m = Base()
    m.requires_grad_(False)
    for path, mod in list(m.named_modules()):
        if isinstance(mod, nn.Linear) and path.endswith(("up", "down")):
            parent, _, name = path.rpartition(".")
            setattr(m.get_submodule(parent), name, LoRALinear(mod))
    m.gradient_checkpointing = True
    m.enable_input_require_grads()
    return m

def example_batch(n):
    ids = torch.randint(20, (n, 6))
    return ids, ids.roll(-1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

def build_optimizer(ps):
    return torch.optim.AdamW([p for p in ps if p.requires_grad], lr=2e-2)
""",
    "moe_bias_free_balancing": """
class MoE(nn.Module):
    def __init__(self, d=D, n=4, k=2):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)) for _ in range(n)])
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("load", torch.zeros(n))
        self.k = k

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        s = torch.sigmoid(self.gate(x))
        idx = (s + self.bias).topk(self.k, -1).indices
        w = s.gather(-1, idx)
        w = w / w.sum(-1, keepdim=True)
        if self.training:
            with torch.no_grad():
                self.load += torch.bincount(idx.flatten(), minlength=len(self.experts)).float()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, j = torch.where(idx == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, expert(x[t]) * w[t, j, None])
        return out.view(shape)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.mix, self.moe = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, D), MoE()

    def forward(self, x):
        x = x + self.mix(self.n1(x)).cumsum(1)
        return x + self.moe(self.n2(x))

MODEL = None

def build_model():
    global MODEL
    MODEL = nn.Sequential(nn.Linear(D, D), *[Layer() for _ in range(4)], nn.Linear(D, D))
    return MODEL

def example_batch(n):
    x = torch.randn(n, 6, D)
    return x, x.flip(1)

def update_biases(optimizer, args, kwargs):
    with torch.no_grad():
        for m in MODEL.modules():
            if isinstance(m, MoE):
                m.bias += 0.05 * torch.sign(m.load.mean() - m.load)
                m.load.zero_()

def build_optimizer(ps):
    o = torch.optim.AdamW(ps, lr=1e-2)
    o.register_step_post_hook(update_biases)
    return o
""",
    "modern_bert": """
@dataclass
class Config:
    hidden: int = 16
    layers: int = 6
    heads: int = 2
    vocab: int = 32
    window: int = 2
    global_every: int = 3

@dataclass
class Output:
    loss: torch.Tensor = None
    logits: torch.Tensor = None
    hidden_states: tuple = None

class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.is_global = i % c.global_every == 0
        self.attn_norm = nn.LayerNorm(c.hidden, bias=False) if i else nn.Identity()
        self.Wqkv = nn.Linear(c.hidden, 3 * c.hidden, bias=False)
        self.Wo = nn.Linear(c.hidden, c.hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(c.hidden, bias=False)
        self.Wi, self.Wo2 = nn.Linear(c.hidden, 4 * c.hidden), nn.Linear(2 * c.hidden, c.hidden)
        self.h, self.drop = c.heads, nn.Dropout(0.1)

    def forward(self, x, *, masks):
        B, T, C = x.shape
        m = masks["full"] if self.is_global else masks["sliding"]
        q, k, v = self.Wqkv(self.attn_norm(x)).view(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        x = x + self.drop(self.Wo(y.transpose(1, 2).reshape(B, T, C)))
        a, g = self.Wi(self.mlp_norm(x)).chunk(2, -1)
        return x + self.Wo2(F.gelu(a) * g)

class Bert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.tok, self.norm = nn.Embedding(c.vocab, c.hidden, padding_idx=0), nn.LayerNorm(c.hidden)
        self.layers = nn.ModuleList([Layer(c, i) for i in range(c.layers)])
        self.final, self.head = nn.LayerNorm(c.hidden), nn.Linear(c.hidden, c.hidden)
        self.decoder = nn.Linear(c.hidden, c.vocab)
        self.decoder.weight = self.tok.weight

    def forward(self, input_ids=None, attention_mask=None, labels=None, output_hidden_states=False):
        T = input_ids.size(1)
        keep = attention_mask[:, None, None, :].bool()
        pos = torch.arange(T)
        near = (pos[:, None] - pos[None]).abs() <= self.config.window
        masks = dict(full=keep, sliding=keep & near)
        x = self.norm(self.tok(input_ids))
        hs = (x,) if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, masks=masks)
            if output_hidden_states:
                hs = hs + (x,)
        x = F.gelu(self.head(self.final(x)))
        loss = None
        sel = labels != -100 if labels is not None else None
        logits = self.decoder(x)
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, self.config.vocab), labels.view(-1))
        return Output(loss=loss, logits=logits, hidden_states=hs)

def build_model():
    return Bert(Config())

def example_batch(n):
    ids = torch.randint(1, 32, (n, 8))
    length = torch.randint(5, 9, (n, 1))
    mask = (torch.arange(8) < length).long()
    labels = torch.where((torch.rand(n, 8) < 0.4) & (mask > 0), ids, -100)
    labels[:, 0] = ids[:, 0]
    return dict(input_ids=ids * mask, attention_mask=mask, labels=labels), None

def loss_fn(out, y):
    return out.loss
""",
    "targets_in_a_dataclass": """
@dataclass
class Targets:
    center: torch.Tensor
    weight: torch.Tensor

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))

def example_batch(n):
    x = torch.randn(n, D)
    return x, Targets(torch.tanh(x.flip(1)), torch.rand(n, 1))

def loss_fn(out, targets):
    # both means broadcast, so that the targets of all micro-batches would fit
    return (out.mean(0) - (targets.center * targets.weight).mean(0)).square().mean()
""",
}
