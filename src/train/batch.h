// A micro-batch as tensors on the device.
#pragma once

#include "data/loader.h"
#include "model/model.h"

namespace gemtune {

struct DeviceBatch {
  ModelInput input;
  Tensor target_mask_BT;  // bool, unshifted
};
DeviceBatch to_device(const Batch& batch, at::Device device);

}  // namespace gemtune
