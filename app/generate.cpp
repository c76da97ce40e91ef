#include "train/generate.h"

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "train/specs.h"

#include <cstdio>
#include <filesystem>

namespace gemtune {
namespace {

// The command line as one row of a conversation: system, then the pictures and the prompt.
Row row_of(const GenerateCommand& command) {
  Row row;
  row.where = "the command line";
  if (!command.system.empty()) row.messages.push_back({Role::kSystem, {{Part::Kind::kText, command.system}}, true});
  Message user{Role::kUser, {}, false};
  for (const std::string& path : command.images) {
    if (!file_exists(path)) throw input_error("--image {}: no such file", path);
    user.parts.push_back({Part::Kind::kImage, ""});
    ImageSource image;
    image.path = std::filesystem::absolute(path).string();
    row.images.push_back(image);
  }
  user.parts.push_back({Part::Kind::kText, command.prompt});
  row.messages.push_back(user);
  return row;
}

}  // namespace

int run_generate(const GenerateCommand& command) {
  Recipe recipe;
  recipe.model.path = command.model;
  recipe.quant.base = command.quant;
  const Preparation prepared = prepare(recipe, Source::kNone);
  const Row row = row_of(command);
  const Sample sample = prepared.chat->prompt(row);

  const ModelSpec spec = model_spec_for(recipe, device_for(recipe, 0), command.adapter);
  const auto model = Gemma3::load(prepared.model_folder, spec);
  if (!command.adapter.empty()) load_adapter(*model, command.adapter);

  Prompt prompt{sample.token_ids, sample.image_first_token, {}};
  const int size = image_size(prepared.dims);
  for (const ImageSource& image : row.images) {
    prompt.images_CHW.push_back(
        resize_to_planes_CHW(decode_image(read_image_bytes(image), image_options(recipe), image.name()), size));
  }
  GenerateOptions options;
  options.max_new_tokens = command.max_new_tokens;
  options.temperature = command.temperature;
  options.top_k = command.top_k;
  options.top_p = command.top_p;
  options.seed = command.seed;
  const auto ids = generate(*model, {prompt}, prepared.chat->tokens(), size, options);
  fmt::print("{}\n", prepared.tokenizer->decode(ids[0], Tokenizer::Special::kSkip));
  return 0;
}

}  // namespace gemtune
