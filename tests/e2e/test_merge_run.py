"""From a run's adapter to a folder that serves: merged, opened offline and alone in both transformers, answers as the live model."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from program import BASE, SHORT, photo, run

OPEN_ALONE = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from PIL import Image
from transformers import AutoProcessor, GenerationConfig, Gemma3ForConditionalGeneration
folder, picture = sys.argv[1:]
processor = AutoProcessor.from_pretrained(folder)
model = Gemma3ForConditionalGeneration.from_pretrained(folder, torch_dtype=torch.float32).eval()
messages = [{"role": "user", "content": [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": "Write the product line for this picture."}]}]
inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
out = model.generate(**inputs, do_sample=False, max_new_tokens=12)
text = processor.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
print(json.dumps({"text": text.strip(), "stops": GenerationConfig.from_pretrained(folder).eos_token_id}))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    work = tmp_path_factory.mktemp("merge")
    run("train", *SHORT, f"output.dir={work / 'run'}", "train.max_steps=40")
    photo(work / "photo.png")
    adapter = work / "run" / "final"
    said = run("merge", "--model", BASE, "--adapter", adapter, "--out", work / "merged").stdout
    return {"work": work, "adapter": adapter, "said": said}


def answer(*words, picture):
    words = ["generate", *words, "--image", picture, "--prompt", "Write the product line for this picture.", "--max-new-tokens", 12]
    return run(*words).stdout.strip()


def test_the_gap_is_printed_for_the_run_s_own_rows(world):
    first, second, last = world["said"].splitlines()
    assert first.startswith("logits of live and merged model on 8 rows of ") and "train.parquet: largest gap 0.00" in first
    assert "the run trained on NF4 weights" in second
    assert last == f"{world['work'] / 'merged'}: 109 tensors (2.1 MiB), 28 linear layers merged"


@pytest.mark.parametrize("which", ["pinned", "today"])
def test_the_folder_opens_alone_and_offline_and_answers_as_the_live_model(world, which):
    python = sys.executable if which == "pinned" else os.environ["GEMTUNE_TODAY_PYTHON"]
    picture = world["work"] / "photo.png"
    done = subprocess.run([python, "-c", OPEN_ALONE, str(world["work"] / "merged"), str(picture)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    live = answer("--model", BASE, "--adapter", world["adapter"], picture=picture)
    assert said["text"] == live == answer("--model", world["work"] / "merged", picture=picture)
    assert said["stops"] == json.loads((BASE / "generation_config.json").read_text())["eos_token_id"]


def test_built_in_rows_serve_where_the_run_s_are_gone(world, tmp_path):
    import shutil

    shutil.copytree(world["adapter"], tmp_path / "adapter")
    assert "8 built-in rows" in run("merge", "--model", BASE, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged").stdout


def test_a_gap_above_the_bound_fails_and_leaves_nothing(world, tmp_path):
    words = ["merge", "--model", BASE, "--adapter", world["adapter"], "--out", tmp_path / "merged", "--max-gap", "0"]
    said = run(*words, code=5).stderr
    assert "--max-gap allows 0, so nothing was written" in said
    assert list(tmp_path.iterdir()) == []


def test_onto_nf4_keeps_what_the_adapter_saw(world, tmp_path):
    said = run("merge", "--model", BASE, "--adapter", world["adapter"], "--out", tmp_path / "merged", "--onto", "nf4").stdout
    assert "largest gap 0.00" in said and "the run trained on NF4" not in said
    gap = lambda text: float(text.split("largest gap ")[1].split(",")[0])
    assert gap(said) < gap(world["said"].splitlines()[1])
