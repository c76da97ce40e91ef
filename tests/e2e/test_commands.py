"""The other commands, and what the program says to wrong input."""

import json
import lzma
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from program import BASE, FASHION, PROGRAM, SOURCE, conversation, photo, run, write_rows

ASSETS = os.environ.get("GEMTUNE_TEST_ASSETS", "")
needs_tokenizer = pytest.mark.skipif(not ASSETS, reason="GEMTUNE_TEST_ASSETS is unset: Gemma's tokenizer is not here")

CONFIG_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


@pytest.fixture(scope="module")
def gemma_4b(tmp_path_factory):
    """A folder as the 4B model's, without its weights."""
    folder = tmp_path_factory.mktemp("gemma-3-4b")
    (folder / "config.json").write_text(json.dumps(CONFIG_4B))
    (folder / "tokenizer.json").write_bytes(lzma.open(pathlib.Path(ASSETS) / "gemma3-tokenizer" / "tokenizer.json.xz").read())
    return folder


@pytest.fixture(scope="module")
def tutorial_rows(tmp_path_factory):
    """1,345 rows with the columns of the tutorial's data set."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 200, 30)).save(buffer, "PNG")
    image = {"bytes": buffer.getvalue(), "path": None}
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    count = 1345
    table = {"image": [image] * count, "Product Name": ["Red mug"] * count, "Category": ["Kitchen"] * count, "description": ["A red mug."] * count}
    pq.write_table(pa.table(table), path)
    return path


def measured(*words):
    """Runs the program; gives its JSON and the most memory any child had so far, in bytes."""
    done = run(*words)
    return json.loads(done.stdout), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


@needs_tokenizer
def test_the_tutorials_job_is_planned_with_its_numbers_and_nothing_is_loaded(gemma_4b, tutorial_rows):
    words = [f"model.path={gemma_4b}", f"data.train={tutorial_rows}", "--json"]
    plan, peak = measured("plan", SOURCE / "recipes" / "tutorial.yaml", *words)
    assert plan["trainable_parameters"] == 1381002752
    assert plan["lora_modules"] == 400
    assert plan["steps_per_epoch"] == 22 and plan["total_steps"] == 66
    assert plan["weights_found"] is False
    assert plan["peak_bytes"] > sum(plan["bytes_by_part"].values())
    assert peak < 1 << 30
    plan, _ = measured("plan", *words)
    assert plan["trainable_parameters"] == 29802496 and plan["lora_modules"] == 238


@needs_tokenizer
def test_the_tutorials_prompt_has_339_tokens_and_inspect_loads_nothing(gemma_4b, tutorial_rows, tmp_path):
    words = [f"model.path={gemma_4b}", f"data.train={tutorial_rows}", "--row", "3", "--json", "--out", tmp_path]
    row, peak = measured("inspect", SOURCE / "recipes" / "tutorial.yaml", *words)
    ids, mask = row["token_ids"], row["target_mask"]
    assert ids[:5] == [2, 105, 2364, 107, 3048] and ids.count(2) == 1
    model_turn = len(ids) - 1 - ids[::-1].index(105)
    assert model_turn + 3 == 339  # up to and with "model\n"
    assert ids[-1] == 106  # the script strips the last newline
    image = row["images"][0]
    assert image["num_tokens"] == 256 and ids[image["first_token"]] == 262144
    # Loss on everything but padding, start_of_image and image tokens.
    assert [t for t in range(1, len(ids)) if not mask[t]] == [image["first_token"] - 1 + i for i in range(257)]
    assert row["length"] == len(ids)
    for pixel in row["pixel_values"][0]:
        assert pixel == pytest.approx([10 / 127.5 - 1, 200 / 127.5 - 1, 30 / 127.5 - 1], abs=1e-6)
    assert (tmp_path / "row-3-image-0.png").exists()
    assert peak < 1 << 30


@needs_tokenizer
def test_only_the_answer_carries_loss_by_default(gemma_4b, tmp_path):
    write_rows(tmp_path / "train.jsonl", [conversation("U", "A", [photo(tmp_path / "a.png")]) for _ in range(2)])
    row = json.loads(run("inspect", f"model.path={gemma_4b}", f"data.train={tmp_path / 'train.jsonl'}", "--json").stdout)
    assert len(row["token_ids"]) == 272
    assert row["images"][0]["first_token"] == 5
    targets = [i for i, t in enumerate(row["target_mask"]) if t]
    assert [row["token_ids"][i] for i in targets] == [236776, 106]
    assert row["token_ids"][-1] == 107 and not row["target_mask"][-1]


FLAGS = {
    "--model_id": ("google/gemma-3-12b-it", "model.path", "google/gemma-3-12b-it"),
    "--dataset_name": ("me/photos", "data.train", "me/photos"),
    "--lora_r": ("8", "lora.rank", "8"),
    "--lora_alpha": ("32", "lora.alpha", "32"),
    "--lora_dropout": ("0.1", "lora.dropout", "0.1"),
    "--max_seq_length": ("300", "data.max_length", "300"),
    "--num_train_epochs": ("2", "train.epochs", "2"),
    "--per_device_train_batch_size": ("2", "train.micro_batch", "2"),
    "--gradient_accumulation_steps": ("8", "train.accumulation", "8"),
    "--learning_rate": ("1e-4", "optim.learning_rate", "0.0001"),
    "--logging_steps": ("5", "logging.every", "5"),
    "--output_dir": ("mine", "output.dir", "gs://bucket/mine"),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_each_argument_of_the_tutorials_script_acts(flag):
    value, key, shown = FLAGS[flag]
    said = run("train", "--gcs_bucket", "bucket", flag, value, code=3).stderr
    line = next(line for line in said.splitlines() if line.startswith(key + " "))
    assert line.split()[1].strip("[]\"") == shown, line
    # With a bucket, --output_dir names the folder in it.
    assert f"({'--gcs_bucket' if flag == '--output_dir' else flag}" in line


def test_save_flags_and_push_act_too():
    said = run("train", "--gcs_bucket", "bucket", "--save_strategy", "steps", "--save_steps", "50", "--push_to_hub", code=3).stderr
    assert 'checkpoint.every           "50"' in said and "hub.push                   true" in said
    assert "gs://bucket/" in said.splitlines()[-1]  # object stores are refused by name


def test_data_check_lists_every_bad_row(tmp_path):
    good = photo(tmp_path / "good.png")
    rows = [conversation("Q", "A", [good]), conversation("Q", "A", ["gone.png"]), conversation("Q", "  ", [good]), conversation("Q", "A", ["../out.png"])]
    rows.append({"messages": [{"role": "assistant", "content": "A"}], "images": []})
    write_rows(tmp_path / "train.jsonl", rows)
    words = [f"model.path={BASE}", f"data.train={tmp_path / 'train.jsonl'}"]
    report = json.loads(run("data", "check", "--json", *words, code=2).stdout)
    assert report["rows"] == 5 and report["used"] == 1
    assert [(e["row"], e["line"]) for e in report["errors"]] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert all(e["field"] and e["rule"] and e["file"].endswith("train.jsonl") for e in report["errors"])
    assert sum(report["skipped"].values()) == 4
    assert run("data", "check", *words, "data.on_bad_row=skip").returncode == 0
    assert "train.jsonl:3" in run("data", "check", *words, code=2).stdout


def test_preview_eval_and_report(tmp_path):
    said = run("data", "preview", FASHION / "demo.yaml", "--rows", "2").stdout
    assert said.count("<start_of_turn>model") >= 2
    words = [FASHION / "demo.yaml", f"output.dir={tmp_path / 'run'}", "train.micro_batch=4", "eval.every=never", "eval.max_rows=12"]
    run("train", *words, "train.max_steps=3")
    words.append("train.max_steps=3")
    scores = json.loads(run("eval", *words, "--checkpoint", tmp_path / "run" / "final", "--compare-base", "--json").stdout)
    for field in ["loss", "perplexity", "token_accuracy", "exact_match", "rouge_l", "chrf", "num_eval_rows", "exact_match_before", "exact_match_after"]:
        assert field in scores
    assert scores["num_eval_rows"] == 12 and scores["exact_match_before"] == 0 and scores["loss"] < scores["loss_before"]
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == scores
    run("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 8 and page.count("<polyline") >= 4
    assert "http://" not in page and "https://" not in page and "<script src" not in page


def test_generate_is_deterministic_and_sampling_follows_its_seed(tmp_path):
    image = tmp_path / "photo.png"
    photo(image)
    words = ["generate", "--model", BASE, "--image", image, "--prompt", "What is this?"]
    assert run(*words).stdout == run(*words).stdout != ""
    hot = [*words, "--temperature", "3", "--max-new-tokens", "30"]
    assert run(*hot, "--seed", "1").stdout == run(*hot, "--seed", "1").stdout
    assert len({run(*hot, "--seed", str(seed)).stdout for seed in range(4)}) > 1


def test_make_model_writes_a_folder_that_transformers_opens(tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText

    run("make-model", "--like", BASE, "--random-weights", "--tokenizer", BASE, "--out", tmp_path / "model")
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert run("generate", "--model", tmp_path / "model", "--prompt", "Hello", "--max-new-tokens", "3").returncode == 0


def test_help_doctor_and_keys_answer():
    keys = run("recipe", "--help-keys").stdout
    for key in ["model.path", "lora.rank", "quant.double", "dist.workers", "debug.check_data"]:
        assert key in keys
    assert "nf4" in run("doctor").stdout
    for command in ["train", "inspect", "data", "plan", "generate", "eval", "make-model", "report", "recipe", "doctor"]:
        assert command in run("--help").stdout


WRONG = {
    "unknown command": (["trian"], 2, "did you mean train?"),
    "unknown flag": (["train", "--lora_rr", "3"], 2, "did you mean --lora_r?"),
    "unknown key": (["train", "lora.rnk=3"], 2, "did you mean lora.rank?"),
    "missing recipe": (["train", "absent.yaml"], 2, "absent.yaml: no such file"),
    "missing model": (["train", "model.path=absent", f"data.train={FASHION / 'train.parquet'}"], 2, "no such folder"),
    "hub id that is not here": (["plan", "model.path=google/gemma-3-4b-it", "data.train=x.jsonl"], 2, "hf download google/gemma-3-4b-it"),
    "missing data": (["train", f"model.path={BASE}", "data.train=absent.jsonl"], 2, "absent.jsonl: no such file"),
    "no GPU": (["train", str(FASHION / "demo.yaml"), "train.device=cuda", "output.dir=never"], 3, "train.device=cuda"),
    "fp16": (["train", f"model.path={BASE}", "data.train=x.jsonl", "optim.table_dtype=fp16"], 2, "fp16"),
    "missing picture": (["generate", "--model", str(BASE), "--image", "absent.png", "--prompt", "Hi"], 2, "absent.png: no such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_answered_in_one_line_with_its_exit_code(name):
    words, code, text = WRONG[name]
    said = run(*words, code=code).stderr
    assert text in said
    assert "terminate called" not in said and "frame #" not in said


def test_a_folder_of_another_kind_is_named(tmp_path):
    shutil.copytree(BASE, tmp_path / "model")
    config = json.loads((BASE / "config.json").read_text())
    config["text_config"]["hidden_size"] = 192
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = [f"model.path={tmp_path / 'model'}", f"data.train={FASHION / 'train.parquet'}", "data.prompt=Hi", "data.answer={line}"]
    said = run("plan", *words, code=2).stderr
    assert "language_model.model.embed_tokens.weight: expected" in said and "192" in said and "more" in said
    config["model_type"] = "llama"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert 'model_type is "llama"' in run("plan", *words, code=2).stderr


def test_only_one_json_document_stands_on_stdout():
    done = subprocess.run([PROGRAM, "plan", str(FASHION / "demo.yaml"), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["lora_modules"] == 28
