"""Gradients of every trained tensor in fp32 against transformers with peft."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import reference as ref

BOUND = 1e-4
ROWS = [ref.row(25), ref.row(11, images=1), ref.row(14, images=2)]
LANGUAGE = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
VISION = r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ref.save_folder(ref.random_model(ref.vision_config(sliding_window_pattern=2, num_hidden_layers=4), seed=11),
                           tmp_path_factory.mktemp("base"))


def adapted(folder, work, targets="all-linear", tables=None, dropout=0.0, **lora):
    """A PEFT model with a random adapter, and the folder that save_pretrained writes of it."""
    config = LoraConfig(r=4, lora_alpha=6, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM",
                        modules_to_save=["lm_head", "embed_tokens"] if tables else None, **lora)
    model = ref.randomise_adapter(get_peft_model(ref.load_folder(folder), config), tables=tables)
    model.save_pretrained(work / "adapter")
    return model.eval(), work / "adapter"


def reference_gradients(model, inputs):
    loss = model(**inputs.reference).loss
    loss.backward()
    return loss.detach(), {ref.peft_key(name): p.grad for name, p in model.named_parameters() if p.requires_grad}


def gradients(out):
    return {name[len("grad."):]: tensor for name, tensor in out.items() if name.startswith("grad.")}


def assert_gradients_agree(ours, theirs, bound=BOUND):
    assert set(ours) == set(theirs)
    bad = {name: ref.error(ours[name], theirs[name]) for name in theirs}
    bad = {name: value for name, value in bad.items() if not value <= bound}
    assert not bad, bad


@pytest.mark.parametrize("recompute", [[], ["--recompute"]], ids=["kept", "recomputed"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_lora_on_both_towers_with_two_tables(folder, padding, recompute, tmp_path):
    model, adapter = adapted(folder, tmp_path, tables="own")
    inputs = ref.batch(ROWS, padding)
    loss, theirs = reference_gradients(model, inputs)
    out = ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients", *recompute)
    assert len(theirs) == 2 * (7 * 4 + 6 * ref.VISION_LAYERS) + 2
    assert ref.scalar_error(out["loss_sum"] / out["num_targets"], loss) <= 1e-5
    assert_gradients_agree(gradients(out), theirs)


def test_one_tied_table_gets_the_sum_of_both_uses(folder, tmp_path):
    model, adapter = adapted(folder, tmp_path, tables="equal")
    inputs = ref.batch(ROWS)
    _, theirs = reference_gradients(model, inputs)
    head = theirs.pop("base_model.model.lm_head.weight")
    table = "base_model.model.model.language_model.embed_tokens.weight"
    theirs[table] = theirs[table] + head
    for options in ([], ["--recompute"]):
        out = ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients", "--tables", "tied", *options)
        assert_gradients_agree(gradients(out), theirs)


@pytest.mark.parametrize("targets", [LANGUAGE, VISION], ids=["language", "vision"])
def test_one_tower_alone(folder, targets, tmp_path):
    model, adapter = adapted(folder, tmp_path, targets=targets)
    inputs = ref.batch(ROWS)
    _, theirs = reference_gradients(model, inputs)
    ours = gradients(ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients"))
    assert all(("vision_tower" in name) == (targets == VISION) for name in ours)
    assert_gradients_agree(ours, theirs)


def test_rslora_scales_by_the_root_of_the_rank(folder, tmp_path):
    model, adapter = adapted(folder, tmp_path, targets=LANGUAGE, use_rslora=True)
    inputs = ref.batch(ROWS[:1])
    _, theirs = reference_gradients(model, inputs)
    assert_gradients_agree(gradients(ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients")), theirs)


def test_a_model_whose_head_is_a_table_of_its_own(tmp_path):
    folder = ref.save_folder(ref.random_model(ref.vision_config(tied=False, num_hidden_layers=2, sliding_window_pattern=2), seed=12),
                             tmp_path / "base")
    model, adapter = adapted(folder, tmp_path, tables="own")
    inputs = ref.batch(ROWS)
    _, theirs = reference_gradients(model, inputs)
    assert_gradients_agree(gradients(ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients")), theirs)


def test_recompute_changes_nothing_not_even_under_dropout(folder, tmp_path):
    _, adapter = adapted(folder, tmp_path, tables="own", dropout=0.05)
    inputs = ref.batch(ROWS)
    command = ["--adapter", adapter, "--gradients", "--train"]
    kept = ref.probe(folder, inputs, tmp_path, *command)
    again = ref.probe(folder, inputs, tmp_path, *command, "--recompute")
    without = ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients")
    assert set(kept) == set(again)
    different = [name for name in kept if not torch.equal(kept[name], again[name])]
    assert not different, different
    assert not torch.equal(kept["logits"], without["logits"])


def test_image_rows_and_padding_give_the_table_no_gradient(folder, tmp_path):
    model, adapter = adapted(folder, tmp_path, tables="own")
    inputs = ref.batch(ROWS, "left")
    reference_gradients(model, inputs)
    ours = gradients(ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients"))
    table = ours["base_model.model.model.language_model.embed_tokens.weight"]
    assert table[ref.IMAGE].abs().max() == 0 and table[0].abs().max() == 0 and table[ref.BEGIN_IMAGE].abs().max() > 0


def test_the_loss_in_chunks_over_the_real_vocabulary_equals_the_dense_one(tmp_path):
    """262,208 rows: the loss goes through in chunks of 64 positions, the reference holds all logits."""
    folder = ref.save_folder(ref.random_model(ref.vision_config(vocab_size=262208, num_hidden_layers=1, hidden_size=64), seed=13),
                             tmp_path / "base")
    model, adapter = adapted(folder, tmp_path, targets=LANGUAGE, tables="own")
    inputs = ref.batch([ref.row(90), ref.row(170, images=1)])
    assert inputs.targets.sum() > 2 * (64 << 20) // (4 * 262208)
    loss, theirs = reference_gradients(model, inputs)
    out = ref.probe(folder, inputs, tmp_path, "--adapter", adapter, "--gradients")
    assert ref.scalar_error(out["loss_sum"] / out["num_targets"], loss) <= 1e-5
    assert_gradients_agree(gradients(out), theirs)


def test_the_adapter_file_is_what_the_probe_trained_on(folder, tmp_path):
    """A and B reach the engine bit for bit: gradients of another adapter differ."""
    _, adapter = adapted(folder, tmp_path, tables="own")
    ref.run(ref.PROBE, "--model", folder, "--adapter", adapter, "--save-adapter", tmp_path / "copy")
    ours, theirs = load_file(tmp_path / "copy" / "adapter_model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
