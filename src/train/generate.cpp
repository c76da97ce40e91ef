#include "train/generate.h"

#include "base/error.h"
#include "data/loader.h"
#include "ops/torch.h"
#include "train/batch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <limits>
#include <set>

namespace gemtune {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Next ids [B] from logits [B, V].
Tensor choose(Tensor logits_BV, const GenerateOptions& options, at::Generator& generator) {
  if (options.temperature <= 0) return logits_BV.argmax(-1);
  logits_BV = logits_BV / options.temperature;
  if (options.top_k > 0 && options.top_k < logits_BV.size(1)) {
    const Tensor least = std::get<0>(logits_BV.topk(options.top_k, -1)).narrow(1, options.top_k - 1, 1);
    logits_BV = logits_BV.masked_fill(logits_BV < least, kMinusInfinity);
  }
  if (options.top_p < 1) {
    const auto [sorted, order] = logits_BV.sort(-1, /*descending=*/true);
    const Tensor probability = at::softmax(sorted, -1);
    // The smallest set whose mass reaches top_p; the likeliest token always stays.
    const Tensor dropped = (probability.cumsum(-1) - probability) >= options.top_p;
    logits_BV = logits_BV.masked_fill(dropped.scatter(1, order, dropped), kMinusInfinity);
  }
  return at::multinomial(at::softmax(logits_BV, -1), 1, false, generator).squeeze(1);
}

Batch prompt_batch(const std::vector<Prompt>& prompts, const ChatTokens& tokens, int image_size) {
  std::vector<Sample> samples;
  std::vector<std::vector<std::vector<uint8_t>>> images;
  for (const Prompt& prompt : prompts) {
    Sample& sample = samples.emplace_back();
    sample.token_ids = prompt.token_ids;
    sample.target_mask.assign(prompt.token_ids.size(), 0);
    sample.image_first_token = prompt.image_first_token;
    images.push_back(prompt.images_CHW);
  }
  return collate(samples, images, tokens.pad, image_size);
}

}  // namespace

std::vector<std::vector<int32_t>> generate(const Gemma3& model, const std::vector<Prompt>& prompts, const ChatTokens& tokens,
                                           int image_size, const GenerateOptions& options,
                                           const std::function<void(const std::vector<int32_t>&)>& on_token) {
  const at::NoGradGuard no_grad;
  for (const Prompt& prompt : prompts) {
    if (prompt.token_ids.size() != prompts[0].token_ids.size())
      throw job_error("generate: prompts of one batch must have one length");
  }
  const int64_t num_rows = int64_t(prompts.size());
  const at::Device device = model.spec().device;
  std::set<int32_t> stops(model.dims().stop_tokens.begin(), model.dims().stop_tokens.end());
  stops.insert(tokens.end_of_turn);
  auto generator = at::detail::createCPUGenerator(options.seed);

  DeviceBatch batch = to_device(prompt_batch(prompts, tokens, image_size), device);
  KvCache cache;
  const Pass pass;
  Tensor hidden_BTD = model.forward(batch.input, pass, &cache);
  std::vector<std::vector<int32_t>> answers(prompts.size());
  std::vector<bool> done(prompts.size(), false);
  int64_t num_open = num_rows;
  const int64_t room = std::max<int64_t>(0, model.dims().text.max_positions - int64_t(prompts[0].token_ids.size()));
  for (int64_t i = 0; i < std::min(options.max_new_tokens, room) && num_open > 0; ++i) {
    const Tensor next_B = choose(model.logits(hidden_BTD.select(1, hidden_BTD.size(1) - 1)), options, generator).cpu();
    std::vector<int32_t> fresh(prompts.size(), -1);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (done[size_t(row)]) continue;
      const int32_t id = int32_t(next_B.const_data_ptr<int64_t>()[row]);
      if (stops.count(id) != 0) {
        done[size_t(row)] = true;
        --num_open;
        continue;
      }
      answers[size_t(row)].push_back(id);
      fresh[size_t(row)] = id;
    }
    if (on_token) on_token(fresh);
    if (num_open == 0) break;
    ModelInput& input = batch.input;
    input.token_ids_BT = next_B.to(device).unsqueeze(1);
    input.pixels_NCHW = Tensor();
    input.valid_BT = at::cat({input.valid_BT, at::ones({num_rows, 1}, input.valid_BT.options())}, 1);
    input.image_group_BT = at::cat({input.image_group_BT, at::full({num_rows, 1}, -1, input.image_group_BT.options())}, 1);
    hidden_BTD = model.forward(input, pass, &cache);
  }
  return answers;
}

}  // namespace gemtune
