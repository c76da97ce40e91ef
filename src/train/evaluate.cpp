#include "train/evaluate.h"

#include "base/text.h"
#include "data/loader.h"
#include "ops/torch.h"
#include "train/batch.h"
#include "train/generate.h"

#include <algorithm>
#include <map>

namespace gemtune {
namespace {

constexpr size_t kAnswersAtOnce = 32;

int image_size(const Gemma3& model) {
  return model.dims().vision ? int(model.dims().vision->image_size) : 0;
}

std::string text_of(const Message& message) {
  std::string text;
  for (const Part& part : message.parts) text += part.text;
  return std::string(strip(text));
}

const Message* last_of(const Row& row, Role role) {
  for (auto it = row.messages.rbegin(); it != row.messages.rend(); ++it) {
    if (it->role == role) return &*it;
  }
  return nullptr;
}

// Words as ROUGE counts them.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text + " ") {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80 || std::isalnum(byte)) {
      word += char(byte < 0x80 ? std::tolower(byte) : byte);
    } else if (!word.empty()) {
      words.push_back(std::exchange(word, {}));
    }
  }
  return words;
}

std::vector<std::string> characters_of(const std::string& text) {
  std::vector<std::string> characters;
  for (const char c : text) {
    if ((static_cast<unsigned char>(c) & 0xC0) == 0x80 && !characters.empty()) {
      characters.back() += c;
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      characters.push_back(std::string(1, c));
    }
  }
  return characters;
}

std::map<std::string, int64_t> ngrams(const std::vector<std::string>& characters, size_t n) {
  std::map<std::string, int64_t> counts;
  for (size_t i = 0; i + n <= characters.size(); ++i) {
    std::string gram;
    for (size_t j = 0; j < n; ++j) gram += characters[i + j];
    ++counts[gram];
  }
  return counts;
}

}  // namespace

double LossScores::perplexity() const {
  return std::exp(loss);
}

LossScores evaluate_loss(const Gemma3& model, const HeldOut& held_out) {
  const at::NoGradGuard no_grad;
  LoaderOptions options;
  options.shuffle = false;
  options.micro_batch = held_out.micro_batch;
  options.num_workers = held_out.num_workers;
  options.image_size = image_size(model);
  Loader loader(std::shared_ptr<const Dataset>(std::shared_ptr<void>(), &held_out.dataset),
                std::shared_ptr<const Chat>(std::shared_ptr<void>(), &held_out.chat), held_out.image_options, held_out.rows,
                options, {});
  double loss_sum = 0;
  double num_correct = 0;
  LossScores scores;
  const Pass pass;
  for (int64_t i = 0; i < loader.steps_per_epoch(); ++i) {
    for (const Batch& batch : loader.next().micro_batches) {
      if (batch.num_targets == 0) continue;
      const DeviceBatch on_device = to_device(batch, model.spec().device);
      const auto loss = model.loss(model.forward(on_device.input, pass), on_device.targets);
      loss_sum += loss.loss_sum.item<double>();
      num_correct += double(loss.num_correct.item<int64_t>());
      scores.num_targets += batch.num_targets;
    }
  }
  if (scores.num_targets > 0) {
    scores.loss = loss_sum / double(scores.num_targets);
    scores.token_accuracy = num_correct / double(scores.num_targets);
  }
  return scores;
}

TextScores evaluate_text(const Gemma3& model, const HeldOut& held_out, int64_t max_new_tokens,
                         const std::function<void(int64_t, int64_t)>& progress) {
  TextScores scores;
  scores.num_eval_rows = int64_t(held_out.rows.size());
  scores.answers.resize(held_out.rows.size());
  // Prompts of one length go together: no padding, so the answers are those of each row alone.
  std::map<size_t, std::vector<size_t>> by_length;
  std::vector<Prompt> prompts(held_out.rows.size());
  const int size = image_size(model);
  for (size_t i = 0; i < held_out.rows.size(); ++i) {
    const Row row = held_out.dataset.row(held_out.rows[i]);
    const Sample sample = held_out.chat.prompt(row);
    prompts[i].token_ids = sample.token_ids;
    prompts[i].image_first_token = sample.image_first_token;
    for (const ImageSource& image : row.images) {
      const RgbImage decoded = decode_image(read_image_bytes(image), held_out.image_options, row.where);
      prompts[i].images_CHW.push_back(resize_to_planes_CHW(decoded, size));
    }
    const Message* user = last_of(row, Role::kUser);
    const Message* assistant = last_of(row, Role::kAssistant);
    scores.answers[i] = {held_out.rows[i], user ? text_of(*user) : "", assistant ? text_of(*assistant) : "", ""};
    by_length[sample.token_ids.size()].push_back(i);
  }
  int64_t done = 0;
  GenerateOptions options;
  options.max_new_tokens = max_new_tokens;
  for (const auto& [length, indices] : by_length) {
    for (size_t begin = 0; begin < indices.size(); begin += kAnswersAtOnce) {
      const size_t end = std::min(begin + kAnswersAtOnce, indices.size());
      std::vector<Prompt> batch;
      for (size_t i = begin; i < end; ++i) batch.push_back(prompts[indices[i]]);
      const auto ids = generate(model, batch, held_out.chat.tokens(), size, options);
      for (size_t i = begin; i < end; ++i) {
        const std::string text = held_out.chat.tokenizer().decode(ids[i - begin], Tokenizer::Special::kSkip);
        scores.answers[indices[i]].generated = std::string(strip(text));
      }
      done += int64_t(end - begin);
      if (progress) progress(done, scores.num_eval_rows);
    }
  }
  for (const Answer& answer : scores.answers) {
    scores.exact_match += answer.generated == answer.expected ? 1 : 0;
    scores.rouge_l += rouge_l(answer.generated, answer.expected);
    scores.chrf += chrf(answer.generated, answer.expected);
  }
  const double count = std::max<double>(1, double(scores.num_eval_rows));
  scores.exact_match /= count;
  scores.rouge_l /= count;
  scores.chrf /= count;
  return scores;
}

double rouge_l(const std::string& generated, const std::string& expected) {
  const auto a = words_of(generated);
  const auto b = words_of(expected);
  if (a.empty() || b.empty()) return 0;
  std::vector<int64_t> row(b.size() + 1, 0);
  for (const std::string& word : a) {
    int64_t diagonal = 0;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t above = row[j];
      row[j] = word == b[j - 1] ? diagonal + 1 : std::max(row[j], row[j - 1]);
      diagonal = above;
    }
  }
  const double common = double(row[b.size()]);
  if (common == 0) return 0;
  const double precision = common / double(a.size());
  const double recall = common / double(b.size());
  return 2 * precision * recall / (precision + recall);
}

double chrf(const std::string& generated, const std::string& expected) {
  const auto a = characters_of(generated);
  const auto b = characters_of(expected);
  double precision = 0;
  double recall = 0;
  int64_t orders = 0;
  for (size_t n = 1; n <= 6; ++n) {
    const auto grams_a = ngrams(a, n);
    const auto grams_b = ngrams(b, n);
    if (grams_a.empty() || grams_b.empty()) continue;
    int64_t matches = 0;
    for (const auto& [gram, count] : grams_a) {
      const auto it = grams_b.find(gram);
      if (it != grams_b.end()) matches += std::min(count, it->second);
    }
    precision += double(matches) / double(a.size() + 1 - n);
    recall += double(matches) / double(b.size() + 1 - n);
    ++orders;
  }
  if (orders == 0 || precision + recall == 0) return 0;
  precision /= double(orders);
  recall /= double(orders);
  return 100 * 5 * precision * recall / (4 * precision + recall);
}

}  // namespace gemtune
