"""Opens merged folders, offline and alone, with whatever transformers this interpreter has; test_merge.py runs it in both.

merged_logits.py JOB.json: for each case {model, inputs, out}: loads the folder, refuses missing or unexpected keys, writes the
logits and whether the head shares the table."""

import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3ForConditionalGeneration, GenerationConfig


def main():
    for case in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        config = AutoConfig.from_pretrained(case["model"])
        model, info = Gemma3ForConditionalGeneration.from_pretrained(
            case["model"], output_loading_info=True, torch_dtype=torch.float32, attn_implementation="eager")
        complaints = {kind: list(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
        assert not complaints, complaints
        batch = load_file(case["inputs"])
        arguments = {"input_ids": batch["token_ids"], "attention_mask": batch["valid"].long(), "pixel_values": batch["pixels"],
                     "token_type_ids": (batch["image_group"] >= 0).long()}
        with torch.no_grad():
            logits = model.eval()(**arguments).logits.float()
        shared = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        save_file({"logits": logits, "shared": torch.tensor(shared), "config_ties": torch.tensor(bool(config.tie_word_embeddings))}, case["out"])


if __name__ == "__main__":
    main()
