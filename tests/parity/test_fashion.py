"""The bundled demo's files: written the same each time, and opened by the reference's own readers."""

import io
import json
import os
import pathlib
import sys

import pyarrow.parquet as pq
import pytest
from PIL import Image

SOURCE = pathlib.Path(os.environ.get("GEMTUNE_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
FASHION = SOURCE / "examples" / "fashion"
sys.path.insert(0, str(SOURCE / "python"))

from gemtune import fashion, small_tokenizer  # noqa: E402

needs_pictures = pytest.mark.skipif(
    not pathlib.Path(fashion.DATA_DIR).is_dir(), reason="the apt package dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="module")
def processor():
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(FASHION / "base", use_fast=True)


def conversation(answer=None):
    picture = Image.open(io.BytesIO(pq.read_table(FASHION / "heldout.parquet")["image"][0]["bytes"].as_py()))
    question = {"role": "user", "content": [{"type": "text", "text": " What is this? "}, {"type": "image", "image": picture}]}
    reply = {"role": "assistant", "content": [{"type": "text", "text": answer}]} if answer else None
    return [question] + ([reply] if reply else [])


@needs_pictures
def test_rows_command_writes_the_committed_rows(tmp_path):
    assert fashion.main(["rows", "--out", str(tmp_path)]) == 0
    for name, num_rows, split in (("train", 1500, "train"), ("heldout", 300, "t10k")):
        written, committed = pq.read_table(tmp_path / f"{name}.parquet"), pq.read_table(FASHION / f"{name}.parquet")
        assert written.equals(committed, check_metadata=True)
        assert committed.num_rows == num_rows
        assert all(cell["path"].startswith(split + "-") for cell in committed["image"].to_pylist())


def test_base_command_writes_the_committed_settings(tmp_path):
    assert fashion.main(["base", "--out", str(tmp_path)]) == 0
    written = sorted(p.name for p in tmp_path.iterdir())
    assert "tokenizer.json" in written and "config.json" in written
    for name in written:
        assert (tmp_path / name).read_text() == (FASHION / "base" / name).read_text(), name


def test_every_category_is_equally_frequent_and_has_its_own_line():
    lines = fashion.read_lines()
    assert sorted(lines) == sorted(fashion.CATEGORIES) and len(set(lines.values())) == len(lines)
    for name, count in (("train", 150), ("heldout", 30)):
        rows = pq.read_table(FASHION / f"{name}.parquet", columns=["category", "line"]).to_pylist()
        for category, line in lines.items():
            assert [r["line"] for r in rows if r["category"] == category] == count * [line]


def test_no_phrase_of_the_base_is_a_product_line():
    # The base must not have read what the demo's adapter learns to write.
    phrases = " ".join(fashion.read_phrases())
    assert not [line for line in fashion.read_lines().values() if line in phrases or line.removeprefix("New in: ") in phrases]


@needs_pictures
def test_png_holds_the_packages_pixels():
    images, labels = fashion.read_split(fashion.DATA_DIR, "t10k")
    cells = pq.read_table(FASHION / "heldout.parquet").to_pylist()
    for cell in cells[::37]:
        index = int(cell["image"]["path"].removeprefix("t10k-").removesuffix(".png"))
        picture = Image.open(io.BytesIO(cell["image"]["bytes"]))
        assert (picture.mode, picture.size) == ("L", (28, 28))
        assert picture.tobytes() == images[index].tobytes()
        assert cell["category"] == fashion.CATEGORIES[labels[index]]


def test_missing_pictures_are_an_environment_error_that_names_the_package(tmp_path, capsys):
    assert fashion.main(["rows", "--out", str(tmp_path), "--data-dir", str(tmp_path)]) == 3
    assert capsys.readouterr().err == (
        f"{tmp_path}/train-images-idx3-ubyte.gz: not there; "
        "run: apt-get install dataset-fashion-mnist, or name the folder with --data-dir\n"
    )


def test_a_file_that_is_no_idx_is_refused(tmp_path, capsys):
    import gzip

    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + 20 * b"\0"))
    assert fashion.main(["rows", "--out", str(tmp_path), "--data-dir", str(tmp_path)]) == 3
    assert capsys.readouterr().err == (
        f"{tmp_path}/train-images-idx3-ubyte.gz: starts with 0x801, expected 0x803 (idx of bytes); "
        "install dataset-fashion-mnist again\n"
    )


def test_image_column_opens_in_datasets_as_pictures():
    from datasets import Image as ImageFeature
    from datasets import load_dataset

    rows = load_dataset("parquet", data_files=str(FASHION / "heldout.parquet"), split="train", streaming=True)
    assert isinstance(rows.features["image"], ImageFeature)
    assert next(iter(rows))["image"].size == (28, 28)


def test_tokenizer_has_gemmas_kinds_of_tokens(processor):
    tokenizer = processor.tokenizer
    assert type(tokenizer).__name__ == "GemmaTokenizerFast"
    ids = tokenizer("New\n\nüa  b", add_special_tokens=True).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "New", "\n\n", "<0xC3>", "<0xBC>", "a", "▁▁", "b"]
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    assert special == set(small_tokenizer.CONTROL + small_tokenizer.TURNS + small_tokenizer.IMAGE + [small_tokenizer.IMAGE_SOFT])
    assert max(tokenizer.get_vocab().values()) == processor.image_token_id
    assert len(tokenizer) <= fashion.VOCABULARY and fashion.VOCABULARY % 64 == 0


def test_tokenizer_gives_text_back(processor):
    for text in ["A  b\tc\n\n\n\nd", "12 × 3 = 36 – naïve 日本 🙂", " leading and trailing ", *fashion.read_phrases()]:
        ids = processor.tokenizer(text, add_special_tokens=False).input_ids
        assert processor.tokenizer.decode(ids) == text


def test_lines_are_short_in_tokens(processor):
    longest = max(len(processor.tokenizer(line, add_special_tokens=False).input_ids) for line in fashion.read_lines().values())
    assert longest <= 14


def test_conversation_is_rendered_in_gemmas_turns(processor):
    text = processor.apply_chat_template(conversation("Bag"), tokenize=False)
    assert text == (
        "<bos><start_of_turn>user\nWhat is this?<start_of_image><end_of_turn>\n<start_of_turn>model\nBag<end_of_turn>\n"
    )
    system = {"role": "system", "content": [{"type": "text", "text": " Be brief. "}]}
    text = processor.apply_chat_template([system] + conversation(), tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\n Be brief. \n\nWhat is this?<start_of_image><end_of_turn>\n<start_of_turn>model\n"
    )


def test_two_turns_of_one_role_are_refused(processor):
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(Exception, match="turn 2 is of role user, expected assistant: user and assistant must alternate"):
        processor.tokenizer.apply_chat_template(turns, tokenize=False)


def test_reference_runs_the_base_on_a_picture(processor):
    import torch
    from transformers import AutoConfig, Gemma3ForConditionalGeneration

    config = AutoConfig.from_pretrained(FASHION / "base")
    assert config.text_config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.text_config.sliding_window >= config.mm_tokens_per_image
    model = Gemma3ForConditionalGeneration(config).eval()
    inputs = processor.apply_chat_template(
        conversation(), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert int((inputs["input_ids"] == config.image_token_id).sum()) == config.mm_tokens_per_image
    with torch.no_grad():
        assert model(**inputs).logits.shape[-1] == fashion.VOCABULARY


def test_base_fits_in_four_megabytes():
    weights = FASHION / "base" / "model.safetensors"
    if not weights.exists():
        pytest.skip("base/model.safetensors is not made yet (make demo-base)")
    assert weights.stat().st_size <= 4_000_000
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    assert "language_model.model.embed_tokens.weight" in header
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
