"""Order, resume, micro-batches and ranks: none of them changes what is learned."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference as ref
import tiny_run

ROWS = 22  # with 4 rows a step: six steps an epoch, the last of 2 rows
SETTINGS = ["lora.rank=4", "lora.targets=all-linear", "lora.dropout=0.05", "optim.learning_rate=1e-3", "quant.base=none", "train.epochs=9"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    work = tmp_path_factory.mktemp("resume")
    model = tiny_run.model_folder(work / "model")
    tiny_run.write_rows(work, ROWS, with_system=False)
    adapter = random_adapter(model, work)
    return {"work": work, "model": model, "data": work / "train.jsonl", "init": adapter}


def random_adapter(model, work):
    """B away from zero, so that every tensor has a gradient from the first step on."""
    ref.run(ref.PROBE, "--model", model, "--targets", "all-linear", "--rank", 4, "--save-adapter", work / "init")
    path = work / "init" / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = {key: torch.randn(t.shape, generator=generator) * 0.1 if "lora_B" in key else t for key, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return work / "init"


def train(world, name, *settings, nproc=1):
    run_dir = world["work"] / name
    tiny_run.train(run_dir, world["model"], world["data"], *SETTINGS, f"lora.init={world['init']}", *settings, nproc=nproc)
    return run_dir


def adapter_of(run_dir):
    return load_file(run_dir / "final" / "adapter_model.safetensors")


KEYS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "num_tokens", "mean_token_accuracy")


def numbers(run_dir):
    return [[record[key] for key in KEYS] for record in ref.read_metrics(run_dir)]


def assert_same_learning(a, b, bound, adapter_bound):
    ours, theirs = numbers(a), numbers(b)
    assert len(ours) == len(theirs)
    worst = {}
    for mine, other in zip(ours, theirs, strict=True):
        for key, x, y in zip(KEYS, mine, other, strict=True):
            worst[key] = max(worst.get(key, 0.0), ref.scalar_error(x, y))
    first, second = adapter_of(a), adapter_of(b)
    assert set(first) == set(second)
    assert max(worst.values()) <= bound, worst
    # By norm: AdamW moves an element whose gradient is near rounding by up to the learning rate, in no certain direction.
    distance = max(((first[key] - second[key]).norm() / second[key].norm()).item() for key in first)
    assert distance <= adapter_bound, distance


@pytest.fixture(scope="module")
def straight(world):
    """Ten steps, over an epoch's end, with a checkpoint in the middle of the first epoch."""
    return train(world, "straight", "train.accumulation=4", "train.max_steps=10", "checkpoint.every=5", "quant.base=nf4")


def test_ten_steps_are_five_and_five_more_bit_for_bit(world, straight):
    resumed = world["work"] / "resumed"
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "final")
    shutil.rmtree(resumed / "checkpoints" / "step-00000010")
    assert (resumed / "checkpoints" / "step-00000005").is_dir()
    train(world, "resumed", "train.accumulation=4", "train.max_steps=10", "checkpoint.every=5", "quant.base=nf4")
    assert numbers(resumed) == numbers(straight) and len(numbers(resumed)) == 10
    files = ["final/adapter_model.safetensors"] + [f"checkpoints/step-00000010/{name}" for name in (
        "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json")]
    for name in files:
        assert (resumed / name).read_bytes() == (straight / name).read_bytes(), name


def test_the_same_command_twice_gives_the_same_bits(world, straight):
    again = train(world, "again", "train.accumulation=4", "train.max_steps=10", "checkpoint.every=5", "quant.base=nf4")
    assert (again / "final" / "adapter_model.safetensors").read_bytes() == (straight / "final" / "adapter_model.safetensors").read_bytes()
    assert numbers(again) == numbers(straight)


def test_another_seed_gives_another_order(world, straight):
    other = train(world, "other_seed", "train.accumulation=4", "train.max_steps=2", "train.seed=43", "quant.base=nf4")
    assert numbers(other)[0] != numbers(straight)[0]


@pytest.mark.parametrize("average", ["tokens", "micro_batches"])
def test_two_ranks_learn_what_one_does(world, average):
    settings = [f"train.loss_average={average}", "train.max_steps=10", "checkpoint.every=never"]
    one = train(world, f"one_{average}", "train.accumulation=4", *settings)
    two = train(world, f"two_{average}", "train.accumulation=2", *settings, nproc=2)
    assert_same_learning(two, one, 1e-6, adapter_bound=1e-6)


def test_how_a_step_s_rows_are_cut_into_micro_batches_changes_nothing(world):
    settings = ["train.max_steps=4", "checkpoint.every=never", "lora.dropout=0"]
    many = train(world, "four_by_one", "train.micro_batch=1", "train.accumulation=4", *settings)
    one = train(world, "one_by_four", "train.micro_batch=4", "train.accumulation=1", *settings)
    # Padding changes the shapes of the products, and with them the order of their sums.
    assert_same_learning(one, many, 1e-6, adapter_bound=1e-5)


def test_recompute_changes_no_bit_of_a_run(world):
    settings = ["train.accumulation=4", "train.max_steps=3", "checkpoint.every=never", "lora.dropout=0.05"]
    kept = train(world, "kept", *settings)
    recomputed = train(world, "recomputed", *settings, "train.recompute=true")
    assert numbers(kept) == numbers(recomputed)
    assert (kept / "final" / "adapter_model.safetensors").read_bytes() == (recomputed / "final" / "adapter_model.safetensors").read_bytes()


def test_after_two_steps_every_b_has_moved_from_zero(world):
    run_dir = world["work"] / "fresh"
    tiny_run.train(run_dir, world["model"], world["data"], *SETTINGS, "train.accumulation=4", "train.max_steps=2", "checkpoint.every=never",
                   "train.recompute=true")
    tensors = adapter_of(run_dir)
    still = [key for key, tensor in tensors.items() if "lora_B" in key and not tensor.norm() > 0]
    dims = tiny_run.config()
    assert sum("lora_B" in key for key in tensors) == 7 * dims.text_config.num_hidden_layers + 6 * dims.vision_config.num_hidden_layers
    assert not still, still


def test_the_loss_is_a_mean_over_tokens_not_over_micro_batches(world, tmp_path):
    """Rows of very different lengths: the step's loss is that of one batch of all of them."""
    rows = [json.loads(line) for line in world["data"].read_text().splitlines()[:4]]
    rows[0]["messages"][-1]["content"] = "a"
    rows[1]["messages"][-1]["content"] = "warm coat " * 12
    data = world["work"] / "uneven.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def first_loss(name, *settings, nproc=1):
        run_dir = tmp_path / name
        tiny_run.train(run_dir, world["model"], data, *SETTINGS, "lora.dropout=0", f"lora.init={world['init']}", "train.max_steps=1",
                       "checkpoint.every=never", *settings, nproc=nproc)
        return ref.read_metrics(run_dir)[0]["loss"]

    whole = first_loss("whole", "train.micro_batch=4", "train.accumulation=1")
    assert ref.scalar_error(first_loss("micro", "train.accumulation=4"), whole) <= 1e-6
    assert ref.scalar_error(first_loss("ranks", "train.accumulation=2", nproc=2), whole) <= 1e-6
    mean_of_means = first_loss("means", "train.accumulation=4", "train.loss_average=micro_batches")
    assert ref.scalar_error(mean_of_means, whole) > 1e-3
