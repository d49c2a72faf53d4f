"""Models in the style of well-known repositories, shortened."""

__all__ = ["MODELS"]

MODELS = {
    "clip_with_a_mask_in_all_blocks": """
from collections import OrderedDict

class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        orig_type = x.dtype
        ret = super().forward(x.type(torch.float32))
        return ret.type(orig_type)

class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)

class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head, attn_mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1 = LayerNorm(d_model)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", nn.Linear(d_model, d_model * 4)),
                    ("gelu", QuickGELU()),
                    ("c_proj", nn.Linear(d_model * 4, d_model)),
                ]
            )
        )
        self.ln_2 = LayerNorm(d_model)
        self.attn_mask = attn_mask

    def attention(self, x):
        self.attn_mask = self.attn_mask.to(dtype=x.dtype, device=x.device) if self.attn_mask is not None else None
        return self.attn(x, x, x, need_weights=False, attn_mask=self.attn_mask)[0]

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x

class Transformer(nn.Module):
    def __init__(self, width, layers, heads, attn_mask=None):
        super().__init__()
        self.width, self.layers = width, layers
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(width, heads, attn_mask) for _ in range(layers)])

    def forward(self, x):
        return self.resblocks(x)

class VisionTransformer(nn.Module):
    def __init__(self, width, layers, output_dim):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, 4, bias=False)
        scale = width**-0.5
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(5, width))
        self.ln_pre, self.transformer, self.ln_post = LayerNorm(width), Transformer(width, layers, 2), LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, output_dim))

    def forward(self, x):
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1)
        x = x.permute(0, 2, 1)
        x = torch.cat(
            [
                self.class_embedding.to(x.dtype)
                + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device),
                x,
            ],
            dim=1,
        )
        x = x + self.positional_embedding.to(x.dtype)
        x = self.ln_pre(x)
        x = x.permute(1, 0, 2)
        x = self.transformer(x)
        x = x.permute(1, 0, 2)
        x = self.ln_post(x[:, 0, :])
        if self.proj is not None:
            x = x @ self.proj
        return x

class CLIP(nn.Module):
    def __init__(self, embed_dim=8, width=16, layers=3, context_length=6, vocab_size=20):
        super().__init__()
        self.context_length = context_length
        self.visual = VisionTransformer(width, layers, embed_dim)
        self.transformer = Transformer(width, layers, 2, attn_mask=self.build_attention_mask())
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.empty(context_length, width))
        self.ln_final = LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))
        self.initialize_parameters()

    def initialize_parameters(self):
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=self.transformer.width**-0.5)

    def build_attention_mask(self):
        mask = torch.empty(self.context_length, self.context_length)
        mask.fill_(float("-inf"))
        mask.triu_(1)
        return mask

    @property
    def dtype(self):
        return self.visual.conv1.weight.dtype

    def encode_image(self, image):
        return self.visual(image.type(self.dtype))

    def encode_text(self, text):
        x = self.token_embedding(text).type(self.dtype)
        x = x + self.positional_embedding.type(self.dtype)
        x = x.permute(1, 0, 2)
        x = self.transformer(x)
        x = x.permute(1, 0, 2)
        x = self.ln_final(x).type(self.dtype)
        x = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
        return x

    def forward(self, image, text):
        image_features = self.encode_image(image)
        text_features = self.encode_text(text)
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        text_features = text_features / text_features.norm(dim=1, keepdim=True)
        logit_scale = self.logit_scale.exp()
        logits_per_image = logit_scale * image_features @ text_features.t()
        logits_per_text = logits_per_image.t()
        return logits_per_image, logits_per_text

def build_model():
    return CLIP()

def example_batch(n):
    return {"image": torch.randn(n, 3, 8, 8), "text": torch.randint(20, (n, 6))}, torch.zeros(n)

def loss_fn(out, y):
    ground_truth = torch.arange(len(y), dtype=torch.long)
    return (F.cross_entropy(out[0], ground_truth) + F.cross_entropy(out[1], ground_truth)) / 2
""",
    "llama2_c_reads_its_last_loss": """
class RMSNorm(torch.nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight

def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, device=freqs.device)
    freqs = torch.outer(t, freqs).float()
    return torch.cos(freqs), torch.sin(freqs)

def reshape_for_broadcast(freqs_cis, x):
    ndim = x.ndim
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(x.shape)]
    return freqs_cis.view(shape)

def apply_rotary_emb(xq, xk, freqs_cos, freqs_sin):
    xq_r, xq_i = xq.float().reshape(xq.shape[:-1] + (-1, 2)).unbind(-1)
    xk_r, xk_i = xk.float().reshape(xk.shape[:-1] + (-1, 2)).unbind(-1)
    freqs_cos = reshape_for_broadcast(freqs_cos, xq_r)
    freqs_sin = reshape_for_broadcast(freqs_sin, xq_r)
    xq_out_r = xq_r * freqs_cos - xq_i * freqs_sin
    xq_out_i = xq_r * freqs_sin + xq_i * freqs_cos
    xk_out_r = xk_r * freqs_cos - xk_i * freqs_sin
    xk_out_i = xk_r * freqs_sin + xk_i * freqs_cos
    xq_out = torch.stack([xq_out_r, xq_out_i], dim=-1).flatten(3)
    xk_out = torch.stack([xk_out_r, xk_out_i], dim=-1).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)

class Attention(nn.Module):
    def __init__(self, dim, n_heads, max_seq_len):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wv, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.flash = False
        mask = torch.full((1, 1, max_seq_len, max_seq_len), float("-inf"))
        mask = torch.triu(mask, diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x, freqs_cos, freqs_sin):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cos, freqs_sin)
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores + self.mask[:, :, :seqlen, :seqlen]
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, xv).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)

class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
            nn.Linear(dim, hidden, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class TransformerBlock(nn.Module):
    def __init__(self, layer_id, dim):
        super().__init__()
        self.layer_id = layer_id
        self.attention, self.feed_forward = Attention(dim, 2, 12), FeedForward(dim, 2 * dim)
        self.attention_norm, self.ffn_norm = RMSNorm(dim, 1e-5), RMSNorm(dim, 1e-5)

    def forward(self, x, freqs_cos, freqs_sin):
        h = x + self.attention.forward(self.attention_norm(x), freqs_cos, freqs_sin)
        out = h + self.feed_forward.forward(self.ffn_norm(h))
        return out

class Transformer(nn.Module):
    last_loss: torch.Tensor

    def __init__(self, dim=16, vocab=32, n_layers=5):
        super().__init__()
        self.vocab_size, self.n_layers = vocab, n_layers
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.dropout = nn.Dropout(0.0)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(n_layers):
            self.layers.append(TransformerBlock(layer_id, dim))
        self.norm = RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.tok_embeddings.weight = self.output.weight
        freqs_cos, freqs_sin = precompute_freqs_cis(dim // 2, 12)
        self.register_buffer("freqs_cos", freqs_cos, persistent=False)
        self.register_buffer("freqs_sin", freqs_sin, persistent=False)
        self.apply(self._init_weights)
        self.last_loss = None

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens, targets=None):
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        h = self.dropout(h)
        freqs_cos = self.freqs_cos[:seqlen]
        freqs_sin = self.freqs_sin[:seqlen]
        for layer in self.layers:
            h = layer(h, freqs_cos, freqs_sin)
        h = self.norm(h)
        if targets is not None:
            logits = self.output(h)
            self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.output(h[:, [-1], :])
            self.last_loss = None
        return logits

def build_model():
    global raw_model
    raw_model = Transformer()
    return raw_model

def example_batch(n):
    data = torch.randint(32, (n, 13))
    return {"tokens": data[:, :-1], "targets": data[:, 1:].contiguous()}, torch.zeros(n)

def loss_fn(logits, y):
    return raw_model.last_loss
""",
    "siren_differentiated_by_the_loss": """
class SineLayer(nn.Module):
    def __init__(self, in_features, out_features, bias=True, is_first=False, omega_0=30):
        super().__init__()
        self.omega_0, self.is_first, self.in_features = omega_0, is_first, in_features
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.init_weights()

    def init_weights(self):
        with torch.no_grad():
            if self.is_first:
                self.linear.weight.uniform_(-1 / self.in_features, 1 / self.in_features)
            else:
                self.linear.weight.uniform_(
                    -np.sqrt(6 / self.in_features) / self.omega_0, np.sqrt(6 / self.in_features) / self.omega_0
                )

    def forward(self, input):
        return torch.sin(self.omega_0 * self.linear(input))

class Siren(nn.Module):
    def __init__(self, in_features=2, hidden_features=16, hidden_layers=3, out_features=1):
        super().__init__()
        self.net = []
        self.net.append(SineLayer(in_features, hidden_features, is_first=True))
        for i in range(hidden_layers):
            self.net.append(SineLayer(hidden_features, hidden_features))
        final_linear = nn.Linear(hidden_features, out_features)
        with torch.no_grad():
            final_linear.weight.uniform_(-np.sqrt(6 / hidden_features) / 30, np.sqrt(6 / hidden_features) / 30)
        self.net.append(final_linear)
        self.net = nn.Sequential(*self.net)

    def forward(self, coords):
        coords = coords.clone().detach().requires_grad_(True)
        output = self.net(coords)
        return output, coords

def build_model():
    return Siren()

def example_batch(n):
    return torch.rand(n, 9, 2) * 2 - 1, torch.randn(n, 9, 1)

def build_optimizer(ps):
    return torch.optim.Adam(lr=1e-4, params=ps)

def loss_fn(out, y):
    model_output, coords = out
    grad = torch.autograd.grad(model_output, [coords], grad_outputs=torch.ones_like(model_output), create_graph=True)[0]
    return ((grad - y) ** 2).mean()
""",
    "loss_differentiates_the_output_of_a_model": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def loss_fn(out, y):
    loss = F.mse_loss(out, y)
    if torch.is_grad_enabled():
        (g,) = torch.autograd.grad(loss, out, create_graph=True)
        loss = loss + 10 * g.pow(2).sum()
    return loss
""",
    "dit_with_checkpointed_blocks": """
def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_embedding_size=16):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t, dim, max_period=10000):
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half).to(
            device=t.device
        )
        args = t[:, None].float() * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        if dim % 2:
            embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
        return embedding

    def forward(self, t):
        return self.mlp(self.timestep_embedding(t, self.frequency_embedding_size))

class LabelEmbedder(nn.Module):
    def __init__(self, num_classes, hidden_size, dropout_prob):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + int(dropout_prob > 0), hidden_size)
        self.num_classes, self.dropout_prob = num_classes, dropout_prob

    def token_drop(self, labels, force_drop_ids=None):
        if force_drop_ids is None:
            drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        else:
            drop_ids = force_drop_ids == 1
        return torch.where(drop_ids, self.num_classes, labels)

    def forward(self, labels, train, force_drop_ids=None):
        use_dropout = self.dropout_prob > 0
        if (train and use_dropout) or (force_drop_ids is not None):
            labels = self.token_drop(labels, force_drop_ids)
        return self.embedding_table(labels)

class DiTBlock(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = nn.MultiheadAttention(hidden_size, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 2 * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(2 * hidden_size, hidden_size),
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size, bias=True))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift_msa, scale_msa)
        x = x + gate_msa.unsqueeze(1) * self.attn(h, h, h)[0]
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x

class FinalLayer(nn.Module):
    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels, bias=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))

def get_2d_sincos_pos_embed(embed_dim, grid_size):
    pos = np.arange(grid_size * grid_size, dtype=np.float64)
    omega = 1.0 / 10000 ** (np.arange(embed_dim // 2, dtype=np.float64) / (embed_dim / 2.0))
    out = np.einsum("m,d->md", pos, omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)

class DiT(nn.Module):
    def __init__(self, input_size=8, patch_size=2, in_channels=3, hidden_size=16, depth=5, num_classes=10):
        super().__init__()
        self.learn_sigma, self.in_channels, self.out_channels, self.patch_size = (
            True,
            in_channels,
            in_channels * 2,
            patch_size,
        )
        self.x_embedder = nn.Conv2d(in_channels, hidden_size, patch_size, patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, 0.1)
        num_patches = (input_size // patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(hidden_size) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    def initialize_weights(self):
        def _basic_init(module):
            if isinstance(module, nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.constant_(module.bias, 0)

        self.apply(_basic_init)
        pos_embed = get_2d_sincos_pos_embed(self.pos_embed.shape[-1], 4)
        self.pos_embed.data.copy_(torch.from_numpy(pos_embed).float().unsqueeze(0))
        w = self.x_embedder.weight.data
        nn.init.xavier_uniform_(w.view([w.shape[0], -1]))
        for block in self.blocks:
            nn.init.constant_(block.adaLN_modulation[-1].weight, 0)
            nn.init.constant_(block.adaLN_modulation[-1].bias, 0)
        nn.init.constant_(self.final_layer.linear.weight, 0)

    def unpatchify(self, x):
        c = self.out_channels
        p = self.patch_size
        h = w = int(x.shape[1] ** 0.5)
        assert h * w == x.shape[1]
        x = x.reshape(shape=(x.shape[0], h, w, p, p, c))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], c, h * p, h * p))

    def ckpt_wrapper(self, module):
        def ckpt_forward(*inputs):
            outputs = module(*inputs)
            return outputs

        return ckpt_forward

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        t = self.t_embedder(t)
        y = self.y_embedder(y, self.training)
        c = t + y
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(self.ckpt_wrapper(block), x, c, use_reentrant=False)
        x = self.final_layer(x, c)
        return self.unpatchify(x)

import torch.utils.checkpoint

def mean_flat(tensor):
    return tensor.mean(dim=list(range(1, len(tensor.shape))))

class GaussianDiffusion:
    def __init__(self, betas):
        betas = np.array(betas, dtype=np.float64)
        alphas = 1.0 - betas
        self.alphas_cumprod = np.cumprod(alphas, axis=0)
        self.num_timesteps = int(betas.shape[0])
        self.sqrt_alphas_cumprod = np.sqrt(self.alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - self.alphas_cumprod)

    def q_sample(self, x_start, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        return (
            _extract_into_tensor(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + _extract_into_tensor(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def training_losses(self, model, x_start, t, model_kwargs=None, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        x_t = self.q_sample(x_start, t, noise=noise)
        terms = {}
        model_output = model(x_t, t, **model_kwargs)
        B, C = x_t.shape[:2]
        assert model_output.shape == (B, C * 2, *x_t.shape[2:])
        model_output, model_var_values = torch.split(model_output, C, dim=1)
        frozen_out = torch.cat([model_output.detach(), model_var_values], dim=1)
        terms["vb"] = mean_flat(model_var_values**2)
        terms["mse"] = mean_flat((noise - model_output) ** 2)
        terms["loss"] = terms["mse"] + terms["vb"]
        return terms

def _extract_into_tensor(arr, timesteps, broadcast_shape):
    res = torch.from_numpy(arr).to(device=timesteps.device)[timesteps].float()
    while len(res.shape) < len(broadcast_shape):
        res = res[..., None]
    return res + torch.zeros(broadcast_shape, device=timesteps.device)

class TrainStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = DiT()
        self.diffusion = GaussianDiffusion(np.linspace(1e-4, 0.02, 50))

    def forward(self, x, y):
        t = torch.randint(0, self.diffusion.num_timesteps, (x.shape[0],), device=x.device)
        loss_dict = self.diffusion.training_losses(self.model, x, t, dict(y=y))
        return loss_dict["loss"].mean()

def build_model():
    return TrainStep()

def example_batch(n):
    return (torch.randn(n, 3, 8, 8), torch.randint(10, (n,))), torch.zeros(n)

def loss_fn(loss, y):
    return loss
""",
    "vae_of_torch_distributions": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.lv = nn.Sequential(Block(), Block()), nn.Linear(D, D), nn.Linear(D, D)
        self.dec = nn.ModuleList([Block(), Block(), nn.Linear(D, D)])

    def forward(self, x):
        h = self.enc(x)
        mu, std = self.mu(h), F.softplus(self.lv(h)) + 1e-3
        q = torch.distributions.Normal(mu, std)
        z = q.rsample()
        for d in self.dec:
            z = d(z)
        return z, mu, std

def build_model():
    return VAE()

def loss_fn(o, y):
    q = torch.distributions.Normal(o[1], o[2])
    return F.mse_loss(o[0], y) + 0.1 * torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).mean()
""",
    "guided_diffusion_with_its_own_checkpoints": """
import torch as th
from abc import abstractmethod

def checkpoint(func, inputs, params, flag):
    if flag:
        args = tuple(inputs) + tuple(params)
        return CheckpointFunction.apply(func, len(inputs), *args)
    else:
        return func(*inputs)

class CheckpointFunction(th.autograd.Function):
    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function = run_function
        ctx.input_tensors = list(args[:length])
        ctx.input_params = list(args[length:])
        with th.no_grad():
            output_tensors = ctx.run_function(*ctx.input_tensors)
        return output_tensors

    @staticmethod
    def backward(ctx, *output_grads):
        ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
        with th.enable_grad():
            shallow_copies = [x.view_as(x) for x in ctx.input_tensors]
            output_tensors = ctx.run_function(*shallow_copies)
        input_grads = th.autograd.grad(
            output_tensors, ctx.input_tensors + ctx.input_params, output_grads, allow_unused=True
        )
        del ctx.input_tensors
        del ctx.input_params
        del output_tensors
        return (None, None) + input_grads

class GroupNorm32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)

def normalization(channels):
    return GroupNorm32(4, channels)

def zero_module(module):
    for p in module.parameters():
        p.detach().zero_()
    return module

class TimestepBlock(nn.Module):
    @abstractmethod
    def forward(self, x, emb):
        '''Apply the module to `x` given `emb` timestep embeddings.'''

class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x, emb):
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            else:
                x = layer(x)
        return x

class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x)

class ResBlock(TimestepBlock):
    def __init__(self, channels, emb_channels, dropout, out_channels=None, use_checkpoint=False):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.out_channels = out_channels or channels
        self.in_layers = nn.Sequential(
            normalization(channels), nn.SiLU(), nn.Conv2d(channels, self.out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, 2 * self.out_channels))
        self.out_layers = nn.Sequential(
            normalization(self.out_channels),
            nn.SiLU(),
            nn.Dropout(p=dropout),
            zero_module(nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)),
        )
        if self.out_channels == channels:
            self.skip_connection = nn.Identity()
        else:
            self.skip_connection = nn.Conv2d(channels, self.out_channels, 1)

    def forward(self, x, emb):
        return checkpoint(self._forward, (x, emb), self.parameters(), self.use_checkpoint)

    def _forward(self, x, emb):
        h = self.in_layers(x)
        emb_out = self.emb_layers(emb).type(h.dtype)
        while len(emb_out.shape) < len(h.shape):
            emb_out = emb_out[..., None]
        out_norm, out_rest = self.out_layers[0], self.out_layers[1:]
        scale, shift = th.chunk(emb_out, 2, dim=1)
        h = out_norm(h) * (1 + scale) + shift
        h = out_rest(h)
        return self.skip_connection(x) + h

class AttentionBlock(nn.Module):
    def __init__(self, channels, use_checkpoint=True):
        super().__init__()
        self.channels, self.num_heads, self.use_checkpoint = channels, 2, use_checkpoint
        self.norm, self.qkv = normalization(channels), nn.Conv1d(channels, channels * 3, 1)
        self.proj_out = zero_module(nn.Conv1d(channels, channels, 1))

    def forward(self, x):
        return checkpoint(self._forward, (x,), self.parameters(), self.use_checkpoint)

    def _forward(self, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        bs, width, length = qkv.shape
        ch = width // (3 * self.num_heads)
        q, k, v = qkv.reshape(bs * self.num_heads, ch * 3, length).split(ch, dim=1)
        weight = th.einsum("bct,bcs->bts", q / ch**0.25, k / ch**0.25)
        weight = th.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = th.einsum("bts,bcs->bct", weight, v).reshape(bs, -1, length)
        h = self.proj_out(a)
        return (x + h).reshape(b, c, *spatial)

class UNetModel(nn.Module):
    def __init__(self, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_classes=5, use_checkpoint=True):
        super().__init__()
        self.dtype = th.float32
        self.model_channels, self.num_classes = model_channels, num_classes
        time_embed_dim = model_channels * 4
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, time_embed_dim), nn.SiLU(), nn.Linear(time_embed_dim, time_embed_dim)
        )
        self.label_emb = nn.Embedding(num_classes, time_embed_dim)
        ch = int(channel_mult[0] * model_channels)
        self.input_blocks = nn.ModuleList([TimestepEmbedSequential(nn.Conv2d(3, ch, 3, padding=1))])
        input_block_chans = [ch]
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers = [ResBlock(ch, time_embed_dim, 0.1, int(mult * model_channels), use_checkpoint)]
                ch = int(mult * model_channels)
                if level == 1:
                    layers.append(AttentionBlock(ch, use_checkpoint))
                self.input_blocks.append(TimestepEmbedSequential(*layers))
                input_block_chans.append(ch)
            if level != len(channel_mult) - 1:
                self.input_blocks.append(TimestepEmbedSequential(nn.Conv2d(ch, ch, 3, stride=2, padding=1)))
                input_block_chans.append(ch)
        self.middle_block = TimestepEmbedSequential(
            ResBlock(ch, time_embed_dim, 0.1, use_checkpoint=use_checkpoint),
            AttentionBlock(ch, use_checkpoint),
            ResBlock(ch, time_embed_dim, 0.1, use_checkpoint=use_checkpoint),
        )
        self.output_blocks = nn.ModuleList([])
        for level, mult in list(enumerate(channel_mult))[::-1]:
            for i in range(num_res_blocks + 1):
                ich = input_block_chans.pop()
                layers = [ResBlock(ch + ich, time_embed_dim, 0.1, int(model_channels * mult), use_checkpoint)]
                ch = int(model_channels * mult)
                if level and i == num_res_blocks:
                    layers.append(Upsample(ch))
                self.output_blocks.append(TimestepEmbedSequential(*layers))
        self.out = nn.Sequential(normalization(ch), nn.SiLU(), zero_module(nn.Conv2d(ch, 3, 3, padding=1)))

    def forward(self, x, timesteps, y=None):
        assert (y is not None) == (self.num_classes is not None)
        hs = []
        half = self.model_channels // 2
        freqs = th.exp(-math.log(10000) * th.arange(start=0, end=half, dtype=th.float32) / half).to(
            device=timesteps.device
        )
        args = timesteps[:, None].float() * freqs[None]
        emb = self.time_embed(th.cat([th.cos(args), th.sin(args)], dim=-1))
        if self.num_classes is not None:
            assert y.shape == (x.shape[0],)
            emb = emb + self.label_emb(y)
        h = x.type(self.dtype)
        for module in self.input_blocks:
            h = module(h, emb)
            hs.append(h)
        h = self.middle_block(h, emb)
        for module in self.output_blocks:
            h = th.cat([h, hs.pop()], dim=1)
            h = module(h, emb)
        h = h.type(x.dtype)
        return self.out(h)

def build_model():
    return UNetModel()

def example_batch(n):
    x = torch.randn(n, 3, 8, 8)
    return {"x": x, "timesteps": torch.randint(50, (n,)), "y": torch.randint(5, (n,))}, torch.randn(n, 3, 8, 8)
""",
    "reformer_reversible_sequence": """
from torch.autograd.function import Function

class Deterministic(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.cpu_state = None

    def record_rng(self, *args):
        self.cpu_state = torch.get_rng_state()

    def forward(self, *args, record_rng=False, set_rng=False, **kwargs):
        if record_rng:
            self.record_rng(*args)
        if not set_rng:
            return self.net(*args, **kwargs)
        with torch.random.fork_rng(devices=[], enabled=True):
            torch.set_rng_state(self.cpu_state)
            return self.net(*args, **kwargs)

class ReversibleBlock(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = Deterministic(f), Deterministic(g)

    def forward(self, x, f_args={}, g_args={}):
        x1, x2 = torch.chunk(x, 2, dim=2)
        with torch.no_grad():
            y1 = x1 + self.f(x2, record_rng=self.training, **f_args)
            y2 = x2 + self.g(y1, record_rng=self.training, **g_args)
        return torch.cat([y1, y2], dim=2)

    def backward_pass(self, y, dy, f_args={}, g_args={}):
        y1, y2 = torch.chunk(y, 2, dim=2)
        del y
        dy1, dy2 = torch.chunk(dy, 2, dim=2)
        del dy
        with torch.enable_grad():
            y1.requires_grad = True
            gy1 = self.g(y1, set_rng=True, **g_args)
            torch.autograd.backward(gy1, dy2)
        with torch.no_grad():
            x2 = y2 - gy1
            dx1 = dy1 + y1.grad
            y1.grad = None
        with torch.enable_grad():
            x2.requires_grad = True
            fx2 = self.f(x2, set_rng=True, **f_args)
            torch.autograd.backward(fx2, dx1, retain_graph=True)
        with torch.no_grad():
            x1 = y1 - fx2
            dx2 = dy2 + x2.grad
            x2.grad = None
            x = torch.cat([x1, x2.detach()], dim=2)
            dx = torch.cat([dx1, dx2], dim=2)
        return x, dx

class _ReversibleFunction(Function):
    @staticmethod
    def forward(ctx, x, blocks, kwargs):
        ctx.kwargs = kwargs
        for block in blocks:
            x = block(x, **kwargs)
        ctx.y = x.detach()
        ctx.blocks = blocks
        return x

    @staticmethod
    def backward(ctx, dy):
        y = ctx.y
        kwargs = ctx.kwargs
        for block in ctx.blocks[::-1]:
            y, dy = block.backward_pass(y, dy, **kwargs)
        return dy, None, None

class ReversibleSequence(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f=f, g=g) for f, g in blocks])

    def forward(self, x):
        x = torch.cat([x, x], dim=-1)
        return _ReversibleFunction.apply(x, self.blocks, {"f_args": {}, "g_args": {}})

class ReformerLM(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.token_emb, self.to_model_dim = nn.Embedding(20, d), nn.Linear(d, d)
        self.layers = ReversibleSequence(
            [
                (
                    nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.Dropout(0.1)),
                    nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()),
                )
                for _ in range(4)
            ]
        )
        self.norm, self.to_logits = nn.LayerNorm(d), nn.Linear(d, 20)

    def forward(self, x):
        x = self.to_model_dim(self.token_emb(x))
        x = self.layers(x)
        x = torch.stack(x.chunk(2, dim=-1)).mean(dim=0)
        return self.to_logits(self.norm(x))

def build_model():
    return ReformerLM()

def example_batch(n):
    d = torch.randint(20, (n, 6))
    return d[:, :-1], d[:, 1:]

def loss_fn(o, y):
    return F.cross_entropy(o.transpose(1, 2), y)
""",
    "egnn_with_edges_of_the_batch": """
def unsorted_segment_sum(data, segment_ids, num_segments):
    result_shape = (num_segments, data.size(1))
    result = data.new_full(result_shape, 0)
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result.scatter_add_(0, segment_ids, data)
    return result

def unsorted_segment_mean(data, segment_ids, num_segments):
    result_shape = (num_segments, data.size(1))
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result = data.new_full(result_shape, 0)
    count = data.new_full(result_shape, 0)
    result.scatter_add_(0, segment_ids, data)
    count.scatter_add_(0, segment_ids, torch.ones_like(data))
    return result / count.clamp(min=1)

def get_edges_batch(n_nodes, batch_size):
    rows, cols = [], []
    for i in range(n_nodes):
        for j in range(n_nodes):
            if i != j:
                rows.append(i)
                cols.append(j)
    edge_attr = torch.ones(len(rows) * batch_size, 1)
    edges = [torch.LongTensor(rows), torch.LongTensor(cols)]
    if batch_size == 1:
        return edges, edge_attr
    rows, cols = [], []
    for i in range(batch_size):
        rows.append(edges[0] + n_nodes * i)
        cols.append(edges[1] + n_nodes * i)
    return [torch.cat(rows), torch.cat(cols)], edge_attr

class E_GCL(nn.Module):
    def __init__(self, input_nf, output_nf, hidden_nf, edges_in_d=0, act_fn=nn.SiLU()):
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(input_nf * 2 + 1 + edges_in_d, hidden_nf), act_fn, nn.Linear(hidden_nf, hidden_nf), act_fn
        )
        self.node_mlp = nn.Sequential(
            nn.Linear(hidden_nf + input_nf, hidden_nf), act_fn, nn.Linear(hidden_nf, output_nf)
        )
        layer = nn.Linear(hidden_nf, 1, bias=False)
        torch.nn.init.xavier_uniform_(layer.weight, gain=0.001)
        self.coord_mlp = nn.Sequential(nn.Linear(hidden_nf, hidden_nf), act_fn, layer)

    def edge_model(self, source, target, radial, edge_attr):
        out = torch.cat([source, target, radial, edge_attr], dim=1)
        return self.edge_mlp(out)

    def coord2radial(self, edge_index, coord):
        row, col = edge_index
        coord_diff = coord[row] - coord[col]
        radial = torch.sum(coord_diff**2, 1).unsqueeze(1)
        return radial, coord_diff

    def forward(self, h, edge_index, coord, edge_attr=None, node_attr=None):
        row, col = edge_index
        radial, coord_diff = self.coord2radial(edge_index, coord)
        edge_feat = self.edge_model(h[row], h[col], radial, edge_attr)
        trans = coord_diff * self.coord_mlp(edge_feat)
        agg = unsorted_segment_mean(trans, row, num_segments=coord.size(0))
        coord = coord + agg
        agg = unsorted_segment_sum(edge_feat, row, num_segments=h.size(0))
        h = h + self.node_mlp(torch.cat([h, agg], dim=1))
        return h, coord, edge_attr

class EGNN(nn.Module):
    def __init__(self, in_node_nf, hidden_nf, out_node_nf, in_edge_nf=1, act_fn=nn.SiLU(), n_layers=4):
        super().__init__()
        self.hidden_nf, self.n_layers = hidden_nf, n_layers
        self.embedding_in, self.embedding_out = nn.Linear(in_node_nf, hidden_nf), nn.Linear(hidden_nf, out_node_nf)
        for i in range(0, n_layers):
            self.add_module("gcl_%d" % i, E_GCL(hidden_nf, hidden_nf, hidden_nf, edges_in_d=in_edge_nf, act_fn=act_fn))

    def forward(self, h, x, edges, edge_attr):
        h = self.embedding_in(h)
        for i in range(0, self.n_layers):
            h, x, _ = self._modules["gcl_%d" % i](h, edges, x, edge_attr=edge_attr)
        h = self.embedding_out(h)
        return h, x

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.egnn = EGNN(3, 8, 4)

    def forward(self, feats, pos):
        b, n, _ = feats.shape
        edges, edge_attr = get_edges_batch(n, b)
        h, x = self.egnn(feats.reshape(b * n, -1), pos.reshape(b * n, 3), edges, edge_attr)
        return h.view(b, n, -1).mean((1, 2)), x.view(b, n, 3)

def build_model():
    return Wrapped()

def example_batch(n):
    return (torch.randn(n, 4, 3), torch.randn(n, 4, 3)), torch.randn(n)

def loss_fn(out, y):
    return F.l1_loss(out[0], y) + 0.1 * out[1].pow(2).mean()
""",
    "stylegan2_generator": """
class FullyConnectedLayer(nn.Module):
    def __init__(self, i, o, lr_multiplier=1.0, bias_init=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn([o, i]) / lr_multiplier)
        self.bias = nn.Parameter(torch.full([o], np.float32(bias_init)))
        self.weight_gain, self.bias_gain = lr_multiplier / np.sqrt(i), lr_multiplier

    def forward(self, x):
        return F.leaky_relu(
            torch.addmm((self.bias * self.bias_gain).unsqueeze(0), x, (self.weight * self.weight_gain).t()), 0.2
        )

class MappingNetwork(nn.Module):
    def __init__(self, z_dim, w_dim, num_ws, num_layers=3, w_avg_beta=0.998):
        super().__init__()
        self.num_layers, self.num_ws, self.w_avg_beta = num_layers, num_ws, w_avg_beta
        for idx in range(num_layers):
            setattr(self, f"fc{idx}", FullyConnectedLayer(z_dim if idx == 0 else w_dim, w_dim, lr_multiplier=0.5))
        self.register_buffer("w_avg", torch.zeros([w_dim]))

    def forward(self, z, truncation_psi=1, skip_w_avg_update=False):
        x = z * (z.square().mean(dim=1, keepdim=True) + 1e-8).rsqrt()
        for idx in range(self.num_layers):
            layer = getattr(self, f"fc{idx}")
            x = layer(x)
        if self.w_avg_beta is not None and self.training and not skip_w_avg_update:
            self.w_avg.copy_(x.detach().mean(dim=0).lerp(self.w_avg, self.w_avg_beta))
        x = x.unsqueeze(1).repeat([1, self.num_ws, 1])
        if truncation_psi != 1:
            x = self.w_avg.lerp(x, truncation_psi)
        return x

def modulated_conv2d(x, weight, styles, noise=None, padding=1, demodulate=True):
    b = x.shape[0]
    o, i, kh, kw = weight.shape
    w = weight.unsqueeze(0) * styles.reshape(b, 1, -1, 1, 1)
    dcoefs = (w.square().sum(dim=[2, 3, 4]) + 1e-8).rsqrt()
    w = w * dcoefs.reshape(b, -1, 1, 1, 1)
    x = x.reshape(1, -1, *x.shape[2:])
    x = F.conv2d(x, w.reshape(-1, i, kh, kw), padding=padding, groups=b)
    x = x.reshape(b, -1, *x.shape[2:])
    if noise is not None:
        x = x.add_(noise)
    return x

class SynthesisLayer(nn.Module):
    def __init__(self, i, o, w_dim, resolution, up=1):
        super().__init__()
        self.resolution, self.up, self.use_noise = resolution, up, True
        self.affine, self.weight = FullyConnectedLayer(w_dim, i, bias_init=1), nn.Parameter(torch.randn([o, i, 3, 3]))
        self.register_buffer("noise_const", torch.randn([resolution, resolution]))
        self.noise_strength, self.bias = nn.Parameter(torch.full([], 0.1)), nn.Parameter(torch.zeros([o]))

    def forward(self, x, w, noise_mode="random", gain=1):
        styles = self.affine(w)
        if self.up > 1:
            x = F.interpolate(x, scale_factor=2)
        noise = None
        if self.use_noise and noise_mode == "random":
            noise = (
                torch.randn([x.shape[0], 1, self.resolution, self.resolution], device=x.device) * self.noise_strength
            )
        if self.use_noise and noise_mode == "const":
            noise = self.noise_const * self.noise_strength
        x = modulated_conv2d(x, self.weight, styles, noise)
        return F.leaky_relu(x + self.bias[None, :, None, None], 0.2)

class SynthesisBlock(nn.Module):
    def __init__(self, i, o, w_dim, resolution):
        super().__init__()
        self.in_channels, self.num_conv = i, 0
        if i == 0:
            self.const = nn.Parameter(torch.randn([o, resolution, resolution]))
        if i != 0:
            self.conv0 = SynthesisLayer(i, o, w_dim, resolution, up=2)
            self.num_conv += 1
        self.conv1 = SynthesisLayer(o, o, w_dim, resolution)
        self.num_conv += 1
        self.torgb, self.affine = nn.Conv2d(o, 3, 1), nn.Linear(w_dim, 1)

    def forward(self, x, img, ws, **layer_kwargs):
        w_iter = iter(ws.unbind(dim=1))
        if self.in_channels == 0:
            x = self.const.unsqueeze(0).repeat([ws.shape[0], 1, 1, 1])
            x = self.conv1(x, next(w_iter), **layer_kwargs)
        else:
            x = self.conv0(x, next(w_iter), **layer_kwargs)
            x = self.conv1(x, next(w_iter), **layer_kwargs)
        if img is not None:
            img = F.interpolate(img, scale_factor=2, mode="bilinear")
        y = self.torgb(x) * self.affine(next(w_iter))[:, :, None, None]
        y = y.to(dtype=torch.float32, memory_format=torch.contiguous_format)
        img = img.add_(y) if img is not None else y
        return x, img

class SynthesisNetwork(nn.Module):
    def __init__(self, w_dim):
        super().__init__()
        self.block_resolutions, self.num_ws = [4, 8, 16], 0
        for i, res in enumerate(self.block_resolutions):
            block = SynthesisBlock(8 if i else 0, 8, w_dim, res)
            self.num_ws += block.num_conv
            setattr(self, f"b{res}", block)
        self.num_ws += 1

    def forward(self, ws, **block_kwargs):
        block_ws = []
        ws = ws.to(torch.float32)
        w_idx = 0
        for res in self.block_resolutions:
            block = getattr(self, f"b{res}")
            block_ws.append(ws.narrow(1, w_idx, block.num_conv + 1))
            w_idx += block.num_conv
        x = img = None
        for res, cur_ws in zip(self.block_resolutions, block_ws):
            block = getattr(self, f"b{res}")
            x, img = block(x, img, cur_ws, **block_kwargs)
        return img

class Generator(nn.Module):
    def __init__(self, z_dim=8, w_dim=8):
        super().__init__()
        self.synthesis = SynthesisNetwork(w_dim)
        self.mapping = MappingNetwork(z_dim, w_dim, self.synthesis.num_ws)

    def forward(self, z, **synthesis_kwargs):
        ws = self.mapping(z)
        return self.synthesis(ws, **synthesis_kwargs)

def build_model():
    return Generator()

def example_batch(n):
    return torch.randn(n, 8), torch.randn(n, 3, 16, 16)
""",
    "pix2pix_recursive_unet": """
class UnetSkipConnectionBlock(nn.Module):
    def __init__(
        self,
        outer_nc,
        inner_nc,
        input_nc=None,
        submodule=None,
        outermost=False,
        innermost=False,
        norm_layer=nn.BatchNorm2d,
        use_dropout=False,
    ):
        super().__init__()
        self.outermost = outermost
        if input_nc is None:
            input_nc = outer_nc
        downconv = nn.Conv2d(input_nc, inner_nc, kernel_size=4, stride=2, padding=1, bias=False)
        downrelu, downnorm = nn.LeakyReLU(0.2, True), norm_layer(inner_nc)
        uprelu, upnorm = nn.ReLU(True), norm_layer(outer_nc)
        if outermost:
            upconv = nn.ConvTranspose2d(inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1)
            down, up = [downconv], [uprelu, upconv, nn.Tanh()]
            model = down + [submodule] + up
        elif innermost:
            upconv = nn.ConvTranspose2d(inner_nc, outer_nc, kernel_size=4, stride=2, padding=1, bias=False)
            down, up = [downrelu, downconv], [uprelu, upconv, upnorm]
            model = down + up
        else:
            upconv = nn.ConvTranspose2d(inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1, bias=False)
            down, up = [downrelu, downconv, downnorm], [uprelu, upconv, upnorm]
            model = down + [submodule] + up + ([nn.Dropout(0.5)] if use_dropout else [])
        self.model = nn.Sequential(*model)

    def forward(self, x):
        if self.outermost:
            return self.model(x)
        return torch.cat([x, self.model(x)], 1)

class UnetGenerator(nn.Module):
    def __init__(self, input_nc=3, output_nc=3, ngf=4):
        super().__init__()
        unet_block = UnetSkipConnectionBlock(ngf * 4, ngf * 4, innermost=True)
        unet_block = UnetSkipConnectionBlock(ngf * 4, ngf * 4, submodule=unet_block, use_dropout=True)
        unet_block = UnetSkipConnectionBlock(ngf * 2, ngf * 4, submodule=unet_block)
        unet_block = UnetSkipConnectionBlock(ngf, ngf * 2, submodule=unet_block)
        self.model = UnetSkipConnectionBlock(output_nc, ngf, input_nc=input_nc, submodule=unet_block, outermost=True)

    def forward(self, input):
        return self.model(input)

def build_model():
    return UnetGenerator()

def example_batch(n):
    x = torch.randn(n, 3, 32, 32)
    return x, x.tanh()

def loss_fn(out, y):
    return 100.0 * F.l1_loss(out, y)
""",
    "dlrm_with_initial_values_of_numpy": """
class DLRM_Net(nn.Module):
    def create_mlp(self, ln, sigmoid_layer):
        layers = nn.ModuleList()
        for i in range(0, len(ln) - 1):
            n, m = ln[i], ln[i + 1]
            LL = nn.Linear(int(n), int(m), bias=True)
            W = np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n)).astype(np.float32)
            LL.weight.data = torch.tensor(W, requires_grad=True)
            LL.bias.data = torch.tensor(
                np.random.normal(0.0, np.sqrt(1 / m), size=m).astype(np.float32), requires_grad=True
            )
            layers.append(LL)
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return nn.Sequential(*layers)

    def create_emb(self, m, ln):
        emb_l = nn.ModuleList()
        for n in ln:
            EE = nn.EmbeddingBag(n, m, mode="sum", sparse=False)
            EE.weight.data = torch.tensor(
                np.random.uniform(-np.sqrt(1 / n), np.sqrt(1 / n), size=(n, m)).astype(np.float32), requires_grad=True
            )
            emb_l.append(EE)
        return emb_l

    def __init__(self):
        super().__init__()
        self.emb_l, self.bot_l, self.top_l = (
            self.create_emb(4, [10, 20, 5]),
            self.create_mlp(np.array([6, 8, 4]), -1),
            self.create_mlp(np.array([10, 8, 8, 1]), 2),
        )

    def apply_emb(self, lS_o, lS_i, emb_l):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            V = emb_l[k](sparse_index_group_batch, lS_o[k])
            ly.append(V)
        return ly

    def interact_features(self, x, ly):
        (batch_size, d) = x.shape
        T = torch.cat([x] + ly, dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x] + [Z[:, li, lj]], dim=1)

    def forward(self, dense_x, idx):
        lS_i = [idx[:, k].reshape(-1) for k in range(3)]
        lS_o = [torch.arange(0, len(i), 2) for i in lS_i]
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_o, lS_i, self.emb_l)
        p = self.top_l(self.interact_features(x, ly))
        return torch.clamp(p, min=1e-5, max=1 - 1e-5)

def build_model():
    return DLRM_Net()

def example_batch(n):
    return (torch.randn(n, 6), torch.randint(5, (n, 3, 2))), torch.randint(2, (n, 1)).float()

def loss_fn(o, y):
    return F.binary_cross_entropy(o, y)
""",
    "perceiver_io_with_tied_tokens": """
class Cross(nn.Module):
    def __init__(self, d, d_kv):
        super().__init__()
        self.norm_q, self.norm_kv, self.norm = nn.LayerNorm(d), nn.LayerNorm(d_kv), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 2, kdim=d_kv, vdim=d_kv, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))

    def forward(self, q, kv, mask=None):
        kv = self.norm_kv(kv)
        q = q + self.attention(self.norm_q(q), kv, kv, key_padding_mask=mask, need_weights=False)[0]
        return q + self.mlp(self.norm(q))

class PerceiverIO(nn.Module):
    def __init__(self, words=20, d=12, latent=16):
        super().__init__()
        self.latent = nn.Parameter(0.1 * torch.randn(4, latent))
        self.query = nn.Parameter(0.1 * torch.randn(10, latent))
        self.tokens = nn.Embedding(words, d)
        self.encoder, self.decoder = Cross(latent, d), Cross(latent, latent)
        self.process = nn.ModuleList(Cross(latent, latent) for _ in range(3))
        self.project, self.bias = nn.Linear(latent, d), nn.Parameter(torch.zeros(words))

    def forward(self, tokens):
        x, z = self.tokens(tokens), self.latent.expand(len(tokens), -1, -1)
        for _ in range(2):
            z = self.encoder(z, x, tokens == 0)
            for block in self.process:
                z = block(z, z)
        x = self.decoder(self.query.expand(len(tokens), -1, -1), z)
        return self.project(x) @ self.tokens.weight.T + self.bias

def build_model():
    return PerceiverIO()

def example_batch(n):
    words = torch.randint(1, 20, (n, 10))
    masked = torch.where(torch.rand(n, 10) < 0.2, 0, words)
    masked[:, 0] = 1
    return masked, words

def loss_fn(o, y):
    return F.cross_entropy(o.transpose(1, 2), y)
""",
    "graph_cast_message_passing": """
class MLP(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Linear(i, 16), nn.SiLU(), nn.Linear(16, o), nn.LayerNorm(o))

class Interaction(nn.Module):
    def __init__(self, d, senders, receivers):
        super().__init__()
        self.edge, self.node = MLP(3 * d, d), MLP(2 * d, d)
        self.register_buffer("senders", senders)
        self.register_buffer("receivers", receivers)

    def forward(self, source, target, edges):
        new = self.edge(torch.cat([source[:, self.senders], target[:, self.receivers], edges], -1))
        sums = torch.zeros_like(target).index_add_(1, self.receivers, new)
        return target + self.node(torch.cat([target, sums], -1)), edges + new

class GraphCast(nn.Module):
    def __init__(self, grid=12, mesh=6, d=8):
        super().__init__()
        pick = lambda n: torch.randint(0, n, (20,))
        self.grid_nodes, self.mesh_nodes = MLP(4, d), MLP(3, d)
        self.edges = nn.ModuleList(MLP(4, d) for _ in range(3))
        self.register_buffer("mesh", torch.randn(mesh, 3))
        self.register_buffer("features", torch.randn(20, 4))
        self.encoder = Interaction(d, pick(grid), pick(mesh))
        self.processor = nn.ModuleList(Interaction(d, pick(mesh), pick(mesh)) for _ in range(4))
        self.decoder = Interaction(d, pick(mesh), pick(grid))
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        to_mesh, within, to_grid = (edge(self.features).expand(len(x), -1, -1) for edge in self.edges)
        grid, mesh = self.grid_nodes(x), self.mesh_nodes(self.mesh).expand(len(x), -1, -1)
        mesh, _ = self.encoder(grid, mesh, to_mesh)
        for block in self.processor:
            mesh, within = block(mesh, mesh, within)
        grid, _ = self.decoder(mesh, grid, to_grid)
        return x + self.out(grid)

def build_model():
    return GraphCast()

def example_batch(n):
    x = torch.randn(n, 12, 4)
    return x, x.roll(1, 1)
""",
    "retention_over_chunks_with_states": """
class Retention(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads, self.qkvg, self.out = heads, nn.Linear(d, 4 * d, bias=False), nn.Linear(d, d)
        self.norm = nn.GroupNorm(heads, d, affine=False)
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads).float())))

    def forward(self, x, state):
        n, t, d = x.shape
        *qkv, gate = self.qkvg(x).chunk(4, -1)
        q, k, v = (each.view(n, t, self.heads, -1).transpose(1, 2) for each in qkv)
        i, decay = torch.arange(t), self.decay[:, None, None]
        apart = (i[:, None] - i).float()
        y = (q @ k.transpose(-1, -2) * torch.where(apart >= 0, torch.exp(apart * decay), 0.0)) @ v
        added = k.transpose(-1, -2) @ (torch.exp((t - 1 - i)[:, None] * decay) * v)
        if state is not None:
            y = y + torch.exp((i + 1)[:, None] * decay) * (q @ state)
            added = added + torch.exp(t * decay) * state
        y = self.norm(y.transpose(1, 2).reshape(n * t, d)).view(n, t, d)
        return self.out(F.silu(gate) * y), added

class RetentionBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.retention, self.mlp = nn.LayerNorm(d), Retention(d), Block(d)

    def forward(self, x, state):
        y, state = self.retention(self.norm(x), state)
        return self.mlp(x + y), state

class RetNet(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, d), nn.Linear(d, 32)
        self.blocks = nn.ModuleList(RetentionBlock(d) for _ in range(4))

    def forward(self, tokens):
        states, parts = [None] * len(self.blocks), []
        for chunk in tokens.chunk(2, 1):
            x = self.tokens(chunk)
            for index, block in enumerate(self.blocks):
                x, states[index] = block(x, states[index])
            parts.append(x)
        return self.head(torch.cat(parts, 1))

def build_model():
    return RetNet()

def example_batch(n):
    tokens = torch.randint(32, (n, 13))
    return tokens[:, :-1], tokens[:, 1:]

def loss_fn(o, y):
    return F.cross_entropy(o.transpose(1, 2), y)
""",
    "gpt_with_value_embeddings_and_skips": """
class ValueBlock(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.mix, self.first = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, x, values, x0, mask):
        x = self.first[0] * x + self.first[1] * x0
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, -1)
        v = torch.lerp(v, values, self.mix)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())

class SpeedGPT(nn.Module):
    def __init__(self, d=16, layers=4, words=32):
        super().__init__()
        self.tokens, self.values = nn.Embedding(words, d), nn.Embedding(words, d * layers)
        self.blocks = nn.ModuleList(ValueBlock(d) for _ in range(layers))
        self.skips, self.head = nn.Parameter(torch.ones(layers // 2)), nn.Linear(d, words, bias=False)

    def forward(self, tokens, targets):
        documents, at = (tokens == 3).cumsum(1), torch.arange(tokens.shape[1])
        mask = (documents[:, :, None] == documents[:, None]) & (at[:, None] >= at) & (at[:, None] - at < 8)
        x = x0 = F.rms_norm(self.tokens(tokens), (16,))
        values, kept, half = self.values(tokens).chunk(len(self.blocks), -1), [], len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= half:
                x = x + self.skips[index - half] * kept.pop()
            x = block(x, values[index], x0, mask[:, None])
            if index < half:
                kept.append(x)
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (16,))) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def build_model():
    return SpeedGPT()

def example_batch(n):
    tokens = torch.randint(32, (n, 13))
    return (tokens[:, :-1], tokens[:, 1:]), None

def loss_fn(o, y):
    return o

def build_optimizer(ps):
    ps = list(ps)
    small = [p for p in ps if p.ndim < 2 or 32 in p.shape]
    muon = torch.optim.Muon([p for p in ps if all(p is not other for other in small)], lr=0.01)

    class Both(torch.optim.Optimizer):
        def __init__(self):
            self.parts = [muon, torch.optim.Adam(small, lr=1e-2, betas=(0.8, 0.95))]
            super().__init__(ps, {})
            self.param_groups = [group for part in self.parts for group in part.param_groups]

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    return Both()
""",
    "flow_with_activation_norm_by_data": """
class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("initialized", torch.tensor(False, dtype=torch.bool))
        self.log_scale = nn.Parameter(torch.zeros(D))
        self.shift = nn.Parameter(torch.zeros(D))

    def _initialize(self, inputs):
        with torch.no_grad():
            std = inputs.std(dim=0) + 0.1
            self.log_scale.data = -torch.log(std)
            self.shift.data = -(inputs / std).mean(dim=0)
            self.initialized.data = torch.tensor(True, dtype=torch.bool)

    def forward(self, inputs):
        if self.training and not self.initialized:
            self._initialize(inputs)
        return torch.exp(self.log_scale) * inputs + self.shift, self.log_scale.sum() * inputs.new_ones(len(inputs))

class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(D // 2, 8), nn.Tanh(), nn.Linear(8, D))

    def forward(self, inputs):
        kept, changed = inputs.chunk(2, dim=1)[:: -1 if self.flip else 1]
        log_scale, shift = self.net(kept).chunk(2, dim=1)
        log_scale = torch.tanh(log_scale)
        return torch.cat([kept, changed * torch.exp(log_scale) + shift], dim=1), log_scale.sum(dim=1)

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.transforms = nn.ModuleList(t for n in range(3) for t in (ActNorm(), Coupling(n % 2)))

    def forward(self, x):
        total = x.new_zeros(len(x))
        for transform in self.transforms:
            x, log_det = transform(x)
            total = total + log_det
        return total - 0.5 * x.pow(2).sum(dim=1)

def build_model():
    return Flow()

def loss_fn(out, y):
    return -out.mean()
""",
    "skips_stashed_for_later_layers": """
import threading

class Tracker(threading.local):
    def __init__(self):
        self.tensors = {}

TRACKER = Tracker()

class Stash(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        TRACKER.tensors[self.name] = x
        return x

class PopAdd(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x + TRACKER.tensors.pop(self.name)

def build_model():
    layers = []
    for n in range(3):
        layers += [Stash(f"outer{n}"), Block(), Stash(f"inner{n}"), Block(), PopAdd(f"inner{n}"), Block()]
        layers += [PopAdd(f"outer{n}"), nn.LayerNorm(D)]
    return nn.Sequential(*layers)
""",
    "nearest_neighbor_memory_of_arrays": """
class Memory:
    def __init__(self, rows, most=64):
        self.most = most
        self.keys = [np.zeros((0, D), np.float32) for _ in range(rows)]

    def search(self, queries, top):
        found = torch.zeros(*queries.shape[:2], top, D)
        for row, keys in enumerate(self.keys):
            if len(keys) >= top:
                keys = torch.from_numpy(keys)
                found[row] = keys[(queries[row].detach() @ keys.t()).topk(top, dim=-1).indices]
        return found

    def add(self, keys):
        for row, new in enumerate(keys.detach().numpy()):
            self.keys[row] = np.concatenate([self.keys[row], new])[-self.most :]

class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_queries, self.to_keys, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, memory):
        queries, keys = self.to_queries(x), self.to_keys(x)
        found = memory.search(queries, 2)
        memory.add(keys)
        weights = torch.einsum("btd,btkd->btk", queries, found).softmax(dim=-1)
        return x + self.out(torch.einsum("btk,btkd->btd", weights, found) + keys)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Remembering(), Block(), Block()])
        self.memories = {}

    def forward(self, x):
        if len(x) not in self.memories:
            self.memories[len(x)] = Memory(len(x))
        for block in self.blocks:
            x = block(x, self.memories[len(x)]) if isinstance(block, Remembering) else block(x)
        return x

def build_model():
    return Net()

def example_batch(n):
    x = torch.randn(n, 6, D)
    return x, torch.tanh(x.flip(1))
""",
}
