"""Adapter folders both ways: ours open in peft, theirs of every spelling open here, and the logits agree."""

import json
import os
import pathlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import peft_logits
import reference as ref

BOUND = 1e-5
LANGUAGE = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
VISION = r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
LANGUAGE_MODULES, VISION_MODULES = 7 * 4, 6 * ref.VISION_LAYERS
CASES = {
    "language": ({"target_modules": LANGUAGE}, LANGUAGE_MODULES),
    "vision": ({"target_modules": VISION}, VISION_MODULES),
    "both_towers": ({"target_modules": "all-linear"}, LANGUAGE_MODULES + VISION_MODULES),
    "rslora": ({"target_modules": LANGUAGE, "use_rslora": True}, LANGUAGE_MODULES),
    "own_vision_rank": ({"target_modules": "all-linear", "rank_pattern": {r"vision_tower\..*": 2}}, LANGUAGE_MODULES + VISION_MODULES),
    "two_tables": ({"target_modules": "all-linear", "tables": "own"}, LANGUAGE_MODULES + VISION_MODULES),
    "tied_table": ({"target_modules": LANGUAGE, "tables": "equal"}, LANGUAGE_MODULES),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A base, a batch, and for each case the adapter as peft wrote it, as gemtune wrote it again, and gemtune's logits."""
    work = tmp_path_factory.mktemp("adapters")
    base = ref.save_folder(ref.random_model(ref.vision_config(sliding_window_pattern=2, num_hidden_layers=4), seed=31), work / "base", "hub")
    inputs = ref.batch([ref.row(12, images=1), ref.row(19), ref.row(16, images=2)])
    cases = {}
    for name, (settings, _) in CASES.items():
        folder = work / name
        folder.mkdir()
        settings = dict(settings)
        tables = settings.pop("tables", None)
        config = LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM",
                            modules_to_save=["lm_head", "embed_tokens"] if tables else None, **settings)
        model = ref.randomise_adapter(get_peft_model(ref.load_folder(base), config), tables=tables)
        model.save_pretrained(folder / "theirs")
        out = ref.probe(base, inputs, work, "--adapter", folder / "theirs", "--save-adapter", folder / "ours")
        cases[name] = {"folder": folder, "logits": out["logits"], "reference": peft_logits.logits(model.eval(), work / "inputs0.safetensors")}
    return {"work": work, "base": base, "inputs": inputs, "cases": cases}


@pytest.mark.parametrize("name", CASES)
def test_peft_s_adapter_gives_peft_s_logits_here(world, name):
    case, valid = world["cases"][name], world["inputs"].valid
    assert ref.error(case["logits"][valid], case["reference"][valid]) <= BOUND


@pytest.mark.parametrize("name", CASES)
def test_our_adapter_holds_peft_s_keys_and_bits(world, name):
    folder = world["cases"][name]["folder"]
    ours, theirs = (load_file(folder / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)


def test_our_adapter_config_has_the_pinned_peft_s_keys(world):
    for case in world["cases"].values():
        ours, theirs = (json.loads((case["folder"] / side / "adapter_config.json").read_text()) for side in ("ours", "theirs"))
        assert set(ours) == set(theirs)
        for key in ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "task_type", "peft_type", "rank_pattern", "inference_mode"):
            assert ours[key] == theirs[key], key
        assert set(ours["modules_to_save"] or []) == set(theirs["modules_to_save"] or [])
        assert ours["base_model_name_or_path"] == str(world["base"])


@pytest.mark.parametrize("name", CASES)
def test_our_adapter_opens_in_the_pinned_peft(world, name):
    case, valid = world["cases"][name], world["inputs"].valid
    model = peft_logits.open_adapter(world["base"], case["folder"] / "ours")
    assert sum("lora_A" in key for key, _ in model.named_parameters()) == CASES[name][1]
    assert ref.error(peft_logits.logits(model, world["work"] / "inputs0.safetensors")[valid], case["logits"][valid]) <= BOUND


def today_python():
    """The environment of today's transformers and peft (tools/env.sh today)."""
    python = os.environ.get("GEMTUNE_TODAY_PYTHON")
    if not python:
        python = pathlib.Path(ref.run(ref.SOURCE / "tools" / "env.sh", "today").stdout.strip()) / "bin" / "python"
    assert os.path.exists(python), python
    return python


def test_our_adapters_open_in_today_s_peft_and_its_own_open_here(world):
    work, valid = world["work"], world["inputs"].valid
    inputs = work / "today_inputs.safetensors"
    save_file(world["inputs"].probe, inputs)
    job = [{"model": str(world["base"]), "adapter": str(case["folder"] / "ours"), "inputs": str(inputs),
            "out": str(case["folder"] / "today.safetensors"), "save": str(case["folder"] / "today")}
           for case in world["cases"].values()]
    (work / "job.json").write_text(json.dumps(job))
    ref.run(today_python(), pathlib.Path(peft_logits.__file__), work / "job.json")
    for name, case in world["cases"].items():
        out = load_file(case["folder"] / "today.safetensors")
        assert out["modules"].item() == CASES[name][1], name
        assert ref.error(out["logits"][valid], case["logits"][valid]) <= BOUND, name
        again = ref.probe(world["base"], world["inputs"], work, "--adapter", case["folder"] / "today")["logits"]
        assert torch.equal(again, case["logits"]), name
    keys = load_file(world["cases"]["vision"]["folder"] / "today" / "adapter_model.safetensors")
    assert not any("vision_model" in key for key in keys), "today's spelling is expected to differ from the pinned one"


SPELLINGS = {
    "before_4.52": lambda key: key.replace("model.model.language_model.", "model.language_model.model.")
                                  .replace("model.model.vision_tower.", "model.vision_tower.")
                                  .replace("model.lm_head.", "model.language_model.lm_head."),
    "from_5.6": lambda key: key.replace(".vision_model.", "."),
    "with_the_adapter_s_name": lambda key: key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_the_keys_loads_the_same(world, spelling, tmp_path):
    case = world["cases"]["two_tables"]
    tensors = load_file(case["folder"] / "theirs" / "adapter_model.safetensors")
    renamed = {SPELLINGS[spelling](key): tensor for key, tensor in tensors.items()}
    assert set(renamed) != set(tensors)
    (tmp_path / "adapter").mkdir()
    save_file(renamed, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_bytes((case["folder"] / "theirs" / "adapter_config.json").read_bytes())
    out = ref.probe(world["base"], world["inputs"], tmp_path, "--adapter", tmp_path / "adapter")
    assert torch.equal(out["logits"], case["logits"])


def test_an_adapter_that_does_not_fit_is_refused_with_every_fault(world, tmp_path):
    case = world["cases"]["language"]
    tensors = load_file(case["folder"] / "theirs" / "adapter_model.safetensors")
    prefix = "base_model.model.model.language_model.layers.0.self_attn."
    del tensors[prefix + "q_proj.lora_A.weight"]
    tensors[prefix + "k_proj.lora_A.weight"] = torch.zeros(4, 3)
    tensors["base_model.model.model.elsewhere.lora_A.weight"] = torch.zeros(4, 3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_bytes((case["folder"] / "theirs" / "adapter_config.json").read_bytes())
    message = ref.run(ref.PROBE, "--model", world["base"], "--adapter", adapter, expect=2).stderr
    faults = [
        "base_model.model.model.elsewhere.lora_A.weight: unexpected, no such module in this model",
        f"{prefix}k_proj.lora_A.weight: expected shape [4,128], got [4,3]",
        f"{prefix}q_proj.lora_A.weight: missing",
    ]
    assert message == f"error: {adapter}/adapter_model.safetensors: {', '.join(faults)}\n"


def test_settings_that_would_change_the_mathematics_are_refused_by_name(world, tmp_path):
    case = world["cases"]["language"]
    config = json.loads((case["folder"] / "theirs" / "adapter_config.json").read_text())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True, "bias": "all"}))
    message = ref.run(ref.PROBE, "--model", world["base"], "--adapter", adapter, expect=2).stderr
    assert message == (f'error: {adapter}/adapter_config.json: use_dora is true, gemtune supports false, '
                       f'bias is "all", gemtune supports "none"\n')


