"""4-bit weights against bitsandbytes: bit for bit where its CPU path is the CUDA rule, else against an own float64 oracle."""

import json

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, Gemma3ForConditionalGeneration

import reference as ref

VALUES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], dtype=np.float64)


def dynamic_map():
    """The signed dynamic map from its definition: decades of evenly spaced midpoints, both signs, 0 and 1."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = np.linspace(0.1, 1.0, 2**i + 1)
        middles = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)
        values += [*middles, *-middles]
    return np.sort(np.array(values))


def blocks(values, size, fill=0.0):
    short = -len(values) % size
    return np.concatenate([values, np.full(short, fill)]).reshape(-1, size)


def unpacked(codes, count):
    codes = codes.flatten().numpy()
    return np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[:count]


def dequantized(codes, absmax, shape):
    """float64 values from codes and scales."""
    count = int(np.prod(shape))
    values = VALUES[unpacked(codes, count)]
    return (blocks(values, 64) * np.asarray(absmax, dtype=np.float64)[:, None]).reshape(-1)[:count].reshape(shape)


def nested_absmax(out, name):
    """float64 scales from their 8-bit codes."""
    codes, absmax2 = out[name + ".absmax_codes"].numpy(), out[name + ".absmax2"].numpy().astype(np.float64)
    map8 = out[name + ".code8"].numpy().astype(np.float64)
    scaled = map8[codes] * np.repeat(absmax2, 256)[: len(codes)]
    return scaled + float(out[name + ".offset"])


def ulp_bound(values, ulps=2):
    return ulps * np.spacing(np.abs(values).max().astype(np.float32)).astype(np.float64)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(3)
    heavy = torch.randn(256, 128) * torch.exp(torch.randn(256, 1))
    with_zeros = torch.randn(64, 128)
    with_zeros[7:9] = 0
    return {
        "plain": torch.randn(192, 256) * 0.02,
        "bf16": (torch.randn(512, 192) * 0.05).to(torch.bfloat16),
        "heavy": heavy,
        "blocks_across_rows": torch.randn(48, 72) * 0.03,
        "short_last_block": torch.randn(5, 30),
        "zero_blocks": with_zeros,
        "large": torch.randn(1100, 512) * 0.02,
    }


@pytest.fixture(scope="module")
def quantized(weights, tmp_path_factory):
    work = tmp_path_factory.mktemp("nf4")
    save_file(weights, work / "in.safetensors")
    out = {}
    for kind in ("nf4", "nf4-double"):
        ref.run(ref.PROBE, "--quantize", work / "in.safetensors", "--quant", kind, "--out", work / f"{kind}.safetensors")
        out[kind] = load_file(work / f"{kind}.safetensors")
    return out


NAMES = ["plain", "bf16", "heavy", "blocks_across_rows", "short_last_block", "zero_blocks", "large"]


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_bitsandbytes_bits(weights, quantized, name):
    weight, out = weights[name], quantized["nf4"]
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(out[name + ".absmax"], state.absmax.float())
    ours, theirs = (unpacked(codes, weight.numel()) for codes in (out[name + ".codes"], packed))
    # A block of zeros has no scale; its code means nothing.
    live = np.repeat(state.absmax.numpy() > 0, 64)[: weight.numel()]
    assert np.array_equal(ours[live], theirs[live])
    assert torch.equal(quantized["nf4-double"][name + ".codes"], out[name + ".codes"])


@pytest.mark.parametrize("name", NAMES)
def test_dequantised_values_are_one_rounding_from_the_exact_ones(weights, quantized, name):
    weight, out = weights[name], quantized["nf4"]
    exact = dequantized(out[name + ".codes"], out[name + ".absmax"].numpy(), weight.shape)
    expected = torch.from_numpy(exact).float().to(weight.dtype)
    assert torch.equal(out[name + ".dequantized"], expected)


def test_the_dynamic_map_is_the_definition_s(quantized):
    ours = quantized["nf4-double"]["plain.code8"].numpy().astype(np.float64)
    assert len(ours) == 256 and ours[127] == 0 and ours[255] == 1 and ours[0] > -1
    # The reference computes the map in fp32: three roundings.
    assert np.all(np.abs(ours - dynamic_map()) <= 2.0**-22 * np.abs(dynamic_map()))
    assert np.array_equal(ours[1:].astype(np.float32), bnb.create_dynamic_map().numpy()[1:])


@pytest.mark.parametrize("name", NAMES)
def test_nested_scales_follow_the_cuda_rule(weights, quantized, name):
    out = quantized["nf4-double"]
    absmax = quantized["nf4"][name + ".absmax"].numpy().astype(np.float64)
    offset = float(out[name + ".offset"])
    assert abs(offset - absmax.mean()) <= ulp_bound(absmax)
    centred = blocks(absmax - offset, 256)
    absmax2 = np.abs(centred).max(axis=1)
    ours2 = out[name + ".absmax2"].numpy().astype(np.float64)
    assert np.abs(ours2 - absmax2).max() <= ulp_bound(absmax)

    # Each code is the nearest value of the map; at a midpoint either neighbour is, within fp32 rounding.
    map8 = out[name + ".code8"].numpy().astype(np.float64)
    normed = (centred / np.where(absmax2 > 0, absmax2, 1)[:, None]).reshape(-1)[: len(absmax)]
    distance = np.abs(normed[:, None] - map8[None, :])
    chosen = distance[np.arange(len(normed)), out[name + ".absmax_codes"].numpy()]
    slack = ulp_bound(absmax, 4) / np.repeat(np.where(absmax2 > 0, absmax2, 1), 256)[: len(absmax)]
    assert np.all(chosen <= distance.min(axis=1) + slack + 2.0**-22)

    exact = nested_absmax(out, name)
    values = dequantized(out[name + ".codes"], exact, weights[name].shape)
    ours = out[name + ".dequantized"].double().numpy()
    step = 2.0**-8 if weights[name].dtype == torch.bfloat16 else 0.0
    assert np.all(np.abs(ours - values) <= ulp_bound(exact, 4) + step * np.abs(values))


def nf4_oracle(weight, double):
    """bitsandbytes' codes, scales by the CUDA rule in float64, rounded once to the weight's dtype."""
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    absmax = state.absmax.double().numpy()
    if double:
        offset = absmax.mean()
        centred = blocks(absmax - offset, 256)
        absmax2 = np.abs(centred).max(axis=1, keepdims=True)
        map8 = dynamic_map()
        nearest = np.abs((centred / absmax2)[:, :, None] - map8[None, None, :]).argmin(axis=2)
        absmax = (map8[nearest] * absmax2).reshape(-1)[: len(absmax)] + offset
    return torch.from_numpy(dequantized(packed, absmax, weight.shape)).float().to(weight.dtype)


def is_quantised(name, vision):
    return name.endswith("proj.weight") and "language_model" in name or vision and "encoder.layers" in name and name.endswith(
        ("proj.weight", "fc1.weight", "fc2.weight"))


@pytest.mark.parametrize("vision", [False, True], ids=["language", "both_towers"])
@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
def test_a_4bit_forward_is_the_reference_s_on_the_dequantised_weights(kind, vision, tmp_path):
    model = ref.random_model(ref.vision_config(sliding_window_pattern=3), seed=21)
    folder = ref.save_folder(model, tmp_path / "model")
    inputs = ref.batch([ref.row(22), ref.row(12, images=2)], "left")
    plain = ref.reference_taps(model, inputs)["logits"]
    with torch.no_grad():
        count = 0
        for name, parameter in model.named_parameters():
            if is_quantised(name, vision):
                parameter.copy_(nf4_oracle(parameter, kind == "nf4-double"))
                count += 1
    assert count == 6 * 7 + (ref.VISION_LAYERS * 6 if vision else 0)
    theirs = ref.reference_taps(model, inputs)
    assert ref.error(theirs["logits"], plain) > 1e-2
    ours = ref.probe(folder, inputs, tmp_path, "--quant", kind, *(["--quant-vision"] if vision else []))
    ref.assert_taps_agree(ours, theirs, inputs, 1e-5)


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_a_folder_that_bitsandbytes_quantised_loads_as_it_is(double, tmp_path):
    source = ref.random_model(ref.vision_config(sliding_window_pattern=2, num_hidden_layers=4), seed=22)
    ref.save_folder(source, tmp_path / "source", dtype=torch.bfloat16)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double, bnb_4bit_quant_type="nf4",
                                  bnb_4bit_compute_dtype=torch.float32)
    theirs = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "source", quantization_config=settings, dtype=torch.bfloat16,
                                                            device_map="cpu")
    folder = tmp_path / "quantised"
    theirs.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    states = [name for name in stored if name.endswith("quant_state.bitsandbytes__nf4")]
    assert len(states) == 4 * 7 + ref.VISION_LAYERS * 6

    plain = ref.load_folder(tmp_path / "source")
    parameters = dict(plain.named_parameters())
    with torch.no_grad():
        for state in states:
            weight = state.removesuffix(".quant_state.bitsandbytes__nf4")
            absmax = stored[weight + ".absmax"].double().numpy()
            layout = json.loads(bytes(stored[state].tolist()))
            if double:
                map8 = stored[weight + ".nested_quant_map"].double().numpy()
                absmax2 = np.repeat(stored[weight + ".nested_absmax"].double().numpy(), 256)[: len(absmax)]
                absmax = map8[stored[weight + ".absmax"].flatten().numpy()] * absmax2 + layout["nested_offset"]
            values = dequantized(stored[weight], absmax, layout["shape"])
            name = ref.NAMINGS["4.52"](canonical(weight))
            parameters[name].copy_(torch.from_numpy(values).to(torch.bfloat16).float())
    inputs = ref.batch([ref.row(14, images=1), ref.row(25)])
    ref.assert_taps_agree(ref.probe(folder, inputs, tmp_path), ref.reference_taps(plain, inputs), inputs, 1e-5)


def canonical(name):
    """Hub spelling or today's → today's."""
    for old, new in (("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")):
        if name.startswith(old):
            return new + name[len(old):]
    return name
