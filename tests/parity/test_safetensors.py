"""safetensors files both ways against the PyPI package; io_test is the C++ side."""

import hashlib
import json
import os
import random
import struct
import subprocess

import numpy
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

IO_TEST = os.path.join(os.environ["GEMTUNE_BUILD_DIR"], "io_test")

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}


def run(test, folder):
    result = subprocess.run([IO_TEST, f"--gtest_filter=SafetensorsOracle.{test}"], capture_output=True, text=True,
                            env={**os.environ, "GEMTUNE_ORACLE_DIR": str(folder)})
    assert result.returncode == 0 and "[  PASSED  ] 1 test" in result.stdout, result.stdout + result.stderr


def report_of(folder, files):
    read = folder / "read"
    read.mkdir()
    for name, content in files.items():
        (read / name).write_bytes(content)
    run("ReportsWhatItReads", folder)
    return json.loads((folder / "report.json").read_text())


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sample():
    torch.manual_seed(0)
    tensors = {f"t.{name}": (torch.randn(3, 5) * 9).to(dtype) for name, dtype in TYPES.items()}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 7)
    tensors['odd "name" ü\n'] = torch.ones(1)
    return tensors


def test_our_file_opens_in_the_reference(tmp_path):
    run("WritesOneTensorOfEachType", tmp_path)
    path = tmp_path / "ours.safetensors"
    loaded = load_file(path)
    data = bytes(i % 2 for i in range(64))
    assert set(loaded) == {f"t.{name}" for name in TYPES} | {"scalar", "empty"}
    for name, dtype in TYPES.items():
        tensor = loaded[f"t.{name}"]
        assert tensor.dtype == dtype and tensor.shape == (2, 3)
        assert raw(tensor) == data[: tensor.numel() * tensor.element_size()]
    assert loaded["scalar"].shape == () and loaded["empty"].shape == (0, 7)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": '"quoted" ü'}


def test_our_bytes_are_the_reference_writer_s(tmp_path):
    run("WritesOneTensorOfEachType", tmp_path)
    path = tmp_path / "ours.safetensors"
    loaded = load_file(path)
    for name in ("t.F64", "t.I64", "t.F32", "t.U8"):
        save_file({name: loaded[name]}, tmp_path / "one.safetensors", metadata={"format": "pt"})
        theirs = (tmp_path / "one.safetensors").read_bytes()
        size = struct.unpack("<Q", theirs[:8])[0]
        ours = path.read_bytes()
        entry = json.loads(ours[8 : 8 + struct.unpack("<Q", ours[:8])[0]])[name]
        expected = f'{{"__metadata__":{{"format":"pt"}},"{name}":{{"dtype":"{entry["dtype"]}","shape":[2,3],"data_offsets":[0,{entry["data_offsets"][1] - entry["data_offsets"][0]}]}}}}'
        assert theirs[8 : 8 + size].decode().rstrip(" ") == expected
        assert size % 8 == 0 and struct.unpack("<Q", ours[:8])[0] % 8 == 0


def test_the_reference_s_file_opens_here(tmp_path):
    tensors = sample()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt", "k": "v"})
    report = report_of(tmp_path, {"theirs": (tmp_path / "theirs.safetensors").read_bytes()})["theirs"]
    assert report["metadata"] == {"format": "pt", "k": "v"}
    assert report["tensors"] == {
        name: {"dtype": next(key for key, dtype in TYPES.items() if dtype == tensor.dtype), "shape": list(tensor.shape),
               "sha256": hashlib.sha256(raw(tensor)).hexdigest()}
        for name, tensor in tensors.items()
    }


def test_what_the_reference_refuses_is_refused_here(tmp_path):
    save_file({"a": torch.ones(8, 8), "b": torch.tensor(1.0)}, tmp_path / "seed", metadata={"format": "pt"})
    seed = (tmp_path / "seed").read_bytes()
    rng = random.Random(11)
    alphabet = b'{}[]":,0123456789-.eE FB\\u'
    files = {}
    for i in range(600):
        content = bytearray(seed)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            kind = rng.randrange(4)
            if kind == 0:
                content[at] = rng.choice(alphabet)
            elif kind == 1:
                del content[at : at + rng.randint(1, 4)]
            elif kind == 2:
                content[at:at] = bytes([rng.choice(alphabet)])
            else:
                content[at] = rng.randrange(256)
            if not content:
                break
        files[f"{i:04}"] = bytes(content)
    report = report_of(tmp_path, files)
    accepted_by_both = 0
    for name, content in files.items():
        try:
            theirs = {key: value["shape"] for key, value in safetensors.deserialize(content)}
        except safetensors.SafetensorError:
            assert "error" in report[name], (name, content)
            continue
        if "error" not in report[name]:
            accepted_by_both += 1
            assert {key: value["shape"] for key, value in report[name]["tensors"].items()} == theirs
    assert accepted_by_both > 20
