"""A tiny random model with the demo's tokenizer, rows with pictures, and `gemtune train` on them."""

import json
import os
import pathlib
import random
import shutil

import numpy
from PIL import Image
from transformers import Gemma3Config

import reference as ref

BASE = ref.SOURCE / "examples" / "fashion" / "base"
SIDE_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json",
              "processor_config.json", "chat_template.jinja", "generation_config.json"]
WORDS = "soft cotton shirt warm coat city shoes leather bag evening dress light summer sandal for the beach and rain".split()


def config():
    settings = json.loads((BASE / "config.json").read_text())
    settings.pop("torch_dtype", None)
    settings.pop("architectures", None)
    return Gemma3Config(**settings)


def model_folder(folder, seed=41):
    model = ref.random_model(config(), seed=seed)
    ref.save_folder(model, folder, "hub")
    for name in SIDE_FILES:
        shutil.copy(BASE / name, folder / name)
    return pathlib.Path(folder)


def write_rows(folder, count, seed=7, with_system=True):
    """train.jsonl and its pictures, of the model's own size so that no resize takes part."""
    folder = pathlib.Path(folder)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pixels = numpy.random.default_rng(seed)
    size = config().vision_config.image_size
    rows = []
    for i in range(count):
        name = f"pictures/{i}.png"
        Image.fromarray(pixels.integers(0, 256, (size, size, 3), dtype=numpy.uint8)).save(folder / name)
        product = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
        answer = " ".join(rng.choices(WORDS, k=rng.randint(2, 12))).capitalize() + "."
        messages = [{"role": "user", "content": [{"type": "text", "text": f"Describe the product.\n\n{product}"}, {"type": "image"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        if with_system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "You write product lines."}]})
        rows.append({"messages": messages, "images": [name]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def command(run_dir, model, data, *settings):
    return [ref.GEMTUNE, "train", f"model.path={model}", f"data.train={data}", f"output.dir={run_dir}", "train.device=cpu",
            "data.num_workers=1", "logging.tensorboard=false", *settings]


def train(run_dir, model, data, *settings, nproc=1, expect=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(pathlib.Path(run_dir).parent / "cache")}
    return ref.run(*command(run_dir, model, data, *settings), *(["--nproc", nproc] if nproc > 1 else []), expect=expect, env=environment)
