"""The demo's step (forward, backward, clip, AdamW; 16 rows) in gemtune and in transformers + peft, side by side on this CPU.

    make bench

The peer is given the easier job: its base is not quantised, its batch is ready before the clock starts, its loss needs no
counting. Prints medians of the steps after warm-up, their spread, and the ratio; also start to first step of gemtune.
"""

import argparse
import io
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

FASHION = pathlib.Path(__file__).resolve().parents[1] / "examples" / "fashion"
ROWS = 16
WARM_UP = 10


def spread(milliseconds):
    ordered = sorted(milliseconds)
    return f"{statistics.median(ordered):8.1f}   {ordered[len(ordered) // 10]:8.1f} … {ordered[len(ordered) * 9 // 10]:.1f}"


def gemtune_steps(program, steps):
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        events = pathlib.Path(folder) / "events"
        begun = time.monotonic()
        words = [program, "train", FASHION / "demo.yaml", f"output.dir={run}", f"train.max_steps={steps}", "eval.every=never", "checkpoint.every=never"]
        process = subprocess.Popen([*map(str, words), "--events", str(events)], stderr=subprocess.DEVNULL)
        first = None
        while process.poll() is None:
            if first is None and events.exists() and '"step"' in events.read_text():
                first = time.monotonic() - begun
            time.sleep(0.005)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["step_ms"] for r in records[WARM_UP:]], records[0]["loss"], first


def peer_batch():
    import pyarrow.parquet as pq
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(FASHION / "base", use_fast=True)
    table = pq.read_table(FASHION / "train.parquet")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(42))[:ROWS]
    rows = table.take(order.tolist()).to_pylist()
    prompt = "Write the product line for this picture."
    texts, pictures = [], []
    for row in rows:
        user = {"role": "user", "content": [{"type": "text", "text": prompt}, {"type": "image"}]}
        turns = [user, {"role": "assistant", "content": [{"type": "text", "text": row["line"]}]}]
        texts.append(processor.apply_chat_template(turns, tokenize=False))
        pictures.append([Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")])
    batch = processor(text=texts, images=pictures, return_tensors="pt", padding=True, add_special_tokens=False)
    labels = batch["input_ids"].clone()
    turn = processor.tokenizer.convert_tokens_to_ids("<start_of_turn>")
    for i, ids in enumerate(labels.tolist()):
        labels[i, : len(ids) - 1 - ids[::-1].index(turn) + 3] = -100
    labels[batch["attention_mask"] == 0] = -100
    return batch, labels


def peer_steps(steps):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(FASHION / "base", dtype=torch.float32)
    names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, lora_dropout=0.05, target_modules=rf".*language_model.*\.({names})"))
    model.train()
    batch, labels = peer_batch()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0, fused=True)
    times, first_loss = [], None
    for _ in range(steps):
        begun = time.perf_counter()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append((time.perf_counter() - begun) * 1000)
        first_loss = loss.item() if first_loss is None else first_loss
    return times[WARM_UP:], first_loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemtune", default="./gemtune")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    ours, our_loss, first = gemtune_steps(arguments.gemtune, arguments.steps)
    theirs, their_loss = peer_steps(arguments.steps)
    print(f"{'':22} median ms   10 % … 90 %       loss of step 1")
    print(f"{'gemtune (NF4)':22} {spread(ours)}       {our_loss:.4f}")
    print(f"{'transformers + peft':22} {spread(theirs)}       {their_loss:.4f}")
    print(f"ratio (peer ÷ gemtune)  {statistics.median(theirs) / statistics.median(ours):.2f}")
    print(f"gemtune, start to first step  {first:.2f} s")


if __name__ == "__main__":
    main()
