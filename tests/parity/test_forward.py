"""Logits, loss and every intermediate of a forward pass in fp32 against transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference as ref

BOUND = 1e-5

BATCHES = {
    "no_image": ([ref.row(24)], "right"),
    "one_image": ([ref.row(20, images=1)], "right"),
    "two_images": ([ref.row(18, images=2)], "right"),
    "none_one_two_padded_right": ([ref.row(31), ref.row(9, images=1), ref.row(13, images=2)], "right"),
    "none_one_two_padded_left": ([ref.row(31), ref.row(9, images=1), ref.row(13, images=2)], "left"),
}
MIXED = "none_one_two_padded_right"
MODELS = {
    "one_global_layer": lambda: ref.random_model(ref.vision_config(), seed=1),
    "every_second_layer_global": lambda: ref.random_model(ref.vision_config(sliding_window_pattern=2), seed=2),
    "every_third_untied": lambda: ref.random_model(ref.vision_config(tied=False, sliding_window_pattern=3, rope_scaling=None), seed=3),
}


def batch_of(name):
    return ref.batch(*BATCHES[name])


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A reference model and gemtune's tensors for every batch."""
    work = tmp_path_factory.mktemp(request.param)
    found = MODELS[request.param]()
    folder = ref.save_folder(found, work / "model")
    return found, dict(zip(BATCHES, ref.probe_all(folder, [batch_of(name) for name in BATCHES], work), strict=True))


@pytest.fixture(scope="module")
def first_model(tmp_path_factory):
    found = MODELS["every_second_layer_global"]()
    return found, ref.save_folder(found, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", BATCHES)
def test_every_tap_and_the_logits_agree(model, name):
    found, outputs = model
    inputs, ours = batch_of(name), outputs[name]
    theirs = ref.reference_taps(found, inputs)
    assert set(theirs) - {"loss"} == set(ours) - {"loss_sum", "num_targets", "num_correct"}
    ref.assert_taps_agree(ours, theirs, inputs, BOUND)
    picks = inputs.targets[:, 1:] == 1
    right = theirs["logits"][:, :-1].argmax(-1)[picks] == inputs.reference["input_ids"][:, 1:][picks]
    assert ours["num_correct"].item() == right.sum().item()


WRONG = {
    "window": ("text_config", "sliding_window", 7),
    "attention_scale": ("text_config", "query_pre_attn_scalar", 25),
    "local_rotation": ("text_config", "rope_local_base_freq", 9.9e3),
    "global_rotation": ("text_config", "rope_scaling", {"rope_type": "linear", "factor": 7.9}),
    "text_eps": ("text_config", "rms_norm_eps", 1.9e-3),
    "vision_eps": ("vision_config", "layer_norm_eps", 0.9e-3),
    "global_layers": ("text_config", "layer_types", ["sliding_attention"] * 5 + ["full_attention"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_is_a_little_wrong_is_seen(first_model, name, tmp_path):
    """The comparison above can fail: each mechanism moves the numbers by more than the bound."""
    found, _ = first_model
    inputs = batch_of(MIXED)
    section, key, value = WRONG[name]
    wrong = ref.save_folder(found, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    config[section][key] = value
    (wrong / "config.json").write_text(json.dumps(config))
    ours = ref.probe(wrong, inputs, tmp_path)["logits"][inputs.valid]
    assert ref.error(ours, ref.reference_taps(found, inputs)["logits"][inputs.valid]) > 5 * BOUND


@pytest.mark.parametrize("naming", ref.NAMINGS)
def test_every_naming_of_the_weights_loads_to_the_same_logits(first_model, naming, tmp_path):
    found, folder = first_model
    inputs = batch_of(MIXED)
    expected = ref.probe(folder, inputs, tmp_path)["logits"]
    renamed = ref.save_folder(found, tmp_path / "renamed", naming)
    assert torch.equal(ref.probe(renamed, inputs, tmp_path)["logits"], expected)


def test_a_folder_written_by_save_pretrained_in_shards_loads(first_model, tmp_path):
    found, _ = first_model
    found.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    inputs = batch_of("two_images")
    ref.assert_taps_agree(ref.probe(tmp_path / "sharded", inputs, tmp_path), ref.reference_taps(found, inputs), inputs, BOUND)


def test_config_keys_of_transformers_5_mean_the_same(first_model, tmp_path):
    found, _ = first_model
    folder = ref.save_folder(found, tmp_path / "five", "5.6")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    scaling, theta, local = (text.pop(key) for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"))
    text["rope_parameters"] = {"full_attention": {**scaling, "rope_theta": theta},
                               "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    inputs = batch_of("one_image")
    ref.assert_taps_agree(ref.probe(folder, inputs, tmp_path), ref.reference_taps(found, inputs), inputs, BOUND)


def test_a_text_only_model_agrees(tmp_path):
    found = ref.random_model(ref.text_config(sliding_window_pattern=3, num_hidden_layers=6), seed=4)
    folder = ref.save_folder(found, tmp_path / "text")
    inputs = ref.batch([ref.row(40), ref.row(11)], "left")
    ref.assert_taps_agree(ref.probe(folder, inputs, tmp_path), ref.reference_taps(found, inputs), inputs, BOUND)


def test_the_text_only_model_s_soft_cap_acts(tmp_path):
    found = ref.random_model(ref.text_config(num_hidden_layers=2, final_logit_softcapping=2.0), seed=4)
    folder = ref.save_folder(found, tmp_path / "text")
    inputs = ref.batch([ref.row(20)])
    theirs = ref.reference_taps(found, inputs)
    assert 1.0 < theirs["logits"].abs().max() < 2.0
    ref.assert_taps_agree(ref.probe(folder, inputs, tmp_path), theirs, inputs, BOUND)


def test_padding_on_either_side_leaves_real_positions_as_they_are_alone(first_model, tmp_path):
    _, folder = first_model
    rows = [ref.row(3), ref.row(9)]
    batches = [ref.batch([r]) for r in rows] + [ref.batch(rows, padding) for padding in ("right", "left")]
    found = ref.probe_all(folder, batches, tmp_path)
    for inputs, padded in zip(batches[2:], found[2:], strict=True):
        assert torch.isfinite(padded["logits"]).all()
        for i in range(2):
            assert ref.error(padded["logits"][i][inputs.valid[i]], found[i]["logits"][0]) <= BOUND


def test_a_mixed_batch_s_loss_is_the_sum_of_its_rows_alone(first_model, tmp_path):
    _, folder = first_model
    rows = [ref.row(15, images=1), ref.row(8), ref.row(21, images=2)]
    batches = [ref.batch(rows, seed=9)] + [ref.batch([r]) for r in rows]
    first = 0
    for r, one in zip(rows, batches[1:], strict=True):
        if r.images:
            one.probe["pixels"] = batches[0].probe["pixels"][first:first + r.images].clone()
            first += r.images
    mixed, *alone = ref.probe_all(folder, batches, tmp_path)
    assert [("vision_embeddings" in found) for found in alone] == [r.images > 0 for r in rows]
    assert ref.scalar_error(mixed["loss_sum"], sum(found["loss_sum"].item() for found in alone)) <= BOUND


def test_swapping_two_pictures_changes_the_loss_and_swapping_back_restores_it(first_model, tmp_path):
    _, folder = first_model
    batches = [batch_of("two_images") for _ in range(3)]
    batches[1].probe["pixels"] = batches[1].probe["pixels"].flip(0).contiguous()
    losses = [found["loss_sum"].item() for found in ref.probe_all(folder, batches, tmp_path)]
    assert losses[0] == losses[2] and abs(losses[0] - losses[1]) > 1e-4


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_refused_together(first_model, tmp_path):
    found, _ = first_model
    folder = ref.save_folder(found, tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    tensors["model.language_model.extra.weight"] = torch.zeros(3)
    tensors["model.multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    message = ref.run(ref.PROBE, "--model", folder, expect=2).stderr
    assert message == (
        f"error: {folder}/model.safetensors: model.multi_modal_projector.mm_soft_emb_norm.weight: expected [64] from config.json, got [3], "
        f"{folder}: model.language_model.norm.weight: missing, expected [128], "
        f"{folder}/model.safetensors: model.language_model.extra.weight: unexpected, no such tensor in a model of config.json's sizes\n")
