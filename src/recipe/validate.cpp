#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <type_traits>

#include "base/hub.h"
#include "base/text.h"
#include "recipe/leaves.h"

namespace gemtune {
namespace {

class Validator {
 public:
  explicit Validator(const Recipe& recipe) : recipe_(recipe) {}

  std::vector<Complaint> complaints() {
    choices();
    needed();
    ranges();
    contradictions();
    return std::move(complaints_);
  }

 private:
  void complain(const std::string& key, const std::string& text) { complaints_.push_back({key, text}); }

  void choices() {
    visit_leaves(recipe_, [&](const std::string& key, const auto& member, const char* help) {
      if constexpr (std::is_same_v<std::decay_t<decltype(member)>, std::string>) {
        const std::vector<std::string> allowed = choices_of(help);
        if (allowed.empty() || std::find(allowed.begin(), allowed.end(), member) != allowed.end()) {
          if (member == "N") complain(key, "N stands for a number of steps, e.g. 100");
          return;
        }
        const bool counts = std::find(allowed.begin(), allowed.end(), "N") != allowed.end();
        if (counts && is_count(member)) return;
        if (is_half_precision(member)) return complain(key, kHalfPrecisionRefusal);
        const std::string guess = did_you_mean(member, allowed);
        complain(key, fmt::format("expected {}, got {}{}", one_of(allowed), in_quotes(member),
                                  guess.empty() || guess == "N" ? "" : fmt::format("; did you mean {}?", guess)));
      }
    });
  }

  // Digits only, so that every reader of the key agrees on the number.
  static bool is_count(const std::string& text) {
    const bool digits = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    return digits && !text.empty() && text.size() <= 9 && text[0] != '0';
  }

  static std::string one_of(const std::vector<std::string>& allowed) {
    std::string text;
    for (size_t i = 0; i < allowed.size(); ++i) {
      if (i > 0) text += i + 1 == allowed.size() ? " or " : ", ";
      text += allowed[i] == "N" ? "a number of steps" : allowed[i];
    }
    return text;
  }

  void needed() {
    if (recipe_.model.path.empty())
      complain("model.path", "is missing; give a model folder or a hub id, e.g. google/gemma-3-4b-it");
    sources("data.train", recipe_.data.train);
    sources("data.eval", recipe_.data.eval);
    if (recipe_.data.train.empty())
      complain("data.train", "is missing; give a .jsonl, .csv or .parquet file or a folder of images");
    if (recipe_.eval.every != "never" && recipe_.data.eval.empty()) {
      complain("eval.every", fmt::format("{} needs held-out rows; set data.eval or eval.every: never", recipe_.eval.every));
    }
    if (!recipe_.data.prompt.empty() && recipe_.data.answer.empty()) {
      complain("data.prompt", "needs data.answer, the template of what the model shall say; set it, e.g. \"{caption}\"");
    }
  }

  void sources(const std::string& key, const std::vector<std::string>& items) {
    for (const std::string& item : items) {
      if (strip(item).empty()) complain(key, "names an empty source; remove it or give a file or folder");
    }
  }

  template <class T>
  void at_least(const std::string& key, T value, T least) {
    if (value < least) complain(key, fmt::format("expected {} or more, got {}", least, value));
  }
  void above_zero(const std::string& key, double value) {
    if (value <= 0) complain(key, fmt::format("expected a number above 0, got {}", value));
  }
  void below_one(const std::string& key, double value) {
    if (value < 0 || value >= 1) complain(key, fmt::format("expected 0 or more and below 1, got {}", value));
  }

  void ranges() {
    const Recipe& r = recipe_;
    at_least<int64_t>("data.max_length", r.data.max_length, 0);
    at_least("data.num_workers", r.data.num_workers, 0);
    at_least<int64_t>("image.max_pixels", r.image.max_pixels, 1);
    at_least("lora.rank", r.lora.rank, 0);
    above_zero("lora.alpha", r.lora.alpha);
    below_one("lora.dropout", r.lora.dropout);
    at_least("lora.vision_rank", r.lora.vision_rank, 0);
    at_least("lora.vision_learning_rate", r.lora.vision_learning_rate, 0.0);
    above_zero("optim.learning_rate", r.optim.learning_rate);
    below_one("optim.warmup_ratio", r.optim.warmup_ratio);
    at_least<int64_t>("optim.warmup_steps", r.optim.warmup_steps, 0);
    at_least("optim.max_grad_norm", r.optim.max_grad_norm, 0.0);
    at_least("optim.weight_decay", r.optim.weight_decay, 0.0);
    below_one("optim.beta1", r.optim.beta1);
    below_one("optim.beta2", r.optim.beta2);
    above_zero("optim.eps", r.optim.eps);
    above_zero("train.epochs", r.train.epochs);
    at_least<int64_t>("train.max_steps", r.train.max_steps, 0);
    at_least("train.micro_batch", r.train.micro_batch, 1);
    at_least("train.accumulation", r.train.accumulation, 1);
    at_least<int64_t>("train.seed", r.train.seed, 0);
    at_least("checkpoint.keep", r.checkpoint.keep, 0);
    at_least<int64_t>("eval.max_rows", r.eval.max_rows, 0);
    at_least("eval.num_samples", r.eval.num_samples, 0);
    at_least("eval.max_new_tokens", r.eval.max_new_tokens, 1);
    at_least("train.memory_gib", r.train.memory_gib, 0.0);
    at_least("logging.every", r.logging.every, 1);
    at_least("dist.nproc", r.dist.nproc, 1);
    at_least("dist.workers", r.dist.workers, 0);
    above_zero("dist.timeout_s", r.dist.timeout_s);
    const bool names_repo = looks_like_hub_id(r.hub.repo_id) || looks_like_hub_id("me/" + r.hub.repo_id);
    if (!r.hub.repo_id.empty() && !names_repo) {
      complain("hub.repo_id", fmt::format("expected ORG/NAME or NAME, got {}", in_quotes(r.hub.repo_id)));
    }
  }

  void contradictions() {
    const LoraRecipe& lora = recipe_.lora;
    if (lora.rank == 0) {
      if (recipe_.quant.base == "nf4") {
        complain("lora.rank", "0 trains every weight, and full fine-tuning cannot train a quantised base; set quant.base: none");
      }
      if (lora.train_tables == "tied" || lora.train_tables == "untied") {
        complain("lora.train_tables",
                 fmt::format("{} belongs to adapters, and lora.rank 0 trains the tables with every other weight; "
                             "set lora.train_tables: none",
                             lora.train_tables));
      }
      if (!lora.init.empty()) complain("lora.init", "continues an adapter, and lora.rank 0 has none; remove it or set lora.rank");
    }
    if (lora.targets == "language") {
      if (lora.vision_rank > 0) {
        complain("lora.vision_rank", "has no effect while lora.targets is language; set lora.targets: all-linear or remove it");
      }
      if (lora.vision_learning_rate > 0) {
        complain("lora.vision_learning_rate",
                 "has no effect while lora.targets is language; set lora.targets: all-linear or remove it");
      }
    }
    if (recipe_.quant.vision && recipe_.quant.base == "none") {
      complain("quant.vision", "true needs quant.base: nf4; set it or remove quant.vision");
    }
    // The run's files would overwrite what it reads.
    const std::string& dir = recipe_.output.dir;
    const auto same = [&](const std::string& other) {
      std::error_code ignored;
      return std::filesystem::equivalent(dir, other, ignored);
    };
    if (same(recipe_.model.path)) {
      complain("output.dir", fmt::format("{} is model.path; choose another folder for the run", in_quotes(dir)));
    }
    for (const std::string& source : recipe_.data.train) {
      if (same(source)) {
        complain("output.dir", fmt::format("{} is data.train; choose another folder for the run", in_quotes(dir)));
      }
    }
  }

  const Recipe& recipe_;
  std::vector<Complaint> complaints_;
};

}  // namespace

std::vector<Complaint> validate(const Recipe& recipe) {
  return Validator(recipe).complaints();
}

}  // namespace gemtune
