"""The byte U-Net: a language model over bytes that is told where segments begin.

::

    BOS,x -> embed -> encoder (byte layers, sliding window) -> h[S,T+1,D]
          h -> early head -> log p_early
          h at a=1 -> mid (token layers, full causal attention, rotary byte positions) -> y[B,M,D]
          h[t] + y[segment(t)] -> decoder (byte layers, sliding window) -> log p

How tokens are made of h, and what bytes receive of y, is the pooling pair's to say; drawn is the paper's. It implements the scorer
protocol of ``segment_env.scorer``, whose docstrings give the contract of every method.

Letters: S sequences, B rows, T bytes, M segments, D width, H heads, E = D / H, W window.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import attend_ring, attend_rows, causal, rotary_angles, sliding
from models.block import Attend, Block, RMSNorm
from models.mean_pooling import MeanAdd
from models.pooling import SelectAdd
from models.sizes import MLP_RATIO_BYTE, MLP_RATIO_TOKEN, SIZES, Size, flops_per_byte
from models.smoothing import SelectSmooth
from segment_env.boundaries import BOS, NUM_BYTES
from segment_env.errors import UserError

SAFETENSORS = "model.safetensors"
#: What makes a pair of the width D, by the name that a saved model goes by.
POOLINGS: dict[str, Callable[[int], nn.Module]] = {"SelectAdd": lambda _: SelectAdd(), "SelectSmooth": SelectSmooth, "MeanAdd": MeanAdd}


class ByteUNet(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="segment-env",
    license="mit",
    paper_url="https://arxiv.org/abs/2602.13940",
    tags=["byte-level", "tokenization"],
):
    """A scorer with parameters.

    Args: ``size``, a name of ``models.sizes.SIZES`` or a :class:`Size`; ``pooling``, a pair (see ``models.pooling``; default: the
    paper's), or what makes one of the width D. Raises ValueError on a name that is none.

    ``save_pretrained(folder)`` writes ``model.safetensors``, the state_dict as it is, ``config.json``, which holds what ``config``
    does, and a model card; ``ByteUNet.from_pretrained(folder)`` reads the first two, of a folder or of a repository on the Hub. So
    does every checkpoint of a run have them: ``ByteUNet.from_pretrained("runs/NAME/checkpoints/00000977")`` is its language model.
    They hold the model alone. Where it is to be cut is the agent's to say, whose weights lie beside it, in ``agent.safetensors`` of
    the checkpoint; ``agents.training.open_run`` puts both together.
    """

    def __init__(self, size: str | Size = "nano", pooling: nn.Module | Callable[[int], nn.Module] | None = None):
        super().__init__()
        if isinstance(size, str):
            size = SIZES.get(size, size)
        if not isinstance(size, Size):
            raise ValueError(f"no model size {size!r}; use one of {', '.join(SIZES)}, or a models.Size")
        self.size, self.width = size, size.width
        self.embedding = nn.Embedding(NUM_BYTES + 1, size.width)
        self.encoder = nn.ModuleList(Block(size.width, size.heads, MLP_RATIO_BYTE) for _ in range(size.encoder))
        self.mid = nn.ModuleList(Block(size.width, size.heads, MLP_RATIO_TOKEN) for _ in range(size.mid))
        self.decoder = nn.ModuleList(Block(size.width, size.heads, MLP_RATIO_BYTE) for _ in range(size.decoder))
        self.encoder_norm, self.mid_norm, self.decoder_norm = (RMSNorm(size.width) for _ in range(3))
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)
        self.early_head = nn.Linear(size.width, NUM_BYTES, bias=False)
        self.apply(_initialise)
        with torch.no_grad():
            self.early_head.weight.copy_(self.head.weight)
        # last: it initialises itself, and the rest begins alike whatever it draws
        self.pooling: Any = SelectAdd() if pooling is None else pooling if isinstance(pooling, nn.Module) else pooling(size.width)
        self.reads_gate, self.needs_gate = self.pooling.reads_gate, self.pooling.needs_gate
        self._compiled: Callable[..., Tensor] | None = None
        self._hub_mixin_config = self.config  # what save_pretrained writes

    @property
    def config(self) -> dict[str, Any]:
        """Size and name of the pooling, as JSON can hold them: what a model is besides its parameters."""
        return {"size": asdict(self.size), "pooling": type(self.pooling).__name__}

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        size: Any = None,
        pooling: Any = None,
        map_location: str = "cpu",
        **where: Any,
    ) -> "ByteUNet":
        """The mixin's, but safetensors alone, whole, and nothing on standard output; a ``pooling`` that was given wins over its name.

        Raises UserError on a folder that holds no model, or another one than its configuration says.
        """
        local = Path(model_id, SAFETENSORS)
        file = local if local.parent.is_dir() else hf_hub_download(model_id, SAFETENSORS, **where)
        if isinstance(pooling, str) and pooling not in POOLINGS:
            raise UserError(f"'{model_id}' has a pooling {pooling} of its own: hand it over, from_pretrained(..., pooling={pooling}())")
        try:
            made = Size(**size) if isinstance(size, dict) else size
            model = cls(made, POOLINGS[pooling] if isinstance(pooling, str) else pooling)
            tensors = load_file(file, device=map_location)
            model.to(map_location, tensors["head.weight"].dtype).load_state_dict(tensors)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"'{model_id}' holds no model of this kind: {' '.join(str(error).split())}") from error
        return model.eval()

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.head.weight.dtype

    @property
    def encoder_reach(self) -> int:
        """How many bytes before t h[t] depends on, at most; further on it does not see BOS."""
        return self.size.encoder * (self.size.window - 1) + 1

    def flops_per_byte(self, rate: float, length: int, samples: float = 1.0) -> float:
        """Forward operations per decoded byte, attention included: see :func:`models.sizes.flops_per_byte`."""
        return flops_per_byte(self.size, rate, length, samples) + self.pooling.flops_per_byte()

    def compile(self, **options: Any) -> None:
        """Compile the layers with ``torch.compile`` and its ``options``, for passes that carry a gradient, whatever their S, B, T and M.

        All byte layers are one compilation, and so are all token layers. What a parameter is called stays.
        """
        self._compiled = torch.compile(_layer, **options)

    def encode(self, x: Tensor) -> Tensor:
        """x [S, T] -> h [S, T+1, D], each vector of root mean square near 1."""
        h = self.embedding(F.pad(x, (1, 0), value=BOS))
        return self.encoder_norm(self._byte_layers(self.encoder, h))

    def early_log_p(self, h: Tensor) -> Tensor:
        """h [..., D] -> log p_early [..., 256]: it never sees a boundary, so it is a baseline that costs no bias."""
        return _log_softmax(self.early_head(h))

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """-log p(x[t] | x[<t], a[<=t]) [B, T] in nats."""
        nll = F.cross_entropy(_wide(self._logits(h, starts, gate)).flatten(0, 1), x.flatten(), reduction="none")
        return nll.view_as(x)

    def log_p(self, h: Tensor, starts: Tensor, gate: Tensor | None = None) -> Tensor:
        """Log-probabilities of all bytes at every position, those that ``nll`` picks from: h [B, T, D] -> [B, T, 256]."""
        return _log_softmax(self._logits(h, starts, gate))

    def _logits(self, h: Tensor, starts: Tensor, gate: Tensor | None) -> Tensor:
        tokens, positions = self.pooling.down(h, starts, gate)
        tokens = self._layers(self.mid, tokens, self._angles(positions), causal)
        z = self.pooling.up(h, self.mid_norm(tokens), starts, gate)
        return self.head(self.decoder_norm(self._byte_layers(self.decoder, z)))

    def init_state(self, num_rows: int, length: int) -> tuple[Any, Tensor]:
        """Caches of fresh rows: a window for every byte layer, ``length`` tokens for every token layer."""
        device, heads, each = self.head.weight.device, self.size.heads, self.width // self.size.heads

        def caches(layers: nn.ModuleList, slots: int) -> list[tuple[Tensor, Tensor]]:
            empty = partial(torch.zeros, num_rows, heads, slots, each, dtype=self.dtype, device=device)
            return [(empty(), empty()) for _ in layers]

        state = {
            "time": torch.full((num_rows,), -1, device=device),
            "tokens": torch.zeros(num_rows, dtype=torch.int64, device=device),
            "h": torch.zeros(num_rows, self.width, dtype=self.dtype, device=device),
            "y": torch.zeros(num_rows, self.width, dtype=self.dtype, device=device),
            "encoder": caches(self.encoder, self.size.window),
            "mid": caches(self.mid, length),
            "decoder": caches(self.decoder, self.size.window),
            "pooling": self.pooling.init(num_rows),
        }
        return self.observe(state, torch.full((num_rows,), BOS, device=device))

    def predict(self, state: Any, action: Tensor, gate: Tensor | None = None) -> tuple[Any, Tensor]:
        """Token layers run only for the rows whose ``action`` is True."""
        pooling, token = self.pooling.down_step(state["pooling"], state["h"], action)
        rows = action.nonzero().squeeze(-1)
        if len(rows):
            state = self._start_segment(state, token[rows], rows)
        pooling, z = self.pooling.up_step(pooling, state["h"], state["y"], action, gate)
        z = self._byte_step(self.decoder, state["decoder"], z, state["time"], state["angles"])
        return {**state, "pooling": pooling}, _log_softmax(self.head(self.decoder_norm(z)))

    def observe(self, state: Any, byte: Tensor) -> tuple[Any, Tensor]:
        """One step of the encoder; BOS is what :meth:`init_state` reads."""
        time = state["time"] + 1
        angles = self._angles(time[:, None])
        h = self.encoder_norm(self._byte_step(self.encoder, state["encoder"], self.embedding(byte), time, angles))
        return {**state, "time": time, "angles": angles, "h": h}, h

    def _start_segment(self, state: Any, token: Tensor, rows: Tensor) -> Any:
        count = state["tokens"][rows]
        used, y = int(count.max()) + 1, token[:, None]
        cos, sin = (each[rows] for each in state["angles"])
        for block, cache in zip(self.mid, state["mid"], strict=True):
            y = block(y, (cos, sin), partial(attend_rows, cache=cache, rows=rows, count=count, used=used))
        newest = state["y"].index_copy(0, rows, self.mid_norm(y).squeeze(1).to(state["y"].dtype))
        return {**state, "y": newest, "tokens": state["tokens"].index_add(0, rows, torch.ones_like(rows))}

    def _byte_layers(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        angles = self._angles(torch.arange(x.shape[1], device=x.device))
        return self._layers(layers, x, angles, partial(sliding, window=self.size.window))

    def _layers(self, layers: nn.ModuleList, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        if self._compiled is None or not torch.is_grad_enabled():
            for block in layers:
                x = block(x, angles, attend)
            return x
        for angle in angles:
            torch._dynamo.maybe_mark_dynamic(angle, tuple(range(angle.dim() - 2)))
        for block in layers:
            torch._dynamo.maybe_mark_dynamic(x, (0, 1))  # rows, and bytes or tokens: else every M would be compiled anew
            x = self._compiled(block, x, angles, attend)
        return x

    def _byte_step(self, layers: nn.ModuleList, caches: Any, x: Tensor, time: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x[:, None]
        for block, cache in zip(layers, caches, strict=True):
            x = block(x, angles, partial(attend_ring, cache=cache, time=time))
        return x.squeeze(1)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions, self.width // self.size.heads, self.dtype)


def _layer(block: Block, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    return block(x, angles, attend)


def _wide(x: Tensor) -> Tensor:
    """Float32 or wider: what log-probabilities are computed in, also under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_softmax(logits: Tensor) -> Tensor:
    return _wide(logits).log_softmax(-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)  # root mean square 1, the scale of the blocks' normed outputs
