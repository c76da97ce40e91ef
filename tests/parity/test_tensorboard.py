"""Event files read by the tensorboard package; io_test writes them."""

import math
import os
import subprocess

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

IO_TEST = os.path.join(os.environ["GEMTUNE_BUILD_DIR"], "io_test")


def test_a_run_that_resumed_reads_as_one(tmp_path):
    result = subprocess.run([IO_TEST, "--gtest_filter=TensorboardOracle.*"], capture_output=True, text=True,
                            env={**os.environ, "GEMTUNE_ORACLE_DIR": str(tmp_path)})
    assert result.returncode == 0 and "[  PASSED  ] 1 test" in result.stdout, result.stdout + result.stderr
    assert len(list(tmp_path.iterdir())) == 2
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert events.file_version == 2.0
    tags = events.Tags()
    assert set(tags["scalars"]) == {"train/loss", "train/grad_norm", "train/num_tokens"}
    assert tags["tensors"] == ["recipe"]

    # Steps 6 to 9 of the first file are dropped: the second one writes them again.
    loss = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in loss] == [(step, 10.0 - step) for step in range(6)] + [
        (step, 0.25 * step) for step in range(6, 9)]
    assert all(abs(event.wall_time - loss[0].wall_time) < 60 for event in loss) and loss[0].wall_time > 1e9
    assert math.isnan(events.Scalars("train/grad_norm")[0].value)
    assert [(event.step, event.value) for event in events.Scalars("train/num_tokens")] == [(5 << 32, 1e9)]

    text = events.Tensors("recipe")[0]
    assert text.tensor_proto.string_val == ["# Recipe\n\n`rank: 16` ü".encode()]
    assert list(dim.size for dim in text.tensor_proto.tensor_shape.dim) == [1]
    assert events.SummaryMetadata("recipe").plugin_data.plugin_name == "text"
