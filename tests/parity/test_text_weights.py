"""Real weights: Gemma 3 270M's language model on English text, against transformers on the same tensors."""

import lzma
import math
import os
import pathlib
import types

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM

import reference as ref
import text_weights

TEXT = ("The sun rises in the east and sets in the west. In the northern hemisphere, winter begins in December and ends in March. "
        "Water boils at one hundred degrees Celsius at sea level. The capital of France is Paris, and the capital of Italy is Rome. "
        "A product description should tell the buyer what the product is, what it is made of and why it is useful. ")
# More tokens than the sliding window of 512, so that it acts.
NUM_TOKENS = 640


@pytest.fixture(scope="module")
def tokens():
    assets = os.environ.get("GEMTUNE_TEST_ASSETS")
    if not assets:
        pytest.skip("GEMTUNE_TEST_ASSETS is not set: Gemma's tokenizer.json is needed and may not be part of the project")
    packed = pathlib.Path(assets) / "gemma3-tokenizer" / "tokenizer.json.xz"
    tokenizer = Tokenizer.from_buffer(lzma.decompress(packed.read_bytes()))
    short = tokenizer.encode(TEXT).ids
    assert short[0] == 2
    long = tokenizer.encode((pathlib.Path(text_weights.__file__).read_text() + TEXT) * 2).ids[:NUM_TOKENS]
    return short, long


@pytest.fixture(scope="module")
def folder():
    found, reason = text_weights.model_folder()
    if found is None:
        pytest.skip(reason)
    return found


def one_row(ids):
    row = types.SimpleNamespace(tokens=ids, targets=[0] + [1] * (len(ids) - 1), images=0)
    return ref.batch([row])


def test_logits_on_english_text_are_transformers_and_the_model_is_a_trained_one(folder, tokens, tmp_path):
    model = ref.load_folder(folder, Gemma3ForCausalLM)
    batches = [one_row(ids) for ids in tokens]
    ours = ref.probe_all(folder, batches, tmp_path)
    for inputs, found in zip(batches, ours, strict=True):
        theirs = ref.reference_taps(model, inputs)
        ref.assert_taps_agree(found, theirs, inputs, 1e-3)
    # A guess among 262,144 tokens has perplexity 262,144; a trained model's is in the tens.
    perplexity = math.exp(ours[0]["loss_sum"].item() / ours[0]["num_targets"].item())
    assert 1 < perplexity < 40, perplexity
