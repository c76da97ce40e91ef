"""Runs the built program as a person would, on the demo's tiny base and its real photos."""

import json
import os
import pathlib
import subprocess

SOURCE = pathlib.Path(os.environ["GEMTUNE_SOURCE_DIR"])
PROGRAM = os.environ["GEMTUNE"]
FASHION = SOURCE / "examples" / "fashion"
BASE = FASHION / "base"

# A short run that takes a second or two.
SHORT = [
    str(FASHION / "demo.yaml"),
    "train.micro_batch=4",
    "eval.every=never",
    "optim.schedule=constant",
    "optim.warmup_ratio=0",
]


def run(*words, code=0, **kwargs):
    """Runs `gemtune WORDS`, checks the exit code, returns the finished process with text output."""
    done = subprocess.run(
        [PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=300, **kwargs
    )
    assert done.returncode == code, f"exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done


def metrics(run_dir):
    return [json.loads(line) for line in (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def tensors(path):
    from safetensors.numpy import load_file

    return load_file(path)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(prompt, answer, images=()):
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ],
        "images": list(images),
    }


def photo(path, colour=(200, 100, 50), size=(28, 28)):
    from PIL import Image

    Image.new("RGB", size, colour).save(path)
    return path.name
