#include "app/commands.h"
#include "base/file.h"
#include "base/text.h"
#include "ops/ops.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/core.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <thread>

namespace gemtune {
namespace {

struct Finding {
  bool good;
  std::string name;
  std::string text;
};

Finding look_at_gpu() {
  const bool driver = file_exists("/proc/driver/nvidia/version");
  if (!driver) return {true, "gpu", "none found; training runs on the CPU in fp32"};
  return {false, "gpu", "an NVIDIA driver is here, but this program was built without CUDA; training runs on the CPU"};
}

Finding look_at_disk(const std::string& folder) {
  const int64_t bytes = free_bytes(folder);
  return {bytes > (int64_t{2} << 30), "disk", fmt::format("{} free at {}", human_bytes(bytes), folder)};
}

// NF4 there and back: no value may move by more than half the widest gap between codes.
Finding check_nf4() {
  const Tensor weight = at::randn({128, 192});
  const Tensor back = nf4_dequantize(nf4_quantize(weight, /*double_quant=*/true), at::kFloat);
  const double error = (weight - back).abs().max().item<double>() / weight.abs().max().item<double>();
  return {error < 0.16, "nf4", fmt::format("largest round-trip error {:.3f} of the largest weight", error)};
}

Finding look_for_token() {
  const char* token = std::getenv("HF_TOKEN");
  const char* home = std::getenv("HOME");
  const bool found =
      (token != nullptr && *token != '\0') || (home != nullptr && file_exists(join_path(home, ".cache/huggingface/token")));
  return {true, "hub token", found ? "found" : "none; gated models need one (HF_TOKEN or `hf auth login`)"};
}

}  // namespace

int run_doctor() {
  utsname system{};
  uname(&system);
  fmt::print("gemtune {}, libtorch {}, {} {}, {} cores, {} threads for products\n\n", GEMTUNE_VERSION, TORCH_VERSION,
             system.sysname, system.machine, std::thread::hardware_concurrency(), at::get_num_threads());
  const Finding findings[] = {look_at_gpu(), look_at_disk("."), look_at_disk(cache_folder()), check_nf4(), look_for_token()};
  bool all_good = true;
  for (const Finding& finding : findings) {
    fmt::print("{:<4} {:<10} {}\n", finding.good ? "ok" : "LOOK", finding.name, finding.text);
    all_good = all_good && finding.good;
  }
  return all_good ? 0 : 3;
}

int run_recipe_help() {
  std::string section;
  for (const KeyHelp& key : recipe_keys()) {
    const std::string head = key.key.substr(0, key.key.find('.'));
    if (head != section) fmt::print("{}{}\n", section.empty() ? "" : "\n", head);
    section = head;
    fmt::print("  {:<30} {}\n  {:<30} default: {}\n", key.key, key.help, "",
               key.default_value.empty() ? "none" : key.default_value);
  }
  return 0;
}

}  // namespace gemtune
