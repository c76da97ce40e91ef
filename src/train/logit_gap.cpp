#include "train/logit_gap.h"

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/loader.h"
#include "ops/torch.h"
#include "train/batch.h"

#include <ATen/ops/linspace.h>

#include <algorithm>
#include <limits>

namespace gemtune {
namespace {

constexpr int64_t kPlacesARow = 16;

constexpr const char* kConversations[][2] = {
    {"Write a short product description.", "A sturdy red mug of glazed stoneware that keeps tea warm."},
    {"What do you see?", "A smooth field of colour that turns from dark to bright."},
    {"Name three uses of a wooden box.", "Storage, a seat, and a plant stand."},
    {"Describe the picture in one sentence.", "Colours run into each other without an edge."},
    {"Was kostet das?", "Das steht auf dem Schild: 12,50 €."},
    {"List what is shown.", "- background\n- gradient\n- light"},
    {"def f(x):", "    return 2 * x + 1"},
    {"Which colour dominates?", "It depends on where you look."},
};

// A picture without a file: gradients whose colours differ from number to number.
std::vector<uint8_t> gradient_CHW(int size, int number) {
  std::vector<uint8_t> planes;
  planes.reserve(size_t(3 * size * size));
  for (int c = 0; c < 3; ++c) {
    for (int y = 0; y < size; ++y) {
      for (int x = 0; x < size; ++x) {
        const int along = (c + number) % 3 == 0 ? x : (c + number) % 3 == 1 ? y : (x + y) / 2;
        planes.push_back(uint8_t((255 * along / size + 37 * number) % 256));
      }
    }
  }
  return planes;
}

ModelInput input_of(const Sample& sample, const std::vector<std::vector<uint8_t>>& images_CHW, const Preparation& prepared,
                    at::Device device) {
  return to_device(collate({sample}, {images_CHW}, prepared.chat->tokens().pad, image_size(prepared.dims)), device).input;
}

std::vector<ModelInput> built_in(const Preparation& prepared, int num_rows, at::Device device) {
  std::vector<ModelInput> inputs;
  for (int i = 0; i < num_rows; ++i) {
    const auto& [prompt, answer] = kConversations[size_t(i) % std::size(kConversations)];
    Row row;
    row.where = "a built-in row";
    Message user{Role::kUser, {}, false};
    std::vector<std::vector<uint8_t>> images_CHW;
    if (prepared.dims.vision && i % 2 == 1) {
      user.parts.push_back({Part::Kind::kImage, ""});
      row.images.emplace_back();
      images_CHW.push_back(gradient_CHW(image_size(prepared.dims), i));
    }
    user.parts.push_back({Part::Kind::kText, prompt});
    row.messages = {user, {Role::kAssistant, {{Part::Kind::kText, answer}}, false}};
    inputs.push_back(input_of(prepared.chat->sample(row), images_CHW, prepared, device));
  }
  return inputs;
}

std::vector<ModelInput> of_run(const Recipe& recipe, const Preparation& prepared, int num_rows, at::Device device) {
  std::vector<ModelInput> inputs;
  const int64_t count = std::min<int64_t>(num_rows, prepared.dataset->size());
  for (int64_t i = 0; i < count; ++i) {
    const Row row = prepared.dataset->row(i * prepared.dataset->size() / count);
    std::vector<std::vector<uint8_t>> images_CHW;
    for (const ImageSource& image : row.images) {
      images_CHW.push_back(resize_to_planes_CHW(decode_image(read_image_bytes(image), image_options(recipe), row.where),
                                                image_size(prepared.dims)));
    }
    inputs.push_back(input_of(prepared.chat->sample(row), images_CHW, prepared, device));
  }
  return inputs;
}

}  // namespace

SampleRows sample_rows(const Preparation& prepared, const std::string& adapter_folder, int num_rows, at::Device device) {
  for (const std::string& folder : {adapter_folder, parent_folder(adapter_folder)}) {
    RecipeArguments arguments;
    arguments.file = join_path(folder, "recipe.yaml");
    if (!file_exists(arguments.file)) continue;
    try {
      Recipe recipe = load_recipe(arguments).recipe;
      recipe.model.path = prepared.model_folder;
      const Preparation run = prepare(recipe, Source::kTrain);
      return {"rows of " + join_some(recipe.data.train), of_run(recipe, run, num_rows, device)};
    } catch (const Error& error) {
      log_info("built-in rows are compared; the run's own cannot be read: {}", error.what());
      break;
    }
  }
  return {"built-in rows", built_in(prepared, num_rows, device)};
}

std::vector<Tensor> logits_on(const Gemma3& model, const SampleRows& rows) {
  const at::NoGradGuard no_grad;
  const Pass pass;
  std::vector<Tensor> logits;
  for (const ModelInput& input : rows.inputs) {
    const Tensor hidden_TD = model.forward(input, pass).squeeze(0);
    const int64_t num_tokens = hidden_TD.size(0);
    const Tensor places = at::linspace(0, double(num_tokens - 1), std::min(kPlacesARow, num_tokens), at::kDouble)
                              .to(at::kLong)
                              .to(hidden_TD.device());
    logits.push_back(model.logits(hidden_TD.index_select(0, places)).to(at::kCPU));
  }
  return logits;
}

LogitGap logit_gap(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  LogitGap gap;
  double largest = 0, sum = 0, count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor difference = (a[i] - b[i]).abs();
    // A NaN on either side is a gap without bound.
    const double most = difference.max().item<double>();
    gap.max = std::isnan(most) ? std::numeric_limits<double>::infinity() : std::max(gap.max, most);
    largest = std::max(largest, b[i].abs().max().item<double>());
    sum += difference.sum(at::kDouble).item<double>();
    count += double(difference.numel());
    gap.num_places += a[i].size(0);
    gap.num_same_choice += (a[i].argmax(-1) == b[i].argmax(-1)).sum().item<int64_t>();
  }
  if (largest > 0) {
    gap.max /= largest;
    gap.mean = sum / count / largest;
  }
  return gap;
}

}  // namespace gemtune
