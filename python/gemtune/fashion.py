"""Prepares the bundled demo from Debian's package dataset-fashion-mnist (MIT, Zalando SE).

    python -m gemtune.fashion rows      --out examples/fashion       train.parquet and heldout.parquet
    python -m gemtune.fashion base      --out examples/fashion/base  tokenizer and settings of the tiny base model
    python -m gemtune.fashion base-rows --out FILE.parquet           every training picture, to train that base on

Every command writes the same bytes each time. Pictures and categories are the data set's; the product lines (lines.json)
and the phrases (phrases.txt) were written for this demo.
"""

import argparse
import gzip
import json
import os
import pathlib
import random
import struct
import sys
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gemtune import small_tokenizer

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "fashion"
DATA_DIR = "/usr/share/datasets/fashion-mnist"
CATEGORIES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
TRAIN_A_CATEGORY = 150
HELDOUT_A_CATEGORY = 30
PHRASE_SEED = 17
VOCABULARY = 768  # rows of the embedding table; the tokenizer uses fewer, as Gemma's does

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 7,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "vision_use_head": False,
}
TOKENS_PER_IMAGE = 4
TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
}


class MissingData(Exception):
    pass


def read_idx(data_dir, name, num_dimensions):
    """An idx file of unsigned bytes as an array."""
    path = pathlib.Path(data_dir) / name
    if not path.exists():
        raise MissingData(f"{path}: not there; run: apt-get install dataset-fashion-mnist, or name the folder with --data-dir")
    raw = gzip.decompress(path.read_bytes())
    (magic,) = struct.unpack(">I", raw[:4])
    expected = 0x800 + num_dimensions
    if magic != expected:
        raise MissingData(f"{path}: starts with {magic:#x}, expected {expected:#x} (idx of bytes); install dataset-fashion-mnist again")
    shape = struct.unpack(f">{num_dimensions}I", raw[4 : 4 + 4 * num_dimensions])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def read_split(data_dir, split):
    return read_idx(data_dir, f"{split}-images-idx3-ubyte.gz", 3), read_idx(data_dir, f"{split}-labels-idx1-ubyte.gz", 1)


def png(picture):
    """An 8-bit grey picture [height, width] as a PNG file."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def first_of_each(labels, count):
    """The first `count` rows of every category, in the data set's order."""
    return sorted(int(i) for category in range(len(CATEGORIES)) for i in np.flatnonzero(labels == category)[:count])


def write_parquet(path, names, pictures, columns):
    """Image cells are {bytes, path} with the schema note that Hugging Face's datasets reads."""
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array([{"bytes": png(p), "path": name} for p, name in zip(pictures, names)], image_type)
    features = {"image": {"_type": "Image"}} | {name: {"dtype": "string", "_type": "Value"} for name in columns}
    schema = pa.schema(
        [("image", image_type)] + [(name, pa.string()) for name in columns],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    table = pa.Table.from_arrays([cells] + [pa.array(values, pa.string()) for values in columns.values()], schema=schema)
    write_whole(path, lambda f: pq.write_table(table, f, compression="zstd", row_group_size=1000))


def write_whole(path, write):
    """Writes beside `path` and renames, so that a file is there completely or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        write(f)
    os.replace(part, path)


def write_json(path, content, indent=2):
    separators = (",", ":") if indent is None else None
    text = json.dumps(content, ensure_ascii=False, indent=indent, separators=separators) + "\n"
    write_whole(path, lambda f: f.write(text.encode()))


def read_lines():
    return json.loads((EXAMPLE / "lines.json").read_text(encoding="utf-8"))


def read_phrases():
    return (EXAMPLE / "phrases.txt").read_text(encoding="utf-8").splitlines()


def command_rows(options):
    lines = read_lines()
    for split, name, count in (("train", "train", TRAIN_A_CATEGORY), ("t10k", "heldout", HELDOUT_A_CATEGORY)):
        images, labels = read_split(options.data_dir, split)
        rows = first_of_each(labels, count)
        categories = [CATEGORIES[labels[i]] for i in rows]
        columns = {"category": categories, "line": [lines[c] for c in categories]}
        write_parquet(pathlib.Path(options.out) / f"{name}.parquet", [f"{split}-{i:05d}.png" for i in rows], images[rows], columns)


def command_base_rows(options):
    phrases = read_phrases()
    chooser = random.Random(PHRASE_SEED)
    images, labels = read_split(options.data_dir, "train")
    columns = {
        "phrase": [phrases[int(chooser.random() * len(phrases))] for _ in labels],
        "category": [CATEGORIES[label] for label in labels],
    }
    write_parquet(options.out, [f"train-{i:05d}.png" for i in range(len(labels))], images, columns)


def command_base(options):
    out = pathlib.Path(options.out)
    # Lines and names count more than phrases, so that their words become whole pieces first.
    text = 8 * ["user", "model"] + 4 * list(read_lines().values()) + 4 * CATEGORIES + read_phrases()
    text += [f"a {c}" for c in CATEGORIES] + ["Write the product line for this picture."]
    tokenizer = small_tokenizer.make_tokenizer(text, VOCABULARY - 16)
    ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    write_json(out / "tokenizer.json", tokenizer, indent=1)
    write_json(out / "tokenizer_config.json", tokenizer_config(tokenizer))
    write_json(out / "special_tokens_map.json", special_tokens_map())
    write_json(out / "config.json", model_config(ids))
    write_json(out / "generation_config.json", {
        "bos_token_id": ids["<bos>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "pad_token_id": ids["<pad>"],
        "do_sample": False,
    })
    write_json(out / "preprocessor_config.json", {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_seq_length": TOKENS_PER_IMAGE,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": VISION["image_size"], "width": VISION["image_size"]},
    })
    write_json(out / "processor_config.json", {"image_seq_length": TOKENS_PER_IMAGE, "processor_class": "Gemma3Processor"})


def model_config(ids):
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "pad_token_id": ids["<pad>"],
        "mm_tokens_per_image": TOKENS_PER_IMAGE,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "text_config": TEXT | {"pad_token_id": ids["<pad>"], "bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"]},
        "vision_config": VISION,
    }


def tokenizer_config(tokenizer):
    decoder = {
        str(t["id"]): {key: t[key] for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
        for t in tokenizer["added_tokens"]
    }
    image = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return {
        "tokenizer_class": "GemmaTokenizer",
        "processor_class": "Gemma3Processor",
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": decoder,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        **image,
        "extra_special_tokens": image,
        "clean_up_tokenization_spaces": False,
        "spaces_between_special_tokens": False,
        "model_max_length": TEXT["max_position_embeddings"],
        "padding_side": "left",
        "sp_model_kwargs": None,
        "use_default_system_prompt": False,
    }


def special_tokens_map():
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    whole = {
        name: {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        for name, content in names.items()
    }
    return {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"} | whole


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="gemtune.fashion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"rows": (command_rows, EXAMPLE), "base": (command_base, EXAMPLE / "base"), "base-rows": (command_base_rows, None)}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--out", help="folder or file to write")
    parser.add_argument("--data-dir", default=DATA_DIR, help="folder of the idx files (default: %(default)s)")
    options = parser.parse_args(arguments)
    function, default_out = commands[options.command]
    options.out = options.out or default_out
    if options.out is None:
        parser.error("base-rows needs --out FILE.parquet")
    try:
        function(options)
    except MissingData as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
