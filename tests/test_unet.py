"""The byte U-Net: nothing leaks from the future, checked in three ways that are themselves checked; and what it is equal under."""

from dataclasses import replace

import pytest
import torch
from torch import bfloat16, float32, float64

from models import SIZES, ByteUNet
from models.mean_pooling import MeanAdd
from models.pooling import SelectAdd
from models.smoothing import SelectSmooth
from segment_env.boundaries import BOS

POOLINGS = {"select": None, "smoothing": SelectSmooth, "mean": MeanAdd}
LAYOUTS = {name: size if name == "nano" else replace(size, width=32, heads=4) for name, size in SIZES.items()}
EXACT = 1e-12


def unet_of(size="nano", dtype=float64, pooling=None, device="cpu"):
    """Weights large enough for every part to matter although nothing was trained."""
    unet = ByteUNet(size, pooling).to(device, dtype)
    with torch.no_grad():
        if isinstance(unet.pooling, SelectSmooth):
            unet.pooling.residual.normal_(std=unet.width**-0.5)
        for name, weight in unet.named_parameters():
            weight.mul_(5 if "head" in name else 3 if weight.dim() == 2 and "embedding" not in name else 1)
    return unet


def rows_of(length, rows=4, device="cpu"):
    """Random bytes; no boundary but at t = 0, boundaries everywhere, then random ones."""
    starts = torch.rand(rows, length) < 0.3
    starts[:, 0], starts[0, 1:], starts[1] = True, False, True
    return torch.randint(256, (rows, length)).to(device), starts.to(device)


def length_of(unet):
    """More than two windows and no multiple of one."""
    length = 2 * unet.size.window + 9
    assert length % unet.size.window
    return length


def gate_of(x, h=None):
    """A gate [B, T] that depends on the position alone or, given h, on h[t] alone; 1 at t = 0."""
    time = torch.arange(x.shape[1], device=x.device, dtype=float64)
    gate = (time.sin() / 2 + 0.5).expand(x.shape)
    return torch.where(time == 0, 1.0, gate if h is None else (h[:, :-1].sum(-1) / 4).sigmoid())


def parallel(unet, x, starts):
    """nll [B, T], early log p and h [B, T+1, ...]; where the pooling reads a gate, one of h."""
    h = unet.encode(x)
    gate = gate_of(x, h) if unet.reads_gate else None
    return unet.nll(h[:, :-1], starts, x, gate), unet.early_log_p(h), h


def largest(*differences):
    return torch.cat([difference.abs().flatten() for difference in differences]).max().item()  # NaN if there is one


@torch.no_grad()
def prefix_error(unet, x, starts, times):
    """How far position t of the whole differs from the same position of x[:t+1], a[:t+1] alone."""
    nll, early, h = parallel(unet, x, starts)
    errors = []
    for t in times:
        alone, early_alone, h_alone = parallel(unet, x[:, : t + 1], starts[:, : t + 1])
        # h alone holds one position more, t + 1, which has read the last byte
        errors += [alone - nll[:, : t + 1], early_alone - early[:, : t + 2], h_alone - h[:, : t + 2]]
    return largest(*errors)


def gradient_error(unet, x, starts, times):
    """The largest gradient of position t with respect to embedded bytes that it has not read; embedded[t] is x[t-1]."""
    embedded = []
    hook = unet.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    nll, early, h = parallel(unet, x, starts)
    hook.remove()
    errors = []
    for t in times:
        mixture = nll[:, t].sum() + 0.7 * early[:, t, 0].sum() + 0.3 * h[:, t].sum()
        (grad,) = torch.autograd.grad(mixture, embedded, retain_graph=True)
        assert (grad[:, t] != 0).any(-1).all()  # what it has read does reach it
        errors.append(grad[:, t + 1 :])
    return largest(*errors)


@torch.no_grad()
def perturbation_error(unet, x, starts, times):
    """How far position t moves where all bytes from t on and all actions after t are others."""
    nll, early, h = parallel(unet, x, starts)
    errors = []
    for t in times:
        later_x, later_starts = x.clone(), starts.clone()
        later_x[:, t:] = (x[:, t:] + 100) % 256
        later_starts[:, t + 1 :] ^= True
        other, other_early, other_h = parallel(unet, later_x, later_starts)
        errors += [(other - nll)[:, :t], (other_early - early)[:, : t + 1], (other_h - h)[:, : t + 1]]
        later_x[:, t] = x[:, t]  # the byte that t is scored by
        errors.append((parallel(unet, later_x, later_starts)[0] - nll)[:, t])
    return largest(*errors)


def stepped(unet, x, starts):
    """nll [B, T], early log p and h [B, T+1, ...], a position at a time."""
    state, h = unet.init_state(*x.shape)
    nll, hidden = [], [h]
    for t, (byte, action) in enumerate(zip(x.unbind(1), starts.unbind(1), strict=True)):
        gate = (torch.ones_like(h[:, 0]) if t == 0 else (h.sum(-1) / 4).sigmoid()) if unet.reads_gate else None
        state, log_p = unet.predict(state, action, gate)
        state, h = unet.observe(state, byte)
        nll.append(-log_p.gather(1, byte[:, None]).squeeze(1))
        hidden.append(h)
    h = torch.stack(hidden, 1)
    return torch.stack(nll, 1), unet.early_log_p(h), h


@torch.no_grad()
def step_error(unet, x, starts):
    """How far the stepwise face is from the parallel one."""
    return largest(*(one - other for one, other in zip(stepped(unet, x, starts), parallel(unet, x, starts), strict=True)))


# ---------------------------------------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nano_reads_the_past_alone(pooling, device):
    unet = unet_of(pooling=POOLINGS[pooling], device=device)
    x, starts = rows_of(length_of(unet), device=device)
    times = range(x.shape[1])
    assert prefix_error(unet, x, starts, times) < EXACT
    assert gradient_error(unet, x, starts, times[::3]) == 0
    assert perturbation_error(unet, x, starts, times[::3]) < EXACT
    assert step_error(unet, x, starts) < EXACT


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "nano"])
def test_every_layout_reads_the_past_alone(name):
    unet = unet_of(LAYOUTS[name])
    x, starts = rows_of(length_of(unet), rows=3)
    window = unet.size.window
    times = (1, window - 1, window, 2 * window + 3)
    assert prefix_error(unet, x, starts, times) < EXACT
    assert gradient_error(unet, x, starts, times[1:]) == 0
    assert perturbation_error(unet, x, starts, times[::2]) < EXACT
    assert step_error(unet, x, starts) < EXACT


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("length", [1, 2, 16, 32])
def test_other_lengths(length, pooling):
    unet = unet_of(pooling=POOLINGS[pooling])
    x, starts = rows_of(length)
    assert prefix_error(unet, x, starts, range(length)) < EXACT
    assert step_error(unet, x, starts) < EXACT


def test_more_tokens_than_the_explicit_products_take():
    unet = unet_of(replace(SIZES["nano"], width=16, heads=2, mid=1))
    x, starts = rows_of(270, rows=2)
    assert prefix_error(unet, x, starts, (255, 256)) < EXACT
    assert gradient_error(unet, x, starts, (256,)) == 0
    assert step_error(unet, x, starts) < EXACT


@pytest.mark.parametrize("pooling", ["smoothing", "mean"])
def test_no_gradient_of_a_later_gate(pooling):
    unet = unet_of(pooling=POOLINGS[pooling])
    x, starts = rows_of(length_of(unet))
    gate = gate_of(x).clone().requires_grad_()
    nll = unet.nll(unet.encode(x)[:, :-1], starts, x, gate)
    for t in (1, 5, 20, 33):
        (grad,) = torch.autograd.grad(nll[:, t].sum(), gate, retain_graph=True)
        assert not grad[:, t + 1 :].any() and (t == 1 or grad[:, :t].any())


@pytest.mark.parametrize("pooling", POOLINGS)
def test_float32_steps_are_parallel(pooling, device):
    unet = ByteUNet(pooling=POOLINGS[pooling]).to(device)
    x, starts = rows_of(length_of(unet), device=device)
    with torch.no_grad():
        for one, other in zip(stepped(unet, x, starts), parallel(unet, x, starts), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class NextSegment(SelectAdd):
    """A planted leak: byte t receives the answer to the segment after its own."""

    def up(self, h, y, starts, gate=None):
        ids = starts.long().cumsum(-1).clamp(max=y.shape[1] - 1)
        return h + y.gather(1, ids[..., None].expand(-1, -1, y.shape[-1]))


class SameSegment(MeanAdd):
    """A planted leak: byte t receives the mean of its own segment, which has read all of it."""

    def up(self, h, y, starts, gate=None):
        ids = starts.long().cumsum(-1).clamp(max=y.shape[1] - 1)
        return h + y.gather(1, ids[..., None].expand(-1, -1, y.shape[-1]))


class EndOfSegment(SelectAdd):
    """A planted leak: a segment's token is h at its last byte."""

    def down(self, h, starts, gate=None):
        ends = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], 1)
        return super().down(h, ends)


@pytest.mark.parametrize("leak", [lambda width: NextSegment(), lambda width: EndOfSegment(), SameSegment])
def test_every_check_finds_a_leak(leak):
    unet = unet_of(replace(SIZES["nano"], width=32, mid=1), pooling=leak)
    x, starts = rows_of(length_of(unet))
    times = (5, 20, 30)
    assert prefix_error(unet, x, starts, times) > 1e-3
    assert gradient_error(unet, x, starts, times) > 1e-3
    assert perturbation_error(unet, x, starts, times) > 1e-3
    assert step_error(unet, x, starts) > 1e-3


def test_boundaries_matter():
    unet = unet_of()
    x, starts = rows_of(20)
    h = unet.encode(x)[:, :-1]
    other = starts.clone()
    other[2:, 10] ^= True
    moved = (unet.nll(h, starts, x) - unet.nll(h, other, x)).abs()[2:]
    assert (moved[:, :10] < EXACT).all() and (moved[:, 10:] > 1e-6).all()


# --------------------------------------------------------------------------------------------------------------- invariances


def test_rows_are_independent():
    unet = unet_of()
    x, starts = rows_of(37)
    assert len(set(starts.sum(-1).tolist())) > 2
    together = parallel(unet, x, starts)
    order = torch.tensor([2, 0, 3, 1])
    for value, permuted in zip(together, parallel(unet, x[order], starts[order]), strict=True):
        torch.testing.assert_close(permuted, value[order], rtol=0, atol=EXACT)
    for b in range(len(x)):
        for value, alone in zip(together, parallel(unet, x[b : b + 1], starts[b : b + 1]), strict=True):
            torch.testing.assert_close(alone[0], value[b], rtol=0, atol=EXACT)


def test_steps_of_rows_are_independent():
    unet = unet_of()
    x, starts = rows_of(20)
    together = stepped(unet, x, starts)
    for b in range(len(x)):
        for value, alone in zip(together, stepped(unet, x[b : b + 1], starts[b : b + 1]), strict=True):
            torch.testing.assert_close(alone[0], value[b], rtol=0, atol=EXACT)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_changes_nothing(pooling):
    unet = unet_of(pooling=POOLINGS[pooling])
    x, starts = rows_of(37)
    lengths = torch.tensor([37, 20, 1, 0])
    valid = torch.arange(37) < lengths[:, None]
    nll, *_ = parallel(unet, torch.where(valid, x, 0), starts & valid)
    assert nll.isfinite().all()
    other, *_ = parallel(unet, torch.where(valid, x, 77), starts & valid)
    assert largest((nll - other)[valid]) < EXACT
    for b, length in enumerate(lengths.tolist()[:3]):
        alone, *_ = parallel(unet, x[b : b + 1, :length], starts[b : b + 1, :length])
        torch.testing.assert_close(nll[b, :length], alone[0], rtol=0, atol=EXACT)


def test_it_is_a_distribution():
    unet = unet_of()
    x, starts = rows_of(10)
    h = unet.encode(x)
    assert largest(unet.early_log_p(h).logsumexp(-1)) < EXACT
    every_byte = torch.arange(256)[:, None].expand(-1, 10)  # in the place of the bytes that are scored, not of those that are read
    nll = unet.nll(h[:1, :-1].expand(256, -1, -1), starts[2:3].expand(256, -1), every_byte)
    assert largest((-nll).logsumexp(0)) < EXACT


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nll_is_one_of_all_log_probabilities(pooling):
    unet = unet_of(pooling=POOLINGS[pooling])
    x, starts = rows_of(37)
    nll, _, h = parallel(unet, x, starts)
    log_p = unet.log_p(h[:, :-1], starts, gate_of(x, h) if unet.reads_gate else None)
    assert largest(log_p.logsumexp(-1)) < EXACT
    assert largest(nll + log_p.gather(-1, x[..., None]).squeeze(-1)) < EXACT


def test_the_early_head_begins_as_the_head():
    unet = ByteUNet()
    assert torch.equal(unet.early_head.weight, unet.head.weight)
    assert unet.early_head.weight is not unet.head.weight


def test_h_has_unit_scale_and_reads_bos():
    unet = ByteUNet()
    x, _ = rows_of(12)
    h = unet.encode(x)
    assert h.shape == (4, 13, unet.width)
    torch.testing.assert_close(h.square().mean(-1), torch.ones(4, 13), rtol=1e-3, atol=0)
    assert torch.equal(h[:1, 0].expand(4, -1), h[:, 0])
    with torch.no_grad():
        unet.embedding.weight[BOS] += 1
    assert (unet.encode(x)[:, :3] != h[:, :3]).any(-1).all()


# ------------------------------------------------------------------------------------------------------- dtypes and gradients


def test_autocast_answers_in_float32(device):
    unet = ByteUNet().to(device)
    x, starts = rows_of(100, device=device)
    with torch.no_grad():
        wide = parallel(unet, x, starts)
        with torch.autocast(device.type, dtype=bfloat16):
            narrow, steps = parallel(unet, x, starts), stepped(unet, x, starts)
    # bfloat16 keeps 8 bits: some 1 % of a logit, and the logits of a fresh model are about 0.2
    for value, exact, step in zip(narrow, wide, steps, strict=True):
        assert value.dtype == step.dtype == float32
        tolerance = 0.02 if value is not narrow[-1] else 0.05
        torch.testing.assert_close(value, exact, rtol=0, atol=tolerance)
        torch.testing.assert_close(step, exact, rtol=0, atol=tolerance)
    assert (narrow[0] - wide[0]).mean().abs() < 1e-3


def test_half_precision_parameters_answer_in_float32():
    unet = ByteUNet().to(bfloat16)
    x, starts = rows_of(20)
    nll, early, h = parallel(unet, x, starts)
    assert unet.dtype == h.dtype == bfloat16 and nll.dtype == early.dtype == float32
    assert stepped(unet, x, starts)[0].dtype == float32


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_reaches_every_parameter(autocast, pooling):
    unet = ByteUNet(pooling=POOLINGS[pooling])
    x, starts = rows_of(50)
    x[0] = torch.arange(50)
    with torch.autocast("cpu", dtype=bfloat16, enabled=autocast):
        nll, early, _ = parallel(unet, x, starts)
    (nll.mean() - early[:, :-1].gather(-1, x[..., None]).mean()).backward()
    for name, parameter in unet.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.dtype == float32 and (parameter.grad != 0).any(), name
    read = torch.zeros(257, dtype=torch.bool).index_fill(0, torch.cat([x[:, :-1].flatten(), torch.tensor([BOS])]), True)
    assert torch.equal((unet.embedding.weight.grad != 0).any(-1), read)  # every byte that was read, and no other


@pytest.mark.parametrize("pooling", ["smoothing", "mean"])
def test_the_rest_begins_alike_whatever_the_pooling(pooling):
    weights = []
    for make in (None, POOLINGS[pooling]):
        torch.manual_seed(0)
        weights.append(ByteUNet(pooling=make).state_dict())
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
    assert all(name.startswith("pooling.") for name in weights[1].keys() - weights[0].keys())


def test_the_early_loss_leaves_the_rest_alone():
    unet = ByteUNet()
    x, _ = rows_of(20)
    unet.early_log_p(unet.encode(x)).mean().backward()
    reached = {name.split(".")[0] for name, parameter in unet.named_parameters() if parameter.grad is not None}
    assert reached == {"embedding", "encoder", "encoder_norm", "early_head"}


def test_an_unknown_size_is_one_clear_line():
    with pytest.raises(ValueError, match="no model size '7B'; use one of nano, 18M") as error:
        ByteUNet("7B")
    assert "\n" not in str(error.value)
