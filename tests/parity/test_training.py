"""Ten optimizer steps of the Gemma tutorial's own loop (its collator, TRL's SFTTrainer) against `gemtune train`."""

import json

import pytest
import torch
from PIL import Image
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer

import reference as ref
import tiny_run

BOUND = 1e-4
STEPS = 10
ROWS = 26  # seven steps an epoch, the last of fewer micro-batches: ten steps go over an epoch's end


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    work = tmp_path_factory.mktemp("training")
    model = tiny_run.model_folder(work / "model")
    rows = tiny_run.write_rows(work, ROWS)
    return {"work": work, "model": model, "rows": rows}


def with_pictures(rows, folder):
    """Rows as the tutorial holds them: pictures inside the messages."""
    out = []
    for row in rows:
        images = iter(row["images"])
        messages = [{"role": m["role"],
                     "content": [{"type": "image", "image": Image.open(folder / next(images)).convert("RGB")}
                                 if part["type"] == "image" else part for part in m["content"]]} for m in row["messages"]]
        out.append({"messages": messages})
    return out


def collator(processor):
    """The tutorial's collate_fn, with one bos: the rendered text has it already."""
    boi = processor.tokenizer.convert_tokens_to_ids(processor.tokenizer.special_tokens_map["boi_token"])

    def collate(examples):
        texts, images = [], []
        for example in examples:
            images.append([part["image"].convert("RGB") for m in example["messages"] for part in m["content"] if part["type"] == "image"])
            texts.append(processor.apply_chat_template(example["messages"], add_generation_prompt=False, tokenize=False).strip())
        batch = processor(text=texts, images=images, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].clone()
        # bos too: behind padding on the left the reference would learn to predict it from a pad, gemtune never does.
        for ignored in (processor.tokenizer.pad_token_id, processor.tokenizer.bos_token_id, boi, processor.image_token_id):
            labels[labels == ignored] = -100
        batch["labels"] = labels
        return batch

    return collate


class UnroundedTrainer(SFTTrainer):
    """The reference logs the loss with four decimals; this keeps what it rounds."""

    def _maybe_log_save_evaluate(self, tr_loss, *arguments, **keywords):
        if self.control.should_log:
            self.unrounded = getattr(self, "unrounded", []) + [tr_loss.item()]
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **keywords)


def reference_run(world, folder, out, micro_batch, tables):
    model = ref.load_folder(folder)
    processor = AutoProcessor.from_pretrained(world["model"], use_fast=True)
    lora = LoraConfig(lora_alpha=16, lora_dropout=0.0, r=16, bias="none", target_modules="all-linear", task_type="CAUSAL_LM",
                      modules_to_save=["lm_head", "embed_tokens"] if tables else None)
    arguments = SFTConfig(
        output_dir=str(out / "trl"), max_steps=STEPS, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=4,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, optim="adamw_torch_fused",
        logging_steps=1, save_strategy="no", learning_rate=2e-4, bf16=False, fp16=False, use_cpu=True, max_grad_norm=0.3,
        warmup_ratio=0.03, lr_scheduler_type="constant", report_to="none", dataset_text_field="", disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True})
    arguments.remove_unused_columns = False
    trainer = UnroundedTrainer(model=model, args=arguments, train_dataset=with_pictures(world["rows"], world["work"]), peft_config=lora,
                               processing_class=processor, data_collator=collator(processor))
    trainer.model.save_pretrained(out / "initial")
    trainer.train()
    trainer.model.save_pretrained(out / "trained")
    records = [record for record in trainer.state.log_history if "loss" in record]
    for record, loss in zip(records, trainer.unrounded, strict=True):
        assert round(loss, 4) == record["loss"]
        record["loss"] = loss
    return records


def dequantised_copy(world, out):
    """The model with gemtune's dequantised weights in place of those that it holds as NF4."""
    ref.run(ref.PROBE, "--model", world["model"], "--quant", "nf4-double", "--quant-vision", "--dump-weights", out / "weights.safetensors")
    model = ref.load_folder(world["model"])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    missing = model.load_state_dict(load_file(out / "weights.safetensors"), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    dims = tiny_run.config()
    assert len(changed) == 7 * dims.text_config.num_hidden_layers + 6 * dims.vision_config.num_hidden_layers
    return ref.save_folder(model, out / "dequantised", "hub")


CASES = {
    "unquantised": {"settings": ["quant.base=none"], "micro_batch": 1, "tables": False},
    "unquantised_two_tables": {"settings": ["quant.base=none", "lora.train_tables=untied", "optim.table_dtype=fp32"], "micro_batch": 1,
                               "tables": True},
    "padded_micro_batches": {"settings": ["quant.base=none", "train.micro_batch=2", "train.recompute=true"], "micro_batch": 2,
                             "tables": False},
    "4bit_both_towers": {"settings": ["quant.base=nf4", "quant.double=true", "quant.vision=true"], "micro_batch": 1, "tables": False},
}


@pytest.fixture(scope="module", params=CASES)
def both(request, world):
    case = CASES[request.param]
    out = world["work"] / request.param
    out.mkdir()
    folder = dequantised_copy(world, out) if "quant.base=nf4" in case["settings"] else world["model"]
    theirs = reference_run(world, folder, out, case["micro_batch"], case["tables"])
    tiny_run.train(out / "run", world["model"], world["work"] / "train.jsonl", f"lora.init={out / 'initial'}", "lora.rank=16",
                   "lora.alpha=16", "lora.dropout=0", "lora.targets=all-linear", "data.loss_on=all", "optim.learning_rate=2e-4",
                   "optim.max_grad_norm=0.3", "train.accumulation=4", f"train.max_steps={STEPS}", "train.seed=42",
                   "train.loss_average=micro_batches", "checkpoint.every=never", *case["settings"])
    return {"theirs": theirs, "ours": ref.read_metrics(out / "run"), "out": out, "folder": folder, "case": case, "world": world}


def test_every_logged_number_of_every_step_agrees(both):
    ours, theirs = both["ours"], both["theirs"]
    assert len(ours) == len(theirs) == STEPS
    worst = {}
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["step"] == reference["step"]
        for key in ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "num_tokens", "epoch"):
            worst[key] = max(worst.get(key, 0.0), ref.scalar_error(mine[key], reference[key]))
    assert max(worst.values()) <= BOUND, worst
    assert len({record["loss"] for record in ours}) == STEPS and ours[-1]["epoch"] > 1


def test_the_trained_adapter_opens_in_peft_with_the_same_logits(both, tmp_path):
    final = both["out"] / "run" / "final"
    inputs = tokens(both["world"])
    quant = ["--quant", "nf4-double", "--quant-vision"] if both["folder"] != both["world"]["model"] else []
    ours = ref.probe(both["world"]["model"], inputs, tmp_path, "--adapter", final, *quant)["logits"]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(ref.load_folder(both["folder"]), final).eval()(**inputs.reference).logits
        trained = PeftModel.from_pretrained(ref.load_folder(both["folder"]), both["out"] / "trained").eval()(**inputs.reference).logits
        untrained = PeftModel.from_pretrained(ref.load_folder(both["folder"]), both["out"] / "initial").eval()(**inputs.reference).logits
    assert ref.error(ours, theirs) <= 1e-5
    # Both sides learned the same: far closer to each other than to where they began.
    assert ref.error(theirs, trained) <= 0.01 * ref.error(untrained, trained)


def tokens(world):
    """The first row as a batch of both sides."""
    processor = AutoProcessor.from_pretrained(world["model"], use_fast=True)
    found = collator(processor)(with_pictures(world["rows"][:1], world["work"]))
    soft = found["token_type_ids"] == 1
    inputs = ref.batch([ref.row(4)])
    inputs.reference = {key: found[key] for key in ("input_ids", "attention_mask", "token_type_ids", "pixel_values")}
    inputs.probe = {"token_ids": found["input_ids"], "valid": found["attention_mask"].to(torch.uint8),
                    "target_mask": (found["labels"] != -100).to(torch.uint8),
                    "image_group": torch.where(soft, 0, -1).to(torch.int32), "pixels": found["pixel_values"].float()}
    return inputs


def test_what_inspect_shows_is_what_the_tutorial_s_collator_makes(world):
    processor = AutoProcessor.from_pretrained(world["model"], use_fast=True)
    for row in (0, 1, ROWS - 1):
        found = collator(processor)(with_pictures(world["rows"][row:row + 1], world["work"]))
        out = ref.run(ref.GEMTUNE, "inspect", f"model.path={world['model']}", f"data.train={world['work'] / 'train.jsonl'}",
                      "data.loss_on=all", "--row", row, "--json").stdout
        shown = json.loads(out)
        count = len(shown["token_ids"])
        assert found["input_ids"][0].tolist() == shown["token_ids"]
        labels = (found["labels"][0] != -100).long().tolist()
        # The reference labels bos too, at place 0, which nothing predicts.
        assert count == shown["length"] and labels[1:] == shown["target_mask"][1:]
