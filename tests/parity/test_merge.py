"""Merged folders: the live model's logits in both transformers, the base's names, dtypes and index, one rounding; what cannot be
merged is refused."""

import json
import os
import pathlib
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import merged_logits
import peft_logits
import reference as ref

LANGUAGE = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
# In fp32 nothing is rounded away; sums are made in another order than peft's.
FP32 = 2e-5
# A bf16 weight is off by up to 2⁻⁹ of itself; six layers of seven products add such errors up by chance.
BF16 = 0.05
CASES = {
    "language": ({"target_modules": LANGUAGE}, None, torch.float32),
    "both_towers": ({"target_modules": "all-linear", "rank_pattern": {r"vision_tower\..*": 2}}, None, torch.float32),
    "rslora": ({"target_modules": LANGUAGE, "use_rslora": True}, None, torch.float32),
    "two_tables": ({"target_modules": LANGUAGE}, "own", torch.float32),
    "tied_table": ({"target_modules": LANGUAGE}, "equal", torch.float32),
    "bf16": ({"target_modules": "all-linear"}, None, torch.bfloat16),
}


def run(*words, expect=0):
    return ref.run(ref.GEMTUNE, *words, expect=expect)


def merge(base, adapter, out, *words, expect=0):
    """Without the comparison of logits, which wants a tokenizer; test_train's folders have one."""
    return run("merge", "--model", base, "--adapter", adapter, "--out", out, "--rows", "0", *words, expect=expect)


def adapter_of(base, folder, tables=None, config=None, **settings):
    lora = config or LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM",
                                modules_to_save=["lm_head", "embed_tokens"] if tables else None, **settings)
    model = ref.randomise_adapter(get_peft_model(ref.load_folder(base), lora), tables=tables)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    work = tmp_path_factory.mktemp("merge")
    config = ref.vision_config(sliding_window_pattern=2, num_hidden_layers=4)
    model = ref.random_model(config, seed=31)
    inputs = ref.batch([ref.row(12, images=1), ref.row(19), ref.row(16, images=2)])
    save_file(inputs.probe, work / "inputs.safetensors")
    cases = {}
    for name, (settings, tables, dtype) in CASES.items():
        base = ref.save_folder(model, work / f"base-{str(dtype)[6:]}", "hub", dtype)
        folder = work / name
        peft = adapter_of(base, folder / "adapter", tables, **settings)
        merge(base, folder / "adapter", folder / "merged")
        cases[name] = {"base": base, "folder": folder, "merged": folder / "merged", "dtype": dtype,
                       "live": peft_logits.logits(peft, work / "inputs.safetensors")}
    for which in ("pinned", "today"):
        python = sys.executable if which == "pinned" else os.environ["GEMTUNE_TODAY_PYTHON"]
        job = [{"model": str(case["merged"]), "inputs": str(work / "inputs.safetensors"), "out": str(case["folder"] / f"{which}.safetensors")}
               for case in cases.values()]
        (work / "job.json").write_text(json.dumps(job))
        ref.run(python, pathlib.Path(merged_logits.__file__), work / "job.json")
    return {"work": work, "model": model, "valid": inputs.valid, "cases": cases}


@pytest.mark.parametrize("which", ["pinned", "today"])
@pytest.mark.parametrize("name", CASES)
def test_the_merged_folder_opens_alone_and_gives_the_live_model_s_logits(world, name, which):
    case, valid = world["cases"][name], world["valid"]
    out = load_file(case["folder"] / f"{which}.safetensors")
    assert ref.error(out["logits"][valid], case["live"][valid]) <= (FP32 if case["dtype"] == torch.float32 else BF16)
    assert bool(out["shared"]) == bool(out["config_ties"]) == (name != "two_tables")


@pytest.mark.parametrize("name", CASES)
def test_names_and_dtypes_are_the_base_s(world, name):
    case = world["cases"][name]
    base, merged = (load_file(case[side] / "model.safetensors") for side in ("base", "merged"))
    assert set(merged) - set(base) == ({"language_model.lm_head.weight"} if name == "two_tables" else set())
    assert set(base) <= set(merged)
    assert {tensor.dtype for tensor in merged.values()} == {case["dtype"]}
    if name != "two_tables":
        assert (case["merged"] / "config.json").read_bytes() == (case["base"] / "config.json").read_bytes()
    touched = {key for key in base if not torch.equal(base[key], merged[key])}
    adapter = load_file(case["folder"] / "adapter" / "adapter_model.safetensors")
    assert len(touched) == sum("lora_A" in key or key.endswith("embed_tokens.weight") for key in adapter)


def test_the_sum_is_made_in_fp32_and_rounded_once(world):
    case = world["cases"]["bf16"]
    base, merged = (load_file(case[side] / "model.safetensors") for side in ("base", "merged"))
    adapter = load_file(case["folder"] / "adapter" / "adapter_model.safetensors")
    checked = 0
    for key, a in adapter.items():
        if ".lora_A." not in key:
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        name = ref.hub_name(module) + ".weight"
        exact = base[name].double() + 6 / 4 * (adapter[key.replace("lora_A", "lora_B")].double() @ a.double())
        # Half a unit in the last place of bf16, and the fp32 sum's own error.
        ulp = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp_min(1e-30))) - 7)
        assert ((merged[name].double() - exact).abs() <= 0.5 * ulp + 1e-6 * exact.abs().max()).all(), name
        checked += 1
    assert checked == 7 * 4 + 6 * ref.VISION_LAYERS


def sharded(folder, to, shards=3):
    """The same model in several files with an index, as large models come."""
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, to)
    (to / "model.safetensors").unlink()
    names = list(tensors)
    index = {"metadata": {"total_parameters": sum(t.numel() for t in tensors.values()), "total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, to / file, metadata={"format": "pt"})
        index["weight_map"].update(dict.fromkeys(part, file))
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("name", ["language", "two_tables"])
def test_shards_and_index_are_kept(world, name, tmp_path):
    case = world["cases"][name]
    index = sharded(case["base"], tmp_path / "base")
    merge(tmp_path / "base", case["folder"] / "adapter", tmp_path / "merged")
    made = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    whole = load_file(case["merged"] / "model.safetensors")
    seen = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "merged" / file)
        assert {key: file for key in part} == {key: at for key, at in made["weight_map"].items() if at == file}
        seen.update(part)
    assert set(seen) == set(whole) and all(torch.equal(seen[key], whole[key]) for key in whole)
    assert made["metadata"] == {"total_parameters": sum(t.numel() for t in whole.values()), "total_size": sum(t.nbytes for t in whole.values())}
    if name == "language":
        assert made == index
    else:
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False and config["text_config"]["tie_word_embeddings"] is False


def test_one_trained_table_of_two_leaves_the_other_as_it_was(world, tmp_path):
    case = world["cases"]["language"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=LANGUAGE, modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    adapter_of(case["base"], tmp_path / "adapter", "own", config=config)
    merge(case["base"], tmp_path / "adapter", tmp_path / "merged")
    base, merged = load_file(case["base"] / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    embed = "language_model.model.embed_tokens.weight"
    assert torch.equal(merged["language_model.lm_head.weight"], base[embed]) and not torch.equal(merged[embed], base[embed])


def test_merged_onto_what_a_4_bit_run_saw(world, tmp_path):
    case = world["cases"]["bf16"]
    merge(case["base"], case["folder"] / "adapter", tmp_path / "merged", "--onto", "nf4")
    zero = tmp_path / "zero"
    shutil.copytree(case["folder"] / "adapter", zero)
    adapter = load_file(zero / "adapter_model.safetensors")
    save_file({key: torch.zeros_like(t) for key, t in adapter.items()}, zero / "adapter_model.safetensors")
    merge(case["base"], zero, tmp_path / "dequantised", "--onto", "nf4")
    base = load_file(case["base"] / "model.safetensors")
    plain, merged = load_file(tmp_path / "dequantised" / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    # 16 values a block of 64, as NF4 has.
    assert all(len(block.unique()) <= 16 for block in plain[name].reshape(-1, 64)) and not torch.equal(plain[name], base[name])
    key = "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_A.weight"
    delta = 6 / 4 * (adapter[key.replace("lora_A", "lora_B")].float() @ adapter[key].float())
    assert ref.error(merged[name].float(), plain[name].float() + delta) <= 2**-8
    vision = next(key for key in base if "vision_tower" in key and key.endswith("fc1.weight"))
    assert torch.equal(plain[vision], base[vision])


def test_what_is_no_plain_sum_is_refused_by_name(world, tmp_path):
    case = world["cases"]["language"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=LANGUAGE, use_dora=True, task_type="CAUSAL_LM")
    get_peft_model(ref.load_folder(case["base"]), config).save_pretrained(tmp_path / "dora")
    message = merge(case["base"], tmp_path / "dora", tmp_path / "out", expect=2).stderr
    assert message == f"error: {tmp_path}/dora/adapter_config.json: use_dora is true, gemtune supports false\n"
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_fits_in_part_is_refused_with_counts(world, tmp_path):
    case = world["cases"]["language"]
    shutil.copytree(case["folder"] / "adapter", tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.language_model.layers.0.self_attn."
    del tensors[prefix + "q_proj.lora_B.weight"]
    tensors[prefix + "k_proj.lora_A.weight"] = torch.zeros(4, 3)
    tensors["base_model.model.model.elsewhere.lora_A.weight"] = torch.zeros(4, 3)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    message = merge(case["base"], tmp_path / "adapter", tmp_path / "out", expect=2).stderr
    assert message == (f"error: {tmp_path}/adapter/adapter_model.safetensors: 3 of 56 tensors do not fit the model: "
                       "base_model.model.model.elsewhere.lora_A.weight: no such module in this model, "
                       f"{prefix}k_proj.lora_A.weight: expected shape [4,128], got [4,3], "
                       f"{prefix}q_proj.lora_A.weight: its lora_B is missing\n")


def test_4_bit_folders_are_no_base_to_merge_into(world, tmp_path):
    case = world["cases"]["language"]
    shutil.copytree(case["base"], tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    tensors[name + ".quant_map"] = torch.zeros(16)
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    message = merge(tmp_path / "base", case["folder"] / "adapter", tmp_path / "out", expect=2).stderr
    assert f"{name}.quant_map: the weights are 4-bit" in message and "give the original model to --model" in message


def test_a_folder_that_holds_something_is_left_alone(world, tmp_path):
    case = world["cases"]["language"]
    (tmp_path / "mine.txt").write_text("mine")
    message = merge(case["base"], case["folder"] / "adapter", tmp_path, expect=2).stderr
    assert message == f"error: --out {tmp_path}: the folder is not empty; choose another\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
