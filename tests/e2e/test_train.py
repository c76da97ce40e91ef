"""`gemtune train` end to end: files of a run, resuming, stopping, ranks, what is trained."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
from program import BASE, PROGRAM, SHORT, conversation, metrics, photo, run, tensors, write_rows

STEP_FIELDS = [
    "step", "epoch", "loss", "learning_rate", "grad_norm", "num_tokens", "mean_token_accuracy",
    "tokens_per_s", "samples_per_s", "step_ms", "data_ms", "peak_bytes",
]  # fmt: skip


def check_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(manifest) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    for name, entry in manifest.items():
        content = (folder / name).read_bytes()
        assert entry["size"] == len(content), name
        assert entry["sha256"] == hashlib.sha256(content).hexdigest(), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Ten steps in one go, a checkpoint every five."""
    out = tmp_path_factory.mktemp("straight") / "run"
    events = out.parent / "events.jsonl"
    done = run("train", *SHORT, "train.max_steps=10", "checkpoint.every=5", f"output.dir={out}", "--events", events)
    return out, done, [json.loads(line) for line in events.read_text().splitlines()]


def test_a_run_leaves_its_files(straight):
    out, _, _ = straight
    records = metrics(out)
    assert [r["step"] for r in records] == list(range(1, 11))
    assert list(records[0]) == STEP_FIELDS
    assert records[-1]["loss"] < records[0]["loss"]
    assert (out / "recipe.yaml").exists()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]
    for folder in [*(out / "checkpoints").iterdir(), out / "final"]:
        check_manifest(folder)
        for name in ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"]:
            assert (folder / name).exists(), name
    assert not [p for p in out.rglob("*") if p.suffix in {".pt", ".pth", ".bin", ".pkl"}]


def test_tensorboard_opens_the_event_files(straight):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _, _ = straight
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == list(range(1, 11))
    assert losses[3].value == pytest.approx(metrics(out)[3]["loss"], rel=1e-6)


def test_events_come_in_order_with_the_rank(straight):
    out, _, events = straight
    kinds = [e["event"] for e in events]
    assert kinds[0] == "hello" and kinds[1] == "phase" and kinds[-1] == "finished"
    assert kinds.count("step") == 10 and kinds.count("checkpoint") == 2
    assert all(e["rank"] == 0 for e in events)
    step = next(e for e in events if e["event"] == "step")
    assert [k for k in step if k not in {"event", "rank"}] == STEP_FIELDS
    assert events[-1]["final_dir"] == str(out / "final")


def test_the_recipe_is_printed_with_origins_and_the_first_row_is_shown(straight):
    _, done, _ = straight
    assert "train.max_steps            10  (command line)" in done.stderr
    assert "lora.rank                  16  (demo.yaml:" in done.stderr
    assert "tokens, 4 of pictures," in done.stderr


def test_five_steps_and_five_more_are_ten_bit_for_bit(straight, tmp_path):
    straight_run, _, _ = straight
    words = [*SHORT, "checkpoint.every=5", f"output.dir={tmp_path / 'run'}"]
    run("train", *words, "train.max_steps=5")
    run("train", *words, "train.max_steps=10")
    assert [r["step"] for r in metrics(tmp_path / "run")] == list(range(1, 11))
    ours = (tmp_path / "run" / "final" / "adapter_model.safetensors").read_bytes()
    assert ours == (straight_run / "final" / "adapter_model.safetensors").read_bytes()


def test_a_finished_run_says_so_and_another_recipe_is_refused(tmp_path):
    words = [*SHORT, "train.max_steps=2", f"output.dir={tmp_path / 'run'}"]
    run("train", *words)
    assert "holds this run, finished" in run("train", *words).stderr
    refused = run("train", *words, "lora.rank=8", code=2).stderr
    assert "holds a run with another recipe" in refused and "lora.rank" in refused
    run("train", *words, "lora.rank=8", "--fresh")
    assert (tmp_path / "run-2" / "final" / "manifest.json").exists()


def stop_after_steps(words, steps, number):
    """Starts a run, sends the signal once `steps` steps are written, returns the exit code."""
    out = next(w for w in words if w.startswith("output.dir=")).split("=", 1)[1]
    process = subprocess.Popen([PROGRAM, "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = os.path.join(out, "metrics.jsonl")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if os.path.exists(path) and open(path).read().count("\n") >= steps:
            break
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(timeout=60)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -9)])
def test_a_stopped_or_killed_run_ends_like_an_undisturbed_one(number, code, tmp_path):
    words = [*SHORT, "train.max_steps=60", "checkpoint.every=7"]
    run("train", *words, f"output.dir={tmp_path / 'quiet'}")
    disturbed = [*words, f"output.dir={tmp_path / 'disturbed'}"]
    assert stop_after_steps(disturbed, 20, number) == code
    if code == 75:
        newest = max((tmp_path / "disturbed" / "checkpoints").iterdir())
        check_manifest(newest)
    run("train", *disturbed)
    assert [r["step"] for r in metrics(tmp_path / "disturbed")] == list(range(1, 61))
    quiet, again = [(tmp_path / name / "final" / "adapter_model.safetensors").read_bytes() for name in ("quiet", "disturbed")]
    assert quiet == again


@pytest.mark.parametrize(
    "settings, ranks",
    [(["train.accumulation=2"], 2), (["train.accumulation=1", "dist.workers=4"], 2), (["train.accumulation=1", "dist.workers=4"], 1)],
)
def test_ranks_share_a_step_without_changing_it(settings, ranks, tmp_path):
    run("train", *SHORT, "train.max_steps=6", "train.accumulation=4", f"output.dir={tmp_path / 'one'}")
    run("train", *SHORT, "train.max_steps=6", *settings, f"output.dir={tmp_path / 'many'}", "--nproc", ranks)
    for one, many in zip(metrics(tmp_path / "one"), metrics(tmp_path / "many"), strict=True):
        assert many["num_tokens"] == one["num_tokens"]
        for field in ["loss", "grad_norm", "mean_token_accuracy"]:
            assert many[field] == pytest.approx(one[field], rel=1e-6), (one["step"], field)


def test_a_lost_rank_ends_the_others_and_is_named(tmp_path):
    words = [*SHORT, "train.max_steps=4000", f"output.dir={tmp_path / 'run'}", "--nproc", "2"]
    process = subprocess.Popen([PROGRAM, "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    path = tmp_path / "run" / "metrics.jsonl"
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count("\n") >= 3):
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    ranks = {open(f"/proc/{pid}/environ").read().split("\0RANK=")[1].split("\0")[0]: int(pid) for pid in children}
    os.kill(ranks["1"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "rank 1 was lost" in said


def test_every_adapter_of_both_towers_learns(tmp_path):
    run("train", *SHORT, "train.max_steps=2", "lora.targets=all-linear", "lora.vision_rank=4", f"output.dir={tmp_path / 'run'}")
    adapter = tensors(tmp_path / "run" / "final" / "adapter_model.safetensors")
    b = {k: v for k, v in adapter.items() if ".lora_B." in k}
    assert len(b) == 3 * 6 + 4 * 7
    assert all(np.abs(v).max() > 0 for v in b.values())
    assert {v.shape[1] for k, v in b.items() if "vision_tower" in k} == {4}
    assert {v.shape[1] for k, v in b.items() if "language_model" in k} == {16}


@pytest.mark.parametrize("tables, equal", [("tied", True), ("untied", False)])
def test_trained_tables_are_saved_as_peft_keeps_them(tables, equal, tmp_path):
    run("train", *SHORT, "train.max_steps=3", f"lora.train_tables={tables}", "optim.table_dtype=fp32", f"output.dir={tmp_path / 'run'}")
    adapter = tensors(tmp_path / "run" / "final" / "adapter_model.safetensors")
    embed = adapter["base_model.model.model.language_model.embed_tokens.weight"]
    head = adapter["base_model.model.lm_head.weight"]
    assert np.array_equal(embed, head) == equal
    assert json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head", "embed_tokens"]


def test_full_fine_tuning_gives_a_model_that_transformers_opens(tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    run("train", *SHORT, "train.max_steps=2", "lora.rank=0", "quant.base=none", f"output.dir={tmp_path / 'run'}")
    final = tmp_path / "run" / "final"
    model, info = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert AutoProcessor.from_pretrained(final) is not None
    before, after = tensors_of(BASE), tensors_of(final)
    assert set(before) == set(after)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert "language_model.model.embed_tokens.weight" in changed and any("vision_tower" in n for n in changed)


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_an_adapter_from_elsewhere_is_continued(tmp_path):
    run("train", *SHORT, "train.max_steps=6", f"output.dir={tmp_path / 'first'}")
    run("train", *SHORT, "train.max_steps=1", f"lora.init={tmp_path / 'first' / 'final'}", f"output.dir={tmp_path / 'second'}")
    first, second = metrics(tmp_path / "first"), metrics(tmp_path / "second")
    assert second[0]["loss"] < 0.6 * first[0]["loss"]


def test_a_warm_up_is_honoured_under_a_constant_schedule(tmp_path):
    words = [w for w in SHORT if not w.startswith("optim.warmup")]
    run("train", *words, "optim.warmup_steps=4", "optim.learning_rate=2e-4", "train.max_steps=6", f"output.dir={tmp_path / 'run'}")
    rates = [r["learning_rate"] for r in metrics(tmp_path / "run")]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1.5e-4, 2e-4, 2e-4, 2e-4])


def test_checkpoints_beyond_keep_are_removed_and_held_out_loss_is_logged(tmp_path):
    words = [w for w in SHORT if not w.startswith("eval.")]
    run("train", *words, "train.max_steps=8", "checkpoint.every=2", "checkpoint.keep=2", "eval.every=4", "eval.max_rows=20", f"output.dir={tmp_path / 'run'}")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    assert [r["step"] for r in metrics(tmp_path / "run") if "eval_loss" in r] == [4, 8]


def test_a_bad_row_stops_training_before_the_model_loads_or_is_skipped(tmp_path):
    good = photo(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) * 6 // 10])
    rows = [conversation("What is this?", "A mug.", [good]) for _ in range(9)]
    rows.insert(7, conversation("What is this?", "A mug.", ["cut.png"]))
    write_rows(tmp_path / "train.jsonl", rows)
    words = [f"model.path={BASE}", f"data.train={tmp_path / 'train.jsonl'}", "train.epochs=1", "train.accumulation=1", f"output.dir={tmp_path / 'run'}"]
    refused = run("train", *words, code=2).stderr
    assert "1 of 10 rows cannot be trained on" in refused and "train.jsonl:8: images[0]" in refused and "cut.png" in refused
    assert "loading the model" not in refused
    skipped = run("train", *words, "data.on_bad_row=skip").stderr
    assert "skipped 1 of 10 rows: damaged image" in skipped
    assert len(metrics(tmp_path / "run")) == 9


def test_text_rows_and_picture_rows_mix_and_pictures_matter(tmp_path):
    red, blue = photo(tmp_path / "red.png", (255, 0, 0)), photo(tmp_path / "blue.png", (0, 0, 255))

    def first_loss(name, rows, micro_batch):
        write_rows(tmp_path / f"{name}.jsonl", rows)
        run("train", f"model.path={BASE}", f"data.train={tmp_path / name}.jsonl", "quant.base=none", "lora.dropout=0", "train.max_steps=1",
            f"train.micro_batch={micro_batch}", f"train.accumulation={2 // micro_batch}", f"output.dir={tmp_path / name}")  # fmt: skip
        return metrics(tmp_path / name)[0]["loss"]

    mixed = [conversation("What is this?", "A red mug.", [red]), conversation("Say hello to everyone.", "Hello")]
    assert first_loss("together", mixed, 2) == pytest.approx(first_loss("apart", mixed, 1), rel=1e-5)
    two = [conversation("Compare.", "One is red.", [red, blue])] * 2
    swapped = [conversation("Compare.", "One is red.", [blue, red])] * 2
    assert first_loss("two", two, 2) != first_loss("swapped", swapped, 2)
    assert first_loss("two", two, 2) == first_loss("two_again", two, 2)


def test_an_overfitted_row_is_answered_word_for_word_and_ends(tmp_path):
    image = photo(tmp_path / "mug.png")
    write_rows(tmp_path / "train.jsonl", [conversation("What is this?", "New in: a red mug.", [image])])
    run("train", f"model.path={BASE}", f"data.train={tmp_path / 'train.jsonl'}", "train.max_steps=60", "train.accumulation=1", "optim.learning_rate=0.005",
        "optim.max_grad_norm=1", "lora.dropout=0", "quant.base=none", f"output.dir={tmp_path / 'run'}")  # fmt: skip
    answer = run("generate", "--model", BASE, "--adapter", tmp_path / "run" / "final", "--image", tmp_path / "mug.png", "--prompt", "What is this?").stdout
    assert answer == "New in: a red mug.\n"
