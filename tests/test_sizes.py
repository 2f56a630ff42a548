"""Sizes: exact numbers of parameters, and operations against torch's own count and a count by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.attention import causal
from models.mean_pooling import MeanAdd
from models.sizes import SIZES, Size, flops_per_byte
from models.smoothing import SelectSmooth
from models.unet import ByteUNet

PARAMETERS = {
    "nano": 1_379_840,
    "18M": 18_596_352,
    "40M": 40_269_824,
    "90M": 90_289_152,
    "147M": 146_930_688,
    "346M": 365_793_280,
}


def parameters(size):
    """Embedding and two heads; matrices and four norms of every layer; three norms between the stages."""
    d, byte_layers = size.width, size.encoder + size.decoder
    attention, byte_mlp, token_mlp = 4 * d * d, 3 * d * d, 3 * 4 * d * d
    layers = byte_layers * (attention + byte_mlp + 4 * d) + size.mid * (attention + token_mlp + 4 * d)
    return (257 + 2 * 256) * d + layers + 3 * d


@pytest.mark.parametrize("name", SIZES)
def test_parameters(name):
    with torch.device("meta"):
        count = sum(p.numel() for p in ByteUNet(name).parameters())
    assert count == parameters(SIZES[name]) == PARAMETERS[name]
    if name not in ("nano", "346M"):  # the one is named after nothing, the other's name is explained beside it
        assert count == pytest.approx(1e6 * float(name.removesuffix("M")), rel=0.05)


def test_every_size_is_pinned():
    assert PARAMETERS.keys() == SIZES.keys()


@pytest.mark.parametrize("broken", ["width", "heads", "encoder", "mid", "decoder", "window"])
def test_every_number_is_at_least_one(broken):
    numbers = dict(width=8, heads=2, encoder=1, mid=1, decoder=1, window=4)
    Size(**numbers)
    with pytest.raises(ValueError, match="at least 1"):
        Size(**numbers | {broken: 0})


@pytest.mark.parametrize(("width", "heads"), [(10, 4), (12, 4), (6, 2)])
def test_heads_divide_the_width_into_pairs(width, heads):
    with pytest.raises(ValueError, match="multiple of twice"):
        Size(width=width, heads=heads, encoder=1, mid=1, decoder=1, window=4)


def matrix_products(size, starts, num_sequences):
    """Operations of every product but attention's, of one forward with the early head, counted a position at a time."""
    d, rows, length = size.width, *starts.shape
    byte_layer, token_layer, head = 2 * 7 * d * d, 2 * 16 * d * d, 2 * 256 * d
    encoder = num_sequences * length * (size.encoder * byte_layer + head)
    return encoder + rows * length * (size.decoder * byte_layer + head) + int(starts.sum()) * size.mid * token_layer


def attention_products(size, starts, num_sequences):
    """Operations of the scores and of the weighted sums: 2 D each for every key in reach."""
    length = starts.shape[1]
    in_window = sum(min(t, size.window - 1) + 1 for t in range(length))
    in_tokens = sum(m + 1 for row in starts for m in range(int(row.sum())))
    pairs = (num_sequences * size.encoder + len(starts) * size.decoder) * in_window + size.mid * in_tokens
    return 4 * size.width * pairs


def every(rows, length, step):
    """A start at every ``step``-th byte."""
    return (torch.arange(length) % step == 0).expand(rows, -1)


@pytest.mark.parametrize("length", [1, 3, 16, 40])
@pytest.mark.parametrize("samples", [1, 3])
def test_flops_are_those_of_a_count_by_hand(length, samples):
    for size in (SIZES["nano"], SIZES["18M"], Size(width=8, heads=2, encoder=3, mid=1, decoder=2, window=5)):
        for step in (1, 2, 5):
            starts = every(samples, length, step)
            counted = matrix_products(size, starts, 1) + attention_products(size, starts, 1)
            rate = float(starts.double().mean())
            assert flops_per_byte(size, rate, length, samples) * samples * length == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("samples", [1, 2])
def test_flops_are_those_that_torch_counts(samples):
    size, length, step = SIZES["nano"], 64, 4
    unet, x = ByteUNet(size), torch.randint(256, (2, length))
    starts = every(2 * samples, length, step)
    with FlopCounterMode(display=False) as counter:
        h = unet.encode(x[:, :-1])  # BOS and T-1 bytes: T positions
        unet.early_log_p(h)
        unet.nll(h.repeat_interleave(samples, 0), starts, x.repeat_interleave(samples, 0))
    counts = counter.get_flop_counts()["Global"]
    products, attention = (counts[getattr(torch.ops.aten, name)] for name in ("mm", "bmm"))
    assert products == matrix_products(size, starts, 2)
    # explicit products score all that is stored, in reach or not: blocks of 32 queries by 32 + W - 1 keys, and M by M tokens
    blocks = (2 * size.encoder + len(starts) * size.decoder) * length // 32 * 32 * (32 + size.window - 1)
    tokens = len(starts) * size.mid * (length // step) ** 2
    assert attention == 4 * size.width * (blocks + tokens)
    exact = unet.flops_per_byte(1 / step, length, samples) * len(starts) * length
    assert exact == pytest.approx(products + attention_products(size, starts, 2), rel=1e-12)
    assert sum(counts.values()) == products + attention  # nothing else was counted


def test_flops_of_a_pooling_pair():
    """H-Net's residual is a product at every byte; a mean is additions. Smoothing takes 4 D a token, counted as little as those."""
    plain, smooth, mean = (ByteUNet("nano", make).flops_per_byte(0.2, 512) for make in (None, SelectSmooth, MeanAdd))
    assert smooth == plain + 2 * 128 * 128 and mean == plain
    pair, h, starts = SelectSmooth(128), torch.randn(2, 64, 128), every(2, 64, 4)
    y = pair.down(h, starts)[0]
    with FlopCounterMode(display=False) as counter:
        pair.up(h, y, starts, torch.rand(2, 64))
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.mm] == pair.flops_per_byte() * 2 * 64
    assert counts[torch.ops.aten.bmm] < 0.005 * plain * 2 * 64  # blocks of C x C weights, of which half is nothing


def test_flops_of_the_fused_kernel_are_the_square():
    q = torch.randn(1, 2, 300, 4)
    with FlopCounterMode(display=False) as counter:
        causal(q, q, q)
    assert counter.get_total_flops() in (0, 4 * 8 * 300 * 300)  # torch may not know the kernel of this device


@pytest.mark.parametrize("name", SIZES)
def test_flops_grow_with_the_rate_and_are_shared(name):
    size = SIZES[name]
    costs = [flops_per_byte(size, rate, 512) for rate in (0.01, 0.1, 0.2, 0.5, 1.0)]
    assert costs == sorted(set(costs))
    one, two, many = (flops_per_byte(size, 0.2, 512, k) for k in (1, 2, 1e12))
    assert one > two > many and one - two == pytest.approx((one - many) / 2)
