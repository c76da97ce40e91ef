// Times training steps of a model folder on a GPU: forward, backward, clip and AdamW on a fixed batch, without data loading.
// bench/gpu.py runs it beside the Python peers on the same batch. Prints one JSON object.
//
//   gpu_step MODEL_DIR key=value …     batch text_tokens accumulation steps lora(language|all) tables(none|tied|untied)
//                                      quant(nf4|none) quant_vision recompute(auto|true|false) memory_gib(0: what is free)
//                                      vision(live|cached: a frozen tower's outputs at hand) dropout
#include "base/error.h"
#include "model/model.h"
#include "ops/cuda.h"
#include "ops/torch.h"
#include "train/optimizer.h"
#include "train/specs.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>

namespace gemtune {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void synchronize(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeDevice(device.index());
}

struct Settings {
  std::map<std::string, std::string> values = {{"batch", "1"},      {"text_tokens", "156"}, {"accumulation", "1"},
                                               {"steps", "5"},      {"lora", "all"},        {"tables", "untied"},
                                               {"quant", "nf4"},    {"quant_vision", "1"},  {"recompute", "auto"},
                                               {"memory_gib", "0"}, {"vision", "live"},     {"dropout", "0.05"}};
  int64_t number(const std::string& key) const { return std::stoll(values.at(key)); }
  bool is(const std::string& key, const std::string& value) const { return values.at(key) == value; }
};

struct BenchBatch {
  ModelInput input;
  Targets targets;
};

// The batch of bench/gpu.py, number for number: 60 text tokens, an image, the rest of the text; loss on all text.
BenchBatch make_batch(const Dims& dims, int64_t rows, int64_t text_tokens, at::Device device) {
  const int64_t soft = dims.vision ? dims.tokens_per_image : 0;
  const int64_t before = 60;
  const int64_t tokens = text_tokens + soft;
  const Tensor ids = at::zeros({rows, tokens}, at::kLong);
  const Tensor group = at::full({rows, tokens}, -1, at::kInt);
  const Tensor target = at::ones({rows, tokens}, at::kBool);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < tokens; ++t) id[r * tokens + t] = 1000 + (t * 7919 + r * 104729) % 199000;
    if (!dims.vision) continue;
    id[r * tokens + before] = dims.start_of_image;
    ids.select(0, r).narrow(0, before + 1, soft).fill_(dims.image_token);
    id[r * tokens + before + 1 + soft] = dims.end_of_image;
    group.select(0, r).narrow(0, before + 1, soft).fill_(0);
    target.select(0, r).narrow(0, before, soft + 1).fill_(false);
  }
  target.select(1, 0).fill_(false);
  BenchBatch batch;
  batch.input.token_ids_BT = ids.to(device);
  batch.input.valid_BT = at::ones({rows, tokens}, at::kBool).to(device);
  batch.input.image_group_BT = group.to(device);
  if (dims.vision) {
    const int64_t side = dims.vision->image_size;
    const Tensor pixels = at::zeros({rows, 3, side, side}, at::kByte);
    uint8_t* p = pixels.mutable_data_ptr<uint8_t>();
    for (int64_t i = 0; i < pixels.numel(); ++i) p[i] = uint8_t((uint32_t(i) * 2654435761u) >> 24);
    batch.input.pixels_NCHW = pixels.to(device);
  }
  batch.targets = find_targets(ids, target).to(device);
  return batch;
}

int run(int argc, char** argv) {
  if (argc < 2) throw input_error("usage: gpu_step MODEL_DIR key=value …");
  Settings settings;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (equals == std::string::npos || settings.values.count(argument.substr(0, equals)) == 0) {
      throw input_error("{}: no such setting", argument);
    }
    settings.values[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  const Dims dims = read_dims(argv[1]);
  const auto started = Clock::now();
  ModelSpec spec;
  spec.device = at::Device(at::kCUDA, 0);
  spec.compute_dtype = at::kBFloat16;
  spec.lora.vision = settings.is("lora", "all");
  spec.lora.dropout_p = std::stod(settings.values.at("dropout"));
  spec.quant = {settings.is("quant", "nf4"), true, settings.number("quant_vision") != 0};
  spec.tables = settings.is("tables", "untied") ? Tables::kUntied
                : settings.is("tables", "tied") ? Tables::kTied
                                                : Tables::kFrozen;
  PlanLoad load;
  load.micro_batch = settings.number("batch");
  load.accumulation = settings.number("accumulation");
  load.longest = settings.number("text_tokens") + (dims.vision ? dims.tokens_per_image : 0);
  load.targets = settings.number("text_tokens");
  load.images_a_row = dims.vision ? 1 : 0;
  load.cached = settings.is("vision", "cached");
  Recipe recipe;
  recipe.train.recompute = settings.values.at("recompute");
  recipe.train.memory_gib = std::stod(settings.values.at("memory_gib"));
  const MemoryChoice choice = memory_choice(recipe, dims, spec, load);
  const double predicted_gib = double(make_plan(dims, spec, load, choice).peak_bytes) / double(1 << 30);
  spec.keep_expanded = choice.keep_expanded;
  const auto model = Gemma3::load(argv[1], spec);
  OptimizerSpec optimizer_spec;
  Optimizer optimizer(model->parameters(), optimizer_spec);
  synchronize(spec.device);
  const double load_s = seconds_since(started);
  const int64_t rows = settings.number("batch");
  BenchBatch batch = make_batch(model->dims(), rows, settings.number("text_tokens"), spec.device);
  const int64_t accumulation = settings.number("accumulation");
  const double count = double(batch.targets.token_N.numel()) * double(accumulation);
  Pass pass;
  pass.mode = Pass::Mode::kTrain;
  pass.recompute_vision = choice.recompute_vision;
  pass.recompute_language = choice.recompute_language;
  if (load.cached) {
    const at::NoGradGuard no_grad;
    std::vector<Tensor> pooled;
    for (int64_t row = 0; row < rows; ++row) {
      pooled.push_back(model->pooled_patches(batch.input.pixels_NCHW.narrow(0, row, 1), Pass{}));
    }
    batch.input.pooled_NSW = at::cat(pooled);
    batch.input.pixels_NCHW = Tensor();
    c10::getDeviceAllocator(spec.device.type())->resetPeakStats(0);
  }

  std::vector<double> step_s, losses, norms;
  double forward_s = 0, backward_s = 0, update_s = 0;
  const int64_t warm_up = 2;
  double first_step_s = 0;
  for (int64_t step = 1; step <= settings.number("steps") + warm_up; ++step) {
    synchronize(spec.device);
    const auto begun = Clock::now();
    std::vector<Tensor> sums;
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      pass.micro = uint64_t(step * accumulation + micro);
      const CrossEntropySum loss = model->loss(model->forward(batch.input, pass), batch.targets);
      if (step == warm_up) synchronize(spec.device), forward_s += seconds_since(begun);
      (loss.loss_sum / count).backward();
      sums.push_back(loss.loss_sum.detach());
    }
    if (step == warm_up) synchronize(spec.device), backward_s = seconds_since(begun) - forward_s;
    const double norm = optimizer.gradient_norm();
    optimizer.update(step, norm);
    double loss = 0;
    for (const Tensor& sum : sums) loss += sum.item<double>();
    synchronize(spec.device);
    const double took = seconds_since(begun);
    if (step == 1) first_step_s = seconds_since(started);
    if (step == warm_up) update_s = took - forward_s - backward_s;
    if (step > warm_up) step_s.push_back(took);
    losses.push_back(loss / count);
    norms.push_back(norm);
  }
  std::vector<double> sorted = step_s;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[sorted.size() / 2];
  const auto stats = c10::getDeviceAllocator(spec.device.type())->getDeviceStats(0);
  const int64_t peak = stats.allocated_bytes[size_t(c10::CachingAllocator::StatType::AGGREGATE)].peak;
  std::string text;
  for (const auto& [key, value] : settings.values) text += fmt::format("{}={} ", key, value);
  std::printf(
      "{\"stack\": \"gemtune\", \"settings\": \"%s\", \"samples_per_s\": %.3f, \"step_s\": %.4f, \"fastest_s\": %.4f, "
      "\"slowest_s\": "
      "%.4f, \"forward_s\": %.4f, \"backward_s\": %.4f, \"update_s\": %.4f, \"peak_gib\": %.2f, \"predicted_gib\": %.2f, "
      "\"memory\": \"%s\", \"loss_1\": %.5f, \"loss_2\": "
      "%.5f, "
      "\"loss_3\": %.5f, \"grad_norm_1\": %.4f, \"load_s\": %.2f, \"first_step_done_s\": %.2f}\n",
      text.c_str(), double(rows * accumulation) / median, median, sorted.front(), sorted.back(), forward_s, backward_s, update_s,
      double(peak) / double(1 << 30), predicted_gib, choice.describe().c_str(), losses[0], losses[1], losses[2], norms[0], load_s,
      first_step_s);
  return 0;
}

}  // namespace
}  // namespace gemtune

int main(int argc, char** argv) {
  try {
    return gemtune::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
