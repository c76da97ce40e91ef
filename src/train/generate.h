// Answers, token by token, with a key-value cache.
#pragma once

#include "data/chat.h"
#include "model/model.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gemtune {

struct GenerateOptions {
  int64_t max_new_tokens = 128;
  double temperature = 0;  // 0 = greedy
  int64_t top_k = 0;       // 0 = all
  double top_p = 1;
  uint64_t seed = 42;
};

// Prompts of one length (in tokens) with their pictures in order; each answer ends before the first stop token.
// `on_token` (may be empty) is called with each row's new ids after every step.
struct Prompt {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> image_first_token;
  std::vector<std::vector<uint8_t>> images_CHW;
};
std::vector<std::vector<int32_t>> generate(const Gemma3& model, const std::vector<Prompt>& prompts, const ChatTokens& tokens,
                                           int image_size, const GenerateOptions& options,
                                           const std::function<void(const std::vector<int32_t>&)>& on_token = {});

}  // namespace gemtune
