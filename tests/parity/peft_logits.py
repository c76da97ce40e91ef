"""Opens adapters with whatever transformers and peft this interpreter has; test_adapter_files.py runs it in today's environment.

peft_logits.py JOB.json: for each case {model, adapter, inputs, out}: loads both, refuses any warning about keys, writes the
logits; with "save" it also writes the adapter as this peft does."""

import json
import pathlib
import sys
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForConditionalGeneration


def open_adapter(model_folder, adapter_folder):
    base = Gemma3ForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, adapter_folder).eval()
    complaints = [str(w.message) for w in caught if "key" in str(w.message)]
    assert not complaints, complaints
    return model


def logits(model, inputs):
    batch = load_file(inputs)
    arguments = {"input_ids": batch["token_ids"], "attention_mask": batch["valid"].long(), "pixel_values": batch["pixels"],
                 "token_type_ids": (batch["image_group"] >= 0).long()}
    with torch.no_grad():
        return model(**arguments).logits.float()


def main():
    for case in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        model = open_adapter(case["model"], case["adapter"])
        adapted = sum(1 for name, _ in model.named_parameters() if "lora_A" in name)
        save_file({"logits": logits(model, case["inputs"]), "modules": torch.tensor(adapted)}, case["out"])
        if case.get("save"):
            model.save_pretrained(case["save"])


if __name__ == "__main__":
    main()
