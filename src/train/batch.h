// A micro-batch as tensors on the device.
#pragma once

#include "data/loader.h"
#include "model/model.h"

namespace gemtune {

struct DeviceBatch {
  ModelInput input;
  Targets targets;
};
DeviceBatch to_device(const Batch& batch, at::Device device);

}  // namespace gemtune
