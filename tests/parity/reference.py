"""What the parity tests share: tiny random Gemma 3 folders, batches, the Python reference and gemtune's probe."""

import json
import os
import pathlib
import subprocess
import types

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

BUILD = pathlib.Path(os.environ["GEMTUNE_BUILD_DIR"])
SOURCE = pathlib.Path(os.environ.get("GEMTUNE_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
PROBE = BUILD / "tests" / "gemtune_probe"
GEMTUNE = pathlib.Path(os.environ.get("GEMTUNE", BUILD / "gemtune"))

VOCABULARY, BEGIN_IMAGE, END_IMAGE, IMAGE = 512, 500, 501, 502
TOKENS_PER_IMAGE = 4
IMAGE_SIZE = 28
VISION_LAYERS = 3


# --- models -----------------------------------------------------------------------------------------------------------------


def text_settings(**changes):
    """Global layers by sliding_window_pattern; the window holds an image's tokens and is shorter than the rows; the norms' eps is
    large enough to be seen."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6, "sliding_window_pattern": 6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 512, "rms_norm_eps": 2e-3, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, **changes,
    }


def vision_config(tied=True, **text_changes):
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": VISION_LAYERS, "num_attention_heads": 4,
        "image_size": IMAGE_SIZE, "patch_size": 7, "layer_norm_eps": 1e-3, "vision_use_head": False,
    }
    return Gemma3Config(text_config=text_settings(tie_word_embeddings=tied, **text_changes), vision_config=vision,
                        mm_tokens_per_image=TOKENS_PER_IMAGE, boi_token_index=BEGIN_IMAGE, eoi_token_index=END_IMAGE,
                        image_token_index=IMAGE, tie_word_embeddings=tied)


def text_config(**changes):
    return Gemma3TextConfig(**text_settings(**changes))


def random_model(config, seed=0):
    """fp32, eager attention. Every tensor is random, norms and biases too: none may be left out unnoticed."""
    config._attn_implementation = "eager"
    kind = Gemma3ForConditionalGeneration if isinstance(config, Gemma3Config) else Gemma3ForCausalLM
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                centre = 1.0 if "layer_norm" in name or "post_layernorm.weight" in name and "vision" in name else 0.0
                parameter.copy_(noise * 0.2 + (centre if name.endswith("weight") else 0.0))
            elif "embed" in name or name == "lm_head.weight":
                parameter.copy_(noise * 0.1)
            elif name.endswith("mm_input_projection_weight"):
                parameter.copy_(noise * parameter.shape[0] ** -0.5)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model


def hub_name(name):
    """The released folders' spelling: what transformers wrote before 4.52."""
    for new, old in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")):
        if name.startswith(new):
            return old + name[len(new):]
    return name


NAMINGS = {
    "hub": hub_name,
    "4.52": lambda name: name,
    "5.6": lambda name: name.replace(".vision_model.", "."),
}


def save_folder(model, folder, naming="4.52", dtype=None):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rename = NAMINGS[naming] if isinstance(model, Gemma3ForConditionalGeneration) else NAMINGS["4.52"]
    tied = model.config.tie_word_embeddings
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        tensors[rename(name)] = tensor.detach().to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return folder


def load_folder(folder, kind=Gemma3ForConditionalGeneration):
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


# --- batches ----------------------------------------------------------------------------------------------------------------


def row(num_text, images=0, seed=0):
    """bos, text with image blocks spread in it; every second half of the text is a target."""
    generator = torch.Generator().manual_seed(1000 * num_text + 10 * images + seed)
    text = torch.randint(7, BEGIN_IMAGE, (num_text,), generator=generator).tolist()
    block = [BEGIN_IMAGE] + [IMAGE] * TOKENS_PER_IMAGE + [END_IMAGE]
    tokens = [2]
    for i, token in enumerate(text):
        if images and i % max(1, num_text // (images + 1)) == 0 and i // max(1, num_text // (images + 1)) < images:
            tokens += block
        tokens.append(token)
    half = len(tokens) // 2
    targets = [int(i >= half and token < BEGIN_IMAGE) for i, token in enumerate(tokens)]
    return types.SimpleNamespace(tokens=tokens, targets=targets, images=images)


def batch(rows, padding="right", seed=0):
    """The same batch as the probe's tensors and as the reference's arguments."""
    length = max(len(r.tokens) for r in rows)

    def padded(values, fill):
        filler = [fill] * (length - len(values))
        return filler + values if padding == "left" else values + filler

    def groups(tokens):
        out, group = [], -1
        for i, token in enumerate(tokens):
            group += token == IMAGE and (i == 0 or tokens[i - 1] != IMAGE)
            out.append(group if token == IMAGE else -1)
        return out

    tokens = torch.tensor([padded(r.tokens, 0) for r in rows])
    valid = torch.tensor([padded([1] * len(r.tokens), 0) for r in rows])
    targets = torch.tensor([padded(r.targets, 0) for r in rows])
    group = torch.tensor([padded(groups(r.tokens), -1) for r in rows])
    num_images = sum(r.images for r in rows)
    generator = torch.Generator().manual_seed(seed)
    probe = {"token_ids": tokens, "valid": valid.to(torch.uint8), "target_mask": targets.to(torch.uint8),
             "image_group": group.to(torch.int32)}
    reference = {"input_ids": tokens, "attention_mask": valid, "labels": torch.where(targets == 1, tokens, -100)}
    if any(IMAGE in r.tokens for r in rows) or num_images == 0:
        reference["token_type_ids"] = (tokens == IMAGE).long()
    if num_images:
        pixels = torch.rand((num_images, 3, IMAGE_SIZE, IMAGE_SIZE), generator=generator) * 2 - 1
        probe["pixels"] = reference["pixel_values"] = pixels
    return types.SimpleNamespace(probe=probe, reference=reference, valid=valid.bool(), targets=targets)


# --- both sides -------------------------------------------------------------------------------------------------------------


def run(*command, expect=0, **options):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert result.returncode == expect, f"{command}\nexit {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result


def probe_all(folder, batches, work, *options):
    """gemtune's tensors for several batches, from one process."""
    work = pathlib.Path(work)
    command = [PROBE, "--model", folder, *options]
    for i, inputs in enumerate(batches):
        save_file(inputs.probe, work / f"inputs{i}.safetensors")
        command += ["--inputs", work / f"inputs{i}.safetensors", "--out", work / f"out{i}.safetensors"]
    run(*command)
    return [load_file(work / f"out{i}.safetensors") for i in range(len(batches))]


def probe(folder, inputs, work, *options):
    """gemtune's tensors for a batch."""
    return probe_all(folder, [inputs], work, *options)[0]


def reference_taps(model, inputs):
    """The reference's logits, loss and intermediates under the probe's names."""
    taps = {}

    def keep(name, pick=lambda output: output):
        def hook(_module, _arguments, output):
            output = pick(output)
            taps[name] = (output[0] if isinstance(output, tuple) else output).detach()
        return hook

    def keep_input(name):
        def hook(_module, arguments, keywords):
            taps[name] = (arguments[0] if arguments else keywords["hidden_states"]).detach()
        return hook

    inner = model.model
    language = inner.language_model if hasattr(inner, "language_model") else inner
    handles = [language.layers[0].register_forward_pre_hook(keep_input("embeddings"), with_kwargs=True),
               language.norm.register_forward_hook(keep("final_norm"))]
    handles += [layer.register_forward_hook(keep(f"decoder_layer.{i}")) for i, layer in enumerate(language.layers)]
    if language is not inner:
        vision = inner.vision_tower.vision_model
        handles += [vision.embeddings.register_forward_hook(keep("vision_embeddings")),
                    vision.post_layernorm.register_forward_hook(keep("vision_post_layernorm")),
                    inner.multi_modal_projector.register_forward_hook(keep("projector"))]
        handles += [layer.register_forward_hook(keep(f"vision_layer.{i}")) for i, layer in enumerate(vision.encoder.layers)]
    arguments = dict(inputs.reference)
    if language is inner:
        arguments.pop("token_type_ids", None)
    with torch.no_grad():
        output = model(**arguments)
    for handle in handles:
        handle.remove()
    taps["logits"], taps["loss"] = output.logits, output.loss
    return taps


def error(a, b):
    """max|a − b| ÷ max|b|."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    assert torch.isfinite(a).all() and torch.isfinite(b).all()
    return ((a - b).abs().max() / b.abs().max()).item()


def scalar_error(a, b):
    return abs(float(a) - float(b)) / max(abs(float(b)), 1e-6)


def assert_taps_agree(ours, theirs, inputs, bound):
    """Every tap the reference has, at positions that are no padding."""
    worst = {}
    for name, tensor in theirs.items():
        if name == "loss":
            continue
        found = ours[name]
        if name in ("logits", "embeddings", "final_norm") or name.startswith("decoder_layer"):
            found, tensor = found[inputs.valid], tensor[inputs.valid]
        worst[name] = error(found, tensor)
    bad = {name: value for name, value in worst.items() if not value <= bound}
    assert not bad, bad
    assert scalar_error(ours["loss_sum"] / ours["num_targets"], theirs["loss"]) <= bound
    return worst


def peft_key(name):
    """A PEFT module's parameter name as it stands in the adapter file."""
    return name.replace(".default.", ".").replace(".modules_to_save.", ".")


def randomise_adapter(model, seed=5, tables="equal"):
    """A and B random, so that every gradient is there; the trained tables moved off their start, alike or each its own way."""
    generator = torch.Generator().manual_seed(seed)
    shared = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "modules_to_save" in name:
                if shared is None or tables == "own":
                    shared = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(shared)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.1 if "lora_B" in name else 0.3 / parameter.shape[1] ** 0.5))
    return model


def read_metrics(run_dir):
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]
