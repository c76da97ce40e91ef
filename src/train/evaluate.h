// Held-out data: loss and accuracy by teacher forcing, and generated answers compared with the true ones.
#pragma once

#include "data/chat.h"
#include "data/dataset.h"
#include "data/image.h"
#include "model/model.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gemtune {

struct HeldOut {
  const Dataset& dataset;
  const Chat& chat;
  ImageOptions image_options;
  std::vector<int64_t> rows;
  int micro_batch = 8;
  int num_workers = 2;
};

struct LossScores {
  double loss = 0;  // nats a target token
  double token_accuracy = 0;
  int64_t num_targets = 0;
  double perplexity() const;
};
LossScores evaluate_loss(const Gemma3& model, const HeldOut& held_out);

struct Answer {
  int64_t row = 0;
  std::string prompt;  // the last user turn's text
  std::string expected;
  std::string generated;
};
struct TextScores {
  double exact_match = 0;  // share of answers equal to the expected text, both stripped
  double rouge_l = 0;      // mean ROUGE-L F1
  double chrf = 0;         // mean chrF (character n-grams to 6, β 2), 0 … 100
  int64_t num_eval_rows = 0;
  std::vector<Answer> answers;
};
// Greedy answers to every row's prompt. `progress` (rows done, rows) may be empty.
TextScores evaluate_text(const Gemma3& model, const HeldOut& held_out, int64_t max_new_tokens,
                         const std::function<void(int64_t, int64_t)>& progress = {});

// Longest common subsequence of words, F1 (β 1), lower-cased, split at what is no letter or digit. Source: Lin 2004.
double rouge_l(const std::string& generated, const std::string& expected);
// Character n-gram F-score without white space. Source: Popović 2015.
double chrf(const std::string& generated, const std::string& expected);

}  // namespace gemtune
