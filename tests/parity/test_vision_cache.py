"""A frozen vision tower's outputs are kept: nothing learned changes by a bit, and nothing stale is ever read."""

import hashlib
import json
import shutil

import pytest

import reference as ref
import tiny_run

SETTINGS = ["lora.rank=4", "lora.dropout=0.05", "optim.learning_rate=1e-3", "train.micro_batch=2", "train.accumulation=2", "train.epochs=3",
            "checkpoint.every=3"]
PICTURES = 4  # for 8 rows: two questions about each


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    work = tmp_path_factory.mktemp("vision_cache")
    model = tiny_run.model_folder(work / "model")
    rows = tiny_run.write_rows(work, 2 * PICTURES)
    for i, row in enumerate(rows):
        row["images"] = [f"pictures/{i % PICTURES}.png"]
    (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"work": work, "model": model, "data": work / "train.jsonl"}


def train(world, name, *settings, model=None):
    run_dir = world["work"] / name / "run"
    run_dir.parent.mkdir(exist_ok=True)
    tiny_run.train(run_dir, model or world["model"], world["data"], *SETTINGS, *settings)
    return run_dir


def learned(run_dir):
    return ((run_dir / "final" / "adapter_model.safetensors").read_bytes(),
            [(record["loss"], record["grad_norm"]) for record in ref.read_metrics(run_dir)])


def kept_files(name, world):
    return sorted(path for path in (world["work"] / name / "cache" / "gemtune" / "vision").glob("*/*"))


@pytest.fixture(scope="module")
def uncached(world):
    return learned(train(world, "none", "train.vision_cache=none"))


@pytest.fixture(scope="module")
def disk(world):
    return train(world, "disk", "train.vision_cache=disk")


def test_kept_in_memory_it_changes_no_bit(world, uncached):
    assert learned(train(world, "memory")) == uncached


def test_kept_on_disk_each_picture_is_one_file(world, uncached, disk):
    assert learned(disk) == uncached
    dims = tiny_run.config()
    size = dims.mm_tokens_per_image * dims.vision_config.hidden_size * 4 + 64
    assert [path.stat().st_size for path in kept_files("disk", world)] == [size] * PICTURES


def test_resumed_with_a_warm_cache_it_is_the_same_run(world, uncached, disk):
    shutil.copytree(disk.parent, world["work"] / "resumed")
    resumed = world["work"] / "resumed" / "run"
    shutil.rmtree(resumed / "final")
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    assert learned(train(world, "resumed", "train.vision_cache=disk")) == uncached


def test_a_damaged_file_is_made_again(world, uncached, disk):
    shutil.copytree(disk.parent / "cache", world["work"] / "damaged" / "cache")
    first, second, *_ = kept_files("damaged", world)
    whole = first.read_bytes()
    first.write_bytes(whole[:100])
    second.write_bytes(b"\0" + second.read_bytes()[1:])
    assert learned(train(world, "damaged", "train.vision_cache=disk")) == uncached


def test_what_the_files_hold_is_what_is_learned_from(world, uncached, disk):
    """Other features under the same names, with their right sums: were they not read, the run would be the same."""
    shutil.copytree(disk.parent / "cache", world["work"] / "other" / "cache")
    for path in kept_files("other", world):
        values = bytes(path.stat().st_size - 64)
        path.write_bytes(values + hashlib.sha256(values).hexdigest().encode())
    assert learned(train(world, "other", "train.vision_cache=disk")) != uncached


def test_another_tower_another_quantisation_and_another_preprocessing_share_nothing(world, disk):
    shutil.copytree(disk.parent / "cache", world["work"] / "changed" / "cache")
    before = kept_files("changed", world)
    train(world, "changed", "train.vision_cache=disk", "train.max_steps=2", model=tiny_run.model_folder(world["work"] / "model2", seed=42))
    after_tower = kept_files("changed", world)
    assert len(after_tower) == len(before) + PICTURES and len({path.parent for path in after_tower}) == 2
    train(world, "changed", "train.vision_cache=disk", "train.max_steps=2", "quant.vision=true", "--fresh")
    after_quantisation = kept_files("changed", world)
    assert len(after_quantisation) == len(after_tower) + PICTURES and len({path.parent for path in after_quantisation}) == 3
    train(world, "changed", "train.vision_cache=disk", "train.max_steps=2", "image.exif=ignore", "--fresh")
    assert len(kept_files("changed", world)) == len(after_quantisation) + PICTURES
